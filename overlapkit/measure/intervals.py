"""Time as intervals: how long communication took, and how much of it nothing else covered.

Wall time is a union of intervals over all streams, never a sum of kernels. *Exposed* is the part of the union of a
group's communication that no other device work covers: an upper bound of what hiding it could win. All functions are
pure; a *union* is sorted, and its intervals neither overlap nor touch. Times are microseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from overlapkit.measure.events import Interval, Step

Group = TypeVar("Group", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Communication in microseconds: the union in all, and the part of it that no other device work covers."""

    time_us: float
    exposed_us: float

    @property
    def hidden_us(self) -> float:
        """The part that other device work covers."""
        return self.time_us - self.exposed_us


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes(Generic[Group]):
    """One step: all its communication, and each group's."""

    number: int
    total: Times
    groups: Mapping[Group, Times]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap(Generic[Group]):
    """A whole recording: groups run beside each other, so that their times may add up to more than the total."""

    total: Times
    groups: Mapping[Group, Times]
    steps: tuple[StepTimes[Group], ...]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The times that at least one interval covers. Linear for sorted input; an interval without length covers none."""
    covered: list[Interval] = []
    start = end = float("-inf")
    for next_start, next_end in sorted(intervals):
        if next_start > end:
            if end > start:
                covered.append((start, end))
            start, end = next_start, next_end
        elif next_end > end:
            end = next_end
    if end > start:
        covered.append((start, end))
    return covered


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The times that both unions cover, in linear time."""
    both: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            both.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return both


def subtract(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The times that the first union covers and the second does not, in linear time."""
    left: list[Interval] = []
    j = 0
    for start, end in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        k = j
        while k < len(second) and second[k][0] < end:
            if second[k][0] > start:
                left.append((start, second[k][0]))
            start = max(start, second[k][1])
            k += 1
        if start < end:
            left.append((start, end))
        j = max(j, k - 1)  # the last one may reach into the next interval
    return left


def length(intervals: Iterable[Interval]) -> float:
    """The sum of their lengths, in microseconds."""
    return sum(end - start for start, end in intervals)


def exposed(
    spans: Mapping[Group, Iterable[Interval]], busy: Iterable[Interval], windows: Sequence[Step] = ()
) -> Overlap[Group]:
    """How much of each group's communication is exposed, in all and in each of ``windows``, none of them left out.

    ``spans`` are the communication kernels of each group, ``busy`` all other device work, both in any order. What lies
    outside all windows counts in the totals alone.
    """
    work = union(busy)
    covered = {group: union(intervals) for group, intervals in spans.items()}
    bare = {group: subtract(intervals, work) for group, intervals in covered.items()}
    all_covered = union(interval for intervals in covered.values() for interval in intervals)
    all_bare = subtract(all_covered, work)
    return Overlap(
        total=_times(all_covered, all_bare),
        groups={group: _times(covered[group], bare[group]) for group in covered},
        steps=tuple(
            StepTimes(
                number=step.number,
                total=_times(_within(all_covered, step), _within(all_bare, step)),
                groups={group: _times(_within(covered[group], step), _within(bare[group], step)) for group in covered},
            )
            for step in windows
        ),
    )


def windows(ranges: Mapping[int, Interval]) -> tuple[Step, ...]:
    """Steps by their numbers' ranges, each from its beginning to that of the next.

    Work that runs late belongs to the step that it runs in; a step that no next one follows ends with its range.
    """
    numbers = sorted(ranges, key=lambda number: ranges[number])
    ends = {number: ranges[after][0] for number, after in pairwise(numbers) if after == number + 1}
    return tuple(
        Step(number=number, start_us=ranges[number][0], end_us=ends.get(number, ranges[number][1]))
        for number in numbers
    )


def step_at(steps: Sequence[Step], at_us: float) -> int | None:
    """The number of the step, of those that :func:`windows` gave, in which a moment lies; None outside all of them."""
    place = bisect_right(steps, at_us, key=lambda step: step.start_us) - 1
    return steps[place].number if place >= 0 and at_us < steps[place].end_us else None


def _times(covered: Iterable[Interval], bare: Iterable[Interval]) -> Times:
    return Times(time_us=length(covered), exposed_us=length(bare))


def _within(intervals: Sequence[Interval], step: Step) -> list[Interval]:
    """The part of a union inside a step."""
    first = max(bisect_right(intervals, (step.start_us, float("inf"))) - 1, 0)
    last = bisect_right(intervals, (step.end_us, float("inf")), lo=first)
    return overlap(intervals[first:last], [(step.start_us, step.end_us)])
