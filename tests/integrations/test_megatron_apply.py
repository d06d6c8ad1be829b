"""A plan on real configuration objects of megatron-core."""

from __future__ import annotations

import copy
import dataclasses
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from overlapkit import RecipeError, resolve
from overlapkit.errors import PlanError
from overlapkit.integrations.megatron import apply
from overlapkit.integrations.megatron.construct import construct
from overlapkit.plan import Plan
from overlapkit.recipe import load_recipe

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
BASE: dict[str, Any] = {
    "cluster": {"gpu": "h100", "num_gpus": 16},
    "software": {"megatron_bridge": "0.3.1"},
    "model": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "num_layers": 8,
        "hidden_size": 512,
        "num_attention_heads": 8,
    },
    "ddp": {"use_distributed_optimizer": True},
}
OFF = {"comm_overlap": {"tp_comm_overlap": False, "overlap_grad_reduce": False, "overlap_param_gather": False}}


def objects(**changes: Any) -> tuple[TransformerConfig, OptimizerConfig, DistributedDataParallelConfig]:
    """What a training script has made for the recipe above, nothing overlapped yet."""
    fields = {**BASE["model"], "bf16": True, "pipeline_dtype": torch.bfloat16, **changes}
    return (
        TransformerConfig(**fields),
        OptimizerConfig(use_distributed_optimizer=True),
        DistributedDataParallelConfig(use_distributed_optimizer=True),
    )


def values(*found: Any) -> list[dict[str, Any]]:
    return [copy.copy(vars(each)) for each in found]


def settings_on(model: Any, optimizer: Any, ddp: Any) -> dict[str, Any]:
    owners = {"model": model, "optimizer": optimizer, "ddp": ddp}
    return {
        path: getattr(owners[path.partition(".")[0]], path.partition(".")[2], None) for path in resolve(BASE).settings
    }


def test_every_setting_is_written_and_the_decisions_come_back() -> None:
    plan = resolve(BASE)
    found = objects()
    assert apply(plan, *found) == plan.decisions
    assert settings_on(*found) == dict(plan.settings)
    model, _, ddp = found
    assert model.overlap_p2p_comm and not model.batch_p2p_comm
    assert ddp.overlap_grad_reduce and ddp.bucket_size == 128 * 1024 * 1024


def test_userbuffers_are_set_though_the_class_has_no_such_field() -> None:
    recipe = {**BASE, "comm_overlap": {"tp_comm_overlap": True, "tp_comm_overlap_cfg": {"qkv_fprop": {"num_sm": 2}}}}
    plan = resolve(recipe)
    found = objects()
    assert "tp_comm_overlap_cfg" not in {field.name for field in dataclasses.fields(TransformerConfig)}
    apply(plan, *found)
    assert found[0].tp_comm_overlap_cfg == {"qkv_fprop": {"num_sm": 2}}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_shipped_recipes_plans_go_onto_the_objects_of_their_sizes(path: Path) -> None:
    recipe = load_recipe(path)
    plan = resolve(recipe)
    if path.stem == "deepseek_v3_gb200":  # cuda_graph_impl=full_iteration is newer than 0.16.1
        recipe = replace(recipe, model=replace(recipe.model, cuda_graph_impl=None))
    made = construct(recipe, plan)
    with_nothing_on = (made.model, made.optimizer, made.ddp)
    for field in ("overlap_grad_reduce", "overlap_param_gather", "align_param_gather"):
        setattr(made.ddp, field, False)
    assert apply(plan, *with_nothing_on) == plan.decisions
    assert settings_on(*with_nothing_on) == dict(plan.settings)


def test_an_object_that_the_script_does_not_have_is_left_out() -> None:
    model, _, _ = objects()
    apply(resolve(BASE), model, None, None)
    assert model.overlap_p2p_comm


# --- a plan with errors -----------------------------------------------------------------------------


def wrong() -> Plan:
    return resolve({**BASE, "model": {**BASE["model"], "num_layers": 6}})


def test_a_plan_with_errors_is_refused_in_one_line_and_nothing_is_written() -> None:
    found = objects()
    before = values(*found)
    with pytest.raises(PlanError, match="PP006") as caught:
        apply(wrong(), *found)
    assert "\n" not in str(caught.value)
    assert values(*found) == before


def test_unless_told_otherwise_and_then_the_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    found = objects()
    with caplog.at_level(logging.WARNING, logger="overlapkit"):
        assert apply(wrong(), *found, on_error="warn") == wrong().decisions
    assert "PP006" in caplog.text
    assert found[0].overlap_p2p_comm


def test_on_error_is_one_of_two_words() -> None:
    with pytest.raises(RecipeError, match="on_error is refuse or warn, not 'ignore'"):
        apply(resolve(BASE), *objects(), on_error="ignore")  # type: ignore[arg-type]


