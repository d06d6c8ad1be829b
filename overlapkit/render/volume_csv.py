"""A volume as a table for spreadsheets: a line per row, or per row and phase."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from typing import Any

from overlapkit.errors import printable
from overlapkit.volume.predict import Volume

_STAGE = ("pipeline_rank", "global_ranks")
_KEY = ("group", "axis", "size", "op", "dtype")
_FIGURES = ("count", "message_bytes", "wire_bytes")
_REST = ("placement", "observable", "exact", "evidence")


def to_csv(volumes: Mapping[str, Volume], *, phases: bool = False) -> str:
    """Comma-separated values with a line of titles; bytes are whole numbers, as in JSON.

    ``volumes`` by the name of their configuration, which is a column where there are several. With ``phases`` the
    figures are those of one phase, and sums over the phases of a row are the row's (wire bytes but for rounding).
    """
    several = ("configuration",) if len(volumes) > 1 else ()
    columns = (*several, *_STAGE, *_KEY, *(("phase",) if phases else ()), *_FIGURES, *_REST)
    return written(
        columns,
        ({"configuration": name, **line} for name, volume in volumes.items() for line in _lines(volume, phases=phases)),
    )


def written(columns: Sequence[str], lines: Iterable[Mapping[str, Any]]) -> str:
    """Lines with a line of titles; what has no column is left out, None is empty, truth is true or false."""
    buffer = StringIO()
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in line.items()} for line in lines)
    return buffer.getvalue()


def _lines(volume: Volume, *, phases: bool) -> Iterator[dict[str, Any]]:
    for stage in volume.stages:
        # A spreadsheet would take 1-6 alone for a date.
        place = {"pipeline_rank": stage.pipeline_rank, "global_ranks": f"ranks {stage.global_ranks}"}
        for row in stage.rows:
            values = row.to_dict(phases=phases)
            parts = values.get("phases") or {None: {}}
            for phase, figures in parts.items():
                yield {**place, **values, **figures, "phase": phase}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value, limit=1000)
    return str(value).lower() if isinstance(value, bool) else value
