"""Live objects as a recipe: construct from a plan, read back, resolve, and the same settings are there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from generated_recipes import recipes
from hypothesis import HealthCheck, assume, given, settings
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from overlapkit import RecipeError, resolve
from overlapkit.errors import OverlapkitError
from overlapkit.integrations.megatron import from_megatron
from overlapkit.integrations.megatron.construct import construct
from overlapkit.plan import Plan
from overlapkit.recipe import Recipe, load_recipe, recipe_from_mapping

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
# cuda_graph_impl=full_iteration is newer than the megatron-core of the tests.
NEWER = {"deepseek_v3_gb200"}


def model(**changes: Any) -> TransformerConfig:
    fields = {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "bf16": True, **changes}
    return TransformerConfig(**{"pipeline_dtype": torch.bfloat16, **fields})


def read_back(recipe: Recipe, plan: Plan) -> Recipe:
    """The objects that the plan makes, asked again by a script that knows what no object says."""
    made = construct(recipe, plan)
    target = plan.target
    software = {
        "framework": target.framework,
        "megatron_core": target.megatron_core,
        "transformer_engine": target.transformer_engine,
        "torch": target.torch,
    }
    if target.megatron_bridge is not None:
        software["megatron_bridge"] = target.megatron_bridge
    dist = {"use_megatron_fsdp": recipe.dist.use_megatron_fsdp, "use_torch_fsdp2": recipe.dist.use_torch_fsdp2}
    checkpoint = {"ckpt_format": recipe.checkpoint.ckpt_format}
    return from_megatron(
        made.model,
        made.optimizer,
        made.ddp,
        gpu=recipe.cluster.gpu,
        num_gpus=recipe.cluster.num_gpus,
        micro_batch_size=recipe.train.micro_batch_size,
        global_batch_size=recipe.train.global_batch_size,
        seq_length=recipe.model.seq_length,
        software=software,
        environ={**plan.env, **(recipe.env_vars or {})},
        dist=dist,
        checkpoint=checkpoint,
    )


def errors(plan: Plan) -> set[str]:
    return {decision.code for decision in plan.decisions if decision.severity == "error"}


def settings_of(plan: Plan) -> dict[str, Any]:
    """Two Nones have no place in a model's or DDP's section, where null is not set, and are the default there."""
    found = dict(plan.settings)
    found["model.tp_comm_bootstrap_backend"] = found["model.tp_comm_bootstrap_backend"] or "nccl"
    found["ddp.delay_wgrad_compute"] = bool(found["ddp.delay_wgrad_compute"])
    return found


@pytest.mark.parametrize("path", [path for path in RECIPES if path.stem not in NEWER], ids=lambda path: path.stem)
def test_shipped_recipes_come_back_to_the_same_settings(path: Path) -> None:
    recipe = load_recipe(path)
    plan = resolve(recipe)
    again = resolve(read_back(recipe, plan))
    assert settings_of(again) == settings_of(plan)
    assert errors(again) == set()
    assert again.parallelism == plan.parallelism


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(recipes())
def test_generated_recipes_come_back_to_the_same_settings(mapping: dict[str, Any]) -> None:
    software = mapping["software"]  # of releases that the objects of the tests can be for
    if software["framework"] == "megatron-lm":
        software["megatron_core"] = sys.modules["megatron.core"].__version__
    elif software["megatron_bridge"] == "0.2.0":
        software["megatron_bridge"] = "0.3.1"
    mapping["model"] = {"hidden_size": 4096, "num_layers": 48, "num_attention_heads": 32, **mapping["model"]}
    try:
        recipe = recipe_from_mapping(mapping)
        plan = resolve(recipe)
        back = read_back(recipe, plan)
    except (OverlapkitError, ValueError, AssertionError):  # no object, nothing to read back
        assume(False)
        raise
    again = resolve(back)
    assert settings_of(again) == settings_of(plan)
    assert errors(again) <= errors(plan)


# --- what a script says, and what is found ------------------------------------------------------------


def test_the_installed_versions_are_the_target() -> None:
    plan = resolve(from_megatron(model(), gpu="h100", num_gpus=8))
    assert plan.target.framework == "megatron-lm"
    assert plan.target.megatron_core == sys.modules["megatron.core"].__version__
    assert plan.target.torch == torch.__version__
    assert plan.target.transformer_engine is None
    assert plan.target.assumed == ()


def test_the_framework_is_as_told() -> None:
    bridge = from_megatron(model(), gpu="h100", num_gpus=8, framework="megatron-bridge")
    assert resolve(bridge).target.framework == "megatron-bridge"
    with pytest.raises(RecipeError, match=r"software\.framework: .*did you mean megatron-lm"):
        from_megatron(model(), gpu="h100", num_gpus=8, framework="megatron_lm")


def test_the_objects_values_are_what_is_asked_for() -> None:
    recipe = from_megatron(
        model(tensor_model_parallel_size=2, sequence_parallel=True, tp_comm_overlap=True),
        OptimizerConfig(use_distributed_optimizer=True, overlap_param_gather=True),
        DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=10_000),
        gpu="h100",
        num_gpus=8,
        micro_batch_size=1,
        global_batch_size=64,
        seq_length=4096,
        software={"megatron_core": "0.16.1", "transformer_engine": "2.12", "torch": "2.10.0"},
    )
    plan = resolve(recipe)
    assert plan.settings["model.tp_comm_overlap"] is True
    assert plan.settings["ddp.bucket_size"] == 10_000
    assert plan.parallelism.num_microbatches == 16
    assert not any(decision.code == "CFG011" for decision in plan.decisions)


def test_a_script_can_ask_for_what_bridge_would_do() -> None:
    objects = (
        model(tensor_model_parallel_size=2, sequence_parallel=True),
        OptimizerConfig(use_distributed_optimizer=True),
        DistributedDataParallelConfig(use_distributed_optimizer=True),
    )
    where: dict[str, Any] = {"gpu": "h100", "num_gpus": 8, "software": {"megatron_bridge": "0.3.1"}}
    as_it_is = resolve(from_megatron(*objects, framework="megatron-bridge", **where))
    assert not as_it_is.settings["ddp.overlap_grad_reduce"]
    asked = from_megatron(*objects, framework="megatron-bridge", comm_overlap={"tp_comm_overlap": "auto"}, **where)
    plan = resolve(asked)
    assert plan.settings["model.tp_comm_overlap"] and plan.settings["ddp.overlap_grad_reduce"]


def test_the_process_environment_is_judged_as_far_as_rules_read_it() -> None:
    objects = (model(tensor_model_parallel_size=2, sequence_parallel=True),)
    environ = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "SECRET_TOKEN": "x", "PATH": "/bin"}
    recipe = from_megatron(*objects, gpu="h100", num_gpus=8, environ=environ)
    assert recipe.env_vars == {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert "ENV011" in errors(resolve(recipe))
    assert "ENV011" in errors(resolve(from_megatron(*objects, gpu="h100", num_gpus=8, environ={})))
    good = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert resolve(from_megatron(*objects, gpu="h100", num_gpus=8, environ=good)).ok


def test_a_backend_without_the_flex_dispatcher_is_not_asked_for() -> None:
    """Every TransformerConfig says deepep, dense ones too, which would want 32 device connections."""
    assert model().moe_flex_dispatcher_backend == "deepep"
    plan = resolve(from_megatron(model(), gpu="h100", num_gpus=8))
    assert plan.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    moe = {"num_moe_experts": 8, "expert_model_parallel_size": 8, "moe_ffn_hidden_size": 64, "add_bias_linear": False}
    flex = model(**moe, moe_token_dispatcher_type="flex")
    assert resolve(from_megatron(flex, gpu="h100", num_gpus=8)).env["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


# --- the number of GPUs -------------------------------------------------------------------------------


@pytest.mark.parametrize("older", ["enable_cuda_graph", "external_cuda_graph"])
def test_the_older_names_of_cuda_graphs_are_not_said_twice(older: str) -> None:
    """Megatron-Core makes cuda_graph_impl of them, and leaves them on."""
    live = model(**{older: True})
    assert live.cuda_graph_impl != "none" and getattr(live, older)
    recipe = from_megatron(live, gpu="h100", num_gpus=8, software={"megatron_core": "0.16.1"})
    assert recipe.model.cuda_graph_impl == live.cuda_graph_impl
    assert "CFG026" not in errors(resolve(recipe))


def test_the_size_of_the_job_comes_from_the_launcher() -> None:
    assert from_megatron(model(), gpu="h100", environ={"WORLD_SIZE": "64"}).cluster.num_gpus == 64
    assert from_megatron(model(), gpu="h100", num_gpus=8, environ={"WORLD_SIZE": "64"}).cluster.num_gpus == 8


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": ""}, {"WORLD_SIZE": "0"}, {"WORLD_SIZE": "many"}])
def test_without_any_word_of_it_it_is_asked_for(environ: dict[str, str]) -> None:
    with pytest.raises(RecipeError, match=r"cluster\.num_gpus: the number of GPUs is not known; give num_gpus"):
        from_megatron(model(), gpu="h100", environ=environ)


def test_and_from_the_group_where_there_is_one(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert from_megatron(model(), gpu="h100", environ={"WORLD_SIZE": "64"}).cluster.num_gpus == 1
    finally:
        torch.distributed.destroy_process_group()


def test_a_value_that_no_recipe_takes_is_named() -> None:
    with pytest.raises(RecipeError, match=r"train\.micro_batch_size: expected a whole number of at least 1, got 0"):
        from_megatron(model(), gpu="h100", num_gpus=8, micro_batch_size=0)
