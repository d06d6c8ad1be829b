"""What an estimate adds to a plan: decisions about each overlap that is on, and about what is left exposed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from overlapkit.cost.estimate import estimate_of
from overlapkit.cost.result import Estimate
from overlapkit.errors import RecipeError
from overlapkit.facts import Facts, derive
from overlapkit.plan import SETTINGS, Decision, Plan
from overlapkit.resolver import plan as plan_of
from overlapkit.rules import changes, dp_changes
from overlapkit.rules.estimated import EXPOSED, exposed_communication, not_estimated, worth_of_overlap
from overlapkit.rules.registry import observed

_DP = (dp_changes.GRAD_REDUCE, dp_changes.PARAM_GATHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """What a person calls it, the overlaps that hide its messages, and the recipe's field that says its size."""

    name: str
    overlaps: tuple[str, ...] = ()
    size: str | None = None


# Of the volume's axes; on the one that is left out, all, ranks only agree on numbers.
_AXES = {
    "tp": _Axis(name="TP", overlaps=("model.tp_comm_overlap",), size="model.tensor_model_parallel_size"),
    "pp": _Axis(name="PP", overlaps=("model.overlap_p2p_comm",), size="model.pipeline_model_parallel_size"),
    "dp": _Axis(name="DP", overlaps=_DP),
    "expert_dp": _Axis(name="expert DP", overlaps=_DP),
    "cp": _Axis(name="CP", size="model.context_parallel_size"),
    "ep": _Axis(
        name="EP", overlaps=("model.overlap_moe_expert_parallel_comm",), size="model.expert_model_parallel_size"
    ),
    "etp": _Axis(name="expert TP", size="model.expert_tensor_parallel_size"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Switched:
    """An overlap that could be on: what turns it on, and the share of the step that it would save."""

    setting: str
    change: str
    saved_share: float


def with_estimate(facts: Facts, plan: Plan) -> Plan:
    """The plan with further decisions, CFG031 to CFG033; settings, environment and what else was decided stay.

    None of them is an error, and a plan whose step cannot be estimated is told why and stays as it is.
    """
    return replace(plan, decisions=(*plan.decisions, *_decisions(facts, plan)))


def _decisions(facts: Facts, plan: Plan) -> Iterator[Decision]:
    try:
        if not plan.ok:
            raise RecipeError("the plan has an error, and this launch no step", hint="fix what the plan names first")
        estimate = estimate_of(facts, plan)
    except RecipeError as refused:
        yield observed("CFG033", not_estimated(refused))
        return
    for name, saving in estimate.saves.items():
        yield observed("CFG031", worth_of_overlap(_setting(name), saving))
    for axis, time in estimate.groups.items():
        if axis in _AXES and time.exposed_s >= EXPOSED * estimate.step_time_s:
            yield _exposed(facts, plan, estimate, axis)


def _setting(name: str) -> str:
    """The setting of a plan by its last name; DDP's where the optimizer has one of that name too."""
    return next(setting for setting in reversed(SETTINGS) if setting.endswith(f".{name}"))


def _exposed(facts: Facts, plan: Plan, estimate: Estimate, axis: str) -> Decision:
    kind, exposed = _AXES[axis], estimate.groups[axis].exposed_s
    shortest, longest = estimate.interval_s
    off = (setting for setting in kind.overlaps if not plan.settings[setting])
    could = [each for setting in off if (each := _switched(facts, plan, estimate, setting)) is not None]
    best = max(could, key=lambda each: each.saved_share, default=None)
    verdict = exposed_communication(
        best.setting if best else kind.size or kind.overlaps[0],
        False if best else getattr(plan.parallelism, axis, None) if kind.size else plan.settings[kind.overlaps[0]],
        kind.name,
        exposed / estimate.step_time_s,
        (exposed / longest, exposed / shortest),
        turn_on=best.change if best else None,
        saved_share=best.saved_share if best else 0.0,
    )
    return observed("CFG032", verdict)


def _switched(facts: Facts, plan: Plan, estimate: Estimate, setting: str) -> _Switched | None:
    """The overlap turned on; None where a rule keeps it off or finds an error then, or the step gets no shorter."""
    section, name = _home(facts, setting), setting.partition(".")[2]
    recipe = facts.recipe
    changed = replace(getattr(recipe, section), **{name: True})
    written = recipe.written | {f"{section}.{name}"}
    try:
        would = derive(replace(recipe, **{section: changed}, written=written))
        decided = plan_of(would)
        if not decided.ok or not decided.settings[setting]:
            return None
        shorter = estimate_of(would, decided).step_time_s
    except RecipeError:
        return None
    saved_share = 1 - shorter / estimate.step_time_s
    return (
        _Switched(setting=setting, change=f"{section}.{name}=true", saved_share=saved_share)
        if saved_share > 0
        else None
    )


def _home(facts: Facts, setting: str) -> str:
    """The section of the recipe in which the overlap is asked for."""
    section, name = setting.split(".")
    return dp_changes.home(facts, name) if section == "ddp" else changes.home(facts)
