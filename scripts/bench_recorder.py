"""What the recorder costs: per call of torch.distributed, and of a tiny training step of two processes over gloo.

    python scripts/bench_recorder.py [--calls 100000] [--steps 200] [--limit 5]

A call is timed with nothing behind it: the wrapper alone, counting included, in time of the processor. The step has 40
collectives of a few kilobytes and little else; it is run recorded and not, by turns. On a GPU, where a call does not
wait for its result, the cost per call is what the recorder adds to the host's time. Needs torch. Exits with 1 where a
call costs more than the limit, in microseconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed import distributed_c10d

from overlapkit.integrations.torch_recorder import record

LIMIT_US = 5.0
BLOCKS = 10  # of steps, half of them recorded


def microseconds_per_call(name: str, arguments: tuple[Any, ...], calls: int) -> float:
    """Of the function of this name, which does nothing, how much longer a call takes when it is recorded."""

    def nothing(*_: Any, **__: Any) -> None:
        pass

    given = getattr(distributed_c10d, name)
    setattr(distributed_c10d, name, nothing)
    try:
        plain = _timed(nothing, arguments, calls)
        with tempfile.TemporaryDirectory() as folder, record(folder):
            recorded = _timed(getattr(distributed_c10d, name), arguments, calls)
    finally:
        setattr(distributed_c10d, name, given)
    return (recorded - plain) / calls * 1e6


def _timed(function: Any, arguments: tuple[Any, ...], calls: int) -> float:
    """Seconds, the best of three."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        for _ in range(calls):
            function(*arguments)
        times.append(time.thread_time() - start)
    return min(times)


def rank_of_steps(rank: int, store: str, steps: int, results: Any) -> None:
    """One of the two processes; rank 0 sends the milliseconds of a step, not recorded and recorded."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    times: dict[bool, list[float]] = {False: [], True: []}
    weight, part, whole = torch.ones(256, 256), torch.ones(1024), torch.ones(2048)
    for block in range(BLOCKS):
        recorded = block % 2 == 1
        with tempfile.TemporaryDirectory() as folder, record(folder) if recorded else nullcontext():
            for _ in range(steps // BLOCKS):
                start = time.perf_counter()
                for _ in range(20):
                    weight @ weight
                    dist.all_reduce(part)
                    dist.all_gather_into_tensor(whole, part)
                dist.all_reduce(torch.ones(1, dtype=torch.int32))
                times[recorded].append(time.perf_counter() - start)
    if rank == 0:
        results.put([median(times[recorded]) * 1000 for recorded in (False, True)])
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--limit", type=float, default=LIMIT_US, help="microseconds per call")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(f"{folder}/store", 1))
        tensor = torch.ones(128)
        cost = {
            "all_reduce": microseconds_per_call("all_reduce", (tensor,), options.calls),
            "all_gather_into_tensor": microseconds_per_call("all_gather_into_tensor", (tensor, tensor), options.calls),
            "isend": microseconds_per_call("isend", (tensor, 0), options.calls),
            "all_gather of 8": microseconds_per_call("all_gather", ([tensor] * 8, tensor), options.calls),
        }
        dist.destroy_process_group()
        for name, taken in cost.items():
            print(f"  {name:<24} {taken:6.2f} µs per call")
        results = processes.get_context("spawn").SimpleQueue()
        arguments = (str(Path(folder) / "steps"), options.steps, results)
        processes.spawn(rank_of_steps, args=arguments, nprocs=2)
        plain, recorded = results.get()
    share = 41 * max(cost.values()) / 1000 / plain * 100
    print(f"  a step of 41 calls over gloo: {plain:.2f} ms, recorded {recorded:.2f} ms; its calls cost {share:.2f} %")
    return 0 if max(cost.values()) <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
