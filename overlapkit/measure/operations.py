"""What a communicator carries, and how well that fits a group of Megatron."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from overlapkit.measure.events import CommEvent
from overlapkit.volume import placement
from overlapkit.volume.rows import Row

Key = tuple[str, str]  # operation, type
PAIRED = frozenset({"send", "recv"})
# NCCL turns a list of equal tensors into one call, and knows PyTorch's booleans as bytes.
_LISTS = {"all_gather_list": "all_gather", "reduce_scatter_list": "reduce_scatter"}
_DTYPES = {"bool": "uint8"}
_FLOATS = ("bfloat16", "float16", "float32", "float64", "unknown")
_SCALAR_BYTES = 8
_UNUSED = 0.5  # what it counts against a group that nothing is predicted of
_FEW = 16  # calls of a step: gradients come in so many buckets or fewer, activations once or more per layer


@dataclass(frozen=True, slots=True)
class Moved:
    """Calls and message bytes of one key, of the whole input."""

    calls: int
    message_bytes: int

    def plus(self, calls: int, message_bytes: int) -> Moved:
        return Moved(self.calls + calls, self.message_bytes + message_bytes)

    def at_most(self, size: int) -> bool:
        """Whether a call moves ``size`` message bytes or less on average."""
        return self.message_bytes <= size * self.calls


_NOTHING = Moved(0, 0)
Traffic = Mapping[Key, Moved]


def traffic(events: Iterable[CommEvent]) -> dict[int, dict[Key, Moved]]:
    """Communicator -> what it carries, over all steps."""
    sums: dict[int, dict[Key, Moved]] = {}
    for event in events:
        of_one = sums.setdefault(event.communicator, {})
        key = event.op, event.dtype
        of_one[key] = of_one.get(key, _NOTHING).plus(event.calls, event.message_bytes)
    return sums


def common_key(op: str, dtype: str) -> Key:
    """An operation and a type as every source can spell them: NCCL knows neither lists of tensors nor booleans."""
    return _LISTS.get(op, op), _DTYPES.get(dtype, dtype)


class Fit(NamedTuple):
    """How well traffic fits a group: the higher the better, below 0 where it rather speaks against.

    ``evidence`` is what a prediction says, without one what the group is for. Where a job ran otherwise than predicted,
    ``purpose`` tells groups apart that the prediction does not.
    """

    evidence: float
    purpose: float = 0.0

    @property
    def total(self) -> float:
        return self.evidence + self.purpose


def fit_to_prediction(found: Traffic, rows: Sequence[Row], periods: int | None, group: str) -> Fit:
    """How well traffic fits a group and its predicted rows.

    ``periods``: the optimizer steps that the traffic is of; None where unknown.

    A key that is predicted, of scalars or of more, counts 1, and 2 more where calls have the predicted size; bytes of
    all calls together may agree instead, where a profiler writes several calls as one. What only one side has counts
    against; what the group is for makes up for it, but never for a key that another group is predicted to have.
    """
    wanted: dict[Key, list[Row]] = {}
    for row in rows:
        wanted.setdefault(common_key(row.op, row.dtype), []).append(row)
    spelled: dict[Key, Moved] = {}
    for (op, dtype), moved in found.items():
        key = common_key(op, dtype)
        spelled[key] = spelled.get(key, _NOTHING).plus(moved.calls, moved.message_bytes)
    evidence, left = -0.25 * sum(key not in spelled for key in wanted), {}
    for key, moved in spelled.items():
        same = wanted.get(key) or (_of_op(wanted, key[0]) if key[1] == "unknown" else [])
        same = same if _alike(moved, same) else []
        evidence += 1.0 + 2.0 * _same_size(moved, same, periods) if same else -1.0
        if not same:
            left[key] = moved
    purpose = 0.5 * fit_to_group(kinds_of(left, periods), group)
    return Fit(evidence, purpose - (0.0 if rows else _UNUSED))


def _of_op(wanted: Mapping[Key, list[Row]], op: str) -> list[Row]:
    return [row for key, rows in wanted.items() if key[0] == op for row in rows]


def _alike(moved: Moved, rows: Sequence[Row]) -> bool:
    """Whether both are scalars or neither is: a gradient's norm says nothing of gradients."""
    size, calls = sum(row.message_bytes for row in rows), sum(row.count for row in rows)
    return moved.at_most(_SCALAR_BYTES) == (size <= _SCALAR_BYTES * calls)


def _same_size(moved: Moved, rows: Sequence[Row], periods: int | None) -> bool:
    count, size = sum(row.count for row in rows), sum(row.message_bytes for row in rows)
    return moved.calls * size == moved.message_bytes * count or moved.message_bytes == size * (periods or 1)


