"""CFG: what an estimate of the step says of a plan, and why there is none; see overlapkit.cost.decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlapkit.rules.registry import Verdict, info, observation, warning

if TYPE_CHECKING:
    from overlapkit.cost.result import Saving
    from overlapkit.errors import RecipeError

# Of the step: what an overlap saves before it is called worth having, and before turning it on is worth a warning. On 8
# H20 users found 2 s of 43 s little (NVIDIA/Megatron-LM issue 2662).
LITTLE, WORTH_A_WARNING = 0.05, 0.02
_NOTHING = 0.0005  # of the step: 0.0 % as it is written
EXPOSED = 0.10  # of the step: what communication may take before it is told
_SOURCE = "overlapkit.cost: the estimated step, and the same with one overlap switched"
ESTIMATED = frozenset({"CFG031", "CFG032", "CFG033"})


@observation("CFG031", source=_SOURCE)
def worth_of_overlap(setting: str, saving: Saving) -> Verdict:
    """What an overlap that is on saves.

    Said by ``overlapkit resolve --estimate`` of each overlap: the estimated step with it off minus the step as it is,
    as a share of the step as it is. Under 5 % it is of little value. The range in brackets is the saving's interval.

    Why: that an overlap is legal does not make it worth its buffers, its SMs and one more thing that can go wrong; a
    GPU that computes slowly and has fast links has little to hide.
    Fix: none is needed. Where the saving is small and the overlap is in the way of something else, turn it off.
    """
    low, high = saving.low_share, saving.high_share
    if saving.share < -_NOTHING:
        slower = f"the step takes {percent(-saving.share)} ({percents(-high, -low)}) longer with it"
        return info(setting, f"legal, of no value: {slower}", value=True)
    saved = f"{percent(saving.share)} ({percents(low, high)}) of the step"
    if saving.share < LITTLE:
        return info(setting, f"legal, of little value: saves {saved}", value=True)
    return info(setting, f"saves {saved}, {saving.seconds:.3g} s", value=True)


@observation("CFG032", source=_SOURCE)
def exposed_communication(
    subject: str,
    value: Any,
    axis: str,
    share: float,
    between: tuple[float, float],
    *,
    turn_on: str | None = None,
    saved_share: float = 0.0,
) -> Verdict:
    """Communication of one axis that no computation hides takes 10 % of the step or more.

    Said by ``overlapkit resolve --estimate`` of each axis: the estimated exposed time over the estimated step. The
    range in brackets is the same time over the ends of the step's interval. It is a warning where an overlap for the
    axis is off, would be legal, and would save at least 2 % of the step.

    Why: while a message is waited for, the GPU computes nothing.
    Fix: turn on the overlap that is named. Where none is, less of the axis, longer microbatches or a faster network
    make it smaller; ``overlapkit search`` tries layouts.
    """
    because = f"{axis} communication is exposed: {percent(share)} of the step ({percents(*between)})"
    if turn_on is None:
        return info(subject, because, value=value)
    fix = f"set {turn_on}, which saves an estimated {percent(saved_share)} of the step"
    grave = warning if saved_share >= WORTH_A_WARNING else info
    return grave(subject, because, value=value, fix=fix)


@observation("CFG033", source="overlapkit.cost: what can be estimated")
def not_estimated(refused: RecipeError) -> Verdict:
    """There is no estimate of this plan's step.

    Said by ``overlapkit resolve --estimate`` where the recipe lacks a size, the GPU has no figures, the plan has an
    error, or the model or the layout is one that is not modelled. The rest of the plan holds without it.

    Why: a number for something else would mislead.
    Fix: give what the reason names.
    """
    return info(refused.path or "recipe", f"not estimated: {refused.problem}", fix=refused.hint)


def percent(share: float) -> str:
    """A share in percent, with a digit after the point where it is small."""
    return f"{_number(share)} %"


def percents(low: float, high: float) -> str:
    """A range of shares in percent."""
    start = _number(low)
    return f"{start}{' to ' if start.startswith('-') else '–'}{_number(high)} %"


def _number(share: float) -> str:
    value = round(100 * share, 1) + 0.0  # without the sign of a zero
    return f"{value:.1f}" if abs(value) < 10 else f"{value:.0f}"
