"""OverlapPlugin(measure=…): a job leaves in its folder what ``overlapkit measure`` reads."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import nemo_run as run
import pytest
from nemo_run_launches import PLAN_ENV, RECIPE, folder_of, home, local, recipe, script, slurm, stored

from overlapkit import measure
from overlapkit.errors import RecipeError
from overlapkit.integrations.nemo_run import OverlapPlugin
from overlapkit.measure.readers.recorder import read

__all__ = ["home"]  # the fixture

LOG_ENV = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,COLL",
    "NCCL_DEBUG_FILE": "/nemo_run/nccl.%h.%p.log",
}


def set_up(executor: Any, task: Any = None, **fields: Any) -> Any:
    task = task or script()
    executor.job_dir = executor.job_dir or "/nowhere/but/here"
    OverlapPlugin(**{"recipe": RECIPE, "script_args": None, **fields}).setup(task, executor)
    return task


@pytest.fixture
def job(tmp_path: Path) -> Any:
    executor = local()
    executor.job_dir = str(tmp_path / "job")
    return executor


def test_nothing_is_measured_unless_it_is_asked_for(job: Any) -> None:
    task = set_up(job)
    assert (job.env_vars, task) == (PLAN_ENV, script())


# --- NCCL's log ----------------------------------------------------------------------------------


def test_a_local_job_logs_into_its_folder(job: Any) -> None:
    set_up(job, measure="nccl-log")
    assert job.env_vars == {**PLAN_ENV, **LOG_ENV, "NCCL_DEBUG_FILE": f"{job.job_dir}/nccl.%h.%p.log"}


def test_a_container_of_slurm_keeps_the_variables(tmp_path: Path) -> None:
    executor = slurm(tmp_path)
    executor.job_dir = str(tmp_path / "job")
    set_up(executor, measure="nccl-log")
    assert executor.env_vars == {**PLAN_ENV, **LOG_ENV}
    assert set(executor.container_env) == {*PLAN_ENV, *LOG_ENV}


@pytest.mark.parametrize("owner", ["executor", "script", "recipe"])
def test_a_variable_of_the_users_that_would_hide_the_log_is_refused(owner: str, job: Any) -> None:
    task, fields = script(), {}
    if owner == "executor":
        job.env_vars = {"NCCL_DEBUG": "WARN"}
    elif owner == "script":
        task = script(env={"NCCL_DEBUG": "WARN"})
    else:
        fields = {"recipe": {**RECIPE, "env_vars": {"NCCL_DEBUG": "WARN"}}}
    before = copy.deepcopy(job.env_vars)
    with pytest.raises(
        RecipeError, match="NCCL_DEBUG: measure=nccl-log needs INFO, and it is WARN; take one of the two"
    ):
        set_up(job, task, measure="nccl-log", **fields)
    assert job.env_vars == before


def test_the_users_own_value_that_is_the_same_is_no_matter(job: Any) -> None:
    job.env_vars = {"NCCL_DEBUG": "INFO"}
    set_up(job, measure="nccl-log")
    assert job.env_vars["NCCL_DEBUG_SUBSYS"] == "INIT,COLL"


# --- the recorder --------------------------------------------------------------------------------


def test_a_script_is_started_by_the_recorder(job: Any) -> None:
    task = set_up(job, script(args=["--mine"]), measure="recorder", script_args="bridge")
    assert (task.path, task.m) == ("overlapkit.record", True)
    assert task.args[:5] == ["-o", f"{job.job_dir}/recorded", "--", "train.py", "--mine"]
    assert task.args[5].startswith("++model.")


def test_a_module_is_started_by_the_recorder(job: Any) -> None:
    task = set_up(job, script(path="mine.train", m=True), measure="recorder")
    assert (task.path, task.m, task.args[3:]) == ("overlapkit.record", True, ["-m", "mine.train"])


def test_set_up_again_it_is_recorded_once_or_no_more(job: Any) -> None:
    task = set_up(job, script(args=["--mine"]), measure="recorder", script_args="bridge")
    once = copy.deepcopy(task)
    set_up(job, task, measure="recorder", script_args="bridge")
    assert task == once
    set_up(job, task)
    assert task == script(args=["--mine"])


@pytest.mark.parametrize(
    "task",
    [
        run.Script(inline="python train.py"),
        run.Script(path="train.sh"),
        run.Partial(dict, model=1),
    ],
    ids=["inline", "bash", "a function"],
)
def test_what_is_no_python_script_cannot_be_recorded(task: Any, job: Any) -> None:
    before = copy.deepcopy(task)
    with pytest.raises(
        RecipeError, match=r"only a run\.Script of a Python file .* can be recorded; use measure=nccl-log"
    ):
        set_up(job, task, measure="recorder")
    assert task == before


# --- what cannot be ------------------------------------------------------------------------------


def test_an_unknown_kind_is_refused_with_the_known_ones(job: Any) -> None:
    with pytest.raises(
        RecipeError, match=r"measure is 'nsys'; use one of nccl-log, recorder, or None; .* measure --how"
    ):
        set_up(job, measure="nsys")


def test_outside_an_experiment_there_is_no_folder() -> None:
    with pytest.raises(
        RecipeError, match=r"what is measured has no job folder to lie in; add the task to a run\.Experiment"
    ):
        OverlapPlugin(recipe=RECIPE, measure="nccl-log").setup(script(), local())


# --- a job ---------------------------------------------------------------------------------------

JOB = """
import os, sys, torch, torch.distributed as dist
store = dist.FileStore(sys.argv[1], 1)
dist.init_process_group("gloo", rank=0, world_size=1, store=store)
dist.all_reduce(torch.ones(5))
assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
"""


def test_the_recording_of_a_job_is_in_its_folder_and_the_plan_names_it(home: Path) -> None:
    path = home / "job.py"
    path.write_text(JOB)
    given = recipe(cluster={"num_gpus": 1}, model={"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1})
    given["model"]["sequence_parallel"] = False
    given["env_vars"] = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    plugin = OverlapPlugin(recipe=given, script_args=None, measure="recorder")
    task = run.Script(path=str(path), args=[str(home / "store")], entrypoint=sys.executable)
    with run.Experiment("measured", executor=run.LocalExecutor(ntasks_per_node=1)) as experiment:
        experiment.add(task, name="job", plugins=[plugin])
        experiment.run(sequential=True, tail_logs=False)
    folder = folder_of(experiment) / "job"
    (found,) = read(list((folder / "recorded").iterdir())).recordings
    assert [event[1:5] for event in found.events] == [("all_reduce", "float32", 1, 20)]
    notes = stored(experiment, "job")["launch"]["notes"]
    assert f"measured: overlapkit measure {folder}/recorded" in notes
    assert measure(folder).problems == ()
