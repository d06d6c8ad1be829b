"""How many GPUs a launcher's own options ask for.

Sources: torchrun, deepspeed and accelerate launch ``--help``; the manual pages of srun and sbatch; mpirun of Open MPI
(``-np``, ``-N``, ``-npernode``) and MPICH (``-ppn``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from overlapkit.megatron_lm.words import Launch, Word

_SLURM = {"srun", "sbatch", "salloc"}
_MPI = {"mpirun", "mpiexec", "orterun", "horovodrun"}
_OTHERS = {"env", "sudo", "numactl", "taskset", "nsys", "ncu", "docker", "podman", "singularity", "apptainer", "bash"}
_OTHERS |= {"torchrun", "deepspeed", "accelerate", "python", "python3"}
_TORCH = {
    "--nnodes": "nodes",
    "--num_nodes": "nodes",
    "--num-nodes": "nodes",
    "--num_machines": "nodes",
    "--num-machines": "nodes",
    "--nproc-per-node": "per_node",
    "--nproc_per_node": "per_node",
    "--num_gpus": "per_node",
    "--num-gpus": "per_node",
    "--num_processes": "processes",
    "--num-processes": "processes",
}
_OF_SLURM = {
    "-N": "slurm_nodes",
    "--nodes": "slurm_nodes",
    "-n": "tasks",
    "--ntasks": "tasks",
    "--ntasks-per-node": "tasks_per_node",
    "--tasks-per-node": "tasks_per_node",
    "--gpus-per-node": "gpus_per_node",
    "--gres": "gpus_per_node",
    "-G": "gpus",
    "--gpus": "gpus",
}
_OF_MPI = {
    "-n": "tasks",
    "-np": "tasks",
    "--np": "tasks",
    "-c": "tasks",
    "-N": "tasks_per_node",
    "-npernode": "tasks_per_node",
    "--npernode": "tasks_per_node",
    "-ppn": "tasks_per_node",
    "--map-by": "tasks_per_node",
}
_COUNT = re.compile(r"(?:[A-Za-z][\w.-]*:)?(\d+)")  # 8, or h100:8
_GRES = re.compile(r"(?:^|,)gpu(?::[A-Za-z][\w.-]*)?(?::(\d+))?(?=[,(]|$)")
_PER_NODE = re.compile(r"ppr:(\d+):node")


@dataclass(frozen=True, slots=True)
class _Counts:
    """What the options say: the last word of each, by what it counts."""

    words: Mapping[str, Word]

    def __getitem__(self, name: str) -> int | None:
        return _number(self.words.get(name))

    def line(self, *names: str) -> int:
        return next(self.words[name].line for name in names if name in self.words)


def cluster_of(launch: Launch) -> tuple[dict[str, Any], dict[str, int], tuple[str, ...]]:
    """``cluster.num_gpus`` and ``gpus_per_node`` as the launcher's options say, their lines, and what they leave open.

    Processes of torchrun, deepspeed or accelerate count before Slurm's or MPI's tasks, which may start one launcher
    each; tasks count before Slurm's GPUs, unless there is one per node. Without a number of nodes torchrun runs on
    one. Nothing is said of what an option leaves to the run.
    """
    counts = _Counts(dict(_options(launch.launcher)))
    total, each, used = _processes(counts) or _tasks(counts) or _gpus(counts) or (None, None, ())
    cluster = {"gpus_per_node": each, "num_gpus": total}
    lines = {"gpus_per_node": used[-1:], "num_gpus": used}
    found = {name: number for name, number in cluster.items() if number is not None}
    notes = tuple(
        f"line {word.line}: {word.written}: {word.unknown or 'no number'}, so the GPUs are what cluster.num_gpus says"
        for word in counts.words.values()
        if total is None and _number(word) is None
    )
    return found, {f"cluster.{name}": counts.line(*lines[name]) for name in found}, notes


_Sizes = tuple[int | None, int | None, tuple[str, ...]]


def _processes(counts: _Counts) -> _Sizes | None:
    """All processes and those per node, as a launcher of PyTorch processes has them; and the options behind them."""
    nodes_by = "nodes" if "nodes" in counts.words else "slurm_nodes"
    nodes, per_node = counts[nodes_by], counts["per_node"]
    if "per_node" in counts.words:
        if nodes_by not in counts.words:
            return per_node, per_node, ("per_node",)
        return _times(per_node, nodes), per_node, (nodes_by, "per_node")
    if "processes" in counts.words:
        total = counts["processes"]
        return total, _shared(total, counts["nodes"]), ("processes",)
    return None


def _tasks(counts: _Counts) -> _Sizes | None:
    total, per_node, nodes = counts["tasks"], counts["tasks_per_node"], counts["slurm_nodes"]
    gpus = counts["gpus_per_node"] is not None or counts["gpus"] is not None
    if gpus and (per_node == 1 or total == 1 or (total is not None and total == nodes)):
        return None  # a task for each node starts the processes
    if per_node is not None:
        whole = _times(per_node, nodes) if total is None else total
        return whole, per_node, ("tasks" if total is not None else "slurm_nodes", "tasks_per_node")
    return None if total is None else (total, _shared(total, nodes), ("tasks",))


def _gpus(counts: _Counts) -> _Sizes | None:
    total, per_node, nodes = counts["gpus"], counts["gpus_per_node"], counts["slurm_nodes"]
    if per_node is not None:
        return _times(per_node, nodes) if total is None else total, per_node, ("slurm_nodes", "gpus_per_node")
    return None if total is None else (total, _shared(total, nodes), ("gpus",))


def _times(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one * other


def _shared(total: int | None, nodes: int | None) -> int | None:
    return total // nodes if total is not None and nodes is not None and total % nodes == 0 else None


def _options(words: tuple[Word, ...]) -> Iterator[tuple[str, Word]]:
    """What each option counts, and its value; whose option it is tells what ``-N`` and ``-n`` mean."""
    own: Mapping[str, str] = {}
    for position, word in enumerate(words):
        text = word.text if word.text is not None else word.written
        base = text.rsplit("/", 1)[-1]
        if base in _SLURM or base in _MPI or base in _OTHERS:
            own = _OF_SLURM if base in _SLURM else _OF_MPI if base in _MPI else {}
            continue
        name, equals, value = text.partition("=")
        if not equals and (short := re.fullmatch(r"(-[NnG])(\d+)", text)):
            name, equals, value = short[1], "=", short[2]
        counted = own.get(name) or _TORCH.get(name)
        if not counted:
            continue
        given = word
        if equals:
            given = Word(value if word.text is not None else None, value, word.line, word.unknown)
        elif position + 1 < len(words):
            given = words[position + 1]
        inside = _GRES if name == "--gres" else _PER_NODE if name == "--map-by" else None
        if inside is None or given.text is None:
            yield counted, given
        elif found := inside.search(given.text):
            yield counted, Word(found[1] or "1", given.written, given.line)


def _number(word: Word | None) -> int | None:
    found = _COUNT.fullmatch(word.text or "") if word is not None else None
    if found is None or len(found[1]) > 6 or int(found[1]) == 0:
        return None
    return int(found[1])