# --- a plan for other objects -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensor_model_parallel_size": 4}, "model.tensor_model_parallel_size is 2 in the plan and 4 in the object"),
        ({"context_parallel_size": 2}, "model.context_parallel_size is 1 in the plan and 2 in the object"),
        ({"sequence_parallel": False}, "model.sequence_parallel is true in the plan and false in the object"),
        (
            {"virtual_pipeline_model_parallel_size": None},
            "model.virtual_pipeline_model_parallel_size is 2 in the plan and 1 in the object",
        ),
        (
            {"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None},
            "model.pipeline_model_parallel_size is 2 in the plan and 1 in the object",
        ),
        (
            {
                "num_moe_experts": 4,
                "expert_model_parallel_size": 2,
                "moe_ffn_hidden_size": 64,
                "add_bias_linear": False,
            },
            "model.expert_model_parallel_size is 1 in the plan and 2 in the object",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("on_error", ["refuse", "warn"])
def test_sizes_that_differ_are_named_with_both_values(changes: dict[str, Any], said: str, on_error: Any) -> None:
    found = objects(**changes)
    before = values(*found)
    with pytest.raises(RecipeError) as caught:
        apply(resolve(BASE), *found, on_error=on_error)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert values(*found) == before


def test_a_plan_that_gathers_parameters_is_not_for_objects_that_do_not_shard_them() -> None:
    model, optimizer, _ = objects()
    optimizer.use_distributed_optimizer = False
    with pytest.raises(RecipeError, match=r"ddp\.use_distributed_optimizer is true in the plan"):
        apply(resolve(BASE), model, optimizer, DistributedDataParallelConfig())
    apply(resolve({**BASE, **OFF}), model, optimizer, DistributedDataParallelConfig())
    apply(resolve(BASE), model, optimizer, DistributedDataParallelConfig(use_megatron_fsdp=True))


def test_one_virtual_stage_and_none_are_the_same_pipeline() -> None:
    recipe = copy.deepcopy(BASE)
    recipe["model"]["virtual_pipeline_model_parallel_size"] = 1
    apply(resolve(recipe), *objects(virtual_pipeline_model_parallel_size=None))


def test_a_setting_that_is_on_needs_a_field() -> None:
    """An object of an older release would lose it in silence."""
    model, optimizer, _ = objects()
    older = SimpleNamespace(use_distributed_optimizer=True, overlap_grad_reduce=False, overlap_param_gather=False)
    with pytest.raises(RecipeError, match=r"ddp\.align_param_gather is true in the plan, and SimpleNamespace has no"):
        apply(resolve(BASE), model, optimizer, older)
    assert not model.overlap_p2p_comm


def test_a_frozen_object_is_refused_before_another_one_changes() -> None:
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        use_distributed_optimizer: bool = True
        overlap_grad_reduce: bool = False
        overlap_param_gather: bool = False
        align_param_gather: bool = False
        bucket_size: int | None = None
        delay_wgrad_compute: bool = False

    model, optimizer, _ = objects()
    before = values(model, optimizer)
    with pytest.raises(RecipeError, match=r"ddp\.overlap_grad_reduce: a Frozen does not take the plan's"):
        apply(resolve(BASE), model, optimizer, Frozen(), on_error="warn")
    assert values(model, optimizer) == before


# --- what the objects' own checks say -----------------------------------------------------------------


def deferring() -> Plan:
    overlap = {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 1}
    return resolve({**BASE, "comm_overlap": overlap})


def test_a_setting_that_the_objects_own_check_refuses_is_not_written() -> None:
    """The recipe is fine with the fusion, which its frameworks have on; these objects have it off."""
    plan = deferring()
    assert plan.ok
    found = objects(gradient_accumulation_fusion=False)
    before = values(*found)
    with pytest.raises(PlanError, match="TransformerConfig refuses the plan's settings: Cannot defer embedding wgrad"):
        apply(plan, *found)
    assert values(*found) == before
    apply(plan, *objects(gradient_accumulation_fusion=True))


def test_unless_told_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    found = objects(gradient_accumulation_fusion=False)
    with caplog.at_level(logging.WARNING, logger="overlapkit"):
        apply(deferring(), *found, on_error="warn")
    assert "Cannot defer embedding wgrad" in caplog.text
    assert found[0].defer_embedding_wgrad_compute


def test_an_object_that_its_own_check_refuses_as_it_is_counts_as_unchecked() -> None:
    """Some frameworks change fields after the check ran; that is not the plan's doing."""
    found = objects()
    found[0].num_attention_heads = 7
    apply(resolve(BASE), *found)
    assert found[0].overlap_p2p_comm


# --- the job's size -----------------------------------------------------------------------------------


@pytest.fixture
def one_process(tmp_path: Path) -> Any:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_plan_for_another_number_of_gpus_is_refused() -> None:
    with pytest.raises(RecipeError, match="the plan is for 16 GPUs, and this job has 1 processes"):
        apply(resolve(BASE), *objects())
