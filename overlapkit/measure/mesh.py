"""Which groups of Megatron a communicator can be: those of a mesh with its ranks, or with its size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

from overlapkit.measure.events import Communicator
from overlapkit.measure.operations import PAIRED
from overlapkit.volume import placement
from overlapkit.volume.placement import RankLayout, group_sizes, members
from overlapkit.volume.predict import Volume
from overlapkit.volume.rows import Row

# As a process makes them, the job's own group first. Source: megatron-core 0.16.1 and 0.19.2 parallel_state.py,
# initialize_model_parallel; groups that nothing of a step goes through are left out.
CREATION_ORDER = (
    placement.WORLD,
    placement.DP_CP,
    placement.DP_CP_INNER,
    placement.CP,
    placement.CP_INNER,
    placement.CP_OUTER,
    placement.MODEL,
    placement.TP,
    placement.PP,
    placement.EMBEDDING,
    placement.TP_DP_CP,
    placement.TP_CP,
    placement.EP,
    placement.EXPERT_TP,
    placement.EXPERT_TP_EP,
    placement.EXPERT_MODEL,
    placement.EXPERT_MODEL_WITH_REMAT,
    placement.EXPERT_DP,
    placement.EXPERT_DP_INNER,
    placement.INSTANCES,
    placement.INSTANCE,
)
# Beginnings of the names of groups that no prediction has, with the axis that a reader looks for them under.
_AXES_BY_BEGINNING = (
    ("DATA_PARALLEL", "dp"),
    ("INTRA_PARTIAL_DATA_PARALLEL", "dp"),
    ("TENSOR_AND_DATA_PARALLEL", "dp"),
    ("HYBRID_DP_CP", "dp"),
    ("CONTEXT_PARALLEL", "cp"),
    ("HIERARCHICAL_CONTEXT_PARALLEL", "cp"),
    ("POSITION_EMBEDDING", "pp"),
    ("EXPERT_DATA_PARALLEL", "expert_dp"),
    ("HIERARCHICAL_EXPERT_DATA_PARALLEL", "expert_dp"),
)
# The groups whose ranks a layout decides alone, whatever optimizer instances and levels of CP a job has.
_DECIDED = frozenset(
    {
        placement.TP,
        placement.PP,
        placement.CP,
        placement.DP_CP,
        placement.TP_CP,
        placement.TP_DP_CP,
        placement.MODEL,
        placement.EP,
        placement.EXPERT_TP,
        placement.EXPERT_TP_EP,
        placement.EXPERT_DP,
    }
)
_MOST_ENUMERATED = 20_000
_MOST_LAYOUTS = 1_000  # that an input is compared with, fewer where there are
_MOST_RANKS = 2_000_000  # in all of them together


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The ranks of a job in its groups. ``stages`` are the predicted rows of each pipeline stage, where known.

    ``inferred``: not from a recipe but from the communicators themselves.
    """

    layout: RankLayout
    stages: tuple[tuple[Row, ...], ...] = ()
    inferred: bool = False

    def stage_of(self, rank: int) -> int:
        """The pipeline stage that a global rank belongs to."""
        return members(self.layout, placement.PP, rank).index(rank)

    def to_dict(self) -> dict[str, Any]:
        sizes = {axis: getattr(self.layout, axis) for axis in ("tp", "cp", "dp", "pp", "etp", "ep")}
        return {"world_size": self.layout.world_size, **sizes, "by": "input" if self.inferred else "recipe"}


def mesh_of(volume: Volume) -> Mesh:
    """The mesh of a recipe, with what its prediction expects of each stage."""
    return Mesh(layout=volume.layout, stages=tuple(stage.rows for stage in volume.stages))


def described(communicator: Communicator) -> str | None:
    """The group's name where the source gives one: PyTorch's group_desc, which Megatron sets to the group's name."""
    name = communicator.description
    if name in (None, "", "undefined"):  # PyTorch's own word for a group without a description
        return None
    return placement.WORLD if name == "default_pg" else name


def axis_of(group: str, op: str) -> str:
    """The parallel axis of a row, as predicted rows have it; ``other`` for groups that are not Megatron's."""
    if group == placement.WORLD and op in PAIRED:
        return "pp"
    if group in placement.AXES:
        return placement.AXES[group]
    return next((axis for beginning, axis in _AXES_BY_BEGINNING if group.startswith(beginning)), "other")


def candidates(
    layout: RankLayout, communicator: Communicator, rank: int | None, ops: frozenset[str]
) -> tuple[str, ...]:
    """The groups that a communicator of the process ``rank`` can be, in the order in which a process makes them.

    With its global ranks known, those that have just these; else those of its size in which the process has its place;
    all of them where nothing is known.
    A communicator of two ranks with sends and receives alone may also be a pair out of the pipeline's or CP's group:
    PyTorch makes one for each peer of an unbatched send (torch ProcessGroupNCCL, getKeySendRecv).
    """
    sizes = group_sizes(layout)
    pair = communicator.size == 2 and bool(ops) and ops <= PAIRED
    found = []
    for group in CREATION_ORDER:
        if not _is_made(layout, group):
            continue
        whole = sizes[group] == (communicator.size or sizes[group]) and _is_whole(layout, group, communicator, rank)
        part = pair and group in (placement.PP, placement.CP) and _is_part(layout, group, communicator, rank)
        if whole or part:
            found.append(group)
    return tuple(found)


