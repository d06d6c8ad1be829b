"""Measured volumes: what each process moved per group, operation and type, with times where the source has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from overlapkit.measure.attribution import Confidence
from overlapkit.measure.bandwidth import algorithm_bandwidth, bus_bandwidth
from overlapkit.measure.events import Problem
from overlapkit.measure.intervals import Overlap, Times
from overlapkit.measure.mesh import Mesh
from overlapkit.measure.row_comparison import Number, plain_number
from overlapkit.measure.skew import Skew
from overlapkit.volume.predict import CONVENTION
from overlapkit.volume.rows import Row

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PerStep:
    """Calls, message bytes and ring-equivalent bytes sent per optimizer step.

    The first two are fractions where the steps do not share them evenly; what is sent is rounded down, and None where
    the size of the group is unknown.
    """

    count: Number
    message_bytes: Number
    wire_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        moved = {"count": plain_number(self.count), "message_bytes": plain_number(self.message_bytes)}
        return {**moved, "wire_bytes": self.wire_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """What one process moved in one group, by one operation, in one type.

    ``totals`` are of the whole input, in the form of a predicted row; ``per_step`` of a complete optimizer step, None
    where nothing says how many there are. ``times`` of the whole input, None where the source does not say when what
    ran; ``summed_us`` then are its times of the calls, added up, where it has any.
    ``attributed_by``, ``confidence`` and ``ties`` are those of :class:`overlapkit.measure.attribution.Attribution`.
    """

    totals: Row
    per_step: PerStep | None
    times: Times | None
    attributed_by: str
    confidence: Confidence
    ties: tuple[str, ...] = ()
    summed_us: float | None = None

    @property
    def group(self) -> str:
        return self.totals.group

    @property
    def axis(self) -> str:
        return self.totals.axis

    @property
    def size(self) -> int:
        """The ranks of the group, 0 where they are unknown."""
        return self.totals.size

    @property
    def op(self) -> str:
        return self.totals.op

    @property
    def dtype(self) -> str:
        return self.totals.dtype

    @property
    def count(self) -> int:
        return self.totals.count

    @property
    def message_bytes(self) -> int:
        return self.totals.message_bytes

    @property
    def wire_bytes(self) -> int | None:
        """Ring-equivalent bytes that this rank sent, none in a group of one rank; None where the size is unknown."""
        if not self.size:
            return None
        return self.totals.wire_bytes if self.size > 1 else 0

    @property
    def time_us(self) -> float | None:
        return self.summed_us if self.times is None else self.times.time_us

    @property
    def exposed_us(self) -> float | None:
        return None if self.times is None else self.times.exposed_us

    @property
    def hidden_us(self) -> float | None:
        return None if self.times is None else self.times.hidden_us

    @property
    def algbw_gbps(self) -> float | None:
        """Gigabytes per second."""
        return algorithm_bandwidth(self.message_bytes, self.time_us)

    @property
    def busbw_gbps(self) -> float | None:
        return bus_bandwidth(self.op, self.size, self.message_bytes, self.time_us)

    def to_dict(self) -> dict[str, Any]:
        sized = self.totals if self.size else replace(self.totals, size=1)
        return {
            **sized.to_dict(),
            "size": self.size or None,
            "wire_bytes": self.wire_bytes,
            "per_step": None if self.per_step is None else self.per_step.to_dict(),
            **_times(self.times),
            "time_us": _rounded(self.time_us),
            "algbw_gbps": _rounded(self.algbw_gbps),
            "busbw_gbps": _rounded(self.busbw_gbps),
            "attributed_by": self.attributed_by,
            "confidence": self.confidence,
            "ties": list(self.ties),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Unattributed:
    """What could not be given to a group, and why.

    ``message_bytes`` is None for kernels that say nothing of bytes. ``step_bytes``: what of it lies inside the complete
    steps; all of it where none are marked.
    """

    communicator: str
    size: int | None
    op: str
    dtype: str
    count: int
    message_bytes: int | None
    step_bytes: int | None
    time_us: float | None
    why: str
    exposed_us: float | None = None

    def to_dict(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__slots__}
        return found | {"time_us": _rounded(self.time_us), "exposed_us": _rounded(self.exposed_us)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasured:
    """One process. ``steps`` counts its complete optimizer steps, which ``steps_by`` marked.

    ``per_step_of`` counts the steps that figures per step are the average of: the complete ones, else those that the
    whole input is of; None where nothing says how many. ``mesh`` is what its communicators were attributed by, if any.

    ``rows`` are of groups of two ranks and more, ``single_rank`` of groups of one, which move nothing. ``overlap`` is
    None where the source has no device times; its groups are names, None for what could not be attributed.
    """

    rank: int | None
    world_size: int | None
    pipeline_rank: int | None
    source: str
    kind: str
    host: str | None
    steps: int
    steps_by: str | None
    per_step_of: int | None
    mesh: Mesh | None
    rows: tuple[MeasuredRow, ...]
    single_rank: tuple[MeasuredRow, ...]
    unattributed: tuple[Unattributed, ...]
    overlap: Overlap[str | None] | None

    def to_dict(self) -> dict[str, Any]:
        named = ("rank", "world_size", "pipeline_rank", "source", "kind", "host", "steps", "steps_by", "per_step_of")
        return {
            **{name: getattr(self, name) for name in named},
            "rows": [row.to_dict() for row in self.rows],
            "single_rank": [row.to_dict() for row in self.single_rank],
            "unattributed": [one.to_dict() for one in self.unattributed],
            "overlap": None if self.overlap is None else _overlap(self.overlap),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All inputs together."""

    ranks: tuple[RankMeasured, ...]
    skew: Skew | None
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """What communicators without a description were attributed by, one for each size of a job at most."""
        return tuple(dict.fromkeys(rank.mesh for rank in self.ranks if rank.mesh is not None))

    def to_dict(self) -> dict[str, Any]:
        """The measurement as plain values, the form of ``--format json``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "convention": dict(CONVENTION),
            "per": "input",
            "meshes": [mesh.to_dict() for mesh in self.meshes],
            "ranks": [rank.to_dict() for rank in self.ranks],
            "skew": None if self.skew is None else self.skew.to_dict(),
            "problems": [str(problem) for problem in self.problems],
            "notes": list(self.notes),
        }


def _times(times: Times | None) -> dict[str, float | None]:
    names = ("time_us", "exposed_us", "hidden_us")
    return {name: None if times is None else _rounded(getattr(times, name)) for name in names}


def _overlap(found: Overlap[str | None]) -> dict[str, Any]:
    def parts(total: Times, groups: Mapping[str | None, Times]) -> dict[str, Any]:
        return {
            **_times(total),
            "groups": [{"group": group, **_times(times)} for group, times in groups.items()],
        }

    return {
        **parts(found.total, found.groups),
        "steps": [{"step": step.number, **parts(step.total, step.groups)} for step in found.steps],
    }


def _rounded(value: float | None) -> float | None:
    """To a thousandth: nanoseconds, megabytes per second."""
    return None if value is None else round(value, 3)
