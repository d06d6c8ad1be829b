"""The best layouts seen so far and the Pareto front of time against memory, in a memory that does not grow."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
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
    ranked: int = 0  # legal, and fit the memory
    refused: Counter[str] = field(default_factory=Counter)
    too_large: Counter[str] = field(default_factory=Counter)
    points: int = 0  # of the space, looked at

    @property
    def judged(self) -> int:
        return self.ranked + self.refused.total() + self.too_large.total()

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

    def take(self, candidates: Sequence[Candidate]) -> None:
        """One layout with different memory by its overlaps: the fastest stands among the best for all of them."""
        if candidates:
            self.add_best(min(candidates))
        for candidate in candidates:
            self.add_to_front(candidate)

    def beats(self, seconds: float, memory: float) -> bool:
        """Whether nothing that takes longer than ``seconds`` with this much memory or more changes anything."""
        if len(self.best) < self.keep or self.best[-1].seconds >= seconds:
            return False
        at = bisect_left(self.front, seconds, key=lambda candidate: candidate.seconds)
        return at > 0 and self.front[at - 1].memory <= memory

    def add(self, other: Ranking) -> None:
        """Takes in what another part came to."""
        for candidate in other.best:
            self.add_best(candidate)
        for candidate in other.front:
            self.add_to_front(candidate)
        self.ranked += other.ranked
        self.refused.update(other.refused)
        self.too_large.update(other.too_large)
        self.points += other.points