def agrees(layout: RankLayout, named: Collection[tuple[Communicator, int | None]]) -> bool:
    """Whether all communicators can be, in a layout, the groups that their descriptions name.

    Each stands with its process's rank. Names that a layout does not decide agree with every one.
    """
    sizes = group_sizes(layout)
    return all(
        _has_ranks(layout, group, sizes[group], communicator, rank)
        for communicator, rank in named
        if (group := described(communicator)) in _DECIDED
    )


def _has_ranks(layout: RankLayout, group: str, size: int, communicator: Communicator, rank: int | None) -> bool:
    if communicator.size == 2 and group in (placement.PP, placement.CP):  # it may be a pair out of the group
        return size >= 2
    if communicator.size not in (None, size):
        return False
    ranks = communicator.ranks
    if ranks is None or rank is None or rank not in ranks or rank >= layout.world_size:
        return True
    return _members(layout, group, rank) == tuple(sorted(ranks))


def _is_made(layout: RankLayout, group: str) -> bool:
    """Whether Megatron makes such a group at all; without instances or levels the layout repeats the whole one."""
    if group in (placement.DP_CP_INNER, placement.EXPERT_DP_INNER, placement.INSTANCES):
        return layout.instances > 1
    return layout.cp_levels[0] > 1 if group in (placement.CP_INNER, placement.CP_OUTER) else True


def _is_whole(layout: RankLayout, group: str, communicator: Communicator, rank: int | None) -> bool:
    if rank is None or rank >= layout.world_size:
        return communicator.ranks is None
    around = _members(layout, group, rank)
    if rank not in around:  # the embedding's group, seen from a stage between the first and the last
        return False
    if communicator.ranks is not None:
        return around == tuple(sorted(communicator.ranks))
    return communicator.rank is None or around[communicator.rank : communicator.rank + 1] == (rank,)


def _is_part(layout: RankLayout, group: str, communicator: Communicator, rank: int | None) -> bool:
    if group_sizes(layout)[group] < 3:
        return False
    if communicator.ranks is None or rank is None or rank >= layout.world_size:
        return communicator.ranks is None
    return set(communicator.ranks) <= set(_members(layout, group, rank))


@lru_cache(maxsize=64)
def _members(layout: RankLayout, group: str, rank: int) -> tuple[int, ...]:
    """The global ranks of the group, as PyTorch orders them."""
    return tuple(range(layout.world_size)) if group == placement.WORLD else tuple(sorted(members(layout, group, rank)))


def layouts(
    world_size: int, sizes: frozenset[int], *, experts: bool, pairs: bool, allowed: Callable[[RankLayout], bool]
) -> tuple[RankLayout, ...]:
    """The meshes of ``world_size`` ranks whose axes are of sizes that communicators have; the plainest first.

    ``experts``: something moves that only experts need. ``pairs``: sends go through communicators of two ranks, which
    say nothing of the pipeline's length. Others than those ``allowed`` are left out. Of very many the plainest alone.
    """
    known = frozenset({1, *sizes})
    most = min(_MOST_LAYOUTS, max(_MOST_RANKS // world_size, 1))
    dense = sorted(islice(_dense(world_size, known, pairs=pairs), _MOST_ENUMERATED), key=_plainness)
    if not experts:
        return tuple(islice(filter(allowed, dense), most))
    whole = (layout for each in dense[:most] for layout in _with_experts(each, known))
    return tuple(islice(filter(allowed, sorted(islice(whole, _MOST_ENUMERATED), key=_plainness)), most))


def _dense(world_size: int, known: frozenset[int], *, pairs: bool) -> Iterator[RankLayout]:
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for tp in divisors:
        for pp in divisors:
            data, rest = divmod(world_size, tp * pp)
            if rest or tp not in known or data not in known or not (pairs or pp in known):
                continue
            for cp in divisors:
                if cp in known and data % cp == 0:
                    yield RankLayout(
                        tp=tp,
                        cp=cp,
                        dp=data // cp,
                        pp=pp,
                        etp=tp,
                        ep=1,
                        expert_dp=data,
                        instances=1,
                        cp_levels=(1, cp),
                        pp_before_dp=False,
                        node=None,
                    )


def _with_experts(layout: RankLayout, known: frozenset[int]) -> Iterator[RankLayout]:
    stage = layout.world_size // layout.pp
    for etp in sorted({layout.tp, *known}):
        for ep in sorted(known):
            if stage % (etp * ep) == 0 and (ep > 1 or etp == layout.tp):
                yield replace(layout, etp=etp, ep=ep, expert_dp=stage // (etp * ep))


def _plainness(layout: RankLayout) -> tuple[int, int, int, int]:
    axes = (layout.tp, layout.cp, layout.dp, layout.pp, layout.ep)
    return (sum(size > 1 for size in axes), layout.cp, layout.ep, layout.pp)


def expected(mesh: Mesh, stage: int) -> Mapping[str, tuple[Row, ...]]:
    """Group -> what the prediction has of it on a stage, as far as NCCL carries it; empty without a prediction."""
    found: dict[str, tuple[Row, ...]] = {}
    for row in mesh.stages[stage] if mesh.stages else ():
        if row.observable:
            found[row.group] = (*found.get(row.group, ()), row)
    return found
