"""An estimate as one screen that a person reads from top to bottom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from overlapkit.cost.result import Estimate, Saving
from overlapkit.errors import printable
from overlapkit.plan import Plan
from overlapkit.render.estimate_parts import AXES, PARTS, ordered_groups, parts_of, seconds_text, short_seconds
from overlapkit.render.text import grid, mesh_line, print_on, target_line, title, verdict
from overlapkit.render.volume_table import Line, human, measure, percent, write_lines
from overlapkit.rules.estimated import LITTLE, WORTH_A_WARNING, percents
from overlapkit.rules.estimated import percent as percent_of_one

if TYPE_CHECKING:
    from rich.console import Console

# What the interval was measured on, by kind: the ``intervals`` of data/cost.yaml.
_MEASURED_ON = {
    "dense": "dense models",
    "dense_fsdp": "dense models under FSDP",
    "dense_unfused": "dense models with unfused attention",
    "moe": "MoE models under CUDA graphs",
    "moe_eager": "MoE models without CUDA graphs",
}
_WAITS = {"host_s": "the GPU waits for launches", "bubble_s": "a stage waits for others"}


def print_estimate(estimate: Estimate, plan: Plan, stream: IO[str]) -> None:
    """The whole answer on ``stream``; ``plan`` is the recipe's, for the lines at the top."""

    def write(out: Console) -> None:
        _head(estimate, plan, out)
        _rates(estimate, out)
        _table(estimate, out)
        _saves(estimate, out)
        _doubts(estimate, out)

    print_on(stream, write)


def _head(estimate: Estimate, plan: Plan, out: Console) -> None:
    out.print(printable(estimate.recipe, limit=300), style="bold", end="")
    out.print("  an optimizer step, estimated")
    if not plan.ok:
        text, style = verdict(plan)
        out.print(f"{text}: overlapkit resolve says why", style=style)
    out.print(target_line(plan))
    out.print(mesh_line(plan))


def _rates(estimate: Estimate, out: Console) -> None:
    low, high = (short_seconds(end) for end in estimate.interval_s)
    mfu = "unknown" if estimate.mfu is None else percent(estimate.mfu, 1)
    rows = (
        ("interval", f"{low} to {high}", _of_interval(estimate.kind)),
        ("tokens/s per GPU", f"{estimate.tokens_per_s_per_gpu:,.0f}", f"{estimate.tokens_per_step:,} tokens in a step"),
        ("model TFLOP/s per GPU", f"{estimate.model_tflops_per_gpu:,.1f}", "without what is computed twice"),
        ("MFU", mfu, f"of the dense rate of {estimate.gpu} in the precision of the GEMMs"),
    )
    title(out, f"{short_seconds(estimate.step_time_s)} per step")
    grid(out, [[(name, ""), (figure, ""), (remark, "dim")] for name, figure, remark in rows])


def _of_interval(kind: str) -> str:
    if kind == "not_measured":
        return "assumed: no step of this kind was at hand"
    return f"80 % of held-out steps of {_MEASURED_ON.get(kind, kind)} lie in it"


# --- where the time goes ---------------------------------------------------------------------------


def _table(estimate: Estimate, out: Console) -> None:
    """Communication by axis, then the rest; the last two columns add up to the step."""
    lines = list(_lines(estimate))
    widths, label_width = measure(lines)
    out.print()
    write_lines(out, lines, widths, label_width)


def _lines(estimate: Estimate) -> Iterator[Line]:
    step = estimate.step_time_s

    def cells(seconds: float) -> tuple[str, str]:
        return seconds_text(seconds, step), percent(seconds, step)

    yield Line("Where the time goes", ("message", "total", "hidden", "exposed", "of the step"), "bold")
    for axis, time in ordered_groups(estimate):
        both = (seconds_text(time.total_s, step), seconds_text(time.hidden_s, step))
        yield Line(f"  {AXES[axis]}", (human(time.message_bytes), *both, *cells(time.exposed_s)), "cyan")
    for field, seconds in parts_of(estimate).items():
        remark = f", {_WAITS[field]}" if field in _WAITS and seconds >= WORTH_A_WARNING * step else ""
        yield Line(f"  {PARTS[field]}{remark}", ("", "", "", *cells(seconds)))
    yield Line("  the step", ("", "", "", *cells(step)), "bold")


# --- overlaps --------------------------------------------------------------------------------------


def _saves(estimate: Estimate, out: Console) -> None:
    if not estimate.saves:
        title(out, "No overlap is on that has something to hide")
        return
    title(out, "What each overlap saves: the step without it, minus the step")
    rows = []
    for name, saving in sorted(estimate.saves.items(), key=lambda item: -item[1].seconds):
        word, style = worth(saving)
        shares = f"{percent_of_one(saving.share)} ({percents(saving.low_share, saving.high_share)})"
        seconds = seconds_text(saving.seconds, estimate.step_time_s)
        rows.append([(name, ""), (seconds, ""), (shares, ""), (word, style)])
    grid(out, rows)


def worth(saving: Saving) -> tuple[str, str]:
    """What a saving is worth in words, and their style."""
    if round(saving.share, 3) < 0:
        return "the step takes longer with it", "red"
    if saving.share < LITTLE:
        return "of little value", "yellow"
    return "worth having", "green"


# --- doubts ----------------------------------------------------------------------------------------


def _doubts(estimate: Estimate, out: Console) -> None:
    """Why the estimate may be further off, and what was taken where the recipe is silent."""
    rows = [[("note", "yellow"), (note, "")] for note in estimate.notes]
    if estimate.assumed:
        rows.append([("assumed", "yellow"), (", ".join(estimate.assumed), "")])
    if rows:
        title(out, "Good to know")
        grid(out, rows)
