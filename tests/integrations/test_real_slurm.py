"""Jobs that NeMo-Run submits to a real Slurm: the variables that their processes see are the plan's."""

from __future__ import annotations

import gc
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nemo_run as run
import pytest
from nemo_run.run.torchx_backend.schedulers import slurm as scheduler
from nemo_run_launches import folder_of, home, slurm, stored
from real_launches import (
    BASH,
    DATA_PARALLEL,
    JOBS,
    PARTITION,
    TENSOR_PARALLEL,
    printed,
    slurm_conf,
    slurm_local,
    slurm_log,
    tiny,
)

from overlapkit import resolve
from overlapkit.integrations.nemo_run import OverlapPlugin

__all__ = ["home", "slurm_conf"]  # fixtures

# Without Transformer Engine a plan has no variables for it: what a task before set would be seen here.
NO_ENGINE = tiny(software={"transformer_engine": None})
NAMES = sorted({name for recipe in (TENSOR_PARALLEL, DATA_PARALLEL, NO_ENGINE) for name in resolve(recipe).env})


@pytest.fixture
def cluster(home: Path, slurm_conf: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """NeMo-Run's home; it talks to the module's Slurm, and a job gets from here nothing that a plan would set."""
    monkeypatch.setenv("SLURM_CONF", slurm_conf)
    # Decided when NeMo-Run was imported; else it would be in the user's home.
    monkeypatch.setattr(scheduler, "SLURM_JOB_DIRS", str(home / ".slurm_jobs"))
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    yield home
    gc.collect()  # NeMo-Run leaves the pipes of sbatch open: said here, where warnings of packages are ignored


def executor(home: Path, **fields: Any) -> Any:
    # NeMo-Run would ask for the estimated start of the job in a thread that outlives the test.
    quiet = {"partition": PARTITION, "time": "00:05:00", "poll_estimated_start_time": False}
    return slurm(home, ntasks_per_node=2, **quiet, **fields)


def print_environment() -> Any:
    return run.Script(path=str(JOBS / "print_environment.py"), args=NAMES, entrypoint=sys.executable)


def seen(experiment: Any, task: str) -> list[dict[str, str]]:
    """Of the variables that plans of this module set, those that each process of a task saw."""
    return [process["variables"] for process in printed(slurm_log(folder_of(experiment) / task))]


def test_a_task_sees_the_variables_of_its_plan(cluster: Path) -> None:
    with run.Experiment("env", executor=executor(cluster)) as experiment:
        experiment.add(print_environment(), name="job", plugins=[OverlapPlugin(recipe=TENSOR_PARALLEL)])
        experiment.run(detach=True)
    env = dict(resolve(TENSOR_PARALLEL).env)
    assert len(env) == 3
    assert seen(experiment, "job") == [env, env]
    assert stored(experiment, "job")["env"] == env


def test_a_variable_that_the_user_set_stays(cluster: Path) -> None:
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVTE_FWD_LAYERNORM_SM_MARGIN": "8"}
    with run.Experiment("own", executor=executor(cluster, env_vars=own)) as experiment:
        experiment.add(print_environment(), name="job", plugins=[OverlapPlugin(recipe=TENSOR_PARALLEL)])
        experiment.run(detach=True)
    expected = {**resolve(TENSOR_PARALLEL).env, **own}
    assert expected["NVTE_BWD_LAYERNORM_SM_MARGIN"] == "16"
    assert seen(experiment, "job") == [expected, expected]


def test_tasks_with_one_executor_see_each_the_variables_of_its_own_plan(cluster: Path) -> None:
    recipes = {"tensor_parallel": TENSOR_PARALLEL, "data_parallel": DATA_PARALLEL, "no_engine": NO_ENGINE}
    with run.Experiment("three", executor=executor(cluster)) as experiment:
        for name, recipe in recipes.items():
            experiment.add(print_environment(), name=name, plugins=[OverlapPlugin(recipe=recipe)])
        experiment.add(print_environment(), name="without")
        experiment.run(detach=True)
    expected = {name: dict(resolve(recipe).env) for name, recipe in recipes.items()}
    assert len({str(env) for env in expected.values()}) == len(recipes)
    for name, env in {**expected, "without": {}}.items():
        assert seen(experiment, name) == [env, env], name


# --- the script that starts it -------------------------------------------------------------------


def test_a_machine_without_slurm_is_told_the_packages(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "dirname").symlink_to(shutil.which("dirname"))
    found = slurm_local("start", tmp_path / "slurm", PATH=str(tools))
    assert found.returncode == 2
    assert re.fullmatch(r"slurm_local.sh: there is no \w+ here; .*apt-get install slurm-wlm munge\n", found.stdout)
    assert not (tmp_path / "slurm").exists()


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    for verb, line in (("start", "is not empty"), ("stop", "holds no Slurm that this script started")):
        found = slurm_local(verb, tmp_path)
        assert (found.returncode, found.stdout) == (2, f"slurm_local.sh: {tmp_path} {line}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_it_leaves_nothing_behind_though_a_job_runs(tmp_path: Path) -> None:
    folder, output = tmp_path / "slurm", tmp_path / "job.out"
    assert slurm_local("start", folder).returncode == 0
    exports = slurm_local("env", folder).stdout
    submit = f"{exports} sbatch --output={output} --wrap 'echo $$; exec sleep 600'"
    subprocess.run([BASH, "-c", submit], check=True, stdout=subprocess.DEVNULL)
    processes = [path.read_text(encoding="ascii").strip() for path in folder.glob("*.process")]
    processes.append(first_line(output))
    assert [runs(process) for process in processes] == [True] * 4
    stopped = slurm_local("stop", folder)
    assert (stopped.returncode, stopped.stdout) == (0, "")
    assert not folder.exists()
    assert not any(runs(process) for process in processes)


def first_line(path: Path, seconds: float = 60) -> str:
    end = time.monotonic() + seconds
    while not (path.exists() and "\n" in path.read_text(encoding="utf-8")):
        assert time.monotonic() < end, f"nothing in {path} after {seconds:.0f} seconds"
        time.sleep(0.1)
    return path.read_text(encoding="utf-8").splitlines()[0]


def runs(process: str) -> bool:
    """False for one that has ended, be it that its parent has not asked for its status."""
    try:
        return bool(Path("/proc", process, "cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False
