"""Time one estimate, recipe by recipe: facts, plan and volume -> step time with its parts and what each overlap saves.

Beside it stands what comes before: reading a mapping and resolving it, and the volume. Exits with 1 where an estimate
takes longer than the limit. Calculon takes 1.6 to 4.7 ms a configuration (without a recipe, rules or overlap settings).

    python scripts/bench_estimate.py [--runs 100] [--limit 0.5]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from overlapkit import RecipeError
from overlapkit.cost.estimate import estimate_of
from overlapkit.facts import derive
from overlapkit.resolver import plan, read_recipe
from overlapkit.volume.predict import predict

ROOT = Path(__file__).resolve().parent.parent
LIMIT_MS = 0.5


def milliseconds(timed: Callable[[], Any], runs: int) -> float:
    """The median of ``runs`` after one that fills the caches, in processor time."""
    times = []
    for _ in range(runs + 1):
        start = time.process_time()
        timed()
        times.append(time.process_time() - start)
    return median(times[1:]) * 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--limit", type=float, default=LIMIT_MS, help="milliseconds per estimate")
    options = parser.parse_args()
    print(f"processor time, median of {options.runs}; an estimate may take {options.limit:.1f} ms")
    print(f"  {'':<28} {'estimate':>8} {'volume':>8} {'resolve':>8}")
    good = True
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        mapping = {**yaml.safe_load(path.read_text(encoding="utf-8")), "peft": None}
        facts = derive(read_recipe(mapping))
        found = plan(facts)
        try:
            volume = predict(facts, found, approximate=True)
            estimate_of(facts, found, volume)
        except RecipeError as error:
            print(f"  {path.stem:<28} {error.problem}")
            continue
        times = [
            milliseconds(lambda: estimate_of(facts, found, volume), options.runs),  # noqa: B023  called at once
            milliseconds(lambda: predict(facts, found, approximate=True), options.runs),  # noqa: B023
            milliseconds(lambda: plan(derive(read_recipe(mapping))), options.runs),  # noqa: B023
        ]
        good &= times[0] <= options.limit
        print(f"  {path.stem:<28} " + " ".join(f"{each:8.2f}" for each in times))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
