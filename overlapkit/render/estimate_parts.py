"""What texts, tables, pictures and traces of an estimate share: names, seconds, and what a step is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from overlapkit.cost.result import Estimate, GroupTime
from overlapkit.cost.schedule import Schedule, schedule_of
from overlapkit.errors import RecipeError

# The axes of a volume.
AXES = {
    "tp": "TP",
    "cp": "CP",
    "ep": "EP",
    "etp": "expert TP",
    "pp": "PP",
    "dp": "DP",
    "expert_dp": "expert DP",
    "all": "all ranks",
}
PARTS = {
    "gemm_s": "GEMM",
    "attention_s": "attention",
    "memory_bound_s": "memory-bound kernels",
    "host_s": "host",
    "bubble_s": "pipeline bubble",
    "optimizer_s": "optimizer",
}
# What a pass is made of beside the exposed communication of its axes.
COMPUTE = frozenset({"gemm", "attention", "memory_bound", "host"})
_UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
_ROUNDING = 1e-9  # of a step


class Piece(NamedTuple):
    """A part of a step: its field or axis, its name for people, and its seconds, which add up to the step."""

    key: str
    name: str
    seconds: float


def parts_of(estimate: Estimate) -> dict[str, float]:
    """Seconds of compute and waiting; what sums that cancel have left over is nothing."""
    least = _ROUNDING * estimate.step_time_s
    return {field: seconds if abs(seconds) > least else 0.0 for field, seconds in estimate.parts.to_dict().items()}


def pieces(estimate: Estimate) -> Iterator[Piece]:
    """All of the step: compute and waiting, then what each axis leaves exposed."""
    for field, seconds in parts_of(estimate).items():
        yield Piece(field, PARTS[field], seconds)
    for axis, time in ordered_groups(estimate):
        yield Piece(axis, f"{AXES[axis]} exposed", time.exposed_s)


def ordered_groups(estimate: Estimate) -> list[tuple[str, GroupTime]]:
    """Groups in the order of the axes above, whatever order the volume has them in."""
    return [(axis, estimate.groups[axis]) for axis in AXES if axis in estimate.groups]


def short_seconds(seconds: float) -> str:
    """Seconds in three digits."""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    unit, factor = next((each for each in _UNITS if seconds * each[1] >= 1), _UNITS[-1])
    digits = f"{seconds * factor:#.3g}".removesuffix(".")  # 15.0, so that a figure and its interval are as precise
    return f"{digits} {unit}"


def seconds_text(seconds: float, step_s: float) -> str:
    """Seconds with as many decimals as the step's have in three digits; what is less is not shown as nothing."""
    unit, factor = ("s", 1.0) if step_s >= 1 else ("ms", 1e3)
    whole = step_s * factor
    decimals = 1 if whole >= 100 else 2 if whole >= 10 else 3
    least = 10.0**-decimals
    if 0 < abs(seconds * factor) < least / 2:
        return f"<{least:.{decimals}f} {unit}"
    return f"{seconds * factor:,.{decimals}f} {unit}"


def schedule_for(estimate: Estimate, *, most_blocks: int, option: str) -> Schedule:
    """The passes of the step; what is left of it behind them is exposed DP communication, then the optimizer.

    Raises:
        RecipeError: Megatron-Core would not run this schedule, or it is too large to be shown.
    """
    timeline = estimate.timeline
    end_s = estimate.step_time_s - timeline.dp_exposed_s - timeline.optimizer_s
    try:
        return schedule_of(timeline, end_s, most_blocks=most_blocks)
    except ValueError as error:
        stages, chunks = len(timeline.stages), timeline.vp
        what = f"{timeline.num_microbatches} microbatches on {stages} stages of {chunks} chunks: {error}"
        raise RecipeError(f"{option} cannot show {what}", source=estimate.recipe) from None
