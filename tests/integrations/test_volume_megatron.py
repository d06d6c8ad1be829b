"""What the real Megatron-Core calls is what ``overlapkit.volume`` says, integer for integer.

The test does not trust the prediction: it builds GPTs from recipes without overlapkit, trains two steps, and records
every call that reaches torch.distributed's backend. ``scripts/parity_volume.sh`` does it with many more layouts.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from volume.layouts import LAYOUTS, PROCESSES, layout
from volume.runs import Run, Runner, differences

from overlapkit import volume

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "parity_volume_megatron.py"


@pytest.fixture(scope="session")
def run() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_stage_calls_what_was_predicted(name: str, run: Runner) -> None:
    recipe = LAYOUTS[name]
    predicted, gpus = volume(recipe), recipe["cluster"]["num_gpus"]
    stages = run(recipe, [stage.ranks[-1][-1] for stage in predicted.stages], "fake")
    assert [each.stage for each in stages] == list(range(len(predicted.stages)))
    for each in stages:
        compared, wrong = differences(predicted, each, gpus)
        assert (compared > 0, wrong) == (True, [])


def test_a_model_without_values_calls_the_same(run: Runner) -> None:
    """Large models are built so: what marks a parameter as shared by TP ranks must not be lost."""
    recipe = LAYOUTS["experts, all-to-all, of equal load"]
    (rank,) = run(recipe, [0], "fake", "meta")
    assert differences(volume(recipe), rank, recipe["cluster"]["num_gpus"])[1] == []


@pytest.mark.parametrize("name", PROCESSES)
def test_every_process_calls_what_was_predicted(name: str, run: Runner) -> None:
    """With gloo the calls carry real tensors from one process to another."""
    recipe = PROCESSES[name]
    predicted, gpus = volume(recipe), recipe["cluster"]["num_gpus"]
    processes = run(recipe, list(range(gpus)), "gloo")
    assert [differences(predicted, each, gpus)[1] for each in processes] == [[]] * gpus
    assert sent(processes) == received(processes)
    # One process that stands for a rank, which the other tests rely on, does call by call what the rank does.
    assert [each.calls for each in run(recipe, list(range(gpus)), "fake")] == [each.calls for each in processes]


def sent(processes: list[Run]) -> Counter[tuple[int, int, str, int]]:
    """(from, to, dtype, bytes) of every message, as the senders had it."""
    calls = ((each.rank, call) for each in processes for call in each.calls)
    return Counter((rank, peer, dtype, size) for rank, (_, _, op, dtype, size, peer) in calls if op == "send")


def received(processes: list[Run]) -> Counter[tuple[int, int, str, int]]:
    """The same, as the receivers had it."""
    calls = ((each.rank, call) for each in processes for call in each.calls)
    return Counter((peer, rank, dtype, size) for rank, (_, _, op, dtype, size, peer) in calls if op == "recv")


def test_a_wrong_prediction_is_told(run: Runner) -> None:
    (rank,) = run(layout(tp=2), [0], "fake")
    _, wrong = differences(volume(layout(tp=2, sp=True)), rank, 2)
    told = "\n".join(wrong)
    assert "TENSOR_MODEL_PARALLEL_GROUP all_gather bfloat16" in told  # said, not called
    assert "TENSOR_MODEL_PARALLEL_GROUP all_reduce bfloat16: 0 calls" in told  # called, not said
    _, wrong = differences(volume(layout(tp=2, seq_length=64)), rank, 2)
    assert any("TENSOR_MODEL_PARALLEL_GROUP all_reduce bfloat16" in line for line in wrong)  # other bytes


def test_a_stage_that_sends_the_wrong_way_is_told(run: Runner) -> None:
    recipe = layout(pp=4)
    (rank,) = run(recipe, [1], "fake")
    turned = Run(rank=1, stage=1, calls=[[*call[:5], 0 if call[5] == 2 else call[5]] for call in rank.calls])
    assert differences(volume(recipe), rank, 4)[1] == []
    assert ["onward" in line for line in differences(volume(recipe), turned, 4)[1]] == [True]


def test_a_layout_that_cannot_run_says_why(run: Runner) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 0: .*sequence parallelism"):
        run(layout(sp=True), [0], "fake")


def test_recorded_layouts_are_run_again() -> None:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--only", "tp2sp_pp4", "moe_ep2_ag"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"(\d+)/(\d+) rows of 6 runs of 2 layouts  megatron-core \S+\n", done.stdout)
    assert found is not None, done.stdout
    assert found[1] == found[2]
