"""The plugin on the command line of a real NeMo-Run entrypoint, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nemo_run as run
import pytest
from nemo_run_launches import PLAN_ENV, RECIPE

from overlapkit.integrations.nemo_run import OverlapPlugin
from overlapkit.render.data import to_yaml

ENTRYPOINT = """
import os

import nemo_run as run
import overlapkit.integrations.nemo_run


@run.cli.entrypoint
def launch(steps: int = 1):
    print(f"trained {steps} with {os.environ['CUDA_DEVICE_MAX_CONNECTIONS']}")


@run.cli.factory
@run.autoconvert
def here() -> run.LocalExecutor:
    return run.LocalExecutor(ntasks_per_node=8)


if __name__ == "__main__":
    run.cli.main(launch)
"""


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "launch.py").write_text(ENTRYPOINT, "utf-8")
    (folder / "job.yaml").write_text(to_yaml(RECIPE), "utf-8")
    environment = {**os.environ, "NEMORUN_HOME": str(folder), "NO_COLOR": "1", "COLUMNS": "200"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        [sys.executable, "launch.py", "--yes", "run.executor=here", "run.plugins=overlap", *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def test_a_job_starts_with_the_plan_and_leaves_it_in_its_folder(tmp_path: Path) -> None:
    done = launch(tmp_path, "run.plugins.recipe=job.yaml", "steps=3")
    assert "trained 3 with 1" in done.stdout + done.stderr
    (path,) = tmp_path.glob("experiments/launch/*/launch/*.overlap_plan.json")
    assert json.loads(path.read_text("utf-8"))["launch"]["environment"] == PLAN_ENV
    assert len(list(path.parent.glob("*overlap_plan*"))) == 2


def test_overrides_and_options_are_taken_from_the_command_line(tmp_path: Path) -> None:
    words = ['run.plugins.overrides=["cluster.gpu=b200"]', "run.plugins.on_error=warn", "run.plugins.script_args=none"]
    done = launch(tmp_path, "run.plugins.recipe=job.yaml", *words, "run.plugins.manual_gc=true")
    assert "trained 1 with 32" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (['run.plugins.overrides=["cluster.num_gpus=64"]'],
         "command line: cluster.num_gpus: 64, but the executor has 1 node × 8 = 8"),
        (["run.plugins.on_error=ignore"], "ignore"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_ends_in_one_line_and_no_job(tmp_path: Path, words: list[str], says: str) -> None:
    done = launch(tmp_path, "run.plugins.recipe=job.yaml", *words)
    assert says in done.stderr
    assert "trained" not in done.stdout
    assert list(tmp_path.glob("experiments/launch/*/*")) == []


def test_nemo_runs_own_command_loads_it_by_its_entry_point(tmp_path: Path) -> None:
    program = (
        "from nemo_run.cli.api import _load_entrypoints, resolve_factory; import nemo_run as run; _load_entrypoints(); "
        "print(resolve_factory(run.Plugin, 'overlap')())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "OverlapPlugin" in done.stdout


def test_it_can_be_configured_as_any_plugin() -> None:
    import fiddle as fdl

    config = run.Config(OverlapPlugin, recipe="job.yaml", overrides=["cluster.gpu=b200"])
    assert fdl.build(config) == OverlapPlugin(recipe="job.yaml", overrides=["cluster.gpu=b200"])
