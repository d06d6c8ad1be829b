"""Traces as PyTorch's profiler writes them, from a few calls and kernels, for tests."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

GROUPS = {
    "0": ("default_pg", [0, 1, 2, 3]),
    "1": ("TENSOR_MODEL_PARALLEL_GROUP", [0, 1]),
    "2": ("PIPELINE_MODEL_PARALLEL_GROUP", [0, 2]),
    "3": ("DATA_PARALLEL_GROUP_WITH_CP", [0, 1, 2, 3]),
}
_ids = itertools.count(1)


def event(cat: str, name: str, ts: float, dur: float = 1.0, tid: int | str = 7, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def collective(name: str, group: str, sent: int, received: int, dtype: str = "BFloat16", **more: Any) -> dict[str, Any]:
    """The arguments that record_param_comms and NCCL's kernels carry."""
    description, ranks = GROUPS[group]
    return {
        "Collective name": name,
        "dtype": dtype,
        "In msg nelems": sent,
        "Out msg nelems": received,
        "In split size": "[]",
        "Out split size": "[]",
        "Group size": len(ranks),
        "Rank": 0,
        "Process Group Name": group,
        "Process Group Description": description,
        "Process Group Ranks": str(ranks),
        "Global rank start": ranks[0],
        "Global rank stride": ranks[1] - ranks[0],
        **more,
    }


def record(ts: float, args: dict[str, Any], tid: int = 7) -> dict[str, Any]:
    return event("cpu_op", "record_param_comms", ts, 0.5, tid, **{"External id": next(_ids), **args})


def kernel(name: str, ts: float, dur: float, tid: int = 20, **args: Any) -> dict[str, Any]:
    return event("kernel", name, ts, dur, tid, **{"device": 0, "stream": tid, **args})


def step(number: int, ts: float, dur: float, cat: str = "user_annotation") -> dict[str, Any]:
    return event(cat, f"ProfilerStep#{number}", ts, dur)


def trace(events: list[dict[str, Any]], **header: Any) -> dict[str, Any]:
    distributed = {
        "backend": "nccl",
        "rank": 0,
        "world_size": 4,
        "pg_config": [
            {"pg_name": name, "pg_desc": description, "pg_size": len(ranks), "ranks": ranks}
            for name, (description, ranks) in GROUPS.items()
        ],
    }
    return {
        "schemaVersion": 1,
        "deviceProperties": [],
        "distributedInfo": distributed,
        "host_name": "node0",
        **header,
        "traceEvents": [{"ph": "M", "name": "process_name", "ts": 0, "pid": 1, "args": {"name": "python"}}, *events],
        "traceName": "trace.json",
    }


def written(folder: Path, found: dict[str, Any], name: str = "trace.json") -> Path:
    path = folder / name
    text = json.dumps(found, indent=1).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path
