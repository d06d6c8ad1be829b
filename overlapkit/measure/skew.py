"""How unevenly the ranks of a group communicate, and which of them the others wait for.

A collective's kernel runs from when a rank is ready until all are: the rank that comes last has the shortest kernels,
and the others' waiting stands in theirs. Only lengths are compared, for clocks of two hosts are not one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple


class RankTime(NamedTuple):
    """A rank and a length of time in microseconds."""

    rank: int
    time_us: float


class GroupTime(NamedTuple):
    """What one rank took for one group, in one step or (None) in all. ``ranks`` are the group's, where known."""

    group: str
    ranks: tuple[int, ...] | None
    step: int | None
    rank: int
    time_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSkew:
    """The longest and the shortest time that ranks of one group communicated; ``step`` None: in the whole input.

    ``shortest`` is the rank that the others waited for.
    """

    group: str
    ranks: tuple[int, ...]
    step: int | None
    longest: RankTime
    shortest: RankTime

    @property
    def skew_us(self) -> float:
        return self.longest.time_us - self.shortest.time_us

    def to_dict(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "ranks": list(self.ranks),
            "step": self.step,
            "skew_us": round(self.skew_us, 3),
            "longest": _plain(self.longest),
            "waited_for": _plain(self.shortest),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSkew:
    """The slowest and the fastest rank of one step, by the step's own length."""

    step: int
    slowest: RankTime
    fastest: RankTime

    def to_dict(self) -> dict[str, Any]:
        skew = self.slowest.time_us - self.fastest.time_us
        return {
            "step": self.step,
            "skew_us": round(skew, 3),
            "slowest": _plain(self.slowest),
            "fastest": _plain(self.fastest),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """Of several ranks: of each group that two of them are in, in all and per step, and of each step."""

    groups: tuple[GroupSkew, ...]
    steps: tuple[StepSkew, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"groups": [one.to_dict() for one in self.groups], "steps": [one.to_dict() for one in self.steps]}


def skew(groups: Iterable[GroupTime], steps: Iterable[tuple[int, RankTime]]) -> Skew | None:
    """The skew of what was timed on two ranks or more; None where nothing was.

    ``steps`` are (number, what a rank took for it).
    """
    by_group: dict[tuple[str, tuple[int, ...] | None, int | None], list[RankTime]] = {}
    for each in groups:
        by_group.setdefault((each.group, each.ranks, each.step), []).append(RankTime(each.rank, each.time_us))
    by_step: dict[int, list[RankTime]] = {}
    for number, taken in steps:
        by_step.setdefault(number, []).append(taken)
    found = Skew(
        groups=tuple(
            GroupSkew(
                group=group,
                ranks=tuple(sorted(each.rank for each in times)),
                step=step,
                longest=max(times, key=_length),
                shortest=min(times, key=_length),
            )
            for (group, _, step), times in by_group.items()
            if len(times) > 1
        ),
        steps=tuple(
            StepSkew(step=number, slowest=max(times, key=_length), fastest=min(times, key=_length))
            for number, times in sorted(by_step.items())
            if len(times) > 1
        ),
    )
    return found if found.groups or found.steps else None


def _length(taken: RankTime) -> float:
    return taken.time_us


def _plain(taken: RankTime) -> dict[str, Any]:
    return {"rank": taken.rank, "time_us": round(taken.time_us, 3)}
