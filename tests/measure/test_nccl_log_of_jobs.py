"""Whole jobs: logs that were written from a predicted volume are read back to exactly that volume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jobs_to_log import LAYOUTS, SPELLINGS, STEPS, predicted
from write_nccl_log import ranks_of, write_logs

from overlapkit.measure.events import SOME_STEP, Recording
from overlapkit.measure.readers import nccl_log
from overlapkit.volume import Volume

Totals = dict[tuple[tuple[int, ...], str, str], tuple[int, int]]


def predicted_totals(volume: Volume, rank: int) -> Totals:
    """Calls and bytes per step by (ranks, operation, type): groups of the same ranks are one here."""
    calls, moved = Counter[Any](), Counter[Any]()
    stage = next(stage for stage in volume.stages if any(rank in part for part in stage.ranks))
    for row in stage.rows:
        dtype = "uint8" if row.dtype == "bool" else row.dtype
        key = ranks_of(volume, row.group, rank), row.op, dtype
        calls[key] += row.count
        moved[key] += row.message_bytes
    return {key: (calls[key], moved[key]) for key in calls}


def read_totals(recording: Recording) -> Totals:
    """The same of the complete steps of a recording, per step."""
    calls, moved = Counter[Any](), Counter[Any]()
    for event in recording.events:
        communicator = recording.communicators[event.communicator]
        if event.step == SOME_STEP and communicator.size != 1:
            assert communicator.ranks is not None
            calls[communicator.ranks, event.op, event.dtype] += event.calls
            moved[communicator.ranks, event.op, event.dtype] += event.message_bytes
    assert not any(count % STEPS for count in (*calls.values(), *moved.values()))
    return {key: (calls[key] // STEPS, moved[key] // STEPS) for key in calls}


# Each layout in two spellings, each spelling in two layouts.
PAIRS = [(layout, SPELLINGS[(at + shift) % len(SPELLINGS)]) for shift in (0, 3) for at, layout in enumerate(LAYOUTS)]


@pytest.mark.parametrize(
    ("layout", "spelling"), PAIRS, ids=[f"{layout}: {spelling['version']}" for layout, spelling in PAIRS]
)
def test_every_rank_moves_what_was_predicted(layout: str, spelling: dict[str, Any], tmp_path: Path) -> None:
    volume = predicted(layout)
    reading = nccl_log.read(write_logs(volume, tmp_path, steps=STEPS, **spelling))
    assert reading.problems == ()
    assert [recording.rank for recording in reading.recordings] == list(range(32))
    for recording in reading.recordings:
        assert recording.rank is not None
        assert (recording.world_size, recording.steps) == (32, STEPS)
        assert read_totals(recording) == predicted_totals(volume, recording.rank)
