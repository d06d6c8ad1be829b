"""Which group of Megatron each communicator is, how that was found, and how sure it is.

By the description that PyTorch keeps of a group; else by its global ranks, or its size and place, in the mesh of a
recipe. Groups with the same ranks are told apart by what they carry, then by the order in which Megatron makes them.
Without a recipe the mesh is inferred from the communicators themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from overlapkit.errors import printable
from overlapkit.measure.events import Communicator, Recording
from overlapkit.measure.mesh import CREATION_ORDER, Mesh, agrees, candidates, described, expected, layouts
from overlapkit.measure.operations import PAIRED, Fit, Traffic, fit_to_group, fit_to_prediction, kinds_of, traffic
from overlapkit.volume import placement
from overlapkit.volume.placement import RankLayout, group_sizes
from overlapkit.volume.rows import Row

Confidence = Literal["exact", "likely", "guess"]
_T = TypeVar("_T")
CONFIDENCES: tuple[Confidence, ...] = ("exact", "likely", "guess")

_TAKEN = 6.0  # what it counts against a group that another communicator of the process was given to
_UNEXPLAINED = -10.0  # of a communicator that is no group of a mesh
_UNSEEN = -2.0  # of an axis that no communicator runs along
_LARGEST_WORLD = 1 << 16
_SAMPLE = 4  # processes that a mesh is inferred from, and
_MOST_SAMPLED = 64  # communicators of each, those that move most
_MOST_ORDERED = 256  # communicators of a process whose order is looked at: Megatron makes some twenty


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """What a communicator is: ``group`` with ``size`` ranks, or None and ``why`` not.

    ``by``: description, ranks, size, operations; ranks and size with "and operations" or "and order" where these broke
    a tie. ``ties`` are the groups that fit as well, but for what groups are for. ``confidence``: exact, by description
    or where no other group that is used has the ranks; likely, where its size or what it carries tells it from the
    others; guess for the rest.
    """

    group: str | None
    size: int | None
    by: str = ""
    confidence: Confidence = "guess"
    ties: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Evidence:
    """One process's communicators that carry something and have no description, with all that speaks of them.

    ``carried`` is of the complete steps, for those in ``setup`` of what comes before and after them. ``named`` are the
    groups that descriptions name, with their ranks: no other communicator of the process is one of them.
    """

    recording: Recording
    rank: int | None
    carried: Mapping[int, Traffic]
    setup: frozenset[int]
    periods: int | None
    named: Mapping[str, int]

    def ops(self, index: int) -> frozenset[str]:
        return frozenset(op for op, _ in self.carried[index])

    def is_named(self, index: int, group: str) -> bool:
        """Whether the source calls another communicator so; a pair may be a part of that one."""
        pair = self.recording.communicators[index].size == 2 and self.ops(index) <= PAIRED
        return group in self.named and not (pair and self.named[group] > 2)


def attribute(recording: Recording, mesh: Mesh | None) -> tuple[Attribution, ...]:
    """An attribution for each of the recording's communicators, in their order."""
    evidence = _evidence(recording)
    stage = _stage(evidence, mesh)
    judged = {} if not evidence.carried else _assign(evidence, mesh, stage)[0]
    return tuple(
        judged.get(index) or _named(recording.communicators[index], mesh, evidence)
        for index in range(len(recording.communicators))
    )


def global_rank(recording: Recording) -> int | None:
    """The process's rank in the job; from a communicator that knows its ranks where the source does not say it."""
    if recording.rank is not None:
        return recording.rank
    for each in recording.communicators:
        if each.ranks is not None and each.rank is not None and each.rank < len(each.ranks):
            return each.ranks[each.rank]
    return None


def world_size(recording: Recording) -> int | None:
    """The ranks of the job; where the source does not say it, of the largest communicator."""
    if recording.world_size is not None:
        return recording.world_size
    return max((each.size for each in recording.communicators if each.size is not None), default=None)


def periods(recording: Recording) -> int | None:
    """The optimizer steps that the whole of a recording is of, one mark each; None where nothing marks them."""
    return None if recording.steps_by is None else max(recording.steps, 1)


