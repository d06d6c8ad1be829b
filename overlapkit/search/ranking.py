"""The best layouts seen so far and the Pareto front of time against memory, in a memory that does not grow."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from overlapkit.search.space import Layout, Overlaps


class Candidate(NamedTuple):
    """A layout that is legal and fits: seconds of a step, bytes on the fullest rank. Smaller ones rank first."""

    seconds: float
    memory: float
    layout: Layout
    overlaps: Overlaps


@dataclass(slots=True)
class Ranking:
    """What a part of the space came to. ``best`` is sorted; ``front`` too, so that memory falls as time rises."""

    keep: int
    best: list[Candidate] = field(default_factory=list)
    front: list[Candidate] = field(default_factory=list)
    timed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    too_large: Counter[str] = field(default_factory=Counter)
    points: int = 0  # of the space, looked at

    @property
    def judged(self) -> int:
        return self.timed + self.refused.total() + self.too_large.total()

    def add_best(self, candidate: Candidate) -> None:
        if len(self.best) < self.keep:
            insort(self.best, candidate)
        elif candidate < self.best[-1]:
            insort(self.best, candidate)
            self.best.pop()

    def add_to_front(self, candidate: Candidate) -> None:
        """Keeps it where no other is as fast with as little memory."""
        at = bisect_left(self.front, candidate)
        if at and self.front[at - 1].memory <= candidate.memory:
            return
        end = at
        while end < len(self.front) and self.front[end].memory >= candidate.memory:
            end += 1
        self.front[at:end] = [candidate]

    def add(self, other: Ranking) -> None:
        """Takes in what another part came to."""
        for candidate in other.best:
            self.add_best(candidate)
        for candidate in other.front:
            self.add_to_front(candidate)
        self.timed += other.timed
        self.refused.update(other.refused)
        self.too_large.update(other.too_large)
        self.points += other.points
