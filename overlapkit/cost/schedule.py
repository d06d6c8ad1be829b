"""Which pass runs when: Megatron-Core's 1F1B and interleaved schedules, one pass after the other on every stage.

The order is that of ``megatron.core.pipeline_parallel.schedules`` (0.16): ``get_pp_rank_microbatches`` for the warm-up,
``get_schedule_table`` for the turns of the chunks, which are reversed on the way back. A pass starts when its stage is
free and its input has arrived. One more forward pass before the first backward pass, as EP overlap has it, is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple

from overlapkit.cost.result import Timeline

Kind = Literal["forward", "backward"]
_MOST_BLOCKS = 500_000  # seconds of work, and some hundred MB


class Pass(NamedTuple):
    """A microbatch's way through a chunk of layers, there or back."""

    kind: Kind
    chunk: int
    microbatch: int


class Block(NamedTuple):
    """A pass on its stage, from when to when: seconds from the start of the step."""

    stage: int
    chunk: int
    microbatch: int
    kind: Kind
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Microbatches in the middle of a step that are not shown, and the seconds that they take."""

    microbatches: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The passes of a step in the order of their starts, up to ``end_s``; ``gap`` where the middle is left out."""

    blocks: tuple[Block, ...]
    end_s: float
    gap: Gap | None


def order(stage: int, stages: int, chunks: int, microbatches: int) -> Iterator[Pass]:
    """A stage's passes: warm-up, one forward and one backward in turns, then the backward passes that are left.

    ``chunks`` are model chunks per stage (virtual stages); of each, as many microbatches follow one another as there
    are stages (``microbatch_group_size_per_vp_stage``, whose default that is).
    """
    turns = _turns(stages, chunks, microbatches)
    behind = stages - stage - 1
    warm_up = min(behind if chunks == 1 else 2 * behind + (chunks - 1) * stages, len(turns))
    for index in range(len(turns) + warm_up):
        if index < len(turns):
            microbatch, chunk = turns[index]
            yield Pass("forward", chunk, microbatch)
        if index >= warm_up:
            microbatch, chunk = turns[index - warm_up]
            yield Pass("backward", chunks - 1 - chunk, microbatch)


def _turns(stages: int, chunks: int, microbatches: int) -> list[tuple[int, int]]:
    """Microbatch and chunk of each forward pass: a group of microbatches through every chunk, then the next group."""
    groups = range(0, microbatches, stages)
    return [
        (microbatch, chunk)
        for first in groups
        for chunk in range(chunks)
        for microbatch in range(first, min(first + stages, microbatches))
    ]


def blocks(timeline: Timeline) -> Iterator[Block]:
    """The passes of a step as they come: each starts when its stage is free and its input has arrived.

    A chunk takes its part of the stage's pass, a message between stages ``p2p_s``.

    Raises:
        ValueError: stages wait for each other for ever, as with virtual stages where the last group of microbatches
            has fewer than there are stages; Megatron-Core refuses these.
    """
    stages, chunks, microbatches = len(timeline.stages), timeline.vp, timeline.num_microbatches
    waiting = [deque(order(stage, stages, chunks, microbatches)) for stage in range(stages)]
    free = [0.0] * stages
    inputs = _Inputs(stages * chunks, microbatches, timeline.p2p_s)
    round_trip = [*range(stages), *reversed(range(stages))]  # the way of a microbatch, so that few rounds are needed
    while any(waiting):
        moved = False
        for stage in round_trip:
            passes, took = waiting[stage], timeline.stages[stage]
            while passes:
                kind, chunk, microbatch = passes[0]
                place = chunk * stages + stage
                ready = inputs.ready(kind, place, microbatch)
                if ready is None:
                    break
                passes.popleft()
                start = max(free[stage], ready)
                end = free[stage] = start + (took.forward_s if kind == "forward" else took.backward_s) / chunks
                inputs.made(kind, place, microbatch, end)
                moved = True
                yield Block(stage, chunk, microbatch, kind, start, end)
        if not moved:
            raise ValueError("the stages wait for each other")


class _Inputs:
    """When the input of each pass is there, by its place in the model and its microbatch; None as long as it is not."""

    def __init__(self, places: int, microbatches: int, p2p_s: float) -> None:
        self._forward: list[list[float | None]] = [[None] * microbatches for _ in range(places)]
        self._backward: list[list[float | None]] = [[None] * microbatches for _ in range(places)]
        self._forward[0] = [0.0] * microbatches
        self._p2p_s = p2p_s

    def ready(self, kind: Kind, place: int, microbatch: int) -> float | None:
        return (self._forward if kind == "forward" else self._backward)[place][microbatch]

    def made(self, kind: Kind, place: int, microbatch: int, end_s: float) -> None:
        """A pass has ended: what follows it has its input, on the next stage after a message."""
        if kind == "backward":
            if place:
                self._backward[place - 1][microbatch] = end_s + self._p2p_s
        elif place + 1 < len(self._forward):
            self._forward[place + 1][microbatch] = end_s + self._p2p_s
        else:
            self._backward[place][microbatch] = end_s


def schedule_of(timeline: Timeline, end_s: float, *, most_blocks: int) -> Schedule:
    """The step's passes, stretched so that the last of them ends at ``end_s``.

    With more than ``most_blocks`` the middle of the step, where every stage repeats itself, is a gap; start and end
    are there whole.

    Raises:
        ValueError: as `blocks`; or even start and end are half a million passes.
    """
    stages, chunks, microbatches = len(timeline.stages), timeline.vp, timeline.num_microbatches
    each = 2 * stages * chunks  # blocks per microbatch
    shown = microbatches
    if microbatches * each > most_blocks:
        # Warm-up, cool-down and some turns between them, in whole groups.
        shown = max(most_blocks // each // stages, 4) * stages + microbatches % stages
    left_out = microbatches - shown
    if left_out <= 0:
        shown, left_out = microbatches, 0
    if shown * each > _MOST_BLOCKS:
        raise ValueError(f"{microbatches * each:,} passes are too many")
    found = _in_order(replace(timeline, num_microbatches=shown))
    found_end = _end(found)
    more = 0.0
    if left_out:
        fewer = _end(_in_order(replace(timeline, num_microbatches=shown - stages)))
        more = left_out / stages * (found_end - fewer)
    scale = end_s / (found_end + more)
    cut = found_end / 2 if left_out else found_end
    placed = tuple(_placed(block, scale, end_s, cut, more, left_out) for block in found)
    gap = None
    if left_out:
        gap = Gap(microbatches=left_out, start_s=scale * cut, end_s=scale * (cut + more))
    return Schedule(blocks=placed, end_s=end_s, gap=gap)


def _in_order(timeline: Timeline) -> list[Block]:
    return sorted(blocks(timeline), key=lambda block: (block.start_s, block.stage))


def _end(found: Sequence[Block]) -> float:
    return max(chain((block.end_s for block in found), (0.0,)))


def _placed(block: Block, scale: float, end_s: float, cut: float, more: float, left_out: int) -> Block:
    """A block of the whole step: what starts after the cut comes later, with later microbatches."""
    later, shift = (left_out, more) if block.start_s >= cut else (0, 0.0)
    return block._replace(
        microbatch=block.microbatch + later,
        start_s=(block.start_s + shift) * scale,
        end_s=min((block.end_s + shift) * scale, end_s),  # the last ends there, whatever was rounded
    )
