"""Traces without record_param_comms: what c10d's operators say of collectives, as under gloo.

Only ProcessGroupNCCL and its like record the parameters of calls. For others a trace holds operators such as
``c10d::allreduce_``, with shapes where ``record_shapes`` was on, and never the group. Lists of tensors come without
their type; gloo's own ranges (``gloo:all_reduce``) have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from overlapkit.measure.readers.element_types import WIDTHS
from overlapkit.measure.readers.torch_trace.collectives import UNKNOWN, Collective, number

# c10d's operator -> operation, the argument whose tensor is the message, gloo's range of the same tensor
OPERATORS = {
    "c10d::allreduce_": ("all_reduce", 0, "all_reduce"),
    "c10d::allreduce_coalesced_": ("all_reduce", 0, "all_reduce"),
    "c10d::_allgather_base_": ("all_gather", 0, "all_gather"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0, "all_gather"),
    "c10d::allgather_": ("all_gather_list", 0, "all_gather"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, "all_reduce"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, "reduce_scatter"),
    "c10d::reduce_scatter_": ("reduce_scatter_list", 1, "reduce_scatter"),
    "c10d::alltoall_base_": ("all_to_all", 1, "all_to_all"),
    "c10d::alltoall_": ("all_to_all", 1, "all_to_all"),
    "c10d::broadcast_": ("broadcast", 0, "broadcast"),
    "c10d::reduce_": ("reduce", 0, "reduce"),
    "c10d::gather_": ("gather", 1, "gather"),
    "c10d::scatter_": ("scatter", 1, "scatter"),
    "c10d::send": ("send", 0, "send"),
    "c10d::recv_": ("recv", 0, "recv"),
    "c10d::recv_any_source_": ("recv", 0, "recv"),
    "c10d::barrier": ("barrier", 0, "barrier"),
}
_TYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "unsigned char": "uint8",
    "signed char": "int8",
    "short": "int16",
    "short int": "int16",
    "int": "int32",
    "long": "int64",
    "long int": "int64",
    "bool": "bool",
}
Types = Mapping[tuple[str, str], set[str]]


def range_types(name: str, args: Mapping[str, Any], types: dict[tuple[str, str], set[str]]) -> None:
    """Notes which types gloo's ranges had for tensors of one shape."""
    shapes, written = args.get("Input Dims"), args.get("Input type")
    if isinstance(shapes, list) and isinstance(written, list):
        types.setdefault((name.removeprefix("gloo:"), str(shapes)), set()).update(map(str, written))


def operator_call(name: str, args: Mapping[str, Any], types: Types, communicator: int) -> Collective:
    """The call of an operator, by its shapes and, for a list of tensors, the type of gloo's ranges of these shapes."""
    op, place, range_name = OPERATORS[name]
    shapes, written = _argument(args, "Input Dims", place), _argument(args, "Input type", place)
    tensors = shapes if written == "TensorList" else [shapes]
    if shapes is None or not written:
        reason = "is not in the trace (record_shapes is off, or it does not show lists of lists)"
        return Collective(communicator, op, UNKNOWN, 0, f"{name}: the shape of its message {reason}")
    if written == "TensorList":
        found = types.get((range_name, str(tensors)), set())
        written = next(iter(found)) if len(found) == 1 else None
    dtype = _TYPES.get(str(written), UNKNOWN)
    width = WIDTHS.get(dtype)
    if width is None:
        return Collective(communicator, op, UNKNOWN, 0, f"{name}: the type of its elements is not in the trace")
    elements = _elements(tensors)
    unclear = f"{name}: the shape of its message cannot be read" if elements is None else None
    return Collective(communicator, op, dtype, width * (elements or 0), unclear)


def _elements(tensors: object) -> int | None:
    """The elements of all tensors; None where that are no shapes."""
    if not isinstance(tensors, list) or not all(isinstance(tensor, list) and len(tensor) < 64 for tensor in tensors):
        return None
    sizes = [[number(size) for size in tensor] for tensor in tensors]
    if any(size is None for tensor in sizes for size in tensor):
        return None
    return sum(prod(size or 0 for size in tensor) for tensor in sizes)


def _argument(args: Mapping[str, Any], key: str, place: int) -> Any:
    found = args.get(key)
    return found[place] if isinstance(found, list) and len(found) > place else None
