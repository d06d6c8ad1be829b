"""The order of passes in an estimate's picture is that of the installed megatron-core."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from overlapkit.cost.schedule import order


def megatrons(stage: int, stages: int, chunks: int, microbatches: int) -> list[tuple[str, int, int]]:
    """Way, chunk and microbatch of each pass, from megatron-core's own warm-up and table."""
    group = SimpleNamespace(size=lambda: stages, rank=lambda: stage)
    virtual = chunks if chunks > 1 else None
    communicator: Any = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual)
    total, _, warm_up, _ = get_pp_rank_microbatches(microbatches, chunks, stages, p2p_communicator=communicator)
    table = get_schedule_table(microbatches, chunks, stages)
    found = []
    for index in range(total + warm_up):
        if index < total:
            found.append(("forward", table[index][1], table[index][0]))
        if index >= warm_up:
            found.append(("backward", chunks - 1 - table[index - warm_up][1], table[index - warm_up][0]))
    return found


@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_order_is_megatrons(stages: int, chunks: int) -> None:
    for microbatches in (stages, 2 * stages, 5 * stages):
        for stage in range(stages):
            found = [tuple(each) for each in order(stage, stages, chunks, microbatches)]
            assert found == megatrons(stage, stages, chunks, microbatches)
