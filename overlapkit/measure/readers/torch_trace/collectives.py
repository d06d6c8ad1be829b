"""What PyTorch's profiler says of a collective, as an operation, a type, bytes and a communicator.

ProcessGroupNCCL records each call as ``record_param_comms`` with these arguments; the exporter copies them to the
kernels. Every key is optional: names, ranks and descriptions came with torch 2.1 to 2.4. Sources: ParamCommsUtils.hpp
and profiler/util.cpp of PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from overlapkit.errors import printable
from overlapkit.measure.events import Communicator
from overlapkit.measure.readers.element_types import WIDTHS

# torch's name of a collective -> the operation of predicted rows. A coalesced call is one call with its tensors' sum.
OPERATIONS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allreduce_sparse": "all_reduce",
    "_allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather": "all_gather_list",
    "allgather": "all_gather_list",
    "allgather_coalesced": "all_gather_list",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter": "reduce_scatter_list",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "broadcast": "broadcast",
    "_broadcast_oop": "broadcast",
    "reduce": "reduce",
    "_reduce_oop": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "recvAnySource": "recv",
    "barrier": "barrier",
    "all_reduce_barrier": "barrier",
}
# Recorded like collectives, but nothing moves.
IGNORED = frozenset({"wait", "init"})

# The names of c10::ScalarType, and the C++ types that other arguments of a trace are written with.
DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "UInt16": "uint16",
    "UInt32": "uint32",
    "UInt64": "uint64",
    "Bool": "bool",
    "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e5m2": "float8_e5m2",
    "Float8_e4m3fnuz": "float8_e4m3fnuz",
    "Float8_e5m2fnuz": "float8_e5m2fnuz",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
UNKNOWN = "unknown"
_RANKS_LIMIT = 1 << 20  # more ranks than any job has


class Collective(NamedTuple):
    """One call. ``communicator`` is a place in :attr:`Communicators.found`; ``unclear`` says why there are no bytes."""

    communicator: int
    op: str
    dtype: str
    message_bytes: int
    unclear: str | None


class Communicators:
    """The process groups of one process, from ``distributedInfo`` and from what the calls say of theirs."""

    def __init__(self, distributed: Mapping[str, Any]) -> None:
        self.found: list[Communicator] = []
        self.rank = number(distributed.get("rank"))
        self.world_size = number(distributed.get("world_size"))
        groups = distributed.get("pg_config")
        self._configured: dict[str, tuple[int, Mapping[str, Any]]] = {}
        for order, group in enumerate(groups if isinstance(groups, list) else ()):
            if isinstance(group, dict):
                self._configured[str(group.get("pg_name"))] = (order, group)
        self._places: dict[tuple[Any, ...], int] = {}

    def of(self, args: Mapping[str, Any]) -> int:
        """The place of a call's communicator in ``found``."""
        name = args.get("Process Group Name")
        size = number(args.get("Group size"))
        key: tuple[Any, ...] = (str(name),)
        if name is None:
            key = (None, size, str(args.get("Process Group Ranks")), number(args.get("Global rank start")))
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self.found)
            self.found.append(self._communicator(name, size, args))
        return place

    def _communicator(self, name: object, size: int | None, args: Mapping[str, Any]) -> Communicator:
        order, group = self._configured.get(str(name), (None, {}))
        if size is None:
            size = number(group.get("pg_size"))
        # What a call says of its ranks is cut after 30, and start and stride do not describe every group.
        ranks = (
            _ranks(group.get("ranks"), size) or _ranks(args.get("Process Group Ranks"), size) or _strided(args, size)
        )
        description = args.get("Process Group Description") or group.get("pg_desc")
        if not isinstance(description, str) or description in ("", "undefined"):
            description = None
        if self.rank is None and ranks is not None and args.get("Collective name") not in ("send", "recv"):
            # Here "Rank" is the process's own place; in a send or recv it is the other one's.
            own = number(args.get("Rank"))
            self.rank = ranks[own] if own is not None and own < len(ranks) else None
        label = "a process group without a name" if name is None else f"process group {printable(str(name), limit=40)}"
        return Communicator(
            label=label if description is None else f"{label} ({printable(description)})",
            size=size,
            ranks=ranks,
            rank=ranks.index(self.rank) if ranks is not None and self.rank in ranks else None,
            description=description,
            order=order,
        )


def collective(args: Mapping[str, Any], communicators: Communicators) -> Collective:
    """What the arguments of a ``record_param_comms``, or of an NCCL kernel, say."""
    name = str(args.get("Collective name"))
    op = OPERATIONS.get(name) or printable(name, limit=60)
    dtype = DTYPES.get(str(args.get("dtype")), UNKNOWN)
    width = WIDTHS.get(dtype)
    elements = number(args.get("Out msg nelems" if op.startswith("all_gather") else "In msg nelems"))
    unclear = None
    if width is None:
        unclear = f"{op}: no width is known for the type {printable(str(args.get('dtype')), limit=40)}"
    elif elements is None:
        unclear = f"{op}: the call has no number of elements"
    return Collective(communicators.of(args), op, dtype, (elements or 0) * (width or 0), unclear)


def number(value: object) -> int | None:
    """A whole number that is not negative; traces write some as text."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def _ranks(value: object, size: int | None) -> tuple[int, ...] | None:
    """A list of ranks, or its text; None where it is cut short or not of this size."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list) or not value or (size is not None and len(value) != size):
        return None
    ranks = tuple(rank for rank in map(number, value) if rank is not None)
    return ranks if len(ranks) == len(value) else None


def _strided(args: Mapping[str, Any], size: int | None) -> tuple[int, ...] | None:
    start, stride = number(args.get("Global rank start")), number(args.get("Global rank stride"))
    if start is None or not stride or not size or size > _RANKS_LIMIT:
        return None
    return tuple(range(start, start + stride * size, stride))
