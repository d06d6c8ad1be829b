"""Calls that no optimizer step needs, and who makes them: set-up, barriers, flags that are asked for once.

Where an input marks its steps, set-up lies outside the complete ones, and what is inside belongs to a step. Where it
marks none, or one, its calls are taken for those of whole steps, and set-up is told by what it is. Sources:
initialize.py, timers.py and training.py of Megatron-LM; setup_embeddings_and_output_layer of megatron-core.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from overlapkit.measure.measured import MeasuredRow, RankMeasured
from overlapkit.measure.row_comparison import UNKNOWN_DTYPE, RowComparison
from overlapkit.volume import placement


@dataclass(frozen=True, slots=True)
class _Call:
    """A kind of call, None stands for any type or group, of at most so many bytes. ``in_steps``: wherever it stands."""

    op: str
    dtype: str | None
    group: str | None
    largest: int | None
    in_steps: bool
    why: str


_BARRIERS = "barriers of timers, checkpoints and set-up"
_CALLS = (
    _Call("barrier", None, None, None, True, _BARRIERS),
    # PyTorch's barrier is this all_reduce, where a source sees NCCL's calls.
    _Call("all_reduce", "float32", placement.WORLD, 4, True, _BARRIERS),
    _Call("all_reduce", "uint8", placement.WORLD, 1, True, _BARRIERS),
    _Call("all_reduce", None, placement.EMBEDDING, None, False, "at start-up the shared embeddings are made equal"),
    _Call("all_reduce", "int32", placement.INSTANCE, 4, False, "Megatron-Core asks once, in the first step"),
    _Call("all_reduce", "float64", placement.WORLD, 8, False, "Megatron-LM's ranks agree once on when they started"),
)
_BATCH = "the batch of Megatron-LM: --data-broadcast predicts it"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideSteps:
    """Calls and message bytes of one group, operation and type that lie outside the complete steps of an input."""

    group: str
    size: int
    op: str
    dtype: str
    count: int
    message_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def explained(row: RowComparison, steps: int) -> RowComparison:
    """A row that nothing predicts, with who makes such calls; ``steps`` complete ones were compared, 0 of unmarked."""
    if row.status != "not_predicted" or row.measured is None:
        return row
    if row.op == "broadcast" and row.group == placement.TP:
        return replace(row, note=_BATCH)
    each = Fraction(row.measured.message_bytes) / (row.measured.count or 1)
    for call in _CALLS:
        typed = call.dtype in (None, row.dtype) or (row.dtype == UNKNOWN_DTYPE and call.largest is not None)
        named = call.op == row.op and typed and call.group in (None, row.group)
        if named and (call.in_steps or not steps) and (call.largest is None or each <= call.largest):
            return replace(row, status="beside_steps", note=call.why)
    return row


def outside_steps(rank: RankMeasured) -> tuple[OutsideSteps, ...]:
    """What a rank did outside its complete steps; nothing where none are marked."""
    return tuple(found for row in rank.rows if rank.steps and (found := _outside(row, rank.steps)) is not None)


def _outside(row: MeasuredRow, steps: int) -> OutsideSteps | None:
    if row.per_step is None:
        return None
    count = row.count - int(row.per_step.count * steps)
    moved = row.message_bytes - int(row.per_step.message_bytes * steps)
    if not count:
        return None
    return OutsideSteps(group=row.group, size=row.size, op=row.op, dtype=row.dtype, count=count, message_bytes=moved)
