"""What a search comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlapkit.cost.memory import Memory
from overlapkit.search.space import Layout, Overlaps

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A layout that every rule passed, with its own estimate. ``changes`` are overrides that make it of the recipe.

    ``recipe`` is the whole recipe as plain values.
    """

    layout: Layout
    overlaps: Overlaps
    seconds: float
    interval: tuple[float, float]
    tokens_per_s_per_gpu: float
    memory: Memory
    changes: tuple[str, ...]
    recipe: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {
            "step_time_s": self.seconds,
            "interval_s": list(self.interval),
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "memory": self.memory.to_dict(),
            "layout": {
                **self.layout.point._asdict(),
                "sequence_parallel": self.layout.sequence_parallel,
                "recompute": self.layout.recompute,
            },
            "overlaps": self.overlaps._asdict(),
            "overrides": list(self.changes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The best layouts, and the Pareto front of time against memory, which falls as time rises.

    ``refused`` and ``too_large`` count layouts by reason; ``ranked`` were legal and fit. ``points`` of ``all_points``
    were looked at: fewer where it was interrupted. ``memory_error`` is the share by which memory may exceed its
    estimate, room that every layout leaves.
    """

    recipe: str
    gpu: str
    capacity_bytes: int
    memory_error: float
    best: tuple[Found, ...]
    front: tuple[Found, ...]
    ranked: int
    refused: Mapping[str, int]
    too_large: Mapping[str, int]
    points: int
    all_points: int
    interrupted: bool

    @property
    def judged(self) -> int:
        return self.ranked + sum(self.refused.values()) + sum(self.too_large.values())

    def to_dict(self) -> dict[str, Any]:
        """The form of ``--format json``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "recipe": self.recipe,
            "gpu": self.gpu,
            "memory_bytes": self.capacity_bytes,
            "memory_error": self.memory_error,
            "interrupted": self.interrupted,
            "layouts": {
                "judged": self.judged,
                "ranked": self.ranked,
                "too_large": dict(self.too_large),
                "refused": dict(self.refused),
            },
            "best": [found.to_dict() for found in self.best],
            "front": [found.to_dict() for found in self.front],
        }
