"""How long the volume of a recipe takes in process: mapping in, the rows of all stages out.

    python scripts/bench_volume.py [--runs 100] [--limit 5]

Every shipped recipe; what `volume` does not model is taken out of it first (FP8, frozen parameters, FSDP), and a recipe
that is still refused is named with the reason; what was taken out is said. Processor time, so that other work on the
machine does not count. Exits with 1 where a median is above the limit, in milliseconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import yaml

import overlapkit
from overlapkit import RecipeError

ROOT = Path(__file__).resolve().parent.parent
PLAIN = {"mixed_precision": "bf16_mixed", "peft": None}
LIMIT_MS = 5.0


def modelled(recipe: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The recipe as it is, or else in BF16 with all parameters trained by DDP, and a remark that says so."""
    try:
        overlapkit.volume(recipe)
    except RecipeError:
        dist = {**recipe.get("dist", {}), "use_megatron_fsdp": False}
        ddp = {"use_distributed_optimizer": True}
        return {**recipe, **PLAIN, "dist": dist, "ddp": ddp}, ", made BF16 with DDP"
    return recipe, ""


def milliseconds(recipe: dict[str, Any], runs: int) -> float:
    """The median of ``runs`` after one that fills the caches."""
    times = []
    for _ in range(runs + 1):
        start = time.process_time()
        overlapkit.volume(recipe)
        times.append(time.process_time() - start)
    return median(times[1:]) * 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--limit", type=float, default=LIMIT_MS, help="milliseconds per recipe")
    options = parser.parse_args()
    print(f"all stages of a mapping, processor time, median of {options.runs}, at most {options.limit:.1f} ms")
    good = True
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        recipe, remark = modelled(yaml.safe_load(path.read_text(encoding="utf-8")))
        try:
            found = overlapkit.volume(recipe)
        except RecipeError as error:
            print(f"  {path.stem:<28} {error.problem}")
            continue
        taken = milliseconds(recipe, options.runs)
        good &= taken <= options.limit
        rows = sum(len(stage.rows) for stage in found.stages)
        print(f"  {path.stem:<28} {taken:6.2f} ms   {len(found.stages)} stages, {rows} rows{remark}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
