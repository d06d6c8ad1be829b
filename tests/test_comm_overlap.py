"""``overlapkit.comm_overlap.CommOverlapConfig``: its fields, ``finalize`` and ``setup``."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from comm_overlap_cases import (
    DDP,
    MODEL,
    OPTIMIZER,
    PRESET,
    SOFTWARE,
    GatingCase,
    after,
    config,
    ddp,
    gating_cases,
    model,
    optimizer,
    set_up,
)
from omegaconf import OmegaConf

import overlapkit
from overlapkit.comm_overlap import CommOverlapConfig, SetupError
from overlapkit.errors import OverlapkitError, RecipeError
from overlapkit.presets import load_preset

LOGGER = "overlapkit.comm_overlap"


# --- the class ------------------------------------------------------------------------------------


def test_fields_and_defaults_are_bridges() -> None:
    """megatron-bridge 0.6.2, training/comm_overlap.py."""
    defaults = asdict(CommOverlapConfig(tp_comm_overlap=True))
    assert list(defaults) == [
        "tp_comm_overlap",
        "tp_comm_overlap_cfg",
        "tp_comm_bootstrap_backend",
        "overlap_p2p_comm",
        "batch_p2p_comm",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "overlap_param_gather_with_optimizer_step",
        "align_param_gather",
        "bucket_size",
        "defer_embedding_wgrad_compute",
        "wgrad_deferral_limit",
        "data_parallel_size",
        "overlap_moe_expert_parallel_comm",
        "delay_wgrad_compute",
    ]
    said = {name: value for name, value in defaults.items() if value is not None}
    assert said == {"tp_comm_overlap": True, "tp_comm_bootstrap_backend": "nccl"}


def test_it_takes_keywords_only_and_has_to_be_told_tp_comm_overlap() -> None:
    with pytest.raises(TypeError):
        CommOverlapConfig(True)  # type: ignore[misc]
    with pytest.raises(TypeError, match="tp_comm_overlap"):
        CommOverlapConfig()  # type: ignore[call-arg]


def test_it_is_a_name_of_the_package() -> None:
    assert overlapkit.CommOverlapConfig is CommOverlapConfig


def test_importing_it_takes_no_framework_and_no_preset() -> None:
    code = "import overlapkit.comm_overlap, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, timeout=60)
    taken = {name.partition(".")[0] for name in done.stdout.split()}
    assert "overlapkit" in taken
    assert taken & {"torch", "megatron", "nemo_run", "transformer_engine", "omegaconf", "yaml"} == set()


def test_a_set_up_config_can_be_copied_pickled_and_compared() -> None:
    made = CommOverlapConfig.decide(gpu="h100", num_gpus=16, precision="bf16", tensor_model_parallel_size=4)
    made.finalize()
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert again == made
        assert (again.plan, again.env) == (made.plan, made.env)
        assert again.user_comm_overlap_cfg == made.user_comm_overlap_cfg
    assert replace(made, bucket_size=7) != made
    assert replace(made, bucket_size=7).plan is None


# --- finalize and setup ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.3.1", "0.6.2"])
def test_setup_agrees_with_bridge_on_plain_objects(version: str) -> None:
    """Every tenth case here; all of them on the real dataclasses in tests/integrations."""
    cases = gating_cases(version)[::10]
    assert len(cases) > 200
    assert [miss for case in cases if (miss := set_up(case, *plain_objects(case)))] == []


def plain_objects(case: GatingCase) -> list[SimpleNamespace]:
    """Objects with Megatron-Core's fields."""
    found = []
    for start, names in ((model(), MODEL), (optimizer(), OPTIMIZER), (ddp(), DDP)):
        given = {name: case.given[key] for key, name in names.items()}
        found.append(SimpleNamespace(**{**vars(start), **given}))
    found[0].tp_comm_overlap_cfg = found[0].tp_comm_bootstrap_backend = None
    return found


def test_what_is_set_after_finalize_does_not_count() -> None:
    overlap = config(bucket_size=5)
    overlap.finalize()
    overlap.bucket_size = 6
    overlap.finalize()
    target = ddp()
    overlap.setup(model(), optimizer(), target, software=SOFTWARE)
    assert target.bucket_size == 5


