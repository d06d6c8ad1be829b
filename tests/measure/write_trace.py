"""Writes a PyTorch profiler trace of a job that moves what is predicted, with kernels of made-up lengths.

The form is that of torch 2.13; ``tests/measure/traces`` has traces of the real profiler.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from overlapkit.volume import Stage, Volume
from overlapkit.volume.model import WIDTHS
from overlapkit.volume.placement import members
from overlapkit.volume.rows import Row, wire_bytes

_NAMES = {
    "all_reduce": ("allreduce", "AllReduce_Sum"),
    "all_gather": ("_allgather_base", "AllGather"),
    "all_gather_list": ("all_gather", "AllGather"),
    "reduce_scatter": ("_reduce_scatter_base", "ReduceScatter_Sum"),
    "reduce_scatter_list": ("reduce_scatter", "ReduceScatter_Sum"),
    "all_to_all": ("all_to_all", "SendRecv"),
    "broadcast": ("broadcast", "Broadcast"),
    "send": ("send", "SendRecv"),
    "recv": ("recv", "SendRecv"),
}
_DTYPES = {
    "bfloat16": "BFloat16",
    "float16": "Half",
    "float32": "Float",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
}
_BYTES_PER_US = 100_000  # 100 GB/s
_LATENCY_US = 5.0
# What of an axis's kernels a GEMM covers.
HIDDEN = {"tp": 0.5, "pp": 0.0, "dp": 0.75}


def write_trace(
    volume: Volume,
    path: Path,
    *,
    rank: int = 0,
    steps: int = 2,
    kernels: bool = True,
    ranges: bool = True,
    scalars: bool = True,
) -> None:
    """What ``rank`` does in ``steps`` optimizer steps, as a gzip file.

    ``kernels``: the device's side too. ``ranges``: each step is a ProfilerStep. ``scalars``: its all_reduces of one
    element too, which mark a step where no range does.
    """
    events: list[dict[str, Any]] = []
    now = 1000.0
    for step in range(steps):
        begin = now
        for row in _stage(volume, rank).rows:
            scalar = row.op == "all_reduce" and row.message_bytes == WIDTHS[row.dtype] * row.count
            if not row.observable or (scalar and not scalars):
                continue
            for size in _sizes(row):
                moved = size if row.op == "recv" else wire_bytes(row.op, row.size, size)
                duration = _LATENCY_US + moved / _BYTES_PER_US
                events += _call(volume, rank, row, size, now, duration, len(events) + 1, kernels=kernels)
                now += duration + 1
        if ranges:
            events.append(_event("user_annotation", f"ProfilerStep#{step + 3}", begin, now - begin, {}))
    trace = {"schemaVersion": 1, "distributedInfo": _groups(volume, rank), "traceEvents": events}
    path.write_bytes(gzip.compress(json.dumps(trace).encode(), 1, mtime=0))


def _sizes(row: Row) -> Iterator[int]:
    """Message bytes of each call: as even as whole elements of every rank allow."""
    unit = WIDTHS[row.dtype] * (row.size if "gather" in row.op or "scatter" in row.op else 1)
    units = row.message_bytes // unit
    for call in range(row.count):
        yield unit * (units * (call + 1) // row.count - units * call // row.count)


def _stage(volume: Volume, rank: int) -> Stage:
    return next(stage for stage in volume.stages if any(rank in part for part in stage.ranks))


def _members(volume: Volume, row: Row, rank: int) -> tuple[int, ...]:
    if row.group == "WORLD":
        return tuple(range(volume.layout.world_size))
    return members(volume.layout, row.group, rank)


def _groups(volume: Volume, rank: int) -> dict[str, Any]:
    found = {row.group: _members(volume, row, rank) for row in _stage(volume, rank).rows}
    return {
        "backend": "nccl",
        "rank": rank,
        "world_size": volume.layout.world_size,
        "pg_count": len(found),
        "pg_config": [
            {"pg_name": group, "pg_desc": group, "pg_size": len(ranks), "ranks": list(ranks)}
            for group, ranks in found.items()
        ],
    }


def _call(
    volume: Volume, rank: int, row: Row, size: int, at: float, duration: float, number: int, *, kernels: bool
) -> Iterator[dict[str, Any]]:
    name, kernel = _NAMES[row.op]
    elements = size // WIDTHS[row.dtype]
    gathers = row.op.startswith("all_gather")
    scatters = row.op.startswith("reduce_scatter")
    arguments = {
        "External id": number,
        "Collective name": name,
        "dtype": _DTYPES[row.dtype],
        "In msg nelems": elements // row.size if gathers else elements,
        "Out msg nelems": elements // row.size if scatters else elements,
        "Group size": row.size,
        "Process Group Name": row.group,
        "Process Group Description": row.group,
        "Process Group Ranks": str(list(_members(volume, row, rank))),
    }
    yield _event("cpu_op", "record_param_comms", at, 1.0, arguments)
    if kernels:
        device = {**arguments, "stream": 20, "device": 0, "correlation": number}
        yield _event(
            "kernel", f"ncclDevKernel_{kernel}_RING_LL(ncclDevKernelArgsStorage<4096ul>)", at, duration, device
        )
        covered = duration * HIDDEN.get(row.axis, 0.0)
        if covered:
            yield _event("kernel", "sm90_gemm_bf16", at, covered, {"stream": 7, "device": 0, "correlation": -number})


def _event(cat: str, name: str, at: float, duration: float, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 0 if cat == "kernel" else 1,
        "tid": arguments.get("stream", 1),
        "ts": at,
        "dur": duration,
        "args": dict(arguments),
    }
