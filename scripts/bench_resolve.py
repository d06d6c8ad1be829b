"""How long a resolution takes, against what any command of this kind costs, in one run.

    python scripts/bench_resolve.py [--runs 15] [--megatron PYTHON | --no-megatron]

Cold: whole processes, in turn: an empty typer command that imports omegaconf, rich.table and rich.console;
`overlapkit resolve` of a recipe; and of a 28 KB dump of Megatron-Bridge. In process: mapping in, plan out, for
every shipped recipe. Beside them `import megatron.core`, in PYTHON or in an environment of its own
(.venv-bench, made on first use).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import yaml

from overlapkit import resolve

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "llama2_7b_32xh20.yaml"
DUMP = ROOT / "tests" / "dumps" / "llama3_70b_pretrain_64gpu_h100_bf16.yaml"
EMPTY = """
import typer
import omegaconf, rich.table, rich.console
app = typer.Typer()
@app.command()
def main(name: str = "nobody") -> None: ...
app()
"""
LIMITS = {"a recipe": 1.4, "a 28 KB dump": 1.8}
IN_PROCESS_LIMIT_MS = 1.0


def seconds(command: list[str]) -> float:
    """Wall seconds of one whole process."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return time.perf_counter() - start


def cold(runs: int) -> bool:
    """Prints the medians and ratios of whole processes; whether they keep within the limits."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(EMPTY)
        script.flush()
        console = str(Path(sys.executable).with_name("overlapkit"))
        commands = {
            "an empty command": [sys.executable, script.name],
            "a recipe": [console, "resolve", str(RECIPE)],
            "a 28 KB dump": [console, "resolve", str(DUMP), "cluster.gpu=h100", "cluster.num_gpus=64"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for run in range(runs + 1):
            for name, command in commands.items():
                taken = seconds(command)
                if run > 0:  # the first round fills caches
                    times[name].append(taken)
    empty = times["an empty command"]
    print(f"cold, median of {runs} processes each, in turn")
    print(f"  an empty typer command with omegaconf and rich {median(empty) * 1000:6.0f} ms")
    good = True
    for name, limit in LIMITS.items():
        ratio = median(mine / other for mine, other in zip(times[name], empty, strict=True))
        good &= ratio <= limit
        print(f"  resolve {name:<38} {median(times[name]) * 1000:6.0f} ms   {ratio:.2f} times, at most {limit}")
    return good


def in_process() -> bool:
    """Prints the milliseconds per recipe; whether every one keeps within the limit."""
    print("in process, mapping in, plan out, median of 200")
    good = True
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        times = []
        for _ in range(200):
            start = time.perf_counter()
            resolve(recipe)
            times.append(time.perf_counter() - start)
        taken = median(times) * 1000
        good &= taken <= IN_PROCESS_LIMIT_MS
        print(f"  {path.stem:<46} {taken:6.2f} ms   at most {IN_PROCESS_LIMIT_MS:.0f}")
    return good


def megatron_python() -> str:
    """An environment with megatron-core and a CPU build of torch, made on first use."""
    python = ROOT / ".venv-bench" / "bin" / "python"
    if not python.exists():
        print("making .venv-bench with torch and megatron-core", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", "torch==2.13.0", "megatron-core==0.16.1"]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    return str(python)


def megatron(python: str) -> None:
    command = [python, "-W", "ignore", "-c", "import megatron.core"]
    seconds(command)
    times = [seconds(command) for _ in range(3)]
    print(f"beside it, `import megatron.core`                {median(times) * 1000:6.0f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--megatron", metavar="PYTHON", help="an interpreter that has megatron-core")
    which.add_argument("--no-megatron", action="store_true", help="leave megatron-core out")
    options = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    good = cold(options.runs) & in_process()
    if not options.no_megatron:
        megatron(options.megatron or megatron_python())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
