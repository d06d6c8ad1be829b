"""Steps of a trace without ``ProfilerStep`` ranges, by the call that recurs with each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from overlapkit.measure.events import Communicator, Step
from overlapkit.measure.readers.step_marks import Mark, StepMarks
from overlapkit.measure.readers.torch_trace.collectives import Collective

_TYPES = ("int32", "float32")
_BYTES = 4  # of one element


class MarkedSteps(NamedTuple):
    """``steps`` lie between two marks, none where there is one mark; ``by`` says in words what marks them."""

    steps: tuple[Step, ...]
    by: str | None


def marked_steps(calls: Iterable[tuple[float, Collective]], communicators: Sequence[Communicator]) -> MarkedSteps:
    """The steps of calls, each with when it began, by the rule of :mod:`overlapkit.measure.readers.step_marks`.

    Calls of a group of which not even the size is known mark nothing.
    """
    found: list[tuple[float, Mark]] = []
    for at, call in calls:
        known = communicators[call.communicator].size is not None
        if known and call.op == "all_reduce" and call.dtype in _TYPES and call.message_bytes == _BYTES:
            found.append((at, (call.dtype, call.communicator)))
    marks = StepMarks()
    for _, (dtype, place) in sorted(found):
        marks.add(dtype, place, communicators[place or 0].size or 0)
    chosen = marks.chosen()
    if chosen is None:
        return MarkedSteps((), None)
    moments = sorted({at for at, mark in found if mark == chosen})
    steps = (
        Step(number=number, start_us=start, end_us=end) for number, (start, end) in enumerate(pairwise(moments), 1)
    )
    dtype, place = chosen
    return MarkedSteps(tuple(steps), f"an all_reduce of one {dtype} on {communicators[place or 0].label}")
