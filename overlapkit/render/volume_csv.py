"""A volume as a table for spreadsheets: a line per row, or per row and phase."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any

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
    buffer = StringIO()
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for name, volume in volumes.items():
        writer.writerows({"configuration": name, **line} for line in _lines(volume, phases=phases))
    return buffer.getvalue()


def _lines(volume: Volume, *, phases: bool) -> Iterator[dict[str, Any]]:
    for stage in volume.stages:
        # A spreadsheet would take 1-6 alone for a date.
        place = {"pipeline_rank": stage.pipeline_rank, "global_ranks": f"ranks {stage.global_ranks}"}
        for row in stage.rows:
            values = {name: _plain(value) for name, value in row.to_dict(phases=phases).items()}
            parts = values.get("phases") or {None: {}}
            for phase, figures in parts.items():
                yield {**place, **values, **figures, "phase": phase}


def _plain(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value
