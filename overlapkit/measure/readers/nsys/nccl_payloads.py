"""NCCL's own NVTX ranges in an export of Nsight Systems: calls with a communicator and bytes, where payloads are kept.

A payload is JSON with NCCL's names of its fields. "Message size [bytes]" is the buffer that a rank passes, without the
type of its elements. Source: nvtx_payload_schemas.h of NCCL.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from overlapkit.measure.events import Communicator
from overlapkit.measure.readers.torch_trace.collectives import number

# NCCL's function -> operation, and whether the message is one buffer per rank of the group: AllGather's is what a rank
# sends, ReduceScatter's what it receives, Alltoall's what goes to one other.
_OPERATIONS = {
    "ncclAllReduce": ("all_reduce", False),
    "ncclAllGather": ("all_gather", True),
    "ncclReduceScatter": ("reduce_scatter", True),
    "ncclBroadcast": ("broadcast", False),
    "ncclBcast": ("broadcast", False),
    "ncclReduce": ("reduce", False),
    "ncclSend": ("send", False),
    "ncclRecv": ("recv", False),
    "ncclAlltoAll": ("all_to_all", True),
    "ncclAllToAll": ("all_to_all", True),
}
_COMMUNICATOR, _SIZE, _RANK, _BYTES = "NCCL communicator ID", "No. of ranks", "Rank", "Message size [bytes]"


class Range(NamedTuple):
    """A range of a function of NCCL, in microseconds, with its payload as text (None: it has none)."""

    at: float
    thread: int
    function: str
    payload: str | None


class Call(NamedTuple):
    """A call; ``unclear`` says why it has no bytes."""

    at: float
    thread: int
    communicator: int
    op: str
    message_bytes: int
    unclear: str | None


def is_function(text: str) -> bool:
    """Whether a range is one of a function of NCCL that says something of communication."""
    return text in _OPERATIONS or text.startswith("ncclComm")


def calls(ranges: Iterable[Range]) -> tuple[list[Call], list[Communicator], int]:
    """The calls of one process in order, its communicators, and how many calls name no communicator."""
    found: list[Call] = []
    places: dict[int, int] = {}
    sizes: dict[int, tuple[int | None, int | None]] = {}
    nameless = 0
    for each in sorted(ranges):
        payload = _payload(each.payload)
        name = number(payload.get(_COMMUNICATOR))
        if each.function not in _OPERATIONS:
            if name is not None and number(payload.get(_SIZE)):
                sizes[name] = (number(payload.get(_SIZE)), number(payload.get(_RANK)))
            continue
        moved = number(payload.get(_BYTES))
        if name is None or moved is None:
            nameless += 1
            continue
        op, per_rank = _OPERATIONS[each.function]
        size = sizes.get(name, (None, None))[0]
        unclear = f"{op}: the size of its communicator was not captured" if per_rank and size is None else None
        place = places.setdefault(name, len(places))
        found.append(Call(each.at, each.thread, place, op, moved * (size or 0) if per_rank else moved, unclear))
    communicators = [
        Communicator(label=f"NCCL communicator {name:#x}", size=size, rank=rank, order=order)
        for order, name in enumerate(places)
        for size, rank in [sizes.get(name, (None, None))]
    ]
    return found, communicators, nameless


def _payload(text: str | None) -> Mapping[str, Any]:
    """The fields of a payload, those of a payload inside it too; none where it cannot be read."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    fields: dict[str, Any] = {}
    for value in (found, *(found.values() if isinstance(found, dict) else ())):
        if isinstance(value, dict):
            fields |= value
    return fields