# Group -> kind of traffic -> weight. What is not listed counts -2. Source: facts of a step, as overlapkit.volume
# predicts it for every layout.
_WEIGHTS: Mapping[str, Mapping[str, float]] = {
    placement.TP: {
        "activations": 3,
        "parameters": 0.5,
        "gather": 1,
        "scatter": 1,
        "reduce": 1,
        "broadcast": 1,
        "scalar": 0,
    },
    placement.DP_CP: {"parameters": 3, "gather": 1, "scatter": 1, "reduce": 1.5, "loss": 2, "scalar": 0.5, "flag": 0.5},
    placement.PP: {"paired": 3, "broadcast": 0.5},
    placement.EMBEDDING: {"reduce": 1},
    placement.MODEL: {"flag": 3, "scalar": 1},
    placement.INSTANCE: {"scalar": 1.5},
    placement.EP: {"exchange": 3},
    placement.EXPERT_TP_EP: {"counts": 3, "gather": 0.5, "scatter": 0.5, "activations": 1, "parameters": 0},
    placement.EXPERT_TP: {"lists": 3, "activations": 1, "gather": 0.5, "scatter": 0.5},
    placement.EXPERT_DP: {"parameters": 2.5, "reduce": 0.5},
    placement.CP: {"paired": 1, "activations": 2, "exchange": 1, "gather": 0.5, "scatter": 0.5},
    placement.TP_CP: {"sum of counts": 2},
    placement.TP_DP_CP: {"sum of counts": 1.5, "reduce": 0.5},
    placement.EXPERT_MODEL: {"scalar": 1},
    # Of two pipeline stages that overlap their sends half go there.
    placement.WORLD: dict.fromkeys(("scalar", "flag", "broadcast", "counts", "gather", "reduce", "paired"), 0.1),
}
_FOREIGN = -2.0
_NEVER = {"paired": -12.0}  # Megatron sends in no other group


_KINDS_OF_OPS = {"send": "paired", "recv": "paired", "all_to_all": "exchange", "broadcast": "broadcast"}


def fit_to_group(kinds: Sequence[str], group: str) -> float:
    """The same of kinds of traffic against what a group is for, where nothing is predicted."""
    weights = _WEIGHTS.get(group, {})
    return sum(weights.get(kind, _NEVER.get(kind, _FOREIGN)) for kind in kinds)


def kinds_of(found: Traffic, periods: int | None) -> list[str]:
    """What each key of the traffic seems to be, in the words of the weights."""
    whole = _gathered_and_scattered(found)
    kinds = [] if whole is None else [whole]
    for (op, dtype), moved in found.items():
        if op in ("all_gather", "reduce_scatter") and dtype in _FLOATS:
            if whole is None:
                kinds.append("gather" if op == "all_gather" else "scatter")
        elif op == "all_gather":
            kinds.append("counts")
        elif op in _LISTS:
            kinds.append("lists")
        elif op == "all_reduce":
            kinds.append(_kind_of_reduce(dtype, moved, periods))
        else:
            kinds.append(_KINDS_OF_OPS.get(op, "other"))
    return kinds


def _gathered_and_scattered(found: Traffic) -> str | None:
    """Whether what is gathered and what is reduced are activations or parameters; None without both of them.

    Sequence parallelism gathers more often than it scatters, in one type; the distributed optimizer gathers what it
    scattered, in a type of its own or as often.
    """
    gathered = {key[1]: moved for key, moved in found.items() if key[0] == "all_gather" and key[1] in _FLOATS}
    scattered = {key[1]: moved for key, moved in found.items() if key[0] == "reduce_scatter"}
    if not gathered or not scattered:
        return None
    if set(gathered) != set(scattered):
        return "parameters"
    calls = [sum(moved.calls for moved in side.values()) for side in (gathered, scattered)]
    return "activations" if calls[0] > calls[1] else "parameters"


def _kind_of_reduce(dtype: str, moved: Moved, periods: int | None) -> str:
    if dtype == "int32":
        return "flag" if moved.at_most(4) else "sum of counts"
    if moved.at_most(4) or (dtype == "int64" and moved.at_most(_SCALAR_BYTES)):
        return "scalar"
    if dtype == "int64":
        return "sum of counts"
    if dtype == "float32" and moved.at_most(_SCALAR_BYTES):
        return "loss"
    often = moved.calls > _FEW * (periods or 1)
    return "activations" if often and dtype in ("bfloat16", "float16") else "reduce"
