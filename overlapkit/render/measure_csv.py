"""Measurements and comparisons as tables for spreadsheets: a line per rank and row, bytes as whole numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from overlapkit.measure.comparison import Comparison
from overlapkit.measure.measured import Measured
from overlapkit.measure.row_comparison import Figures, plain_number
from overlapkit.render.volume_csv import written

_INPUT = ("source", "kind", "host", "rank", "pipeline_rank", "steps")
_KEY = ("group", "axis", "size", "op", "dtype")
_TOTALS = ("count", "message_bytes", "wire_bytes")
_PER_STEP = tuple(f"{name}_per_step" for name in _TOTALS)
_TIMES = ("time_us", "exposed_us", "hidden_us", "algbw_gbps", "busbw_gbps")
_ATTRIBUTION = ("attributed_by", "confidence", "ties", "why")
_SIDES = tuple(f"{side}_{name}" for side in ("predicted", "measured") for name in ("count", "message_bytes"))


def measured_to_csv(found: Measured) -> str:
    """Comma-separated values with a line of titles, of all that was read.

    Without a group, ``group`` is empty and ``why`` says why; groups of one rank have lines too, and send nothing.
    """
    return written((*_INPUT, *_KEY, *_TOTALS, *_PER_STEP, *_TIMES, *_ATTRIBUTION), _measured_lines(found))


def _measured_lines(found: Measured) -> Iterator[dict[str, Any]]:
    for rank in found.ranks:
        place = {name: getattr(rank, name) for name in _INPUT}
        for row in (*rank.rows, *rank.single_rank):
            values = row.to_dict()
            step = {f"{name}_per_step": value for name, value in (values["per_step"] or {}).items()}
            yield {**place, **values, **step, "ties": " ".join(row.ties)}
        for lost in rank.unattributed:
            yield {**place, **lost.to_dict()}


def comparison_to_csv(found: Comparison) -> str:
    """The same of a comparison: every row of every rank, equal or not; figures are per optimizer step."""
    columns = ("source", "kind", "rank", "pipeline_rank", "steps", *_KEY, "status", *_SIDES, "note")
    return written(columns, _comparison_lines(found))


def _comparison_lines(found: Comparison) -> Iterator[dict[str, Any]]:
    for rank in found.ranks:
        place = {name: getattr(rank, name) for name in ("source", "kind", "rank", "pipeline_rank", "steps")}
        for row in rank.rows:
            sides = {**_side("predicted", row.predicted), **_side("measured", row.measured)}
            yield {**place, **row.to_dict(), **sides}


def _side(name: str, figures: Figures | None) -> dict[str, Any]:
    if figures is None:
        return {}
    return {
        f"{name}_count": plain_number(figures.count),
        f"{name}_message_bytes": plain_number(figures.message_bytes),
    }
