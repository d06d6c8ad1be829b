"""How many layouts a search judges per second: the usual ranges of recipes, dense and MoE.

    python scripts/bench_search.py [--workers 2] [--limit 20000] [RECIPE ...]

A layout is one parallel layout with one setting of its overlaps and one kind of recomputation; it is refused by a rule,
too large, or ranked. Given per recipe: wall time of the whole search by ``--workers`` processes, starting them
included; then, in one process, the processor time per layout and the whole time over the layouts that were ranked, so
that other work on the machine does not count. Exits with 1 where processors for ``--workers`` would judge fewer than
``--limit`` layouts a second.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from overlapkit.facts import derive
from overlapkit.recipe import load_recipe
from overlapkit.search.judge import Judge
from overlapkit.search.ranges import space_of
from overlapkit.search.work import judged

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ("llama3_70b_64xh100", "qwen3_30b_a3b_16xh100", "mixtral_8x7b_h100")


def bench(path: Path, workers: int) -> float:
    """Layouts per second that ``workers`` free cores would judge."""
    recipe = load_recipe(path)
    space = space_of(derive(recipe), {})
    start = time.perf_counter()
    ranking, _ = judged(recipe, space, keep=40, workers=workers, report=lambda _: None)
    wall = time.perf_counter() - start
    start = time.process_time()
    Judge(recipe, space, 40).judge(0, space.size)
    processor = time.process_time() - start
    rate = workers * ranking.judged / processor
    refused, too_large = ranking.refused.total(), ranking.too_large.total()
    print(
        f"  {path.stem:<24} {ranking.judged:>9,} layouts: {refused:,} refused, {too_large:,} too large, "
        f"{ranking.ranked:,} ranked\n"
        f"  {'':<24} wall {wall:6.1f} s, {ranking.judged / wall:9,.0f} a second\n"
        f"  {'':<24} processor {1e6 * processor / ranking.judged:5.1f} us a layout, "
        f"{1e6 * processor / max(ranking.ranked, 1):5.1f} us a ranked one: {rate:,.0f} a second on {workers} cores"
    )
    return rate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "recipes", nargs="*", type=Path, default=[ROOT / "recipes" / f"{name}.yaml" for name in RECIPES]
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=20_000, help="layouts per second")
    options = parser.parse_args()
    rates = [bench(path, options.workers) for path in options.recipes]
    return 0 if min(rates) >= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
