#!/usr/bin/env python3
"""Trains on this machine with the plan of a recipe: NeMo-Run, torchrun, and overlapkit's plugin.

    python recipes/launch_local.py recipes/llama3_8b_8xh100.yaml -- pretrain.py --my-argument value

What follows `--` is what torchrun would get: the script and its arguments. The plugin sets the plan's variables, and
appends what the recipe and its plan say as overrides of Megatron-Bridge, or as Megatron-LM's arguments.
"""

from __future__ import annotations

import argparse
import sys

import nemo_run as run

from overlapkit import load_recipe
from overlapkit.errors import OverlapkitError
from overlapkit.integrations.nemo_run import OverlapPlugin


def main() -> int:
    options, script = arguments()
    try:
        processes = options.nproc_per_node or load_recipe(options.recipe, options.overrides).cluster.num_gpus or 1
        executor = run.LocalExecutor(ntasks_per_node=processes, launcher="torchrun")
        task = run.Script(path=script[0], args=script[1:], entrypoint="python")
        plugin = OverlapPlugin(recipe=options.recipe, overrides=options.overrides)
        with run.Experiment("overlap-local") as experiment:
            experiment.add(task, executor=executor, name="train", plugins=[plugin])
            if options.dryrun:
                experiment.dryrun()
                return 0
            experiment.run(tail_logs=True)
    except OverlapkitError as error:
        print(f"launch_local.py: {error}", file=sys.stderr)
        return error.exit_code
    state = experiment.jobs[0].state.name
    print(f"launch_local.py: {state}")
    return 0 if state == "SUCCEEDED" else 1


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """The options, and the script with its arguments."""
    given = sys.argv[1:]
    separator = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        usage="launch_local.py RECIPE [SECTION.KEY=VALUE ...] [options] -- SCRIPT [ARGUMENT ...]"
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--nproc-per-node", type=int, help="processes; the recipe's cluster.num_gpus unless given")
    parser.add_argument("--dryrun", action="store_true", help="shows what would be run")
    options, script = parser.parse_args(given[:separator]), given[separator + 1 :]
    if not script:
        parser.error("there is no script to run: give it after --")
    return options, script


if __name__ == "__main__":
    sys.exit(main())
