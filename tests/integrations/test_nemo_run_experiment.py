"""OverlapPlugin in experiments: tasks that share an executor, the job's folder, and what is refused before a start."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any

import nemo_run as run
import pytest
from nemo_run_launches import (
    IMPOSSIBLE,
    MEGATRON_LM,
    PLAN_ENV,
    RECIPE,
    folder_of,
    home,
    local,
    recipe,
    script,
    slurm,
    stored,
)

import overlapkit
from overlapkit.errors import OverlapkitError, RecipeError
from overlapkit.integrations.nemo_run import OverlapPlugin
from overlapkit.recipe import recipe_from_mapping
from overlapkit.render.data import to_yaml

__all__ = ["home"]  # the fixture

pytestmark = pytest.mark.usefixtures("home")
BLACKWELL = recipe(cluster={"gpu": "b200"})


def plugin(**fields: Any) -> OverlapPlugin:
    return OverlapPlugin(**{"recipe": RECIPE, "script_args": None, **fields})


def dryrun(experiment: Any) -> None:
    experiment.dryrun(log=False, delete_exp_dir=False)


# --- tasks do not leak into each other -----------------------------------------------------------


def test_tasks_with_one_executor_have_each_its_own_plan() -> None:
    executor, task = local(env_vars={"MINE": "x"}), script()
    with run.Experiment("leak", executor=executor) as experiment:
        experiment.add(task, name="hopper", plugins=[plugin()])
        experiment.add(task, name="blackwell", plugins=[plugin(recipe=BLACKWELL)])
        experiment.add(task, name="plain")
        hopper, blackwell, plain = (job.executor.env_vars for job in experiment.jobs)
    assert hopper == {"MINE": "x", **PLAN_ENV}
    assert blackwell == {**hopper, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert plain == executor.env_vars == {"MINE": "x"}


def test_one_plugin_and_one_script_for_two_tasks() -> None:
    shared, task = plugin(manual_gc=True), script(args=["--mine"])
    with run.Experiment("twice", executor=local()) as experiment:
        experiment.add(task, name="one", plugins=[shared])
        experiment.add(task, name="two", plugins=[shared])
        arguments = [job.task.args for job in experiment.jobs]
    assert arguments == [["--mine", "train.manual_gc=true", "train.manual_gc_interval=100"]] * 2
    assert task.args == ["--mine"]


def test_two_plugins_on_one_task_are_refused() -> None:
    with (
        run.Experiment("two-plugins", executor=local()) as experiment,
        pytest.raises(RecipeError, match="the task has two of them"),
    ):
        experiment.add(script(), plugins=[plugin(), plugin(recipe=BLACKWELL)])


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_a_group_with_one_environment_has_one_plan_per_task(kind: str, home: Path) -> None:
    executor = local() if kind == "local" else slurm(home)
    with run.Experiment("group", executor=executor) as experiment:
        experiment.add([script(), script()], name="both", plugins=[plugin()])
        dryrun(experiment)
        assert experiment.jobs[0].executor.env_vars == PLAN_ENV
        for task in ("both", "both_2"):
            assert stored(experiment, task, "both")["ok"] is True


def test_a_group_whose_tasks_would_need_two_environments_is_refused() -> None:
    class ByTask(OverlapPlugin):
        def setup(self, task: Any, executor: Any) -> None:
            self.recipe = BLACKWELL if task.args == ["blackwell"] else RECIPE
            super().setup(task, executor)

    tasks = [script(args=["hopper"]), script(args=["blackwell"])]
    with (
        run.Experiment("group", executor=local()) as experiment,
        pytest.raises(RecipeError, match="CUDA_DEVICE_MAX_CONNECTIONS would differ between tasks of a group"),
    ):
        experiment.add(tasks, name="both", plugins=[ByTask(recipe=RECIPE, script_args=None)])


def test_a_group_of_local_executors_has_an_environment_for_each(home: Path) -> None:
    executors = [local(), local(env_vars={"MINE": "x"})]
    with run.Experiment("group") as experiment:
        experiment.add([script(), script()], executor=executors, name="both", plugins=[plugin()])
        dryrun(experiment)
        assert [each.env_vars for each in experiment.jobs[0].executors] == [PLAN_ENV, {"MINE": "x", **PLAN_ENV}]
        assert stored(experiment, "both_2", "both")["ok"] is True


def test_the_resources_of_a_slurm_group_have_the_variables_too(home: Path) -> None:
    executors = [slurm(home, container_image="a"), slurm(home, container_image="b", container_env=["MINE"])]
    with run.Experiment("group") as experiment:
        experiment.add([script(), script()], executor=executors, name="both", plugins=[plugin()])
        requests = experiment.jobs[0].executor.resource_group
    assert [request.env_vars for request in requests] == [PLAN_ENV, PLAN_ENV]
    assert [request.container_env for request in requests] == [list(PLAN_ENV), ["MINE", *PLAN_ENV]]


# --- the job's folder ----------------------------------------------------------------------------


def test_the_plan_lies_in_the_jobs_folder_as_text_and_json() -> None:
    with run.Experiment("stored", executor=local(env_vars={"CUDA_DEVICE_MAX_CONNECTIONS": "8"})) as experiment:
        experiment.add(script(), name="one", plugins=[plugin()])
        dryrun(experiment)
    plan = stored(experiment, "one")
    assert plan["parallelism"]["world_size"] == 8
    assert plan["env"] == PLAN_ENV
    assert plan["launch"]["environment"] == {**PLAN_ENV, "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert plan["launch"]["kept"] == ["CUDA_DEVICE_MAX_CONNECTIONS"]
    assert (plan["launch"]["executor"], plan["launch"]["nodes"]) == ("LocalExecutor", 1)
    page = (folder_of(experiment) / "one" / "one.overlap_plan.txt").read_text("utf-8")
    assert "What overlaps" in page
    assert "CUDA_DEVICE_MAX_CONNECTIONS=8  set by the user\n" in page
    assert "ENV012 CUDA_DEVICE_MAX_CONNECTIONS=8 set by the user, stays; the plan takes 1\n" in page


@pytest.mark.parametrize("env_vars", [None, {"TOKEN": ""}])
def test_other_variables_of_the_user_are_not_stored(env_vars: dict[str, str] | None) -> None:
    with run.Experiment("secret", executor=local(env_vars={"TOKEN": "do-not-tell"})) as experiment:
        experiment.add(script(), name="one", plugins=[plugin(recipe={**RECIPE, "env_vars": env_vars})])
        dryrun(experiment)
    for path in (folder_of(experiment) / "one").glob("one.overlap_plan.*"):
        assert "do-not-tell" not in path.read_text("utf-8")


def test_tasks_of_one_name_do_not_overwrite_each_others_plan(home: Path) -> None:
    with run.Experiment("names", executor=local()) as experiment:
        experiment.add(script(), name="same", plugins=[plugin()])
        experiment.add(script(), name="same", plugins=[plugin(recipe=BLACKWELL)])
        dryrun(experiment)
    assert stored(experiment, "same")["target"]["gpu"] == "h100"
    assert stored(experiment, "same_2", "same")["target"]["gpu"] == "b200"


def test_userbuffers_of_megatron_lm_lie_where_the_flag_says(home: Path) -> None:
    userbuffers = {"qkv_fprop": {"method": "ring_exchange"}}
    overlap = {"tp_comm_overlap": True, "tp_comm_overlap_cfg": userbuffers}
    with run.Experiment("lm", executor=local()) as experiment:
        lm = {**MEGATRON_LM, "comm_overlap": overlap}
        experiment.add(script(), name="one", plugins=[plugin(recipe=lm, script_args="megatron-lm")])
        arguments = experiment.jobs[0].task.args
        dryrun(experiment)
    path = Path(arguments[arguments.index("--tp-comm-overlap-cfg") + 1])
    assert path.parent == folder_of(experiment) / "one" / "configs"
    assert "qkv_fprop" in path.read_text("utf-8")


def test_a_packed_file_is_where_the_executors_own_packing_says(home: Path) -> None:
    from overlapkit.integrations.nemo_run.job_folder import path_in_job

    for executor in (local(), slurm(home)):
        executor.assign("id", str(home / "id"), "task", "task")
        assert executor.package_configs(("x.yaml", "a: 1\n")) == [path_in_job(executor, "x.yaml")]


@pytest.mark.parametrize("form", ["mapping", "path", "recipe", "plan", "converter"])
def test_an_experiment_with_a_plugin_can_be_read_again(form: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(RECIPE), "utf-8")
    given = {
        "mapping": {"recipe": RECIPE},
        "path": {"recipe": path},
        "converter": {"script_args_converter_fn": lambda _: ["--mine"]},
        "recipe": {"recipe": recipe_from_mapping(RECIPE)},
        "plan": {"recipe": None, "plan": overlapkit.resolve(recipe(cluster={"num_gpus": 8}))},
    }[form]
    with run.Experiment("again", executor=local()) as experiment:
        experiment.add(script(), name="one", plugins=[plugin(**given)])
        dryrun(experiment)
    assert [job.id for job in run.Experiment.from_id(experiment._id).jobs] == ["one"]


# --- refused before anything is submitted ----------------------------------------------------------


def refused(executor: Any, name: str = "one", **fields: Any) -> str:
    """The line that an experiment ends with; no job is there, and no folder was made."""
    with run.Experiment("refused", executor=executor) as experiment:
        with pytest.raises(OverlapkitError) as caught:
            experiment.add(script(), name=name, plugins=[plugin(**fields)])
        assert experiment.jobs == []
    assert not folder_of(experiment).exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_recipe_for_64_gpus_on_an_executor_of_32(home: Path) -> None:
    line = refused(slurm(home, nodes=4), recipe=recipe(cluster={"num_gpus": 64}))
    assert line == "mapping: cluster.num_gpus: 64, but the executor has 4 nodes × 8 = 32"


def test_a_mapping_that_nemo_run_cannot_store() -> None:
    line = refused(local(), recipe=MappingProxyType(RECIPE))
    assert line.startswith("OverlapPlugin: NeMo-Run cannot store the recipe, a mappingproxy, with the experiment; give")


def test_an_executor_type_that_is_not_known() -> None:
    class Cluster(run.Executor):
        def assign(self, exp_id: str, exp_dir: str, task_id: str, task_dir: str) -> None:
            self.job_dir = f"{exp_dir}/{task_dir}"

    assert refused(Cluster()).startswith("OverlapPlugin: Cluster is no executor whose size and environment are known")


def test_a_plan_with_errors() -> None:
    line = refused(local(), recipe=IMPOSSIBLE)
    assert line.startswith("mapping would fail with 1 error: EP024")


@pytest.mark.parametrize("value", [1, 1.5, True, None, ["x"]])
def test_env_values_that_are_not_strings(value: Any) -> None:
    assert refused(local(env_vars={"NCCL_DEBUG": value})).startswith("LocalExecutor.env_vars: NCCL_DEBUG: the value is")


def test_a_job_folder_in_the_way_of_which_is_a_file(home: Path) -> None:
    (home / "experiments").write_text("a file\n")
    assert refused(local()) == f"{home}/experiments: the job's folder cannot be made in it: it is no folder"


def test_a_job_folder_that_may_not_be_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the system says to a user without the right; the tests may run as root, who has it everywhere.
    monkeypatch.setattr(Path, "mkdir", _read_only)
    assert refused(local()) == f"{home}: the job's folder cannot be made in it: Read-only file system"
    monkeypatch.undo()
    assert list(home.iterdir()) == []


def test_a_job_folder_where_the_kernel_lets_nobody_write() -> None:
    executor = local()
    executor.job_dir = "/proc/job"
    with pytest.raises(RecipeError, match=r"/proc: the job's folder cannot be made in it: "):
        plugin().setup(script(), executor)


def test_names_as_long_as_a_folder_may_have(home: Path) -> None:
    with run.Experiment("long", executor=local()) as experiment:
        experiment.add(script(), name="n" * 240, plugins=[plugin()])
        dryrun(experiment)
    assert stored(experiment, "n" * 150, "n" * 240)["ok"] is True
    assert refused(local(), name="n" * 256).endswith("the job's folder cannot be made in it: File name too long")


def test_a_job_folder_that_cannot_be_written_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with run.Experiment("late", executor=local()) as experiment:
        experiment.add(script(), name="one", plugins=[plugin()])
        make = experiment.jobs[0].executor.create_job_dir
        monkeypatch.setattr(Path, "write_text", _full)
        with pytest.raises(RecipeError, match=r"one\.overlap_plan\.txt: cannot be written: No space left on device"):
            make()


def _read_only(*_: Any, **__: Any) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def _full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
