"""Where the ranks of a group sit: its members from the rank layout, its place, and bytes between nodes.

Ranks are laid out in the order tp-cp-ep-dp-pp, the first changing fastest; with ``use_tp_pp_dp_mapping`` DP changes
slowest. Experts split the same ranks into expert TP, EP and expert DP. A node is what NVLink joins: a host, or a domain
of several hosts. Source: megatron-core parallel_state.py (RankGenerator, initialize_model_parallel).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, prod

from overlapkit.volume.rows import Row, wire_numerator

TP = "TENSOR_MODEL_PARALLEL_GROUP"
PP = "PIPELINE_MODEL_PARALLEL_GROUP"
CP = "CONTEXT_PARALLEL_GROUP"
CP_INNER = "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0"
CP_OUTER = "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L1"
EMBEDDING = "EMBEDDING_GROUP"
DP_CP = "DATA_PARALLEL_GROUP_WITH_CP"
DP_CP_INNER = "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"
EXPERT_DP = "EXPERT_DATA_PARALLEL_GROUP"
EXPERT_DP_INNER = "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0"
INSTANCES = "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1"  # of the optimizer; dense parameters use it too
EP = "EXPERT_MODEL_PARALLEL_GROUP"
EXPERT_TP = "EXPERT_TENSOR_PARALLEL_GROUP"
EXPERT_TP_EP = "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"
EXPERT_MODEL = "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"
EXPERT_MODEL_WITH_REMAT = "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP"
TP_CP = "TENSOR_AND_CONTEXT_PARALLEL_GROUP"
TP_DP_CP = "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"
MODEL = "MODEL_PARALLEL_GROUP"
INSTANCE = "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"
WORLD = "WORLD"

# Group -> the axis that a reader looks for it under; ``all`` is what spans the model or the job.
AXES = {
    TP: "tp",
    TP_CP: "tp",
    PP: "pp",
    EMBEDDING: "pp",
    CP: "cp",
    CP_INNER: "cp",
    CP_OUTER: "cp",
    DP_CP: "dp",
    DP_CP_INNER: "dp",
    INSTANCES: "dp",
    TP_DP_CP: "dp",
    EXPERT_DP: "expert_dp",
    EXPERT_DP_INNER: "expert_dp",
    EP: "ep",
    EXPERT_TP_EP: "ep",
    EXPERT_TP: "etp",
    EXPERT_MODEL: "all",
    EXPERT_MODEL_WITH_REMAT: "all",
    MODEL: "all",
    INSTANCE: "all",
    WORLD: "all",
}
Dimension = tuple[int, int]  # (distance between neighbours in ranks, number of ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """The sizes of the mesh, in ranks. ``node`` is the GPUs that NVLink joins, None where unknown.

    ``instances`` of the optimizer split DP times CP, ``cp_levels`` the CP group of a2a+p2p.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    expert_dp: int
    instances: int
    cp_levels: tuple[int, int]
    pp_before_dp: bool
    node: int | None

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp


@lru_cache(maxsize=64)
def group_sizes(layout: RankLayout) -> dict[str, int]:
    """Ranks of every group."""
    sizes = {group: prod(size for _, size in dimensions) for group, dimensions in _dimensions(layout).items()}
    return {**sizes, EMBEDDING: min(layout.pp, 2), WORLD: layout.world_size}


