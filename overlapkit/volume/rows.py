"""Rows of a volume: what one rank moves per group, operation and type, merged from single kinds of calls.

Message bytes: an all_reduce's tensor, an all_gather's gathered output, a reduce_scatter's full input, the
tensor of a send, recv or broadcast, an all_to_all's local input. Wire bytes: what a ring, or for an all_to_all
the pairs, would make this rank send.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

# In the order in which a step goes through them, by the names of the recorded runs.
PHASES = ("forward", "recompute", "backward", "p2p", "finalize", "optimizer", "train_loop")
_GATHERS = ("all_gather", "all_gather_list", "reduce_scatter", "reduce_scatter_list", "all_to_all")


class Call(NamedTuple):
    """One kind of call: ``times`` per optimizer step and rank, ``bytes_each`` message bytes each time.

    ``observable``: NCCL carries it. ``exact``: the bytes do not depend on the data. ``evidence`` says how the
    prediction was checked: ``run`` against a run of the real Megatron-Core, ``source`` against its source (or
    Transformer Engine's) alone. ``onward``: a send goes to the next rank of the group, not to the one before.
    """

    phase: str
    group: str
    op: str
    dtype: str
    times: int
    bytes_each: int
    observable: bool = True
    exact: bool = True
    evidence: str = "run"
    onward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What of a row one phase of the step issues."""

    phase: str
    count: int
    message_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one rank moves per optimizer step in one group, by one operation, in one type.

    The key is (group, op, dtype, observable). ``size`` counts ranks; ``message_bytes`` and ``wire_bytes`` are sums over
    ``count`` calls. ``placement`` is intra_node, inter_node or mixed, None where the machine is unknown.
    ``onward_bytes`` are a send row's bytes to the next rank of the group; the rest goes to the one before.
    """

    group: str
    axis: str
    size: int
    op: str
    dtype: str
    count: int
    message_bytes: int
    placement: str | None
    observable: bool
    exact: bool
    evidence: str
    phases: tuple[Share, ...]
    onward_bytes: int = 0

    @property
    def wire_bytes(self) -> int:
        """Ring-equivalent bytes that this rank sends per step, rounded down."""
        return wire_bytes(self.op, self.size, self.message_bytes)

    def to_dict(self, *, phases: bool = False) -> dict[str, Any]:
        """The row as plain values; with the phases' shares on request."""
        row = {name: getattr(self, name) for name in _NAMES}
        if phases:
            row["phases"] = {
                share.phase: {
                    "count": share.count,
                    "message_bytes": share.message_bytes,
                    "wire_bytes": wire_bytes(self.op, self.size, share.message_bytes),
                }
                for share in self.phases
            }
        return row


_NAMES = (
    "group",
    "axis",
    "size",
    "op",
    "dtype",
    "count",
    "message_bytes",
    "wire_bytes",
    "placement",
    "observable",
    "exact",
    "evidence",
)


def wire_bytes(op: str, size: int, message_bytes: int) -> int:
    """Bytes that each of ``size`` ranks sends for ``message_bytes``, rounded down.

    Source: the busBW factors of nccl-tests: 2(n-1)/n for an all_reduce, (n-1)/n for gathers, scatters and a balanced
    all_to_all, 1 for a send or broadcast, 0 for a recv.
    """
    return wire_numerator(op, size, message_bytes) // size


def wire_numerator(op: str, size: int, message_bytes: int) -> int:
    """The same times ``size``, exact: sums over rows are taken of these before they are divided."""
    if op == "all_reduce":
        return 2 * (size - 1) * message_bytes
    if op in _GATHERS:
        return (size - 1) * message_bytes
    return 0 if op == "recv" else size * message_bytes


def total_wire_bytes(rows: Iterable[Row]) -> int:
    """Wire bytes of several rows, rounded down once, not row by row."""
    by_size: dict[int, int] = {}
    for row in rows:
        by_size[row.size] = by_size.get(row.size, 0) + wire_numerator(row.op, row.size, row.message_bytes)
    return int(sum(Fraction(numerator, size) for size, numerator in by_size.items()))


class _Sum:
    """A row that grows call by call."""

    __slots__ = ("count", "evidence", "exact", "message_bytes", "onward_bytes", "phases")

    def __init__(self) -> None:
        self.count = self.message_bytes = self.onward_bytes = 0
        self.exact, self.evidence = True, "run"
        self.phases: dict[str, list[int]] = {}

    def add(self, call: Call) -> None:
        moved = call.times * call.bytes_each
        self.count += call.times
        self.message_bytes += moved
        self.onward_bytes += moved if call.onward else 0
        self.exact &= call.exact
        if call.evidence != "run":
            self.evidence = call.evidence
        share = self.phases.get(call.phase)
        if share is None:
            self.phases[call.phase] = [call.times, moved]
        else:
            share[0] += call.times
            share[1] += moved


def merged(
    calls: Iterable[Call], sizes: Mapping[str, int], axes: Mapping[str, str], placements: Mapping[str, str | None]
) -> tuple[Row, ...]:
    """One row per (group, op, dtype, observable), in that order; groups of one rank and calls of no count are left out.

    ``sizes``, ``axes`` and ``placements`` say of each group its ranks, axis and place.
    """
    sums: dict[tuple[str, str, str, bool], _Sum] = {}
    for call in calls:
        if call.times and sizes[call.group] > 1:
            key = (call.group, call.op, call.dtype, call.observable)
            found = sums.get(key)
            if found is None:
                found = sums[key] = _Sum()
            found.add(call)
    return tuple(
        Row(
            group=group,
            axis="pp" if op in ("send", "recv") and group == "WORLD" else axes[group],
            size=sizes[group],
            op=op,
            dtype=dtype,
            count=found.count,
            message_bytes=found.message_bytes,
            placement=placements[group],
            observable=observable,
            exact=found.exact,
            evidence=found.evidence,
            phases=tuple(
                Share(phase=phase, count=found.phases[phase][0], message_bytes=found.phases[phase][1])
                for phase in PHASES
                if phase in found.phases
            ),
            onward_bytes=found.onward_bytes,
        )
        for (group, op, dtype, observable), found in sorted(sums.items(), key=lambda item: item[0])
    )
