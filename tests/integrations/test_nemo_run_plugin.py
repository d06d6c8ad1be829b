"""What OverlapPlugin sets on one task and its executor."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import nemo_run as run
import pytest
from nemo_run_launches import IMPOSSIBLE, MEGATRON_LM, PLAN_ENV, RECIPE, local, recipe, said, script, slurm

import overlapkit
from overlapkit.errors import OverlapkitError, PlanError, RecipeError
from overlapkit.integrations.nemo_run import OverlapPlugin, ScriptArgs
from overlapkit.integrations.nemo_run.executors import launch_size

__all__ = ["said"]  # the fixture


def set_up(executor: Any, task: Any = None, **fields: Any) -> Any:
    task = task or script()
    OverlapPlugin(**{"recipe": RECIPE, "script_args": None, **fields}).setup(task, executor)
    return task


# --- the environment -----------------------------------------------------------------------------


def test_the_executor_gets_the_plans_environment() -> None:
    executor = local()
    set_up(executor)
    assert executor.env_vars == PLAN_ENV


@pytest.mark.parametrize("form", ["path", "mapping", "recipe", "plan"])
def test_it_takes_a_path_a_mapping_a_recipe_or_a_plan(form: str, tmp_path: Path) -> None:
    from overlapkit.recipe import recipe_from_mapping
    from overlapkit.render.data import to_yaml

    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(RECIPE), "utf-8")
    given = {
        "path": {"recipe": str(path)},
        "mapping": {"recipe": RECIPE},
        "recipe": {"recipe": recipe_from_mapping(RECIPE)},
        "plan": {"recipe": None, "plan": overlapkit.resolve(recipe(cluster={"num_gpus": 8}))},
    }[form]
    executor = local()
    set_up(executor, **given)
    assert executor.env_vars == PLAN_ENV


def test_overrides_change_the_recipe() -> None:
    executor = local()
    set_up(executor, overrides=["cluster.gpu=b200", "model.pipeline_model_parallel_size=1"])
    assert executor.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_the_users_value_stays_and_is_reported_with_the_rules_code(said: list[str]) -> None:
    executor = local(env_vars={"CUDA_DEVICE_MAX_CONNECTIONS": "8", "MINE": "x"})
    set_up(executor)
    assert executor.env_vars == {**PLAN_ENV, "CUDA_DEVICE_MAX_CONNECTIONS": "8", "MINE": "x"}
    assert "ENV012 CUDA_DEVICE_MAX_CONNECTIONS=8 set by the user, stays; the plan takes 1" in said


def test_the_plans_own_value_set_by_the_user_is_no_matter(said: list[str]) -> None:
    set_up(local(env_vars={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}))
    assert said == []


def test_the_users_environment_is_judged_as_the_process_environment() -> None:
    fsdp = recipe(ddp={"use_megatron_fsdp": True}, model={"pipeline_model_parallel_size": 1})
    set_up(local(), recipe=fsdp)
    with pytest.raises(PlanError, match="CUDA_DEVICE_MAX_CONNECTIONS"):
        set_up(local(env_vars={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}), recipe=fsdp)


def test_the_environment_of_a_script_wins_over_the_executors() -> None:
    executor = local(env_vars={"NVTE_FWD_LAYERNORM_SM_MARGIN": "8"})
    set_up(executor, script(env={"NVTE_FWD_LAYERNORM_SM_MARGIN": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}))
    assert executor.env_vars == {"NVTE_BWD_LAYERNORM_SM_MARGIN": "16", "NVTE_FWD_LAYERNORM_SM_MARGIN": "8"}


def test_the_recipes_env_vars_are_exported_too() -> None:
    executor = local()
    set_up(executor, recipe={**RECIPE, "env_vars": {"NCCL_DEBUG": "INFO", "CUDA_DEVICE_MAX_CONNECTIONS": 1}})
    assert executor.env_vars == {**PLAN_ENV, "NCCL_DEBUG": "INFO"}


def test_container_env_names_every_variable_once_and_keeps_the_users(tmp_path: Path) -> None:
    executor = slurm(tmp_path, container_env=["MINE", "CUDA_DEVICE_MAX_CONNECTIONS"])
    set_up(executor, recipe={**RECIPE, "env_vars": {"NCCL_DEBUG": "INFO"}})
    assert executor.container_env[:2] == ["MINE", "CUDA_DEVICE_MAX_CONNECTIONS"]
    assert sorted(executor.container_env) == sorted(["MINE", "NCCL_DEBUG", *PLAN_ENV])


def test_what_a_recipe_exports_is_no_command_of_the_jobs_script(tmp_path: Path) -> None:
    hostile = {**RECIPE, "env_vars": {"NCCL_DEBUG": "$(touch pwned)"}}
    with pytest.raises(RecipeError, match=r"env_vars\.NCCL_DEBUG.*without quotes"):
        set_up(slurm(tmp_path), recipe=hostile)
    with pytest.raises(RecipeError, match=r"env_vars\.http_proxy: SlurmExecutor would export it as HTTP_PROXY"):
        set_up(slurm(tmp_path), recipe={**RECIPE, "env_vars": {"http_proxy": "proxy:80"}})
    executor = local()  # which hands it to the process as it is
    set_up(executor, recipe=hostile)
    assert executor.env_vars["NCCL_DEBUG"] == "$(touch pwned)"


# --- the size ------------------------------------------------------------------------------------


def test_the_executors_size_is_the_recipes_cluster() -> None:
    seen: list[ScriptArgs] = []
    set_up(local(nodes=2, ntasks_per_node=4), script_args_converter_fn=lambda args: seen.append(args) or [])
    assert seen[0].recipe.cluster.num_gpus == seen[0].plan.parallelism.world_size == 8
    assert seen[0].recipe.cluster.gpus_per_node == 4


@pytest.mark.parametrize(
    ("fields", "devices"),
    [
        ({"ntasks_per_node": 8, "gpus_per_node": 8}, 8),
        ({"ntasks_per_node": 1, "gpus_per_node": 8}, 8),
        ({"ntasks_per_node": 8, "gpus_per_task": 1}, 8),
        ({"ntasks_per_node": 8, "launcher": "torchrun"}, 8),
        ({"ntasks_per_node": 1, "torchrun_nproc_per_node": 4}, 4),
        ({"ntasks_per_node": 1, "gpus_per_node": 8, "launcher": "torchrun"}, 1),
    ],
)
def test_the_processes_of_a_slurm_node_before_and_after_its_launcher_is_made(
    tmp_path: Path, fields: dict[str, Any], devices: int
) -> None:
    executor = slurm(tmp_path, nodes=2, **fields)
    assert launch_size(executor).devices_per_node == devices
    executor.get_launcher()
    assert launch_size(executor).devices == 2 * devices


# --- the arguments -------------------------------------------------------------------------------


def test_bridge_overrides_follow_the_scripts_own_arguments() -> None:
    task = set_up(local(), script(args=["--mine"]), script_args="auto")
    assert task.args[0] == "--mine"
    assert "++model.tensor_model_parallel_size=2" in task.args


def test_bridges_env_vars_say_what_the_process_has() -> None:
    executor = local(env_vars={"CUDA_DEVICE_MAX_CONNECTIONS": "8", "TOKEN": "secret"})
    task = set_up(executor, recipe=recipe(software={"megatron_bridge": "0.6.2"}), script_args="bridge")
    assert "++env_vars.NVTE_FWD_LAYERNORM_SM_MARGIN=16" in task.args
    assert "++env_vars.CUDA_DEVICE_MAX_CONNECTIONS=8" in task.args
    assert "secret" not in " ".join(task.args)


def test_a_secret_that_the_recipe_names_too_stays_where_the_user_set_it(said: list[str]) -> None:
    seen: list[ScriptArgs] = []
    executor = local(env_vars={"WANDB_API_KEY": "secret"})
    given = {**recipe(software={"megatron_bridge": "0.6.2"}), "env_vars": {"WANDB_API_KEY": "", "NCCL_DEBUG": "INFO"}}
    task = set_up(executor, recipe=given, script_args="bridge")
    set_up(executor, recipe=given, script_args_converter_fn=lambda args: seen.append(args) or [])
    assert executor.env_vars["WANDB_API_KEY"] == "secret"
    assert "++env_vars.NCCL_DEBUG=INFO" in task.args
    assert not any("WANDB_API_KEY" in text for text in (*task.args, *said, *seen[0].env))


def test_flags_of_megatron_lm_follow_for_its_recipes() -> None:
    task = set_up(local(), recipe=MEGATRON_LM, script_args="auto")
    assert task.args[:2] == ["--tensor-model-parallel-size", "2"]


def test_nothing_follows_when_nothing_is_asked() -> None:
    assert set_up(local(), script(args=["--mine"])).args == ["--mine"]


def test_a_converter_replaces_them() -> None:
    def convert(args: ScriptArgs) -> list[str]:
        return ["--tp", str(args.plan.parallelism.tp), "--env", *args.env]

    task = set_up(local(), script_args="auto", script_args_converter_fn=convert)
    assert task.args == ["--tp", "2", "--env", *PLAN_ENV]


def test_manual_gc_is_what_perf_env_plugin_appended() -> None:
    task = set_up(local(), manual_gc=True, manual_gc_interval=50)
    assert task.args == ["train.manual_gc=true", "train.manual_gc_interval=50"]


def test_vboost_is_what_perf_env_plugin_ran_on_slurm(tmp_path: Path) -> None:
    executor = slurm(tmp_path, nodes=2, ntasks_per_node=4, setup_lines="module load x")
    set_up(executor, enable_vboost=True)
    folder = executor.tunnel.job_dir
    assert executor.setup_lines.split() == [
        *("module", "load", "x", "#", "Command", "0:", "enable", "vboost", "srun", "--ntasks=2"),
        *("--output", f"{folder}/vboost.out", "--error", f"{folder}/vboost.err"),
        *("bash", "-c", "'sudo", "nvidia-smi", "boost-slider", "--vboost", "1'"),
    ]


@pytest.mark.parametrize("path", ["", "ignored.py"])
def test_an_inline_script_takes_no_arguments(said: list[str], path: str) -> None:
    task = set_up(local(), run.Script(inline="env", path=path), script_args="auto")
    assert task.args == []
    assert any("an inline script takes no arguments" in line for line in said)


def test_set_up_twice_appends_once_and_follows_the_plan() -> None:
    executor, task = local(), script(args=["--mine"])
    plugin = OverlapPlugin(recipe=RECIPE)
    plugin.setup(task, executor)
    once = list(task.args)
    plugin.setup(task, executor)
    assert task.args == once
    OverlapPlugin(recipe=recipe(cluster={"gpu": "b200"}), script_args=None).setup(task, executor)
    assert task.args == ["--mine"]
    assert executor.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_a_copy_of_an_executor_is_another_executor() -> None:
    executor = local()
    set_up(executor)
    copied = copy.deepcopy(executor)
    set_up(copied, recipe=recipe(cluster={"gpu": "b200"}))
    assert executor.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert copied.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert copied.create_job_dir.__self__.executor is copied


# --- what cannot be used -------------------------------------------------------------------------


class Unknown(run.Executor):
    """An executor that somebody else wrote."""


@pytest.mark.parametrize(
    ("make", "fields", "says"),
    [
        (lambda: local(nodes=4), {"recipe": recipe(cluster={"num_gpus": 64})},
         "mapping: cluster.num_gpus: 64, but the executor has 4 nodes × 8 = 32"),
        (lambda: local(nodes=4), {"overrides": ["cluster.num_gpus=64"]},
         "command line: cluster.num_gpus: 64, but the executor has 4 nodes × 8 = 32"),
        (lambda: local(), {"recipe": recipe(cluster={"gpus_per_node": 4})},
         "mapping: cluster.gpus_per_node: 4, but the executor has 8 on a node"),
        (lambda: local(nodes=4), {"recipe": None, "plan": overlapkit.resolve(recipe(cluster={"num_gpus": 64}))},
         "mapping: a plan for 64 devices, but the executor has 4 nodes × 8 = 32"),
        (Unknown, {}, "OverlapPlugin: Unknown is no executor whose size and environment are known; known are Local"),
        (local, {"recipe": IMPOSSIBLE}, "mapping would fail with 1 error: EP024"),
        (lambda: local(env_vars={"NCCL_DEBUG": 1}), {},
         "LocalExecutor.env_vars: NCCL_DEBUG: the value is of type int, and an environment holds text; write it in"),
        (lambda: local(env_vars={"NCCL_DEBUG": None}), {}, "LocalExecutor.env_vars: NCCL_DEBUG: the value is of type"),
        (lambda: local(env_vars={"A": "b\0c"}), {}, "LocalExecutor.env_vars: A: no environment can hold it"),
        (lambda: local(env_vars={"A=B": "c"}), {}, "LocalExecutor.env_vars: A=B: no environment can hold it"),
        (lambda: local(env_vars={"": "c"}), {}, "LocalExecutor.env_vars: '': no environment can hold it"),
        (lambda: local(nodes=0), {}, "LocalExecutor: 0 nodes, which is no number of them"),
        (lambda: local(ntasks_per_node="8"), {}, "LocalExecutor: '8' processes per node, which is no number"),
        (lambda: local(ntasks_per_node=None), {}, "LocalExecutor: null processes per node, which is no number"),
        (lambda: local(env_vars=None), {}, "LocalExecutor.env_vars: a mapping of names to texts, not null"),
        (local, {"recipe": None}, "OverlapPlugin: it takes a recipe or a plan, and has neither"),
        (local, {"plan": "plan.json"}, "OverlapPlugin: it takes a recipe or a plan, and has both"),
        (local, {"recipe": None, "plan": "plan.json"}, "OverlapPlugin: plan is 'plan.json'; give a plan that resolve"),
        (local, {"recipe": 3}, "a recipe is a path, a mapping or a loaded Recipe, this is 3"),
        (local, {"recipe": "nowhere.yaml"}, "nowhere.yaml: "),
        (local, {"on_error": "ignore"}, "OverlapPlugin: on_error is 'ignore'; use refuse or warn"),
        (local, {"script_args": "argparse"}, "script_args is 'argparse'; use one of auto, bridge"),
        (local, {"manual_gc_interval": 0}, "OverlapPlugin: manual_gc_interval is 0; give steps"),
        (local, {"script_args_converter_fn": lambda args: "--x"}, "script_args_converter_fn returns '--x'"),
        (local, {"script_args_converter_fn": lambda args: None}, "script_args_converter_fn returns null; return a"),
        (local, {"script_args_converter_fn": "mine"}, "script_args_converter_fn is 'mine'; give a function"),
    ],
)  # fmt: skip
def test_it_is_refused_in_one_line_and_nothing_is_changed(make: Any, fields: dict[str, Any], says: str) -> None:
    executor, task = make(), script(args=["--mine"])
    before = copy.deepcopy(vars(executor))
    with pytest.raises(OverlapkitError) as caught:
        set_up(executor, task, **fields)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)
    assert (vars(executor), task.args) == (before, ["--mine"])


def test_a_task_that_is_none_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"OverlapPlugin: the task is 'train\.py'; give a run\.Script"):
        set_up(local(), "train.py")
    with pytest.raises(RecipeError, match=r"run\.Script\.args: a list of texts, not null"):
        set_up(local(), script(args=None))


@pytest.mark.parametrize("slashes", [1, 30])
def test_a_folder_with_a_name_that_no_file_system_takes_is_refused(tmp_path: Path, slashes: int) -> None:
    executor = local()
    executor.job_dir = str(tmp_path / "/".join(["x" * (300 // min(slashes, 2))] * slashes))
    with pytest.raises(RecipeError, match="the job's folder cannot be made in it: File name too long"):
        set_up(executor)
    assert list(tmp_path.iterdir()) == []


def test_outside_an_experiment_the_plan_is_written_at_once(tmp_path: Path) -> None:
    executor = local()
    executor.job_dir = str(tmp_path / "job")
    set_up(executor)
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == [
        "job.overlap_plan.json",
        "job.overlap_plan.txt",
    ]


def test_a_plan_with_errors_may_be_let_through(said: list[str]) -> None:
    executor = local()
    set_up(executor, recipe=IMPOSSIBLE, on_error="warn")
    assert any("would fail with 1 error: EP024" in line for line in said)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in executor.env_vars
