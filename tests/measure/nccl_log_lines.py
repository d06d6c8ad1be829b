"""Lines of NCCL logs as tests need them, and what is read of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from overlapkit.measure.events import Reading, Recording
from overlapkit.measure.readers import nccl_log

WORLD = 0xA0
DATATYPES = {"uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "bfloat16": 9}


def call(function: str, count: int, dtype: str = "float32", *, comm: int = WORLD, ranks: int = 2, **more: Any) -> str:
    """A call's line; ``host``, ``pid``, ``root``, ``tag`` and ``rest`` (what comes after the stream) may be said."""
    said = {"host": "node-0", "pid": 1000, "root": 0, "tag": "", "rest": "", **more}
    return (
        f"{said['host']}:{said['pid']}:{said['pid']} [0] NCCL INFO {said['tag']}{function}: opCount 1f "
        f"sendbuff 0x7f00 recvbuff (nil) count {count} datatype {DATATYPES[dtype]} op 0 root {said['root']} "
        f"comm {comm:#x} [nranks={ranks}] stream 0x5600{said['rest']}"
    )


def init(
    rank: int, ranks: int, *, comm: int = WORLD, pid: int = 1000, more: str = "commId 0x1f", state: str = "COMPLETE"
) -> str:
    return (
        f"node-0:{pid}:{pid} [0] NCCL INFO ncclCommInitRankConfig comm {comm:#x} rank {rank} nranks {ranks} cudaDev 0 "
        f"nvmlDev 0 busId 18000 {more} - Init {state}"
    )


def read(folder: Path, *lines: str) -> Reading:
    path = folder / "job.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return nccl_log.read([path])


def one(reading: Reading) -> Recording:
    assert reading.problems == ()
    (recording,) = reading.recordings
    return recording


def totals(recording: Recording) -> dict[tuple[str, str], tuple[int, int]]:
    calls, moved = Counter[Any](), Counter[Any]()
    for event in recording.events:
        calls[event.op, event.dtype] += event.calls
        moved[event.op, event.dtype] += event.message_bytes
    return {key: (calls[key], moved[key]) for key in calls}
