"""How long a resolution takes, against what any command of this kind costs, in one run.

    python scripts/bench_resolve.py [--runs 15] [--megatron PYTHON | --no-megatron]

Cold: whole processes, in turn: an empty typer command that imports omegaconf, rich.table and rich.console;
`overlapkit resolve` of a recipe; and of a 28 KB dump of Megatron-Bridge. In process: mapping in, plan out, for
every shipped recipe; and the dump as text and as SARIF with all that is said of it, in turn. Beside them
`import megatron.core`, in PYTHON or in an environment of its own (.venv-bench, made on first use).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from statistics import median

import yaml

from overlapkit import resolve
from overlapkit.check import check
from overlapkit.check_paths import select
from overlapkit.render.data import to_json
from overlapkit.render.sarif import to_sarif
from overlapkit.render.text import print_plan

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
SARIF_LIMIT = 1.1  # times the text
DUMP_OVERRIDES = ["cluster.gpu=h100", "cluster.num_gpus=64"]


def seconds(command: list[str]) -> float:
    """Wall seconds of one whole process, with bytecode cached as an installed package's is."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env)
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
            "a 28 KB dump": [console, "resolve", str(DUMP), *DUMP_OVERRIDES],
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


def as_text() -> None:
    print_plan(resolve(DUMP, DUMP_OVERRIDES), StringIO())


def as_sarif() -> None:
    to_json(to_sarif(check(select([str(DUMP), *DUMP_OVERRIDES])), least="info"))


def sarif() -> bool:
    """Prints the milliseconds from the dump's file to text and to SARIF; whether SARIF keeps within its limit."""
    outputs: dict[str, Callable[[], None]] = {"text": as_text, "SARIF": as_sarif}
    times: dict[str, list[float]] = {name: [] for name in outputs}
    for run in range(101):
        for name, output in outputs.items():
            start = time.perf_counter()
            output()
            if run > 0:  # the first round fills caches
                times[name].append(time.perf_counter() - start)
    in_text, in_sarif = (median(times[name]) for name in outputs)
    print("in process, file in, output out, median of 100 each, in turn")
    print(f"  a 28 KB dump as text                           {in_text * 1000:6.2f} ms")
    print(
        f"  a 28 KB dump as SARIF                          {in_sarif * 1000:6.2f} ms   "
        f"{in_sarif / in_text:.2f} times, at most {SARIF_LIMIT}"
    )
    return in_sarif / in_text <= SARIF_LIMIT


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
    good = cold(options.runs) & in_process() & sarif()
    if not options.no_megatron:
        megatron(options.megatron or megatron_python())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
