"""What readers hand on, whatever they read: one :class:`Recording` per process, with its calls and its device times.

Readers know formats and nothing of parallelism: they name a communicator as their source does. Which group of Megatron
it is, :mod:`overlapkit.measure.attribution` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Interval = tuple[float, float]  # (start, end) in microseconds of the source's clock

# A step of CommEvent: inside the complete steps, where the source does not keep in which.
SOME_STEP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A group of ranks as a source names it.

    ``label`` is how messages name it, such as ``comm 0x55aa00100000``. ``size`` counts ranks, ``ranks`` are the global
    ones in the group's order, ``rank`` is the process's own place in it; ``description`` is PyTorch's group_desc.
    ``order``: it was the how-manieth that the process made or, where that is not known, used, from 0. What a source
    does not say is None.
    """

    label: str
    size: int | None = None
    ranks: tuple[int, ...] | None = None
    rank: int | None = None
    description: str | None = None
    order: int | None = None


class CommEvent(NamedTuple):
    """``calls`` equal calls: the same communicator, operation, type and step.

    ``communicator`` is its place in ``Recording.communicators``. ``op`` and ``dtype`` are named as in predicted rows.
    ``message_bytes`` of all the calls together, by the convention of :mod:`overlapkit.volume.rows`. ``step`` is the
    number of the step, ``SOME_STEP``, or None outside the complete steps (set-up, a step that the source cuts).
    ``time_us`` is the device time of all the calls together, where the source says it without saying when: else None.
    """

    communicator: int
    op: str
    dtype: str
    calls: int
    message_bytes: int
    step: int | None = None
    time_us: float | None = None


class Span(NamedTuple):
    """Device time of one communication kernel. ``communicator`` is None where the source does not say whose it is."""

    start_us: float
    end_us: float
    communicator: int | None
    op: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A complete optimizer step: its number as the source counts and its time."""

    number: int
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What one process did.

    ``kind`` is the reader's: nccl_log, torch_trace, nsys, nccl_inspector, recorder. ``rank`` is the global rank.
    ``steps`` counts the complete optimizer steps, 0 where the source has no mark of them; ``steps_by`` says in words
    what marked them. ``windows`` are their times. ``spans`` are the communication kernels, ``busy`` every other
    piece of device work (compute, copies); both None where the source keeps no device times. ``notes`` say, for the
    reader of the report, what this source lacks.
    """

    source: str
    kind: str
    rank: int | None = None
    world_size: int | None = None
    host: str | None = None
    communicators: tuple[Communicator, ...] = ()
    events: Sequence[CommEvent] = ()
    steps: int = 0
    steps_by: str | None = None
    windows: tuple[Step, ...] = ()
    spans: Sequence[Span] | None = None
    busy: Sequence[Interval] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What could not be read: ``count`` times the same, the first at ``line``, from 1; None without lines."""

    source: str
    what: str
    line: int | None = None
    count: int = 1

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}:{self.line}"
        return f"{place}: {self.what}" + (f" ({self.count} times)" if self.count > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All that a reader found in its files. A file that gave no recording has a problem that says why."""

    recordings: tuple[Recording, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