def undescribed(recording: Recording) -> bool:
    """Whether traffic of groups of two ranks and more has no description to attribute it by."""
    return any(recording.communicators[index].size != 1 for index in _evidence(recording).carried)


def pipeline_rank(recording: Recording, mesh: Mesh | None, groups: Sequence[Attribution]) -> int | None:
    """The process's place in its pipeline, by its rank in the mesh or by its place in the pipeline's group."""
    rank = global_rank(recording)
    if mesh is not None and rank is not None and rank < mesh.layout.world_size:
        return mesh.stage_of(rank)
    for each, found in zip(recording.communicators, groups, strict=True):
        if found.group == placement.PP and each.size == found.size and each.rank is not None:
            return each.rank
    return None


def _named(communicator: Communicator, mesh: Mesh | None, evidence: _Evidence) -> Attribution:
    name = described(communicator)
    if name is None:
        why = "the source does not say whose calls they are" if _is_nobodys(communicator) else "carries nothing"
        return Attribution(group=None, size=communicator.size, why=why)
    size = communicator.size
    if name in (placement.PP, placement.CP):  # it may be a pair out of the group
        whole = 0 if mesh is None or mesh.inferred else group_sizes(mesh.layout)[name]
        size = max(evidence.named[name], whole) or None
    return Attribution(group=printable(name), size=size, by="description", confidence="exact")


def _is_nobodys(communicator: Communicator) -> bool:
    """Whether it stands for the calls of all groups, as c10d's operators in a trace of gloo: nothing is known of it."""
    known = (communicator.size, communicator.ranks, communicator.description, communicator.order)
    return known == (None, None, None, None)


def _evidence(recording: Recording) -> _Evidence:
    every = traffic(recording.events)
    steady = traffic(event for event in recording.events if event.step is not None) if recording.steps else every
    carried = {
        index: steady.get(index, found)
        for index, found in every.items()
        if described(communicator := recording.communicators[index]) is None and not _is_nobodys(communicator)
    }
    setup = frozenset(index for index in carried if index not in steady)
    named: dict[str, int] = {}
    for each in recording.communicators:
        if (name := described(each)) is not None:
            named[name] = max(named.get(name, 0), each.size or 0)
    return _Evidence(recording, global_rank(recording), carried, setup, periods(recording), named)


def _stage(evidence: _Evidence, mesh: Mesh | None) -> int:
    """The process's pipeline stage: its rank's, else the one whose prediction its traffic fits best."""
    if mesh is None or not mesh.stages:
        return 0
    if evidence.rank is not None and evidence.rank < mesh.layout.world_size:
        return mesh.stage_of(evidence.rank)
    return max(range(len(mesh.stages)), key=lambda stage: _assign(evidence, mesh, stage)[1])


def _assign(evidence: _Evidence, mesh: Mesh | None, stage: int) -> tuple[dict[int, Attribution], float]:
    """Attributions of the undescribed communicators, and the sum of how well they fit."""
    rows = expected(mesh, stage) if mesh is not None else {}
    fits = {index: _fits(evidence, index, mesh, rows) for index in evidence.carried}
    groups, total = _distributed(evidence, fits)
    _in_order_of_creation(evidence, fits, groups)
    found: dict[int, Attribution] = {}
    for index, fitting in fits.items():
        communicator = evidence.recording.communicators[index]
        if index in groups:
            found[index] = _judged(groups[index], fitting, communicator, mesh, rows)
        else:
            found[index] = Attribution(group=None, size=communicator.size, why=_why(evidence, index, mesh))
    return found, total


def _distributed(evidence: _Evidence, fits: Mapping[int, Mapping[str, Fit]]) -> tuple[dict[int, str], float]:
    """A group for each communicator that can be one, those with the strongest evidence first, and the sum of fits.

    What the steps go through comes before what only the set-up goes through.
    """
    groups: dict[int, str] = {}
    every = evidence.recording.communicators
    taken: set[tuple[str, int | None]] = set()
    total = 0.0
    for index in sorted(fits, key=lambda at: (at in evidence.setup, -_best(fits[at]), _order(evidence, at))):
        size, pair = every[index].size, evidence.ops(index) <= PAIRED
        if not fits[index]:
            total += _UNEXPLAINED
            continue
        left = {
            group: fit.total - (_TAKEN if (group, size) in taken and not pair else 0.0)
            for group, fit in fits[index].items()
        }
        group = max(left, key=lambda name: left[name])  # of equals the one that is made first
        taken.add((group, size))
        groups[index] = group
        total += left[group]
    return groups, total


