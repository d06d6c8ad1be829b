#!/usr/bin/env python3
"""Submits a training script to Slurm with the plan of a recipe: NeMo-Run, sbatch, and overlapkit's plugin.

    python recipes/launch_slurm.py recipes/llama3_8b_8xh100.yaml --account me --partition batch --nodes 1 \\
        --container-image nvcr.io/nvidia/nemo:26.04 -- pretrain.py --my-argument value

Run it on a login node of the cluster. What follows `--` is what torchrun would get: the script, by a path that the
job finds, and its arguments. The plugin sets the plan's variables, names them to the container, and appends what the
recipe and its plan say as overrides of Megatron-Bridge, or as Megatron-LM's arguments.
"""

from __future__ import annotations

import argparse
import sys

import nemo_run as run

from overlapkit.errors import OverlapkitError
from overlapkit.integrations.nemo_run import OverlapPlugin


def main() -> int:
    options, script = arguments()
    executor = run.SlurmExecutor(
        account=options.account,
        partition=options.partition,
        nodes=options.nodes,
        ntasks_per_node=options.gpus_per_node,  # torchrun starts them: one srun task per node
        gres=options.gres,
        time=options.time,
        container_image=options.container_image,
        container_mounts=options.container_mount,
        launcher="torchrun",
        tunnel=run.LocalTunnel(job_dir=""),  # this machine submits, and NEMORUN_HOME is on a shared file system
        packager=run.Packager(),  # the script lies where the job finds it: nothing is copied
    )
    task = run.Script(path=script[0], args=script[1:], entrypoint="python")
    plugin = OverlapPlugin(recipe=options.recipe, overrides=options.overrides)
    try:
        with run.Experiment("overlap-slurm") as experiment:
            experiment.add(task, executor=executor, name="train", plugins=[plugin])
            if options.dryrun:
                experiment.dryrun()
            else:
                experiment.run(detach=True)
    except OverlapkitError as error:
        print(f"launch_slurm.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """The options, and the script with its arguments."""
    given = sys.argv[1:]
    separator = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        usage="launch_slurm.py RECIPE [SECTION.KEY=VALUE ...] [options] -- SCRIPT [ARGUMENT ...]"
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--account", required=True)
    parser.add_argument("--partition", required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, default=8, help="processes of a node (default: 8)")
    parser.add_argument("--gres", help="such as gpu:8, where the cluster wants GPUs to be asked for")
    parser.add_argument("--time", default="04:00:00", help="(default: 04:00:00)")
    parser.add_argument("--container-image", help="for pyxis")
    parser.add_argument("--container-mount", action="append", default=[], metavar="FROM:TO")
    parser.add_argument("--dryrun", action="store_true", help="shows the sbatch script")
    options, script = parser.parse_args(given[:separator]), given[separator + 1 :]
    if not script:
        parser.error("there is no script to run: give it after --")
    return options, script


if __name__ == "__main__":
    sys.exit(main())
