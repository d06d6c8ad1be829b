"""How many GPUs a launcher's own options ask for."""

from __future__ import annotations

from typing import Any

from overlapkit.megatron_lm.words import Launch, Word

_NODES = frozenset({"--nnodes", "--nodes", "-N", "--num_nodes", "--num-nodes"})
_PER_NODE = frozenset({"--nproc-per-node", "--nproc_per_node", "--num_gpus", "--num-gpus"})
_TASKS_PER_NODE = frozenset({"--ntasks-per-node", "--gpus-per-node", "--tasks-per-node"})


def cluster_of(launch: Launch) -> tuple[dict[str, Any], dict[str, int], tuple[str, ...]]:
    """``cluster.num_gpus`` and ``gpus_per_node`` as the launcher's options say, their lines, and what they leave open.

    torchrun's processes per node count before Slurm's tasks, which may start one torchrun each. torchrun without
    ``--nnodes`` runs on one node. Nothing is said of what an option leaves to the run.
    """
    nodes, per_node = _option(launch.launcher, _NODES), _option(launch.launcher, _PER_NODE)
    one_node = nodes is None and per_node is not None
    if per_node is None:
        per_node = _option(launch.launcher, _TASKS_PER_NODE)
    count, each = _number(nodes), _number(per_node)
    cluster: dict[str, Any] = {}
    lines: dict[str, int] = {}
    if each is not None and per_node is not None:
        cluster["gpus_per_node"] = each
        lines["cluster.gpus_per_node"] = per_node.line
        if one_node or count is not None:
            cluster["num_gpus"] = each * (count or 1)
            lines["cluster.num_gpus"] = (nodes or per_node).line
    open_words = [word for word in (nodes, per_node) if word is not None and _number(word) is None]
    notes = tuple(
        f"line {word.line}: {word.written}: {word.unknown or 'no number'}, so the GPUs are what cluster.num_gpus says"
        for word in open_words
    )
    return cluster, lines, notes


def _option(words: tuple[Word, ...], names: frozenset[str]) -> Word | None:
    """The last value of an option, as ``--name value`` or ``--name=value``."""
    found = None
    for position, word in enumerate(words):
        text = word.text if word.text is not None else word.written
        name, equals, value = text.partition("=")
        if name not in names:
            continue
        if equals:
            found = Word(value if word.text is not None else None, value, word.line, word.unknown)
        elif position + 1 < len(words):
            found = words[position + 1]
    return found


def _number(word: Word | None) -> int | None:
    text = None if word is None else word.text
    if text is None or not text.isdecimal() or len(text) > 6 or int(text) == 0:
        return None
    return int(text)