def _best(fits: Mapping[str, Fit]) -> float:
    return max((fit.total for fit in fits.values()), default=0.0)


def _in_order_of_creation(evidence: _Evidence, fits: Mapping[int, Mapping[str, Fit]], groups: dict[int, str]) -> None:
    """Exchanges the groups of two communicators that fit as well the other way round, and then in the order made."""
    ordered = sorted((index for index in groups if index not in evidence.setup), key=lambda at: _order(evidence, at))
    for at, first in enumerate(ordered[:_MOST_ORDERED]):
        for second in ordered[at + 1 : _MOST_ORDERED]:
            one, other = groups[first], groups[second]
            if CREATION_ORDER.index(one) <= CREATION_ORDER.index(other) or fits[first].keys() != fits[second].keys():
                continue
            exchanged = fits[first][other].total + fits[second][one].total
            if exchanged >= fits[first][one].total + fits[second][other].total:
                groups[first], groups[second] = other, one


def _order(evidence: _Evidence, index: int) -> tuple[int, int]:
    order = evidence.recording.communicators[index].order
    return (index if order is None else order, index)


def _fits(evidence: _Evidence, index: int, mesh: Mesh | None, rows: Mapping[str, Sequence[Row]]) -> dict[str, Fit]:
    """Group -> how well the communicator fits it, of those that it can be."""
    communicator, carried = evidence.recording.communicators[index], evidence.carried[index]
    rows = _of_size(rows, communicator)
    possible = [group for group in _possible(evidence, index, mesh) if not evidence.is_named(index, group)]
    if rows:
        return {group: fit_to_prediction(carried, rows.get(group, ()), evidence.periods, group) for group in possible}
    kinds = kinds_of(carried, evidence.periods)
    return {group: Fit(fit_to_group(kinds, group)) for group in possible}


def _possible(evidence: _Evidence, index: int, mesh: Mesh | None) -> tuple[str, ...]:
    if mesh is None:
        return CREATION_ORDER
    return candidates(mesh.layout, evidence.recording.communicators[index], evidence.rank, evidence.ops(index))


def _of_size(rows: Mapping[str, Sequence[Row]], communicator: Communicator) -> Mapping[str, Sequence[Row]]:
    """The prediction for a communicator: there is none of what a process tells itself alone."""
    return {} if communicator.size == 1 else rows


def _judged(
    group: str,
    fits: Mapping[str, Fit],
    communicator: Communicator,
    mesh: Mesh | None,
    rows: Mapping[str, Sequence[Row]],
) -> Attribution:
    rows = _of_size(rows, communicator)
    by = "operations" if mesh is None or communicator.size is None else "ranks" if communicator.ranks else "size"
    own = fits[group]
    others = {name: fit for name, fit in fits.items() if name != group}
    ties = tuple(name for name, fit in others.items() if fit.evidence >= own.evidence)
    undecided = any(fit.total >= own.total for fit in others.values())
    # Where the traffic is as predicted, what nothing is predicted of is no rival of a group that is used.
    rivals = [name for name in others if not rows or name in rows or (name in ties and own.evidence <= 0)]
    alone = not rivals and (not rows or group in rows or not others)
    confidence: Confidence = "exact" if alone and by == "ranks" else "guess" if undecided and not alone else "likely"
    if by != "operations" and not alone:
        by += " and order" if undecided else " and operations"
    if mesh is None or mesh.inferred:
        sure = mesh is not None and communicator.ranks is not None and not ties and own.evidence > 0
        confidence = "likely" if sure else "guess"
    size = communicator.size
    if mesh is not None and not (mesh.inferred and size is None):
        size = group_sizes(mesh.layout)[group]
    return Attribution(group=group, size=size, by=by, confidence=confidence, ties=ties)


