"""Measurements as bars per group, beside predictions where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from overlapkit.measure.comparison import Comparison
from overlapkit.measure.measured import Measured, MeasuredRow, RankMeasured
from overlapkit.render.measure import figures, folded, label, per_step
from overlapkit.render.volume_plot import plot_series
from overlapkit.volume.predict import Stage
from overlapkit.volume.rows import Row

_MOST_BARS = 12  # of one group


def plot_measured(found: Measured, path: str) -> None:
    """Horizontal bars of what a rank sent: groups downwards, a bar for all ranks that moved the same.

    Per optimizer step where all inputs have steps, else over each input; the first dozen of different ranks.
    """
    step = all(per_step(rank) for rank in found.ranks)
    series = {label(ranks): _stage(ranks[0], step=step) for ranks in folded(found.ranks)[:_MOST_BARS]}
    plot_series(series, path, per="optimizer step" if step else "input")


def plot_comparison(found: Comparison, path: str) -> None:
    """The same per optimizer step, with a bar of what was predicted for the stage above what was measured."""
    by_source = {(rank.source, rank.rank): rank for rank in found.measured.ranks}
    compared = [by_source[rank.source, rank.rank] for rank in found.ranks]
    stage_of = {(rank.source, rank.rank): rank.pipeline_rank for rank in found.ranks}
    series: dict[str, Stage] = {}
    for ranks in folded(compared)[: _MOST_BARS // 2]:
        stage = found.configuration.volume.stages[stage_of[ranks[0].source, ranks[0].rank]]
        series.setdefault(f"Stage {stage.pipeline_rank}, predicted", stage)
        series[f"{label(ranks)}, measured"] = _stage(ranks[0], step=True)
    plot_series(series, path, per="optimizer step")


def _stage(rank: RankMeasured, *, step: bool) -> Stage:
    return Stage(pipeline_rank=rank.pipeline_rank or 0, ranks=(), rows=_rows(rank.rows, step=step))


def _rows(rows: Sequence[MeasuredRow], *, step: bool) -> tuple[Row, ...]:
    """Rows whose figures are a step's, to the whole call and byte."""
    moved = ((row, figures(row, step=step)) for row in rows if row.size)
    return tuple(replace(row.totals, count=round(count), message_bytes=round(size)) for row, (count, size) in moved)
