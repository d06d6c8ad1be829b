"""A real job of the real Megatron-Core under the recorder is what ``overlapkit.volume`` says, row for row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from volume.layouts import layout

from overlapkit import volume
from overlapkit.measure.events import Recording
from overlapkit.measure.readers.recorder import read

HERE = Path(__file__).parent / "measure"
JOB = HERE / "train_two_steps.py"
PLAIN_DDP = {"use_distributed_optimizer": False}
JOBS = {
    "tp2_pp2": layout(tp=2, sp=True, pp=2),
    "tp2_pp2_no_distopt": layout(tp=2, pp=2, ddp=PLAIN_DDP, share_embeddings_and_output_weights=True),
    "tp2_dp2": layout(tp=2, dp=2, ddp={"overlap_grad_reduce": True, "bucket_size": 30_000}),
    "tp2_dp2_no_distopt": layout(tp=2, sp=True, dp=2, ddp=PLAIN_DDP),
}


def run(*command: str) -> None:
    # Four processes on a small machine have no use for more threads.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    started = [sys.executable, "-W", "ignore", *command]
    done = subprocess.run(started, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def written(recipe: dict[str, Any], folder: Path, name: str) -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(recipe))
    return str(path)


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per job, whose four processes are forks of one that had imported Megatron-Core."""
    folder = tmp_path_factory.mktemp("forked")
    recipes = [written(recipe, folder, name) for name, recipe in JOBS.items()]
    run(str(HERE / "fork_ranks.py"), "4", str(folder), str(JOB), *recipes)
    return folder


def differences(recipe: dict[str, Any], folder: Path) -> list[str]:
    """Where four recordings are not what is predicted of their pipeline stages, in words."""
    reading = read(sorted(folder.iterdir()))
    assert reading.problems == ()
    assert sorted(each.rank or 0 for each in reading.recordings) == [0, 1, 2, 3]
    wrong = []
    for each in reading.recordings:
        stages = [stage for stage in volume(recipe).stages if any(each.rank in part for part in stage.ranks)]
        said = {(row.group, row.size, row.op, row.dtype): [row.count, row.message_bytes] for row in stages[0].rows}
        seen = steady_step(each)
        assert len(said) > 5
        wrong += [
            f"rank {each.rank}: {key}: {said.get(key)}, not {seen.get(key)}"
            for key in sorted(said.keys() | seen.keys())
            if said.get(key) != seen.get(key)
        ]
    return wrong


def steady_step(recording: Recording) -> dict[tuple[str, int, str, str], list[int]]:
    """(group, size, op, dtype) -> [calls, bytes] of the second of two steps, the only one that is complete."""
    assert recording.steps == 1
    assert recording.steps_by is not None
    assert recording.steps_by.startswith("the all_reduce of one int32 on group ")
    assert recording.steps_by.endswith("(MODEL_PARALLEL_GROUP)")
    rows: dict[tuple[str, int, str, str], list[int]] = {}
    for event in recording.events:
        group = recording.communicators[event.communicator]
        if event.step == 2 and group.size != 1:
            row = rows.setdefault((group.description or "", group.size or 0, event.op, event.dtype), [0, 0])
            row[0] += event.calls
            row[1] += event.message_bytes
    return rows


@pytest.mark.parametrize("name", JOBS)
def test_the_recorded_job_is_the_predicted_one(name: str, forked: Path) -> None:
    """Also where Megatron-Core, which keeps torch's functions under names of its own, was imported first."""
    assert differences(JOBS[name], forked / name) == []


@pytest.mark.parametrize("name", ["tp2_pp2", "tp2_dp2_no_distopt"])
def test_under_torchrun_it_is_the_predicted_one_too(name: str, tmp_path: Path) -> None:
    recipe = written(JOBS[name], tmp_path, name)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    run(*launch, "-m", "overlapkit.record", "-o", str(tmp_path / name), "--", str(JOB), recipe)
    assert differences(JOBS[name], tmp_path / name) == []


def test_a_wrong_prediction_is_told(forked: Path) -> None:
    wrong = "\n".join(differences(layout(tp=2, pp=2), forked / "tp2_pp2"))
    assert "'TENSOR_MODEL_PARALLEL_GROUP', 2, 'all_gather', 'bfloat16'): None, not [" in wrong
    assert "'PIPELINE_MODEL_PARALLEL_GROUP', 2, 'send', 'bfloat16')" in wrong