def _why(evidence: _Evidence, index: int, mesh: Mesh | None) -> str:
    communicator, others = evidence.recording.communicators[index], _possible(evidence, index, mesh)
    if others:
        return f"the source calls other communicators {', '.join(others)}"
    place = "of the recipe" if mesh is not None and not mesh.inferred else "that fits the input"
    if communicator.ranks is not None:
        shown = ", ".join(str(rank) for rank in communicator.ranks[:8]) + (", …" if len(communicator.ranks) > 8 else "")
        return f"no group of the mesh {place} has the ranks {shown}"
    return f"no group of the mesh {place} has {communicator.size} ranks with this one in its place"


def infer_mesh(recordings: Sequence[Recording]) -> tuple[Mesh | None, tuple[RankLayout, ...]]:
    """The mesh that the communicators of some processes fit best, and others that fit them as well.

    None where the job's size is unknown or absurd, and where every communicator has a description.
    """
    found = [_evidence(recording) for recording in recordings]
    found = [one for one in found if one.carried]
    worlds = {world for one in found if (world := world_size(one.recording)) is not None}
    if not worlds or max(worlds) > _LARGEST_WORLD or max(worlds) < 2:
        return None, ()
    sample = [_largest(one) for one in _spread(found)]
    named = set(_described(_spread(recordings)))
    sizes = frozenset(each.size for one in sample for each in one.recording.communicators if each.size)
    sizes |= {size for each, _ in named if each.size for size in (each.size, max(worlds) // each.size)}
    keys = {key for one in sample for carried in one.carried.values() for key in carried}
    possible = layouts(
        max(worlds),
        sizes,
        experts=any(
            op == "all_to_all" or (op == "all_gather" and dtype in ("int64", "bool", "uint8")) for op, dtype in keys
        )
        or any("EXPERT" in (each.description or "") and each.size != 1 for each, _ in named),
        pairs=any(op in PAIRED for op, _ in keys),
        allowed=lambda layout: agrees(layout, named),
    )
    totals = [sum(_score(one, layout) for one in sample) for layout in possible]
    if not totals or max(totals) <= _UNEXPLAINED:
        return None, ()
    best = [layout for layout, total in zip(possible, totals, strict=True) if total >= max(totals)]
    return Mesh(layout=best[0], inferred=True), tuple(best[1:])


def _spread(found: Sequence[_T]) -> Sequence[_T]:
    """A few processes from all over the job."""
    return found[:: max(len(found) // _SAMPLE, 1)][:_SAMPLE]


def _described(recordings: Sequence[Recording]) -> Iterator[tuple[Communicator, int | None]]:
    """The communicators that descriptions name, each with its process's rank."""
    for recording in recordings:
        rank = global_rank(recording)
        yield from ((replace(each, label=""), rank) for each in recording.communicators if described(each) is not None)


def _largest(evidence: _Evidence) -> _Evidence:
    if len(evidence.carried) <= _MOST_SAMPLED:
        return evidence
    moved = {index: sum(each.message_bytes for each in found.values()) for index, found in evidence.carried.items()}
    kept = sorted(moved, key=lambda index: -moved[index])[:_MOST_SAMPLED]
    return replace(evidence, carried={index: evidence.carried[index] for index in kept})


def _score(evidence: _Evidence, layout: RankLayout) -> float:
    if evidence.rank is not None and evidence.rank >= layout.world_size:
        return _UNEXPLAINED
    judged, total = _assign(evidence, Mesh(layout=layout, inferred=True), 0)
    groups = {one.group for one in judged.values()}
    axes = (
        (layout.tp, {placement.TP}),
        (layout.pp, {placement.PP}),
        (layout.cp, {placement.CP}),
        (layout.ep, {placement.EP, placement.EXPERT_TP_EP}),
        (layout.dp * layout.cp, {placement.DP_CP}),
    )
    return total + sum(_UNSEEN for size, along in axes if size > 1 and not along & groups)
