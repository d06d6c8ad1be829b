"""Predicted against measured: ``overlapkit.compare(recipe, paths)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlapkit.measure.beside_steps import OutsideSteps, explained, outside_steps
from overlapkit.measure.overlap_seen import OverlapSeen, overlap_seen
from overlapkit.measure.reasons import Reason, likely_reasons, score
from overlapkit.measure.row_comparison import RowComparison, Seen, compare_rows
from overlapkit.volume.configuration import Configuration, configure
from overlapkit.volume.placement import RankLayout
from overlapkit.volume.predict import CONVENTION, Stage

if TYPE_CHECKING:
    from overlapkit.measure.measured import Measured, RankMeasured

SCHEMA_VERSION = 1
_MOST_OF_A_STAGE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    """What one rank did beside what its pipeline stage was predicted to do.

    Figures are the average of ``steps`` optimizer steps: complete ones or, with ``whole_input``, all that its source
    has, taken for so many. ``outside_steps`` were not compared. ``unattributed_bytes`` are message bytes of what was,
    without a group.
    """

    source: str
    kind: str
    rank: int | None
    steps: int
    whole_input: bool
    pipeline_rank: int
    rows: tuple[RowComparison, ...]
    outside_steps: tuple[OutsideSteps, ...] = ()
    unattributed_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether every row of the steps matches and nothing in them is without a group."""
        return not self.unattributed_bytes and all(row.matches for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpaired:
    """An input that no stage of the recipe stands beside, and why."""

    source: str
    rank: int | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All inputs beside the recipe. ``stages_without_input`` are the pipeline ranks that nothing was measured of."""

    configuration: Configuration
    measured: Measured
    ranks: tuple[RankComparison, ...]
    unpaired: tuple[Unpaired, ...]
    stages_without_input: tuple[int, ...]
    reasons: tuple[Reason, ...]
    overlap: tuple[OverlapSeen, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether every input was compared and every row of it matches."""
        return bool(self.ranks) and not self.unpaired and all(rank.equal for rank in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain values, the form of ``--format json``."""
        named = ("source", "kind", "rank", "steps", "whole_input", "pipeline_rank", "equal", "unattributed_bytes")
        return {
            "schema_version": SCHEMA_VERSION,
            "recipe": self.configuration.volume.recipe,
            "convention": dict(CONVENTION),
            "per": "optimizer step",
            "equal": self.equal,
            "ranks": [
                {
                    **{name: getattr(rank, name) for name in named},
                    "rows": [row.to_dict() for row in rank.rows],
                    "outside_steps": [one.to_dict() for one in rank.outside_steps],
                    "notes": list(rank.notes),
                }
                for rank in self.ranks
            ],
            "unpaired": [{"source": one.source, "rank": one.rank, "why": one.why} for one in self.unpaired],
            "stages_without_input": list(self.stages_without_input),
            "reasons": [reason.to_dict() for reason in self.reasons],
            "overlap": [one.to_dict() for one in self.overlap],
            "problems": [str(problem) for problem in self.measured.problems],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class _Pair:
    """A measured rank and the place of its stage in the volume."""

    rank: RankMeasured
    seen: tuple[Seen, ...]
    stage: int
    notes: tuple[str, ...] = ()


def compare(
    recipe: str | Path | Mapping[str, Any],
    paths: str | Path | Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    data_broadcast: bool = False,
    steps: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """What logs and traces show beside what the recipe predicts, row by row, with likely reasons for what differs.

    ``recipe`` and ``overrides`` are those of ``overlapkit.volume``, as ``data_broadcast`` is; ``paths``, ``steps`` and
    ``progress`` those of ``overlapkit.measure``.

    Raises:
        RecipeError: the recipe cannot be used, lacks a size that a number needs, or asks for what is not modelled.
        InputError: none of the paths can be read.
    """
    from overlapkit.measure import measure

    base = configure(recipe, overrides, data_broadcast=data_broadcast)
    measured = measure(paths, recipe, overrides, data_broadcast=data_broadcast, steps=steps, progress=progress)
    return compare_measured(recipe, base, measured, data_broadcast=data_broadcast)


def compare_measured(
    recipe: str | Path | Mapping[str, Any], base: Configuration, measured: Measured, *, data_broadcast: bool = False
) -> Comparison:
    """The same of what is measured already; ``base`` is what ``configure`` makes of ``recipe``."""
    pairs, unpaired = _paired(base, measured)
    telling = _telling(pairs, base.volume.stages)

    def compared(found: Configuration) -> list[RowComparison]:
        stages = found.volume.stages
        return [row for pair in telling for row in _rows(pair, stages[pair.stage])]

    reasons = likely_reasons(recipe, base, compared, data_broadcast=data_broadcast)
    with_input = {pair.stage for pair in pairs}
    return Comparison(
        configuration=base,
        measured=measured,
        ranks=tuple(_compared(pair, base.volume.stages[pair.stage]) for pair in pairs),
        unpaired=unpaired,
        stages_without_input=tuple(at for at in range(len(base.volume.stages)) if at not in with_input),
        reasons=reasons,
        overlap=overlap_seen(base, measured),
        notes=measured.notes,
    )


def _rows(pair: _Pair, stage: Stage) -> tuple[RowComparison, ...]:
    rows = compare_rows(stage.rows, pair.seen, kind=pair.rank.kind)
    return tuple(explained(row, pair.rank.steps) for row in rows)


def _telling(pairs: Sequence[_Pair], stages: Sequence[Stage]) -> list[_Pair]:
    """Of ranks with the same rows one, and of each stage the few that differ most: reasons are looked for in these."""
    distinct = {(pair.stage, pair.rank.kind, pair.seen): pair for pair in reversed(pairs)}
    by_stage: dict[tuple[int, str], list[_Pair]] = {}
    for pair in reversed(distinct.values()):
        by_stage.setdefault((pair.stage, pair.rank.kind), []).append(pair)

    def matching(pair: _Pair) -> tuple[float, ...]:
        found = score(_rows(pair, stages[pair.stage]))
        return -found.rows, -found.mismatch

    return [pair for found in by_stage.values() for pair in sorted(found, key=matching)[:_MOST_OF_A_STAGE]]


def _compared(pair: _Pair, stage: Stage) -> RankComparison:
    rank = pair.rank
    return RankComparison(
        source=rank.source,
        kind=rank.kind,
        rank=rank.rank,
        steps=rank.per_step_of or 0,
        whole_input=not rank.steps,
        pipeline_rank=stage.pipeline_rank,
        rows=_rows(pair, stage),
        outside_steps=outside_steps(rank),
        unattributed_bytes=sum(lost.step_bytes or 0 for lost in rank.unattributed),
        notes=pair.notes,
    )


# --- pairs -------------------------------------------------------------------------------------------


def _paired(base: Configuration, measured: Measured) -> tuple[list[_Pair], tuple[Unpaired, ...]]:
    stages = base.volume.stages
    stage_of = {rank: at for at, stage in enumerate(stages) for part in stage.ranks for rank in part}
    pairs, unpaired = [], []
    for rank in measured.ranks:
        found = _pair(rank, stages, stage_of, base.volume.layout)
        if isinstance(found, str):
            unpaired.append(Unpaired(source=rank.source, rank=rank.rank, why=found))
        else:
            pairs.append(found)
    return pairs, tuple(unpaired)


def _pair(rank: RankMeasured, stages: Sequence[Stage], stage_of: Mapping[int, int], layout: RankLayout) -> _Pair | str:
    """The rank's pair, or why it has none."""
    other = rank.mesh is None or rank.mesh.inferred  # the recipe's is not for a job of another size
    if rank.world_size is not None and (other or rank.world_size > layout.world_size):
        return f"its job has {rank.world_size} ranks, the recipe {layout.world_size}"
    if not rank.rows:
        return "nothing of it could be attributed to a group"
    seen = _seen(rank)
    if seen is None:
        return "nothing marks its optimizer steps; --steps says how many it covers"
    if rank.rank is None and rank.pipeline_rank in range(len(stages)):
        return _Pair(rank, seen, rank.pipeline_rank or 0, ("its rank is unknown, its stage follows from its groups",))
    if rank.rank is None:
        at = _closest(seen, rank.kind, stages)
        return _Pair(rank, seen, at, (f"its rank is unknown: stage {stages[at].pipeline_rank} fits best",))
    if rank.rank not in stage_of:
        return f"the recipe has no rank {rank.rank}"
    return _Pair(rank, seen, stage_of[rank.rank])


def _closest(seen: Sequence[Seen], kind: str, stages: Sequence[Stage]) -> int:
    return min(range(len(stages)), key=lambda at: score(compare_rows(stages[at].rows, seen, kind=kind)))


def _seen(rank: RankMeasured) -> tuple[Seen, ...] | None:
    """The rank's rows per optimizer step; None where nothing says how many steps its source covers."""
    if all(row.per_step is None for row in rank.rows):
        return None
    return tuple(
        Seen(
            row.group,
            row.size,
            row.op,
            row.dtype,
            row.per_step.count,
            row.per_step.message_bytes,
        )
        for row in rank.rows
        if row.per_step is not None and row.per_step.count
    )