def test_a_set_up_leaves_nothing_for_the_next() -> None:
    overlap = config()
    assert after(overlap, tensor_model_parallel_size=1, sequence_parallel=False).tp_comm_overlap is False
    assert after(overlap).tp_comm_overlap is True  # Bridge's own snapshot would still say false


def test_it_works_in_the_place_of_bridges_class() -> None:
    """runtime_config_update of megatron-bridge 0.6.2, training/config.py."""
    container = SimpleNamespace(model=model(), optimizer=optimizer(), ddp=ddp(), comm_overlap=config())
    container.comm_overlap.data_parallel_size = 16
    container.comm_overlap.finalize()
    container.comm_overlap.setup(container.model, container.optimizer, container.ddp)
    assert container.ddp.bucket_size == 128 * 1024 * 1024
    assert container.optimizer.overlap_param_gather is True


class Proxy:
    """Answers for its ``transformer``, as GPTModelConfig of Bridge and Megatron-LM does."""

    def __init__(self, transformer: Any) -> None:
        object.__setattr__(self, "transformer", transformer)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "transformer"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        owner = self.transformer if hasattr(self.transformer, name) else self
        object.__setattr__(owner, name, value)


def test_a_model_that_answers_for_its_transformer() -> None:
    proxy = Proxy(model())
    config(tp_comm_overlap_cfg=PRESET).setup(proxy, optimizer(), ddp(), software=SOFTWARE)
    assert proxy.transformer.tp_comm_overlap is True
    assert proxy.tp_comm_overlap_cfg == load_preset(PRESET).userbuffers


def test_the_fields_that_initialization_reads_are_set_on_any_model() -> None:
    found = after(config())
    assert (found.tp_comm_overlap, found.tp_comm_overlap_cfg, found.tp_comm_bootstrap_backend) == (True, None, "nccl")
    bare = model()
    del bare.tp_comm_overlap
    config().setup(bare, optimizer(), ddp(), software=SOFTWARE)
    assert bare.tp_comm_overlap is True
    assert not hasattr(after(config(tp_comm_overlap=False)), "tp_comm_overlap_cfg")


def test_what_the_set_up_does_not_read_cannot_disturb_it() -> None:
    strange = {"fp8_recipe": "of my own", "cp_comm_type": 7, "moe_token_dispatcher_type": "mine", "num_layers": "many"}
    assert after(config(), **strange).tp_comm_overlap is True


def test_without_the_distributed_optimizer_ddp_stays_and_no_size_is_needed() -> None:
    target, before = ddp(use_distributed_optimizer=False), vars(ddp(use_distributed_optimizer=False))
    config(data_parallel_size=None, bucket_size=5).setup(model(), optimizer(), target, software=SOFTWARE)
    assert vars(target) == before


def test_a_missing_size_of_data_parallelism_is_named() -> None:
    with pytest.raises(SetupError, match="data_parallel_size is None") as caught:
        config(data_parallel_size=None).setup(model(), optimizer(), ddp(), software=SOFTWARE)
    assert "\n" not in str(caught.value)


def test_a_model_that_lacks_a_field_is_refused() -> None:
    found = model()
    del found.overlap_moe_expert_parallel_comm
    with pytest.raises(AssertionError, match="the model has no overlap_moe_expert_parallel_comm"):
        config().setup(found, optimizer(), ddp(), software=SOFTWARE)


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
def test_so_is_one_without_a_size(name: str) -> None:
    with pytest.raises(SetupError, match=f"the model has no {name}"):
        after(config(), **{name: None})


class Number:
    """A flag of numpy's, or a tensor of one number."""

    def __init__(self, value: Any) -> None:
        self.item = lambda: value


def test_numbers_of_other_packages_are_numbers() -> None:
    found = model(tensor_model_parallel_size=Number(4), sequence_parallel=Number(True))
    target = ddp()
    config(bucket_size=Number(7), data_parallel_size=Number(2)).setup(found, optimizer(), target, software=SOFTWARE)
    assert found.tp_comm_overlap is True
    assert target.bucket_size == 7
    assert target.overlap_grad_reduce is True


