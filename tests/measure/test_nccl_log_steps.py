"""NCCL logs have no steps: which recurring collective marks them."""

from __future__ import annotations

from pathlib import Path

import pytest
from nccl_log_lines import call, one, read

from overlapkit.measure.events import SOME_STEP, CommEvent


def test_one_int32_marks_a_step_on_any_group(tmp_path: Path) -> None:
    mark = call("AllReduce", 1, "int32", comm=1, ranks=1)
    step = [call("AllGather", 8), call("AllGather", 8), mark]
    recording = one(read(tmp_path, call("AllReduce", 1), *step, *step, *step, call("AllGather", 8)))
    assert recording.steps == 2
    assert recording.steps_by == "an all_reduce of one int32 on comm 0x1, of one rank"
    assert set(recording.events) == {
        CommEvent(0, "all_reduce", "float32", 1, 4, None),
        CommEvent(0, "all_gather", "float32", 4, 4 * 64, SOME_STEP),
        CommEvent(0, "all_gather", "float32", 3, 3 * 64, None),
        CommEvent(1, "all_reduce", "int32", 2, 8, SOME_STEP),
        CommEvent(1, "all_reduce", "int32", 1, 4, None),
    }


def test_a_flag_of_the_first_step_alone_marks_nothing(tmp_path: Path) -> None:
    """Megatron-Core 0.19.2 asks once on the group of the distributed optimizer, before the loop's first mark."""
    once = call("AllReduce", 1, "int32", comm=2, ranks=8)
    step = [call("AllGather", 8), call("AllReduce", 1, "int32", comm=1)]
    recording = one(read(tmp_path, call("AllGather", 8), once, *step, *step, *step))
    assert (recording.steps, recording.steps_by) == (2, "an all_reduce of one int32 on comm 0x1, of 2 ranks")
    assert CommEvent(0, "all_gather", "float32", 2, 2 * 64, SOME_STEP) in recording.events


def test_of_flags_that_recur_the_first_group_s_mark_the_steps(tmp_path: Path) -> None:
    step = [call("AllReduce", 1, "int32", comm=comm) for comm in (1, 2, 2)]
    recording = one(read(tmp_path, *step, *step))
    assert (recording.steps, recording.steps_by) == (1, "an all_reduce of one int32 on comm 0x1, of 2 ranks")


def test_else_one_float32_on_the_largest_communicator(tmp_path: Path) -> None:
    small = call("AllReduce", 1, comm=1, ranks=2)
    large = call("AllReduce", 1, comm=2, ranks=8)
    job = call("AllGather", 1, comm=3, ranks=8)
    recording = one(read(tmp_path, small, job, small, large, call("AllGather", 1), small, large))
    assert (recording.steps, recording.steps_by) == (1, "an all_reduce of one float32 on comm 0x2, of 8 ranks")
    assert CommEvent(0, "all_reduce", "float32", 2, 8, None) in recording.events
    assert CommEvent(0, "all_reduce", "float32", 1, 4, SOME_STEP) in recording.events


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_a_barrier_marks_nothing(tmp_path: Path, dtype: str) -> None:
    """PyTorch's barrier reduces one element on the job's own communicator, which comes first."""
    barrier = call("AllReduce", 1, dtype, ranks=8)
    recording = one(read(tmp_path, barrier, barrier, call("AllGather", 8, comm=1), barrier))
    assert (recording.steps, recording.steps_by) == (0, None)
    norm = call("AllReduce", 1, comm=2, ranks=8)  # of the gradients, on a group with the same ranks
    recording = one(read(tmp_path, barrier, barrier, norm, barrier, norm))
    assert (recording.steps, recording.steps_by) == (1, "an all_reduce of one float32 on comm 0x2, of 8 ranks")


def test_a_single_mark_completes_no_step(tmp_path: Path) -> None:
    recording = one(read(tmp_path, call("AllGather", 8), call("AllReduce", 1, "int32")))
    assert recording.steps == 0
    assert recording.steps_by is not None
    assert {event.step for event in recording.events} == {None}


def test_without_a_mark_nothing_is_said(tmp_path: Path) -> None:
    recording = one(read(tmp_path, call("AllGather", 8)))
    assert (recording.steps, recording.steps_by) == (0, None)
