"""The installed megatron-core runs the layouts of an oracle again: what it issues against what overlapkit.volume says.

    python scripts/parity_volume_megatron.py [ORACLE ...] [--only NAME ...]

Each recorded layout and rank (scripts/parity_volume.py says what an oracle is) is built and trained for two steps by
the megatron-core of this Python, on torch's fake process group. Only its configuration is taken from the oracle.
Every row of a group larger than 1 must be equal in calls and bytes, rows that the routing decides in calls. Exits 1
when a row disagrees or a layout cannot be run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from parity_volume import SAMPLE, recipe_of, runs_of

from overlapkit import volume

sys.path.insert(0, str(SAMPLE.parent.parent / "integrations" / "volume"))
runs: Any = import_module("runs")

# Parameters of a layer's matrices from which a model is built without values; small ones route real tokens.
_LARGE = 10_000_000


def layouts(paths: Sequence[Path], core: str) -> Iterator[tuple[str, dict[str, Any], list[int]]]:
    """(name, recipe for this megatron-core, recorded ranks) of every layout, whichever version recorded it."""
    for path in paths:
        recipes: dict[str, dict[str, Any]] = {}
        ranks: dict[str, set[int]] = {}
        for run in runs_of(path):
            recipes[run["name"]] = recipe_of(run | {"megatron_core": core})
            ranks.setdefault(run["name"], set()).add(run["rank"])
        yield from ((name, recipe, sorted(ranks[name])) for name, recipe in recipes.items())


def device_of(recipe: dict[str, Any]) -> str:
    """Full-size models have their sizes alone."""
    model = recipe["model"]
    return "meta" if model["hidden_size"] * model["ffn_hidden_size"] > _LARGE else "cpu"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracle", nargs="*", type=Path, default=sorted(SAMPLE.glob("*.jsonl.gz")))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="layouts to run")
    options = parser.parse_args(arguments)
    core, run = version("megatron-core"), runs.Runner()
    layouts_run = ranks_run = rows = 0
    wrong: list[str] = []
    for name, recipe, ranks in layouts(options.oracle, core):
        if options.only and name not in options.only:
            continue
        layouts_run += 1
        try:
            done = run(recipe, ranks, "fake", device_of(recipe))
        except RuntimeError as error:
            wrong.append(f"{name}: {error}")
            continue
        ranks_run += len(done)
        for each in done:
            compared, told = runs.differences(volume(recipe), each, recipe["cluster"]["num_gpus"])
            rows += compared
            wrong += [f"{name}: {line}" for line in told]
    run.close()
    sys.stderr.write("".join(f"{line}\n" for line in wrong))
    print(f"{rows - len(wrong)}/{rows} rows of {ranks_run} runs of {layouts_run} layouts  megatron-core {core}")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