def _dimensions(layout: RankLayout) -> dict[str, tuple[Dimension, ...]]:
    """Each group as the axes that its ranks differ in, the one that changes fastest first."""
    tp, cp = (1, layout.tp), (layout.tp, layout.cp)
    etp, ep = (1, layout.etp), (layout.etp, layout.ep)
    inner = layout.tp * layout.cp
    expert_inner = layout.etp * layout.ep
    if layout.pp_before_dp:
        pp, dp, expert_dp_step = (inner, layout.pp), (inner * layout.pp, layout.dp), expert_inner * layout.pp
    else:
        pp, dp, expert_dp_step = (inner * layout.dp, layout.pp), (inner, layout.dp), expert_inner
    # An instance takes consecutive ranks of the group, CP changing faster than DP.
    per_instance = layout.cp * layout.dp // layout.instances
    split = (cp, (dp[0], per_instance // layout.cp)) if per_instance % layout.cp == 0 else ((layout.tp, per_instance),)
    expert_per_instance = max(layout.expert_dp // layout.instances, 1)
    expert_dp_inner = (expert_dp_step, expert_per_instance)
    low, high = layout.cp_levels
    return {
        TP: (tp,),
        PP: (pp,),
        CP: (cp,),
        CP_INNER: ((layout.tp, low),),
        CP_OUTER: ((layout.tp * low, high),),
        DP_CP: (cp, dp),
        DP_CP_INNER: split,
        EXPERT_DP: ((expert_dp_step, layout.expert_dp),),
        EXPERT_DP_INNER: (expert_dp_inner,),
        INSTANCES: ((expert_dp_step * expert_per_instance, layout.instances),),
        EP: (ep,),
        EXPERT_TP: (etp,),
        EXPERT_TP_EP: (etp, ep),
        EXPERT_MODEL: (etp, ep, pp),
        EXPERT_MODEL_WITH_REMAT: (etp, ep, pp),
        TP_CP: (tp, cp),
        TP_DP_CP: (tp, cp, dp),
        MODEL: (tp, pp),
        INSTANCE: (etp, ep, expert_dp_inner, pp),
        WORLD: (pp,),  # what moves there is the pipeline's
        EMBEDDING: ((pp[0] * max(layout.pp - 1, 1), min(layout.pp, 2)),),
    }


def stage_ranks(layout: RankLayout, stage: int) -> tuple[range, ...]:
    """The global ranks of a pipeline stage, as ranges."""
    inner = layout.tp * layout.cp
    if not layout.pp_before_dp:
        size = inner * layout.dp
        return (range(stage * size, (stage + 1) * size),)
    step = inner * layout.pp
    return tuple(range(d * step + stage * inner, d * step + (stage + 1) * inner) for d in range(layout.dp))


def members(layout: RankLayout, group: str, rank: int) -> tuple[int, ...]:
    """The global ranks of the group that ``rank`` is in, in the group's order."""
    if group == EMBEDDING:
        stages = members(layout, PP, rank)
        return (stages[0], stages[-1]) if len(stages) > 1 else stages
    dimensions = _dimensions(layout)[group]
    base = rank - sum(rank // step % size * step for step, size in dimensions)
    return tuple(base + offset for offset in _offsets(dimensions))


def _offsets(dimensions: tuple[Dimension, ...]) -> list[int]:
    offsets = [0]
    for step, size in dimensions:
        offsets = [offset + index * step for index in range(size) for offset in offsets]
    return offsets


@lru_cache(maxsize=64)
def placements(layout: RankLayout) -> dict[str, str | None]:
    """Group -> intra_node, where all its ranks share a node; inter_node, where no two do; else mixed.

    Groups of all stages are judged together; None where the node's size is unknown.
    """
    every = _dimensions(layout)
    # The embedding's groups are parts of the pipeline's.
    along = {**every, EMBEDDING: every[PP]}
    return {group: _placement(layout, _offsets(every[group]), along[group]) for group in every}


@lru_cache(maxsize=1024)
def ranks_per_node(layout: RankLayout, group: str) -> int:
    """How many ranks of a group share a node, where they do; all of them where the node's size is unknown."""
    node, together = layout.node, 1
    for step, size in sorted(_dimensions(layout)[group]):
        inside = size if node is None else min(size, max(node // step, 1))
        together *= inside
        if inside < size:
            break
    return together


def _placement(layout: RankLayout, offsets: list[int], along: tuple[Dimension, ...]) -> str | None:
    """The place of groups with these offsets from their first rank, which lie along these axes."""
    node = layout.node
    if node is None:
        return None
    if layout.world_size <= node:
        return "intra_node"
    together = apart = True
    for start in _starts(layout, along, node):
        nodes = {(start + offset) // node for offset in offsets}
        together &= len(nodes) == 1
        apart &= len(nodes) == len(offsets)
        if not (together or apart):
            return "mixed"
    return "intra_node" if together else "inter_node"


def _starts(layout: RankLayout, dimensions: tuple[Dimension, ...], node: int) -> set[int]:
    """Where in a node a group of this kind may start: what the axes that are not its own make of rank 0."""
    starts, below = {0}, 1
    spread = sorted(dimension for dimension in dimensions if dimension[1] > 1)
    for step, size in (*spread, (layout.world_size, 1)):
        repeats = min(step // below, node // gcd(below, node))
        starts = {(start + index * below) % node for start in starts for index in range(repeats)}
        below = step * size
    return starts


def bytes_between_nodes(layout: RankLayout, stages: tuple[tuple[Row, ...], ...]) -> dict[tuple[int, int], int]:
    """Bytes per optimizer step from one node to another, as (from, to), only where they differ.

    Rings go through a group node by node; an all_to_all sends the same to each other rank; sends go to the neighbours.
    Rows that NCCL does not carry count too. Empty where the node's size is unknown.
    """
    node = layout.node
    if node is None:
        return {}
    sums: dict[tuple[int, int], dict[int, int]] = {}
    for stage, rows in enumerate(stages):
        ranks = frozenset(rank for part in stage_ranks(layout, stage) for rank in part)
        for group in {row.group: None for row in rows if row.placement != "intra_node"}:
            found = [row for row in rows if row.group == group]
            size = found[0].size
            for source, target, moved in _edges(layout, group, found, ranks):
                pair = source // node, target // node
                if pair[0] != pair[1]:
                    by_size = sums.setdefault(pair, {})
                    by_size[size] = by_size.get(size, 0) + moved
    return {
        pair: int(sum(Fraction(moved, size) for size, moved in by_size.items()))
        for pair, by_size in sorted(sums.items())
        if any(by_size.values())
    }


def _edges(layout: RankLayout, group: str, rows: list[Row], ranks: frozenset[int]) -> Iterator[tuple[int, int, int]]:
    """(from, to, bytes times the group's size) of what ``ranks``, those of a stage, send in the groups of a kind."""
    node, size = layout.node or 1, rows[0].size
    pairs = sum(row.message_bytes for row in rows if row.op == "all_to_all")
    onward = sum(row.onward_bytes for row in rows) * size
    back = sum(row.message_bytes for row in rows if row.op == "send") * size - onward
    ring = sum(wire_numerator(r.op, r.size, r.message_bytes) for r in rows if r.op not in ("send", "all_to_all"))
    done: set[int] = set()
    for rank in sorted(ranks):
        if rank in done:
            continue
        around = members(layout, group, rank)
        by_node = sorted(around, key=lambda other: other // node)
        done.update(around)
        for moved, order, step in ((onward, around, 1), (back, around, -1), (ring, by_node, 1)):
            if moved:
                yield from ((a, order[(at + step) % len(order)], moved) for at, a in enumerate(order) if a in ranks)
        if pairs:
            yield from ((a, b, pairs) for a in around if a in ranks for b in around)
