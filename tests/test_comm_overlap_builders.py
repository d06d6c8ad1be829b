"""``CommOverlapConfig.from_recipe`` and ``decide``: Bridge's set-up then ends at the settings of the plan."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overlapkit import load_recipe, resolve
from overlapkit.comm_overlap import CommOverlapConfig, userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192
from overlapkit.errors import PlanError, RecipeError
from overlapkit.plan import SETTINGS, Plan
from overlapkit.recipe.schema import specs_of
from overlapkit.render.bridge_userbuffers import complete_layers

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
LLAMA = RECIPES / "llama3_70b_64xh100.yaml"
LOGGER = "overlapkit.comm_overlap"
FACTS: dict[str, Any] = {
    "gpu": "h100",
    "num_gpus": 64,
    "precision": "bf16",
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 4,
    "virtual_pipeline_model_parallel_size": 5,
    "num_layers": 80,
    "hidden_size": 8192,
    "seq_length": 8192,
    "micro_batch_size": 1,
    "global_batch_size": 256,
}


def for_bridge() -> list[str]:
    recipes = {path.stem: load_recipe(path) for path in sorted(RECIPES.glob("*.yaml"))}
    return [name for name, recipe in recipes.items() if recipe.software.framework == "megatron-bridge"]


@pytest.mark.parametrize("name", for_bridge())
def test_the_set_up_of_every_recipe_ends_at_its_plan(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    overlap = CommOverlapConfig.from_recipe(recipe)
    plan = resolve(recipe)
    assert overlap.plan == plan
    assert overlap.env == plan.env
    assert after_set_up(overlap, recipe, plan) == completed(plan)


def after_set_up(overlap: CommOverlapConfig, recipe: Any, plan: Plan) -> dict[str, Any]:
    """The settings on objects that say what the recipe says, and start with the opposite of the plan."""
    owners = {}
    for section in ("model", "optimizer", "ddp"):
        values = {field: getattr(getattr(recipe, section), field) for field in specs_of(section)}
        owners[section] = SimpleNamespace(**values)
    for path in SETTINGS:
        section, _, field = path.partition(".")
        setattr(owners[section], field, not plan.settings[path])
    model = owners["model"]
    for axis in ("tensor_model", "pipeline_model", "context", "expert_model"):
        setattr(model, f"{axis}_parallel_size", getattr(model, f"{axis}_parallel_size") or 1)
    model.bf16 = True  # as the mixed-precision section sets it up
    software = {
        "megatron_bridge": plan.target.megatron_bridge,
        "transformer_engine": plan.target.transformer_engine,
        "torch": plan.target.torch,
    }
    overlap.setup(model, owners["optimizer"], owners["ddp"], software=software)
    found = {}
    for path in SETTINGS:
        section, _, field = path.partition(".")
        found[path] = getattr(owners[section], field)
    return found


def completed(plan: Plan) -> dict[str, Any]:
    """The plan's settings, with every option that Bridge's classes have."""
    userbuffers, _ = complete_layers(plan.settings["model.tp_comm_overlap_cfg"])
    return {**plan.settings, "model.tp_comm_overlap_cfg": userbuffers}


# --- from a recipe -----------------------------------------------------------------------------------


def test_a_recipe_is_a_path_a_mapping_or_loaded() -> None:
    overlap = CommOverlapConfig.from_recipe(LLAMA)
    assert overlap == CommOverlapConfig.from_recipe(str(LLAMA)) == CommOverlapConfig.from_recipe(load_recipe(LLAMA))
    assert overlap.tp_comm_overlap_cfg == userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192
    assert overlap.data_parallel_size == 2
    mapping = {"cluster": {"gpu": "h100", "num_gpus": 8}, "ddp": {"use_distributed_optimizer": True}}
    assert CommOverlapConfig.from_recipe(mapping).overlap_grad_reduce is True


def test_overrides_are_those_of_resolve() -> None:
    overlap = CommOverlapConfig.from_recipe(LLAMA, ["comm_overlap.bucket_size=40000000"])
    assert overlap.bucket_size == 40_000_000
    with pytest.raises(TypeError, match="already loaded"):
        CommOverlapConfig.from_recipe(load_recipe(LLAMA), ["comm_overlap.bucket_size=40000000"])
    with pytest.raises(RecipeError, match="a recipe is a path, a mapping or a loaded Recipe"):
        CommOverlapConfig.from_recipe(7)  # type: ignore[arg-type]


def test_userbuffers_that_bridges_classes_cannot_hold_stay_a_mapping() -> None:
    layers = {"qkv_fprop": {"method": "ring_exchange", "of_a_later_engine": 1}}
    override = ["comm_overlap.tp_comm_overlap_cfg={qkv_fprop: {method: ring_exchange, of_a_later_engine: 1}}"]
    assert CommOverlapConfig.from_recipe(LLAMA, override, on_error="warn").tp_comm_overlap_cfg == layers


@pytest.mark.parametrize(
    ("recipe", "overrides", "said"),
    [
        ("llama2_7b_32xh20.yaml", [], "software.framework: a recipe for Megatron-LM has no CommOverlapConfig"),
        ("llama3_70b_64xh100.yaml", ["comm_overlap=null"], "comm_overlap: null"),
    ],
)
def test_what_is_not_for_bridges_set_up_is_refused_with_the_way_out(
    recipe: str, overrides: list[str], said: str
) -> None:
    with pytest.raises(RecipeError, match=said) as caught:
        CommOverlapConfig.from_recipe(RECIPES / recipe, overrides)
    assert "overlapkit.integrations.megatron.apply" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plan_with_errors_is_refused_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    override = ["model.expert_model_parallel_size=1"]
    recipe = RECIPES / "qwen3_235b_a22b_h100.yaml"
    with pytest.raises(PlanError, match="EP001"):
        CommOverlapConfig.from_recipe(recipe, override)
    assert caplog.messages == []
    overlap = CommOverlapConfig.from_recipe(recipe, override, on_error="warn")
    assert overlap.overlap_moe_expert_parallel_comm is True
    assert any(message.startswith("EP001 ") for message in caplog.messages)
    with pytest.raises(RecipeError, match="on_error is refuse or warn, not 'ignore'"):
        CommOverlapConfig.from_recipe(recipe, on_error="ignore")  # type: ignore[arg-type]


# --- from facts -----------------------------------------------------------------------------------------


def test_what_can_overlap_does_and_a_preset_is_chosen() -> None:
    overlap = CommOverlapConfig.decide(**FACTS)
    assert overlap.tp_comm_overlap is True
    assert overlap.tp_comm_overlap_cfg == userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192
    assert (overlap.overlap_p2p_comm, overlap.batch_p2p_comm) == (True, False)
    assert (overlap.overlap_grad_reduce, overlap.overlap_param_gather) == (True, True)
    assert (overlap.bucket_size, overlap.data_parallel_size) == (128 * 1024 * 1024, 4)
    assert overlap.plan is not None
    assert overlap.plan.preset.match == "exact"
    assert overlap.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_a_config_built_by_hand_has_no_plan() -> None:
    overlap = CommOverlapConfig(tp_comm_overlap=True)
    assert (overlap.plan, overlap.env) == (None, {})


def test_what_is_not_legal_is_off_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        overlap = CommOverlapConfig.decide(**{**FACTS, "sequence_parallel": False})
    assert overlap.tp_comm_overlap is False
    told = [record for record in caplog.records if record.getMessage().startswith("TP002 model.tp_comm_overlap: off, ")]
    assert [record.levelname for record in told] == ["INFO"]


def test_what_is_asked_for_in_vain_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    overlap = CommOverlapConfig.decide(**{**FACTS, "sequence_parallel": False}, tp_comm_overlap=True)
    assert overlap.tp_comm_overlap is False
    assert any(message.startswith("TP002 model.tp_comm_overlap: off, because") for message in caplog.messages)


def test_overrides_say_what_has_no_keyword() -> None:
    software = {"megatron_bridge": "0.6.2"}
    overlap = CommOverlapConfig.decide(**FACTS, software=software, overrides=["comm_overlap.align_param_gather=false"])
    assert overlap.align_param_gather is False
    assert overlap.plan is not None
    assert overlap.plan.target.megatron_bridge == "0.6.2"


def test_without_the_distributed_optimizer_dp_is_not_asked_for() -> None:
    overlap = CommOverlapConfig.decide(**FACTS, use_distributed_optimizer=False)
    assert (overlap.overlap_grad_reduce, overlap.bucket_size) == (None, None)


@pytest.mark.parametrize("precision", ["bf16", "bf16_mixed", {"bf16": True}])
def test_ways_to_name_a_precision(precision: Any) -> None:
    assert CommOverlapConfig.decide(**{**FACTS, "precision": precision}) == CommOverlapConfig.decide(**FACTS)


def test_fp8_gets_a_preset_of_its_own() -> None:
    overlap = CommOverlapConfig.decide(**{**FACTS, "precision": "bf16_with_fp8_delayed_scaling_mixed"})
    assert overlap.plan is not None
    assert overlap.plan.preset.name == "userbuffers_fp8_h100_h8192_tp4_mbs1_seqlen8192"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"gpu": "h1000"}, r"CommOverlapConfig\.decide: cluster\.gpu: 'h1000' is not a known GPU"),
        ({"num_gpus": 30}, "cluster.num_gpus: 30 GPUs cannot be split"),
        ({"precision": "fp9"}, "mixed_precision: 'fp9' is not a precision recipe"),
        ({"hidden_size": -1}, "model.hidden_size: expected a whole number of at least 1, got -1"),
        ({"tensor_model_parallel_size": "4"}, "model.tensor_model_parallel_size: expected a whole number"),
        ({"software": {"framework": "megatron-lm"}}, "software.framework: a recipe for Megatron-LM"),
    ],
)
def test_bad_facts_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said) as caught:
        CommOverlapConfig.decide(**{**FACTS, **wrong})
    assert "\n" not in str(caught.value)