def test_a_sequence_of_another_package_is_read() -> None:
    experts = {"expert_model_parallel_size": 8, "num_moe_experts": 8, "moe_token_dispatcher_type": "alltoall"}
    with pytest.raises(SetupError, match="recompute_modules"):
        after(
            config(overlap_moe_expert_parallel_comm=True),
            **experts,
            bf16=True,
            recompute_granularity="selective",
            recompute_modules=OmegaConf.create(["moe"]),
        )


def test_bridge_tests_sequence_parallel_for_truth() -> None:
    assert after(config(), sequence_parallel=1).tp_comm_overlap is True
    assert after(config(), sequence_parallel=None).tp_comm_overlap is False


@pytest.mark.parametrize("size", ["2", 1.5, -1, object()])
def test_a_size_of_data_parallelism_is_a_whole_number(size: Any) -> None:
    with pytest.raises(RecipeError, match=r"comm_overlap\.data_parallel_size: expected a whole number"):
        after(config(data_parallel_size=size))


@pytest.mark.parametrize("size", [-1, "4", 4.0, object()])
def test_what_is_no_size_is_refused_by_its_name(size: Any) -> None:
    with pytest.raises(RecipeError, match=r"model\.tensor_model_parallel_size: expected a whole number"):
        after(config(), tensor_model_parallel_size=size)


@pytest.mark.parametrize("name", ["bucket_size", "overlap_p2p_comm", "wgrad_deferral_limit"])
def test_what_is_asked_for_and_is_no_value_is_not_taken_for_nothing(name: str) -> None:
    with pytest.raises(RecipeError, match=rf"comm_overlap\.{name}: expected"):
        after(config(**{name: object()}))


def test_software_is_a_section() -> None:
    with pytest.raises(RecipeError, match="software: expected a mapping"):
        config().setup(model(), optimizer(), ddp(), software="nemo:26.04")  # type: ignore[arg-type]


def test_where_an_object_cannot_be_set_none_has_changed() -> None:
    class Frozen(SimpleNamespace):
        def __setattr__(self, name: str, value: Any) -> None:
            raise TypeError("frozen")

    found = (model(), optimizer(), Frozen(**vars(ddp())))
    before = [dict(vars(owner)) for owner in found]
    with pytest.raises(RecipeError, match=r"ddp\.overlap_grad_reduce: a Frozen does not take"):
        config().setup(*found, software=SOFTWARE)
    assert [dict(vars(owner)) for owner in found] == before


def test_what_bridge_asserts_raises_with_the_code_and_changes_nothing() -> None:
    found = model(expert_model_parallel_size=1, num_moe_experts=8, moe_token_dispatcher_type="alltoall", bf16=True)
    before = dict(vars(found))
    for kind in (AssertionError, OverlapkitError):
        with pytest.raises(kind, match=r"EP001 .*expert_model_parallel_size is 1.*→ set"):
            config(overlap_moe_expert_parallel_comm=True).setup(found, optimizer(), ddp(), software=SOFTWARE)
    assert vars(found) == before


@pytest.mark.parametrize("value", ["auto", 1, "yes"])
def test_tp_comm_overlap_is_true_or_false(value: Any) -> None:
    with pytest.raises(RecipeError, match="tp_comm_overlap: expected true"):
        after(config(tp_comm_overlap=value))


def test_the_set_up_is_bridges_alone() -> None:
    with pytest.raises(RecipeError, match=r"software.framework: .*integrations\.megatron\.apply"):
        config().setup(model(), optimizer(), ddp(), software={"framework": "megatron-lm"})


def test_what_is_turned_off_is_logged_with_its_code(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        after(config(), sequence_parallel=False)
        assert [record.name for record in caplog.records] == [LOGGER]
        assert caplog.messages[0].startswith(
            "TP002 model.tp_comm_overlap: off, because sequence_parallel is false; → set model.sequence_parallel=true"
        )
        caplog.clear()
        after(config())
        assert caplog.messages == []


def test_transformer_engine_is_looked_for_where_no_software_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overlapkit.software.installed_transformer_engine", lambda: None)
    found = model()
    config().setup(found, optimizer(), ddp())
    assert found.tp_comm_overlap is False
    assert caplog.messages[0].startswith(
        "TP003 model.tp_comm_overlap: off, because Transformer Engine is not installed"
    )
