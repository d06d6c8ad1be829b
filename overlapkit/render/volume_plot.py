"""Volumes as bars, per group and stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlapkit.render.plots import plain_text, save_figure
from overlapkit.render.volume_table import alike, human
from overlapkit.volume.predict import Stage, Volume
from overlapkit.volume.rows import total_wire_bytes

_ROW_HEIGHT = 0.28  # inches
_ROOM_FOR_LABELS = 1.25


def plot(volumes: Mapping[str, Volume], path: str) -> None:
    """Writes horizontal bars of what a rank sends per optimizer step: groups downwards, a bar for each stage.

    ``volumes`` by the name of their configuration. Stages that move the same share a bar; hatched is what leaves NCCL.
    The same volumes give the same file.

    Raises:
        RecipeError: the file cannot be written.
    """
    series = {
        f"{name}: {label}" if len(volumes) > 1 else label: stages[0]
        for name, volume in volumes.items()
        for label, stages in alike(volume.stages).items()
    }
    plot_series(series, path, per="optimizer step")


def plot_series(series: Mapping[str, Stage], path: str, *, per: str) -> None:
    """The same of stages by the names of their bars, of any text; ``per``: what their bytes are counted over.

    Raises:
        RecipeError: the file cannot be written.
    """
    series = {plain_text(name): stage for name, stage in series.items()}
    groups = _groups(series)
    rows = len(groups) * (len(series) + 1)
    height = max(2.5, 1.2 + _ROW_HEIGHT * rows)
    save_figure(path, (10, height), lambda figure: _draw(figure.subplots(), series, groups, per))


def _groups(series: Mapping[str, Stage]) -> list[str]:
    """All groups, those that send most first."""
    names = {row.group for stage in series.values() for row in stage.rows}
    return sorted(names, key=lambda name: (-max(stage.wire_bytes(name) for stage in series.values()), name))


def _draw(axes: Any, series: Mapping[str, Stage], groups: list[str], per: str) -> None:
    height = 1 / (len(series) + 1)
    for index, (label, stage) in enumerate(series.items()):
        at = [place + (index - (len(series) - 1) / 2) * height for place in range(len(groups))]
        seen = [_sent(stage, group, observable=True) for group in groups]
        hidden = [_sent(stage, group, observable=False) for group in groups]
        colour = f"C{index % 10}"
        axes.barh(at, seen, height, color=colour, label=label)
        if any(hidden):
            bars = {"color": "white", "edgecolor": colour, "hatch": "////", "linewidth": 0.8}
            axes.barh(at, hidden, height, left=seen, label=f"{label}: not NCCL", **bars)
        for place, group in zip(at, groups, strict=True):
            total = stage.wire_bytes(group)
            if any(row.group == group for row in stage.rows):
                axes.text(total, place, f" {human(total)}", va="center", fontsize=8)
    largest = max((stage.wire_bytes(group) for stage in series.values() for group in groups), default=0)
    axes.set_xlim(0, max(largest, 1) * _ROOM_FOR_LABELS)
    axes.set_yticks(range(len(groups)), groups, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"ring-equivalent bytes that a rank sends per {per}")
    axes.xaxis.set_major_formatter(lambda value, _: human(value))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="lower right", frameon=False)


def _sent(stage: Stage, group: str, *, observable: bool) -> int:
    return total_wire_bytes(row for row in stage.rows if row.group == group and row.observable == observable)
