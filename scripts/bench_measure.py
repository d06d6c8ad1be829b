"""How fast measured inputs are read, and in how much memory: traces beside HTA, then NCCL logs.

    python scripts/bench_measure.py [--megabytes 100] [--no-hta]

A trace as PyTorch's profiler writes it is generated; it is read, and the overlap of its communication computed, by
overlapkit with msgspec and with the standard library's json, plain and compressed, and by Holistic Trace Analysis (the
package traceinsight, in an environment of its own, .venv-hta). Times are CPU seconds of one core without imports, the
best of three; memory is the peak of the process. Exits with 1 where a limit is missed: 150 MB/s with msgspec, three
times the trace's size in memory, ten times the speed of HTA; those for NCCL logs stand in bench_measure_nccl_log.py.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
HTA = ROOT / ".venv-hta"
# What its analysis imports: traceinsight itself requires jupyterlab too, and does not name psutil.
HTA_PACKAGES = ("numpy", "pandas", "networkx", "plotly", "pydot", "psutil", "pyyaml")
SPEED, MEMORY, FASTER = 150.0, 3.0, 10.0
STEPS = 5
RUNS = 3

_EVENT = (
    '  {{\n    "ph": "X", "cat": "{}", "name": "{}", "pid": {}, "tid": {},\n    "ts": {:.3f}, "dur": {:.3f},\n'
    '    "args": {{\n      {}\n    }}\n  }},\n'
)
_OPERATOR = '"External id": {0},"Record function id": 0, "Sequence number": {0}, "Fwd thread id": 0, "Ev Idx": {0}'
_LAUNCH = '"External id": {0}, "cbid": 211, "correlation": {0}'
_KERNEL = (
    '"External id": {0}, "queued": 0, "device": 0, "context": 1, "stream": {1}, "correlation": {0},'
    ' "registers per thread": 168, "shared memory": 213248, "blocks per SM": 1.0, "warps per SM": 12.0,'
    ' "grid": [132, 1, 1], "block": [384, 1, 1], "est. achieved occupancy %": 18'
)
_CALL = (
    '"Collective name": "_allgather_base", "In msg nelems": 2097152, "Out msg nelems": 16777216, "Group size": 8,'
    ' "dtype": "BFloat16", "In split size": "[]", "Out split size": "[]", "Process Group Name": "1",'
    ' "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP", "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"'
)
_ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>,"
    " std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def write_trace(path: Path, megabytes: float) -> None:
    """A trace of ``STEPS`` steps: operators, their launches and kernels, and a gather after every six of them."""
    with path.open("w", encoding="utf-8") as file:
        file.write(
            '{\n  "schemaVersion": 1,\n  "deviceProperties": [],\n  "distributedInfo": {"backend": "nccl", "rank": 0,'
            ' "world_size": 8, "pg_config": [{"pg_name": "1", "pg_desc": "TENSOR_MODEL_PARALLEL_GROUP", "pg_size": 8,'
            ' "ranks": [0, 1, 2, 3, 4, 5, 6, 7]}]},\n  "traceEvents": [\n'
        )
        now, number = 1_000_000.0, 0
        for step in range(STEPS):
            begin = now
            while file.tell() < megabytes * 1e6 * (step + 1) / STEPS:
                now, number = _layer(file, now, number)
            file.write(
                _EVENT.format("user_annotation", f"ProfilerStep#{step}", 1, 1, begin, now - begin, '"External id": 0')
            )
        file.write('  {"ph": "M", "name": "process_name", "pid": 1, "ts": 0, "args": {"name": "python"}}\n')
        file.write('], "traceName": "trace.json"\n}\n')


def _layer(file: IO[str], now: float, number: int) -> tuple[float, int]:
    for place in range(7):
        number += 1
        gathers = place == 6
        call = f"{_OPERATOR.format(number)}, {_CALL}" if gathers else _OPERATOR.format(number)
        file.write(
            _EVENT.format("cpu_op", "record_param_comms" if gathers else "aten::add", 1, 1, now, 8.0, call)
            + _EVENT.format(
                "cuda_runtime",
                "cudaLaunchKernelExC" if gathers else "cudaLaunchKernel",
                1,
                1,
                now + 2,
                3.0,
                _LAUNCH.format(number),
            )
        )
        kernel = _KERNEL.format(number, 20 if gathers else 7)
        if gathers:
            file.write(_EVENT.format("kernel", _GATHER, 0, 20, now + 4, 24.0, f"{kernel}, {_CALL}"))
        else:
            file.write(_EVENT.format("kernel", _ELEMENTWISE, 0, 7, now + 4, 7.0, kernel))
        now += 10
    return now, number


def read_once(path: Path, *, with_msgspec: bool) -> dict[str, float]:
    """CPU seconds to read and in all, best of all runs; peak memory in bytes; the hidden share of communication."""
    from overlapkit.measure.intervals import length, subtract, union
    from overlapkit.measure.readers import torch_trace
    from overlapkit.measure.readers.torch_trace import json_stream

    if not with_msgspec:
        vars(json_stream)["fast"] = None
    best = best_read = float("inf")
    for _ in range(RUNS):
        start = time.process_time()
        (recording,) = torch_trace.read([path]).recordings
        best_read = min(best_read, time.process_time() - start)
        assert recording.spans is not None and recording.busy is not None
        covered = union((span.start_us, span.end_us) for span in recording.spans)
        hidden = 1 - length(subtract(covered, union(recording.busy))) / length(covered)
        best = min(best, time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"read": best_read, "seconds": best, "peak": peak, "hidden": hidden}


_HTA_SCRIPT = """
import json, logging, os, resource, sys
from hta.trace_analysis import TraceAnalysis
logging.disable(logging.WARNING)
start = sum(os.times()[:4])
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, include_last_profiler_step=True)
read = sum(os.times()[:4]) - start
found = analysis.get_comm_comp_overlap(visualize=False)
seconds = sum(os.times()[:4]) - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
hidden = float(found["comp_comm_overlap_pctg"].iloc[0]) / 100
print(json.dumps({"read": read, "seconds": seconds, "peak": peak, "hidden": hidden}))
"""


def read_by_hta(path: Path) -> dict[str, float]:
    """The same by Holistic Trace Analysis, once."""
    python = HTA / "bin" / "python"
    if not python.exists() or subprocess.run([str(python), "-c", "import hta.trace_analysis"], check=False).returncode:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(HTA)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *HTA_PACKAGES], check=True)
        subprocess.run([*pip, "--no-deps", "traceinsight"], check=True)
    return _last_line([str(python), "-W", "ignore", "-c", _HTA_SCRIPT, str(path)])


def read_in_new_process(path: Path, decoder: str) -> dict[str, float]:
    return _last_line([sys.executable, __file__, "--read", str(path), "--decoder", decoder])


def _last_line(command: list[str]) -> dict[str, float]:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def bench_trace(megabytes: float, *, hta: bool) -> bool:
    """Prints the figures; whether every limit is kept."""
    with tempfile.TemporaryDirectory() as folder:
        path, packed = Path(folder) / "trace.json", Path(folder) / "trace.json.gz"
        write_trace(path, megabytes)
        packed.write_bytes(gzip.compress(path.read_bytes(), compresslevel=3))
        size = path.stat().st_size
        print(f"trace of {size / 1e6:.0f} MB, CPU time of one core: read, and its overlap computed")
        fast = _print("overlapkit, msgspec", size, read_in_new_process(path, "msgspec"))
        _print("overlapkit, msgspec, .gz", size, read_in_new_process(packed, "msgspec"))
        _print("overlapkit, json", size, read_in_new_process(path, "json"))
        good = size / 1e6 / fast["read"] >= SPEED and fast["peak"] <= MEMORY * size
        if hta:
            theirs = _print("HTA (traceinsight)", size, read_by_hta(path))
            print(f"  {theirs['seconds'] / fast['seconds']:.0f} times as fast as HTA")
            good &= theirs["seconds"] >= FASTER * fast["seconds"] and abs(theirs["hidden"] - fast["hidden"]) < 0.001
        return good


def _print(who: str, size: int, found: dict[str, float]) -> dict[str, float]:
    speed, peak = size / 1e6 / found["read"], found["peak"]
    print(f"  {who:<26} {found['read']:6.2f} s, {speed:4.0f} MB/s; in all {found['seconds']:6.2f} s", end="; ")
    print(f"{peak / 1e6:4.0f} MB = {peak / size:.1f} x; {100 * found['hidden']:.2f} % hidden")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100.0, help="the trace's size")
    parser.add_argument("--no-hta", action="store_true", help="leave Holistic Trace Analysis out")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--decoder", choices=("msgspec", "json"), default="msgspec", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read is not None:
        print(json.dumps(read_once(options.read, with_msgspec=options.decoder == "msgspec")))
        return 0
    from bench_measure_nccl_log import bench_nccl_log

    good = bench_trace(options.megabytes, hta=not options.no_hta)
    good &= bool(bench_nccl_log())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
