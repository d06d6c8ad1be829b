"""An estimate as a picture: what the step is made of, and which pass runs when on which pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from overlapkit.cost.result import Estimate
from overlapkit.cost.schedule import Block, Schedule
from overlapkit.render.estimate_parts import pieces, schedule_for, short_seconds
from overlapkit.render.plots import plain_text, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_STAGES = 64
_MOST_PASSES = 128  # forward passes of a stage: more cannot be told apart
_MOST_PATHS = 4_000  # blocks that are drawn one by one; more become a bitmap inside the picture
_MOST_NUMBERED = 160  # blocks with room for their microbatch
_LEAST_NAMED = 0.04  # of the step: a part with room for its share
_COLOURS = {
    "gemm_s": "#4c78a8",
    "attention_s": "#72b7b2",
    "memory_bound_s": "#9ecae9",
    "host_s": "#bab0ac",
    "bubble_s": "#dddddd",
    "optimizer_s": "#54a24b",
    "tp": "#e45756",
    "cp": "#ff9da6",
    "ep": "#f58518",
    "etp": "#eeca3b",
    "pp": "#9d755d",
    "dp": "#b279a2",
    "expert_dp": "#d8b5d0",
    "all": "#79706e",
}
_FORWARD, _BACKWARD = "#5254a3", "#d6a85c"


def plot(estimate: Estimate, path: str) -> None:
    """Writes a bar of the step's parts, below it the pipeline: a row per stage, a block per pass.

    Of more than 64 stages the first and last are drawn, of many microbatches those at the start and the end of the
    step; the picture says so. The same estimate gives the same file.

    Raises:
        RecipeError: the file cannot be written, or the passes cannot be put in order.
    """
    timeline = estimate.timeline
    stages = len(timeline.stages)
    found = schedule_for(estimate, most_blocks=2 * stages * _MOST_PASSES, option="--plot")
    rows = _rows(stages)
    height = 3.6 + 0.32 * min(len(rows), 24)
    save_figure(path, (11, height), lambda figure: _draw(figure, estimate, found, rows))


def _rows(stages: int) -> Sequence[int]:
    """The stages that are drawn."""
    if stages <= _MOST_STAGES:
        return range(stages)
    return [*range(_MOST_STAGES // 2), *range(stages - _MOST_STAGES // 2, stages)]


def _draw(figure: Figure, estimate: Estimate, found: Schedule, rows: Sequence[int]) -> None:
    halves = ["start", "end"] if found.gap is not None else ["start"]
    ratios = [1.0, max(1.2, 0.3 * min(len(rows), 24))]
    places: Any = figure.subplot_mosaic([["bar"] * len(halves), halves], height_ratios=ratios)
    _draw_bar(places["bar"], estimate)
    parts = [places[half] for half in halves]
    for index, axes in enumerate(parts):
        _draw_pipeline(axes, estimate, found, rows, _limits(estimate, found, index))
    parts[-1].legend(
        *_legend(estimate), fontsize=8, ncols=4, frameon=False, loc="upper right", bbox_to_anchor=(1, -0.12)
    )
    parts[0].set_ylabel("pipeline stage")
    parts[0].set_title(_title(estimate, found, rows), fontsize=9, loc="left")


def _limits(estimate: Estimate, found: Schedule, index: int) -> tuple[float, float]:
    """What a half of the pipeline shows: of the same length, so that a pass is as long in both."""
    if found.gap is None:
        return 0.0, estimate.step_time_s
    length = max(found.gap.start_s, estimate.step_time_s - found.gap.end_s)
    return (0.0, length) if index == 0 else (estimate.step_time_s - length, estimate.step_time_s)


def _title(estimate: Estimate, found: Schedule, rows: Sequence[int]) -> str:
    timeline = estimate.timeline
    stages = len(timeline.stages)
    parts = [f"{timeline.num_microbatches:,} microbatches on {stages:,} stage{'s' if stages > 1 else ''}"]
    if timeline.vp > 1:
        parts.append(f"in {timeline.vp} chunks each (the lighter, the later)")
    if found.gap is not None:
        parts.append(f"start and end, {found.gap.microbatches:,} microbatches between them are left out")
    if len(rows) < stages:
        parts.append(f"{stages - len(rows):,} stages in the middle are left out")
    return ", ".join(parts)


# --- the step --------------------------------------------------------------------------------------


def _draw_bar(axes: Any, estimate: Estimate) -> None:
    step, left = estimate.step_time_s, 0.0
    for piece in pieces(estimate):
        if piece.seconds <= 0:
            continue
        colour = _COLOURS[piece.key]
        label = f"{plain_text(piece.name)} {short_seconds(piece.seconds)}"
        axes.barh([0], [piece.seconds], 0.5, left=left, color=colour, edgecolor="white", linewidth=0.5, label=label)
        if piece.seconds >= _LEAST_NAMED * step:
            share = f"{100 * piece.seconds / step:.0f} %"
            axes.text(left + piece.seconds / 2, 0, share, ha="center", va="center", fontsize=8)
        left += piece.seconds
    low, high = estimate.interval_s
    axes.plot([low, high], [-0.4, -0.4], color="black", linewidth=1, marker="|", label="interval")
    axes.set_xlim(0, 1.02 * max(high, step))
    axes.set_ylim(-0.6, 0.5)
    axes.set_yticks([])
    axes.xaxis.set_major_formatter(_time)
    axes.spines[["top", "right", "left"]].set_visible(False)
    between = f"{short_seconds(low)} to {short_seconds(high)}"
    axes.set_title(
        f"{plain_text(estimate.recipe)}: {short_seconds(step)} per step ({between})", fontsize=10, loc="left"
    )
    axes.legend(fontsize=8, ncols=4, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.3))


def _time(value: float, _: Any) -> str:
    return f"{value:g} s" if value >= 1 or not value else f"{1e3 * value:g} ms"


# --- the pipeline ----------------------------------------------------------------------------------


def _draw_pipeline(
    axes: Any, estimate: Estimate, found: Schedule, rows: Sequence[int], limits: tuple[float, float]
) -> None:
    """A row per stage; of the passes, those between ``limits``."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb

    place = {stage: row for row, stage in enumerate(rows)}
    start, end = limits
    blocks = [block for block in found.blocks if block.stage in place and block.start_s < end and block.end_s > start]
    chunks, colours = estimate.timeline.vp, {"forward": to_rgb(_FORWARD), "backward": to_rgb(_BACKWARD)}
    corners = [_corners(block.start_s, block.end_s, place[block.stage]) for block in blocks]
    faces = [_lighter(colours[block.kind], block.chunk / chunks) for block in blocks]
    many = len(blocks) > _MOST_PATHS
    style: dict[str, Any] = {"rasterized": True} if many else {"edgecolors": "white", "linewidths": 0.4}
    axes.add_collection(PolyCollection(corners, facecolors=faces, **style))
    optimizer_s = estimate.step_time_s - estimate.timeline.optimizer_s
    for colour, first, last in (
        (_COLOURS["dp"], found.end_s, optimizer_s),
        (_COLOURS["optimizer_s"], optimizer_s, estimate.step_time_s),
    ):
        axes.add_collection(PolyCollection([_corners(first, last, row) for row in place.values()], facecolors=colour))
    if len(blocks) <= _MOST_NUMBERED:
        _number(axes, blocks, place)
    axes.set_xlim(start, end)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    step = max(1, len(rows) // 16)
    axes.set_yticks(range(0, len(rows), step), [str(stage) for stage in rows[::step]], fontsize=8)
    axes.xaxis.set_major_formatter(_time)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _corners(start: float, end: float, row: int) -> list[tuple[float, float]]:
    top, bottom = row - 0.42, row + 0.42
    return [(start, top), (end, top), (end, bottom), (start, bottom)]


def _number(axes: Any, blocks: Sequence[Block], place: dict[int, int]) -> None:
    for block in blocks:
        middle = (block.start_s + block.end_s) / 2
        style = {"ha": "center", "va": "center", "fontsize": 6, "clip_on": True}
        colour = "white" if block.kind == "forward" and block.chunk == 0 else "black"
        axes.text(middle, place[block.stage], str(block.microbatch), color=colour, **style)


def _lighter(colour: tuple[float, float, float], share: float) -> tuple[float, ...]:
    """The colour of a later chunk."""
    return tuple(part + (1 - part) * 0.6 * share for part in colour)


def _legend(estimate: Estimate) -> tuple[list[Any], list[str]]:
    """What is drawn, and no more."""
    from matplotlib.patches import Patch

    names = {"forward": _FORWARD, "backward": _BACKWARD}
    if estimate.timeline.dp_exposed_s > 0:
        names["DP exposed"] = _COLOURS["dp"]
    names["optimizer"] = _COLOURS["optimizer_s"]
    return [Patch(color=colour) for colour in names.values()], list(names)
