"""Whether NCCL's log, PyTorch's trace and the recorder are on this machine as overlapkit's readers expect them.

    python scripts/gpu_check.py [--keep FOLDER]

Runs a job of one process, or of two where there are two GPUs, for a few seconds: collectives of known sizes, with
NCCL's log, a profiler trace and the recorder at once. One process alone launches no NCCL kernels: what their metadata
are, only two can show. Needs torch with CUDA and a GPU; without them it says so. Exits with 1 where something is not
as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    print(f"torch cannot be imported: nothing was checked ({error})")
    sys.exit(0)

from overlapkit.errors import OverlapkitError
from overlapkit.measure.events import Reading
from overlapkit.measure.readers import nccl_log, recorder, torch_trace

STEPS = 4  # the profiler sees all but the first
CALLS_OF_A_STEP = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "AllReduce")
_COLL = re.compile(rb"NCCL INFO (\w+): opCount ([0-9a-f]+) .*? comm (0x[0-9a-f]+)")
_INIT = re.compile(rb"comm (0x[0-9a-f]+) rank .*Init COMPLETE")
Totals = dict[tuple[str, str], tuple[int, int]]  # (op, dtype) -> (calls, message bytes)


def expected(world: int, steps: int) -> Totals:
    """What a process issues in so many steps."""
    return {
        ("all_reduce", "float32"): (steps, steps * 4096),
        ("all_gather", "bfloat16"): (steps, steps * 512 * world),
        ("reduce_scatter", "float32"): (steps, steps * 2048 * world),
        ("broadcast", "float32"): (steps, steps * 256),
        ("all_reduce", "int32"): (steps, steps * 4),
    }


def step(world: int, device: str) -> None:
    floats = {"dtype": torch.float32, "device": device}
    halves = {"dtype": torch.bfloat16, "device": device}
    dist.all_reduce(torch.ones(1024, **floats))
    dist.all_gather_into_tensor(torch.empty(256 * world, **halves), torch.ones(256, **halves))
    dist.reduce_scatter_tensor(torch.empty(512, **floats), torch.ones(512 * world, **floats))
    dist.broadcast(torch.ones(64, **floats), 0)
    dist.all_reduce(torch.ones(1, dtype=torch.int32, device=device))


def process_of_job(folder: Path) -> None:
    """One process of the job."""
    from torch.profiler import ProfilerActivity, profile, schedule

    from overlapkit.record import record

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = f"cuda:{rank}"
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")

    def save(profiler: Any) -> None:
        profiler.export_chrome_trace(str(folder / f"rank{rank}.json"))

    with (
        record(folder),
        profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
            schedule=schedule(wait=0, warmup=1, active=STEPS - 1, repeat=1),
            record_shapes=True,
            on_trace_ready=save,
        ) as profiler,
    ):
        for _ in range(STEPS):
            step(world, device)
            torch.cuda.synchronize()
            profiler.step()
    dist.destroy_process_group()


def run_job(folder: Path, processes: int) -> str | None:
    """Why the job failed, None where it did not."""
    environment = {
        **os.environ,
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,COLL",
        "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.log"),
    }
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launch, str(Path(__file__).resolve()), "--process", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    return None if done.returncode == 0 else done.stderr[-2000:]


def checks(folder: Path, world: int) -> Iterator[tuple[str, str | None]]:
    """(what is checked, what is wrong with it)."""
    logs, traces = sorted(folder.glob("nccl.*.log")), sorted(folder.glob("rank*.json"))
    yield "NCCL's log: a file per process", None if len(logs) == world else f"{len(logs)} files"
    for path in logs:
        yield f"{path.name}: calls in the order in which they were issued", _order(path)
        yield f"{path.name}: a communicator's INIT lines before its calls", _init_first(path)
    yield "NCCL's log, read", _totals(lambda: nccl_log.read(logs), expected(world, STEPS), world)
    yield "PyTorch's trace, read", _totals(lambda: torch_trace.read(traces), expected(world, STEPS - 1), world)
    for path in traces:
        yield f"{path.name}: NCCL kernels with their metadata", _kernels(path, world)
    recorded = sorted(folder.glob("*.jsonl"))
    yield "the recorder, read", _totals(lambda: recorder.read(recorded), expected(world, STEPS), world)


def _order(path: Path) -> str | None:
    found = [match[1].decode() for match in _COLL.finditer(path.read_bytes())]
    wanted = [*CALLS_OF_A_STEP] * STEPS
    return None if found == wanted else f"{len(found)} calls: {' '.join(found[:12])} …"


def _init_first(path: Path) -> str | None:
    known: set[bytes] = set()
    for line in path.read_bytes().splitlines():
        if (made := _INIT.search(line)) is not None:
            known.add(made[1])
        if (called := _COLL.search(line)) is not None and called[3] not in known:
            return line.decode(errors="replace")[:200]
    return None if known else "no such lines"


def _totals(reading: Callable[[], Reading], wanted: Totals, world: int) -> str | None:
    try:
        found = reading()
    except OverlapkitError as error:
        return str(error)
    if len(found.recordings) != world:
        return f"{len(found.recordings)} recordings; {'; '.join(map(str, found.problems))}"
    for recording in found.recordings:
        calls, moved = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for event in recording.events:
            calls[event.op, event.dtype] += event.calls
            moved[event.op, event.dtype] += event.message_bytes
        seen = {key: (calls[key], moved[key]) for key in calls}
        if seen != wanted:
            return f"rank {recording.rank}: {seen}, not {wanted}"
    return None


def _kernels(path: Path, world: int) -> str | None:
    events = json.loads(path.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel" and "nccl" in event["name"].lower()]
    if not kernels:
        return "none" if world > 1 else None
    bare = [event["name"] for event in kernels if "Process Group Name" not in event.get("args", {})]
    return f"{len(bare)} of {len(kernels)} have none: {bare[0]}" if bare else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the log, the trace and the recording there")
    parser.add_argument("--process", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process is not None:
        process_of_job(options.process)
        return 0
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        print("no GPU here that NCCL can use: nothing was checked")
        return 0
    processes = min(2, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        print(f"torch {torch.__version__}, NCCL {nccl}, {processes} × {torch.cuda.get_device_name(0)}")
        failed = run_job(folder, processes)
        if failed is not None:
            print(f"the job failed:\n{failed}")
            return 1
        good = True
        for what, wrong in checks(folder, processes):
            good &= wrong is None
            print(f"  {what}: {'as expected' if wrong is None else wrong}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
