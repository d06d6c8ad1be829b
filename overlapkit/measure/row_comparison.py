"""Predicted rows beside measured ones of one rank: equal, different, or on one side only.

What only the spelling of a source changes is equal: NCCL has no lists of tensors and no booleans, a profiler writes
buckets that were issued together as one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from overlapkit.measure.operations import PAIRED, common_key
from overlapkit.volume.placement import AXES, PP, WORLD
from overlapkit.volume.rows import Row

Number = int | Fraction
Status = Literal["equal", "differs", "not_observable", "not_predicted", "beside_steps"]
Key = tuple[str, str, str]  # group, operation, type

UNKNOWN_DTYPE = "unknown"
# A list of unequal tensors: a call for each rank instead. Source: torch ProcessGroupNCCL::allgather, reduce_scatter.
_OF_A_LIST = {"broadcast": ("all_gather", "all_gather_list"), "reduce": ("reduce_scatter", "reduce_scatter_list")}
# What a source does not write down at all.
_SILENT = {"nccl_inspector": PAIRED}
# The axes on which Megatron-Core issues the buckets of a bucket group together: at most two, of two types of parameters
# (source: megatron.core.distributed partition_buckets). A profiler writes them as one call.
_ISSUED_TOGETHER = ("dp", "expert_dp")
_MOST_TOGETHER = 2


@dataclass(frozen=True, slots=True)
class Seen:
    """A measured row: calls and message bytes of one rank per optimizer step."""

    group: str
    size: int
    op: str
    dtype: str
    count: Number
    message_bytes: Number


@dataclass(frozen=True, slots=True)
class Figures:
    """Calls, and message bytes of all of them, per optimizer step."""

    count: Number
    message_bytes: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class RowComparison:
    """One group, operation and type. ``predicted`` and ``measured`` are None where there is no such row.

    ``status``: equal; differs; not_observable, predicted where this source cannot see it; not_predicted; beside_steps,
    which is not predicted because no step needs it. ``note`` says what made rows equal whose figures are not, why
    there is nothing to see, or who makes the calls.
    """

    group: str
    axis: str | None
    size: int
    op: str
    dtype: str
    status: Status
    predicted: Figures | None
    measured: Figures | None
    note: str | None = None
    measured_size: int | None = None

    @property
    def other_layout(self) -> bool:
        """Whether the group had another number of ranks than predicted. Point-to-point may have a group of the pair."""
        return self.measured_size is not None and self.measured_size != self.size and self.op not in PAIRED

    @property
    def matches(self) -> bool:
        return self.status in ("equal", "not_observable", "beside_steps")

    @property
    def mismatch(self) -> float:
        """How far apart the figures are, from 0 to 2: what of calls and of bytes the larger side has alone."""
        if self.matches:
            return 0.0
        one, other = self.predicted or Figures(0, 0), self.measured or Figures(0, 0)
        return _apart(one.count, other.count) + _apart(one.message_bytes, other.message_bytes)

    def to_dict(self) -> dict[str, Any]:
        named = ("group", "axis", "size", "op", "dtype", "status")
        return {
            **{name: getattr(self, name) for name in named},
            "predicted": _plain(self.predicted),
            "measured": _plain(self.measured),
            "note": self.note,
        }


def _apart(one: Number, other: Number) -> float:
    return abs(float(one) - float(other)) / max(float(one), float(other), 1.0)


def plain_number(number: Number) -> int | float:
    """A whole number as it is; what several steps do not share evenly as a fraction."""
    return int(number) if number == int(number) else float(number)


def _plain(figures: Figures | None) -> dict[str, int | float] | None:
    if figures is None:
        return None
    return {"count": plain_number(figures.count), "message_bytes": plain_number(figures.message_bytes)}


@dataclass(slots=True)
class _Sum:
    """Rows of one key as they add up."""

    size: int
    spelled: tuple[str, str]
    count: Number = 0
    message_bytes: Number = 0
    exact: bool = True

    def add(self, count: Number, message_bytes: Number) -> None:
        self.count += count
        self.message_bytes += message_bytes


def compare_rows(predicted: Iterable[Row], measured: Iterable[Seen], *, kind: str) -> tuple[RowComparison, ...]:
    """A comparison for every key that either side has, in the order of keys.

    ``predicted``: the rows of the rank's pipeline stage. ``kind`` is that of the source, as in
    :class:`overlapkit.measure.events.Recording`.
    """
    rows = tuple(predicted)
    expected = _added(row for row in rows if row.observable)
    usual, others = _by_size(tuple(measured), expected)
    seen = _added(usual)
    _join_lists(rows, expected, seen)
    _join_types(expected, seen)
    found = [_compared(key, expected.get(key), seen.get(key), kind) for key in sorted({*expected, *seen})]
    found += [_compared(key, None, of_one, kind) for each in others for key, of_one in _added(each).items()]
    return tuple(sorted([*found, *_unobservable(rows)], key=lambda row: (row.group, row.op, row.dtype, row.status)))


def _added(rows: Iterable[Row] | Iterable[Seen]) -> dict[Key, _Sum]:
    sums: dict[Key, _Sum] = {}
    for row in rows:
        found = sums.setdefault(_key(row), _Sum(row.size, (row.op, row.dtype)))
        found.add(row.count, row.message_bytes)
        found.exact &= not isinstance(row, Row) or row.exact
        if found.spelled != (row.op, row.dtype):  # several spellings: the common one
            found.spelled = _key(row)[1:]
    return sums


def _key(row: Row | Seen) -> Key:
    # At PP 2 single sends go through the job's own group one way; NCCL may use a communicator of the pair.
    group = PP if row.group == WORLD and row.op in PAIRED else row.group
    return group, *common_key(row.op, row.dtype)


def _by_size(measured: Sequence[Seen], expected: Mapping[Key, _Sum]) -> tuple[list[Seen], Iterable[list[Seen]]]:
    """The rows of groups of the predicted sizes; and, size by size, those of other groups with the name of one."""
    sizes: dict[Key, set[int]] = {}
    for row in measured:
        sizes.setdefault(_key(row), set()).add(row.size)
    usual: list[Seen] = []
    others: dict[int, list[Seen]] = {}
    for row in measured:
        key = _key(row)
        wanted = expected[key].size if key in expected else max(sizes[key])
        other = row.size != wanted and wanted in sizes[key] and row.op not in PAIRED
        (others.setdefault(row.size, []) if other else usual).append(row)
    return usual, others.values()


def _join_lists(predicted: Iterable[Row], expected: Mapping[Key, _Sum], seen: dict[Key, _Sum]) -> None:
    """Counts a broadcast (or reduce) for each rank of a group as the list that it is a part of."""
    lists = {(row.group, row.op) for row in predicted}
    for group, op, dtype in list(seen):
        whole, spelled = _OF_A_LIST.get(op, ("", ""))
        if (group, spelled) not in lists or (group, op, dtype) in expected:
            continue
        parts = seen.pop((group, op, dtype))
        target = seen.setdefault((group, whole, dtype), _Sum(parts.size, (whole, dtype)))
        target.add(Fraction(parts.count) / parts.size, parts.message_bytes)


def _join_types(expected: dict[Key, _Sum], seen: dict[Key, _Sum]) -> None:
    """Compares over all types what a source gives without one."""
    for group, op in {key[:2] for key in seen if key[2] == UNKNOWN_DTYPE}:
        for side in (expected, seen):
            every = [key for key in side if key[:2] == (group, op)]
            if every:
                joined = _Sum(side[every[0]].size, (op, UNKNOWN_DTYPE))
                for key in every:
                    part = side.pop(key)
                    joined.add(part.count, part.message_bytes)
                    joined.exact &= part.exact
                side[(group, op, UNKNOWN_DTYPE)] = joined


def _compared(key: Key, expected: _Sum | None, seen: _Sum | None, kind: str) -> RowComparison:
    status, note = _judged(key, expected, seen, kind)
    known = expected or seen
    assert known is not None
    op, dtype = known.spelled
    return RowComparison(
        group=key[0],
        axis=AXES.get(key[0]) if op not in PAIRED else "pp",
        size=known.size,
        op=op,
        dtype=dtype,
        status=status,
        predicted=None if expected is None else Figures(expected.count, expected.message_bytes),
        measured=None if seen is None else Figures(seen.count, seen.message_bytes),
        note=note,
        measured_size=None if seen is None else seen.size,
    )


def _judged(key: Key, expected: _Sum | None, seen: _Sum | None, kind: str) -> tuple[Status, str | None]:
    group, op, _ = key
    if expected is None:
        return "not_predicted", None
    if seen is None:
        if op in _SILENT.get(kind, ()):
            return "not_observable", "this source does not write sends and receives"
        return "differs", None
    if expected.size != seen.size and op not in PAIRED:  # those may stand on a communicator of the pair
        return "differs", f"on {seen.size} ranks, not {expected.size}: the job ran with another layout"
    if (expected.count, expected.message_bytes) == (seen.count, seen.message_bytes):
        return "equal", None
    if expected.count == seen.count and not expected.exact:
        share = float(seen.message_bytes / Fraction(expected.message_bytes or 1))
        return "equal", f"calls are equal; routing decides the bytes, ×{share:.2f} of balanced experts"
    together = kind == "torch_trace" and AXES.get(group) in _ISSUED_TOGETHER
    fewer = seen.count < expected.count <= _MOST_TOGETHER * seen.count
    if together and fewer and expected.message_bytes == seen.message_bytes:
        return "equal", "bytes are equal; the profiler writes calls that are issued together as one"
    return "differs", None


def _unobservable(rows: Iterable[Row]) -> Iterable[RowComparison]:
    for row in rows:
        if not row.observable:
            yield RowComparison(
                group=row.group,
                axis=row.axis,
                size=row.size,
                op=row.op,
                dtype=row.dtype,
                status="not_observable",
                predicted=Figures(row.count, row.message_bytes),
                measured=None,
                note="not NCCL: userbuffers, DeepEP or HybridEP move it",
            )
