"""A plan on the Bridge-like configuration that a run.Partial carries, as objects and as run.Config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import nemo_run as run
import pytest
from nemo_run_launches import RECIPE, local, recipe, said

import overlapkit
from overlapkit.errors import RecipeError
from overlapkit.integrations.nemo_run import OverlapPlugin

__all__ = ["said"]  # the fixture


@dataclass
class Model:
    tensor_model_parallel_size: int = 2
    pipeline_model_parallel_size: int = 2
    context_parallel_size: int = 1
    tp_comm_overlap: bool = True
    tp_comm_overlap_cfg: Any = None
    tp_comm_bootstrap_backend: str = "mpi"
    overlap_p2p_comm: bool = True
    batch_p2p_comm: bool = True
    hidden_size: int = 1024


@dataclass
class Optimizer:
    overlap_param_gather: bool = False


@dataclass
class Ddp:
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None


@dataclass
class CommOverlap:
    tp_comm_overlap: bool = True
    tp_comm_overlap_cfg: Any = None
    tp_comm_bootstrap_backend: str | None = "mpi"
    overlap_p2p_comm: bool | None = None
    batch_p2p_comm: bool | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    overlap_param_gather_with_optimizer_step: bool | None = None
    align_param_gather: bool | None = None
    bucket_size: int | None = None
    defer_embedding_wgrad_compute: bool | None = None
    wgrad_deferral_limit: int | None = None
    overlap_moe_expert_parallel_comm: bool | None = None
    delay_wgrad_compute: bool | None = None


@dataclass
class Train:
    manual_gc: bool = False
    manual_gc_interval: int = 0


@dataclass
class Container:
    """What Bridge's ConfigContainer looks like from outside."""

    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    ddp: Ddp = field(default_factory=Ddp)
    train: Train = field(default_factory=Train)
    comm_overlap: CommOverlap | None = None
    env_vars: dict[str, Any] = field(default_factory=dict)


def pretrain(config: Any = None, cfg: Any = None, other: Any = None, steps: int = 1) -> None: ...


def as_config(overlap: bool) -> Any:
    parts = {"model": Model, "optimizer": Optimizer}  # the others are defaults that the class makes
    made = {name: run.Config(cls) for name, cls in parts.items()}
    return run.Config(Container, **made, comm_overlap=run.Config(CommOverlap) if overlap else None)


def as_objects(overlap: bool) -> Any:
    return Container(comm_overlap=CommOverlap() if overlap else None)


def set_up(config: Any, argument: str = "config", **fields: Any) -> Any:
    """The configuration that the task carries after the set-up, given as an object or a run.Config."""
    task = run.Partial(pretrain)
    setattr(task, argument, config)
    OverlapPlugin(**{"recipe": RECIPE, **fields}).setup(task, local())
    return getattr(task, argument)


@pytest.mark.parametrize("argument", ["config", "cfg"])
@pytest.mark.parametrize("form", [as_objects, as_config])
def test_without_comm_overlap_the_plans_settings_stand(form: Any, argument: str) -> None:
    plan = overlapkit.resolve(recipe(cluster={"num_gpus": 8}))
    config = set_up(form(False), argument)
    found = {
        f"{section}.{name}": getattr(getattr(config, section), name)
        for section in ("model", "optimizer", "ddp")
        for name in (
            "tp_comm_overlap",
            "overlap_p2p_comm",
            "overlap_param_gather",
            "overlap_grad_reduce",
            "bucket_size",
        )
        if hasattr(getattr(config, section), name)
    }
    assert found == {path: plan.settings[path] for path in found}
    assert len(found) == 6
    assert config.comm_overlap is None
    assert (config.model.hidden_size, config.ddp.use_distributed_optimizer) == (1024, True)


