"""Megatron-Core's constructors and our rules agree on random configurations: ``scripts/parity_mcore.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from overlapkit import RecipeError
from overlapkit.integrations.megatron.construct import construct
from overlapkit.recipe import recipe_from_mapping
from overlapkit.resolver import resolve

ROOT = Path(__file__).resolve().parent.parent.parent
DUMP: dict[str, Any] = {
    "_target_": "live objects",
    "cluster": {"gpu": "h100", "num_gpus": 16},
    "software": {"megatron_bridge": "0.3.1"},
    "comm_overlap": None,
    "model": {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "bf16": True,
    },
}


@pytest.fixture(scope="module")
def parity() -> Any:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import parity_mcore
    finally:
        sys.path.pop(0)
    return parity_mcore


def objects_of(**changes: Any) -> Any:
    """What is constructed of the dump above, with ``section__name`` changed."""
    mapping = {name: dict(body) if isinstance(body, dict) else body for name, body in DUMP.items()}
    for path, value in changes.items():
        section, _, name = path.partition("__")
        if name:
            mapping.setdefault(section, {})[name] = value
        else:
            mapping[section] = value
    recipe = recipe_from_mapping(mapping)
    return construct(recipe, resolve(recipe))


def test_constructors_and_rules_agree(parity: Any) -> None:
    """Of 2,000, at least 40 % accepted, every rule met ten times and every message once; see the script's table."""
    tally = parity.compare(2_000, seed=0)
    assert len(tally.outcomes) == 2_000
    assert list(tally.problems()) == []


def test_a_disagreement_is_a_problem(parity: Any) -> None:
    """What the comparison calls agreement: the right rule for a refusal, none for what is accepted."""
    heads = next(refusal for refusal in parity.REFUSALS if refusal.codes == ("CFG006",))
    refused = {"index": 0, "message": "num_attention_heads (3) must be", "refusal": heads}
    accepted = {"index": 0, "message": None, "refusal": None}
    cases = [
        (refused, {"CFG006"}, True),
        (refused, {"CFG008"}, False),
        (refused, set(), False),
        ({**refused, "refusal": None}, {"CFG006"}, False),
        (accepted, set(), True),
        (accepted, {"CFG006"}, False),
    ]
    for outcome, codes, agrees in cases:
        found = frozenset(codes)
        assert parity.Outcome(**outcome, found=found, refusing=found).agrees is agrees, (outcome, codes)


def test_every_rule_of_the_constructors_is_compared(parity: Any) -> None:
    """A rule that says in some case what Megatron-Core raises at validation stands for one of its messages."""
    known = {code for refusal in (*parity.REFUSALS, parity.WITHOUT_TEXT) for code in refusal.codes}
    known |= parity.SAID_BY_ANOTHER.keys() | parity.ELSEWHERE.keys()
    for path in (ROOT / "tests" / "rules" / "cases").glob("*.yaml"):
        for case in yaml.safe_load(path.read_text()):
            found = case["fires"] if isinstance(case["fires"], list) else [case["fires"] or {}]
            for one in found:
                if (one.get("raised_by"), one.get("raised_at")) == ("megatron-core", "validation"):
                    assert path.stem in known, case["name"]


def test_settings_and_precision_are_on_the_objects() -> None:
    objects = objects_of(
        mixed_precision={"bf16": True, "fp8": "hybrid", "fp8_param": True, "reuse_grad_buf_for_mxfp8_param_ag": True},
        model__fp8="e4m3",
        model__overlap_p2p_comm=True,
        optimizer__use_distributed_optimizer=True,
        ddp__overlap_grad_reduce=True,
        ddp__bucket_size=1_000,
    )
    model, optimizer, ddp = objects.model, objects.optimizer, objects.ddp
    assert (model.fp8, model.fp8_recipe, model.fp8_param, model.overlap_p2p_comm) == (
        "hybrid",
        "tensorwise",
        True,
        True,
    )
    assert str(model.params_dtype) == str(model.pipeline_dtype) == "torch.bfloat16"
    assert optimizer.use_distributed_optimizer and ddp.use_distributed_optimizer  # Bridge makes both true
    assert optimizer.reuse_grad_buf_for_mxfp8_param_ag and ddp.reuse_grad_buf_for_mxfp8_param_ag
    assert (ddp.fp8_param_gather, ddp.overlap_grad_reduce, ddp.bucket_size) == (True, True, 1_000)


def test_multi_latent_attention_has_its_own_class() -> None:
    assert type(objects_of(model__multi_latent_attention=True).model).__name__ == "MLATransformerConfig"
    assert type(objects_of().model).__name__ == "TransformerConfig"


@pytest.mark.parametrize(("bridge", "etp"), [("0.3.1", 2), ("0.6.2", 1)])
def test_expert_tensor_parallelism_is_that_of_bridge(bridge: str, etp: int) -> None:
    experts = {"model__num_moe_experts": 4, "model__expert_model_parallel_size": 2, "model__add_bias_linear": False}
    assert objects_of(software__megatron_bridge=bridge, **experts).model.expert_tensor_parallel_size == etp


def test_bridge_clears_sequence_parallelism_from_0_4() -> None:
    alone = {"model__tensor_model_parallel_size": 1, "model__sequence_parallel": True}
    assert not objects_of(software__megatron_bridge="0.4.0", **alone).model.sequence_parallel
    with pytest.raises(ValueError, match="sequence parallelism"):
        objects_of(**alone)


def test_the_constructors_are_told_the_plans_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not this machine's, which has no Transformer Engine; and this machine's allocator settings are not the job's."""
    experts = {"model__num_moe_experts": 4, "model__add_bias_linear": False, "model__fp8": "hybrid"}
    assert objects_of(**experts, software__transformer_engine="2.12").model.fp8 == "hybrid"
    with pytest.raises(ValueError, match=r"transformer-engine>=1\.7\.0"):
        objects_of(**experts, software__transformer_engine="1.6")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert objects_of(ddp__nccl_ub=True).ddp.nccl_ub
    with pytest.raises(ValueError, match="expandable_segments"):
        objects_of(ddp__nccl_ub=True, env_vars__PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")


def test_fields_that_the_installed_classes_lack_are_named() -> None:
    newer = {"model__tensor_parallel_num_weight_shards": 2, "ddp__num_buckets": 4, "model__seq_length": 64}
    assert objects_of(**newer).lacking == ("model.tensor_parallel_num_weight_shards", "ddp.num_buckets")


def test_missing_sizes_are_named() -> None:
    mapping = {"cluster": {"num_gpus": 8}, "model": {"num_layers": 4, "expert_model_parallel_size": 2}}
    recipe = recipe_from_mapping(mapping)
    expected = "model.hidden_size, model.num_attention_heads and model.num_moe_experts are not given"
    with pytest.raises(RecipeError, match=expected):
        construct(recipe, resolve(recipe))
