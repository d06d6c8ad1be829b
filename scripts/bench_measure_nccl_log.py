"""How fast NCCL logs are read, and in how much memory.

    python scripts/bench_measure_nccl_log.py [--megabytes 1000] [--limit 150] [--memory 200]

Logs of one rank and of 32 ranks in one file, with times in front, and of expert parallelism by Send and Recv, each read
in a process of its own. Exits with 1 where one is read at less than the limit, in MB per second of one core (CPU time),
or where the process takes more memory, in MB.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

LINES = 50_000  # of a pattern that is repeated
READ = """
import json, resource, sys, time
from pathlib import Path
from overlapkit.measure.readers import nccl_log
start = time.process_time()
reading = nccl_log.read([Path(sys.argv[1])])
seconds = time.process_time() - start
calls = sum(event.calls for recording in reading.recordings for event in recording.events)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "darwin" else 1024)
print(json.dumps([seconds, peak, calls, len(reading.problems)]))
"""


def call(rank: int, function: str, at: int, count: int, comm: int, root: int = 0) -> str:
    return (
        f"node-{rank // 8}:{1000 + rank}:{1000 + rank} [{rank % 8}] NCCL INFO {function}: opCount {at:x} sendbuff "
        f"0x7f{at * 64 % 2**40:010x} recvbuff 0x7e{at * 128 % 2**40:010x} count {count} datatype 9 op 0 root {root} "
        f"comm 0x55aa00{comm}00000 [nranks=8] stream 0x5600aabbccd0\n"
    )


def collectives(ranks: int) -> Iterator[str]:
    """What tensor and data parallelism log: few sizes, each again and again."""
    draw = random.Random(0)
    for at in range(LINES):
        function = draw.choice(("AllGather", "ReduceScatter", "AllReduce"))
        yield call(draw.randrange(ranks), function, at, draw.choice((2_097_152, 16_384, 1024)), draw.randrange(1, 5))


def with_times() -> Iterator[str]:
    for at, line in enumerate(collectives(1)):
        yield f"[2026-11-30 12:{at // 1000 % 60:02}:{at % 60:02}] {line}"


def exchanges() -> Iterator[str]:
    """What expert parallelism logs: sends and receives of sizes that never come again."""
    draw = random.Random(0)
    for at in range(LINES // 16):
        for root in range(8):
            for function in ("Send", "Recv"):
                yield call(0, function, at, draw.randrange(1, 10**7), 1, root)


CASES: dict[str, Callable[[], Iterator[str]]] = {
    "one rank": lambda: collectives(1),
    "32 ranks in one file": lambda: collectives(32),
    "with times": with_times,
    "all_to_all as Send and Recv": exchanges,
}


def bench_nccl_log(megabytes: int = 1000, limit: float = 150, memory: float = 200) -> bool:
    """Prints a line per case; whether all are as fast, in MB per CPU second, and as small, in MB, as the limits say."""
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.log"
        for name, lines in CASES.items():
            pattern = "".join(lines()).encode()
            times = max(megabytes * 10**6 // len(pattern), 1)
            with path.open("wb") as file:
                for _ in range(times):
                    file.write(pattern)
            command = [sys.executable, "-c", READ, str(path)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            seconds, peak, calls, problems = found
            size, speed = len(pattern) * times / 1e6, len(pattern) * times / 1e6 / seconds
            verdict = speed >= limit and peak <= memory and calls > 0 and problems == 0
            fine &= verdict
            print(
                f"NCCL log, {name}: {size:.0f} MB, {calls:,} calls: {speed:.0f} MB/s (limit {limit:.0f}), "
                f"peak {peak:.0f} MB (limit {memory:.0f}){'' if verdict else '  MISSED'}"
            )
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of each log")
    parser.add_argument("--limit", type=float, default=150, help="MB per CPU second")
    parser.add_argument("--memory", type=float, default=200, help="peak memory of the process, MB")
    options = parser.parse_args()
    return 0 if bench_nccl_log(options.megabytes, options.limit, options.memory) else 1


if __name__ == "__main__":
    sys.exit(main())