@pytest.mark.parametrize("form", [as_objects, as_config])
def test_a_comm_overlap_gets_the_requests_that_end_at_the_settings(form: Any) -> None:
    plan = overlapkit.resolve(recipe(cluster={"num_gpus": 8}))
    config = set_up(form(True))
    overlap = config.comm_overlap
    assert overlap.tp_comm_overlap is plan.settings["model.tp_comm_overlap"] is True
    assert overlap.tp_comm_bootstrap_backend == "nccl"
    assert overlap.overlap_grad_reduce is plan.settings["ddp.overlap_grad_reduce"] is True
    assert overlap.bucket_size == plan.settings["ddp.bucket_size"]
    assert config.model.tp_comm_bootstrap_backend == "mpi"  # that is for Bridge's set-up to write


def test_userbuffers_without_bridge_on_this_machine_stand_as_settings() -> None:
    userbuffers = {"qkv_fprop": {"method": "ring_exchange"}}
    given = recipe(comm_overlap={"tp_comm_overlap": True, "tp_comm_overlap_cfg": userbuffers})
    config = set_up(as_objects(True), recipe=given)
    assert config.comm_overlap is None
    assert config.model.tp_comm_overlap_cfg["qkv_fprop"]["method"] == "ring_exchange"


def test_the_environment_and_garbage_collection_are_written_beside() -> None:
    config = Container(env_vars={"CUDA_DEVICE_MAX_CONNECTIONS": 8, "MINE": "x"})
    config = set_up(config, manual_gc=True, manual_gc_interval=50)
    assert config.env_vars["MINE"] == "x"
    assert config.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert (config.train.manual_gc, config.train.manual_gc_interval) == (True, 50)


def test_a_plan_alone_sets_its_settings() -> None:
    plan = overlapkit.resolve(recipe(cluster={"num_gpus": 8}))
    config = set_up(as_objects(True), recipe=None, plan=plan)
    assert config.comm_overlap is None
    assert config.ddp.bucket_size == plan.settings["ddp.bucket_size"]


def test_sizes_of_another_job_are_refused_and_nothing_is_changed() -> None:
    config = Container(model=Model(tensor_model_parallel_size=4))
    with pytest.raises(RecipeError) as caught:
        set_up(config)
    assert str(caught.value) == "the task's config: model.tensor_model_parallel_size: 4, but the plan is for 2"
    assert config.env_vars == {}


def test_env_vars_that_are_no_mapping_are_refused_and_nothing_is_changed() -> None:
    config = as_objects(True)
    config.env_vars = [("NCCL_DEBUG", "INFO")]
    with pytest.raises(RecipeError, match="the task's config: env_vars: a mapping of names to values, not a list"):
        set_up(config)
    assert config == Container(comm_overlap=CommOverlap(), env_vars=[("NCCL_DEBUG", "INFO")])


def test_a_configuration_that_refuses_leaves_the_executor_alone() -> None:
    @dataclass(frozen=True)
    class Frozen:
        tp_comm_overlap: bool = False

    for config in (Container(model=Frozen()), Container(comm_overlap=Frozen())):
        executor, task = local(), run.Partial(pretrain)
        task.config = config
        with pytest.raises(RecipeError, match="a Frozen does not take the plan's"):
            OverlapPlugin(recipe=RECIPE).setup(task, executor)
        assert executor.env_vars == {}


def test_userbuffers_that_a_run_config_has_no_field_for_are_refused() -> None:
    @dataclass
    class Bare:
        tensor_model_parallel_size: int = 2
        tp_comm_overlap: bool = False

    config = as_config(False)
    config.model = run.Config(Bare)
    userbuffers = {"qkv_fprop": {"method": "ring_exchange"}}
    given = recipe(comm_overlap={"tp_comm_overlap": True, "tp_comm_overlap_cfg": userbuffers})
    with pytest.raises(RecipeError, match=r"model\.tp_comm_overlap_cfg: a run\.Config of Bare does not take it"):
        set_up(config, recipe=given)


@pytest.mark.parametrize("other", [{"model": Model()}, 3, None])
def test_what_is_no_such_configuration_is_told_and_left_alone(other: Any, said: list[str]) -> None:
    executor, task = local(), run.Partial(pretrain, steps=2)
    task.config = other
    OverlapPlugin(recipe=RECIPE).setup(task, executor)
    assert any("only the environment is set" in line for line in said)
    assert executor.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert (task.steps, task.config) == (2, other)
