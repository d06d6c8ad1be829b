"""Recipe -> Estimate: ``overlapkit.estimate`` and the command of that name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlapkit.cost.communication import DATA_AXES
from overlapkit.cost.constants import Constants
from overlapkit.cost.flops import model_flops_per_token
from overlapkit.cost.interval import interval_of, kind_of, notes_of
from overlapkit.cost.layers import Seconds
from overlapkit.cost.result import Estimate, GroupTime, Parts, Saving, StageTime, Timeline
from overlapkit.cost.step import Step, Switches, Work, chunks_of, step_of, switches_of, work_of
from overlapkit.cost.userbuffers import NOTHING
from overlapkit.facts import Facts, derive
from overlapkit.plan import Plan
from overlapkit.recipe import Recipe
from overlapkit.resolver import plan as plan_of
from overlapkit.resolver import read_recipe
from overlapkit.volume.predict import Volume, predict

# Setting -> the switches that it is.
_SAVES = {
    "tp_comm_overlap": ("tp",),
    "overlap_grad_reduce": ("grad_reduce", "param_gather"),  # gathers overlap only where reductions do
    "overlap_param_gather": ("param_gather",),
    "overlap_p2p_comm": ("p2p",),
    "overlap_moe_expert_parallel_comm": ("ep",),
}


def estimate(recipe: str | Path | Mapping[str, Any] | Recipe, overrides: Sequence[str] = ()) -> Estimate:
    """How long a step takes, where the time goes, and what each overlap saves.

    ``recipe`` and ``overrides`` are those of ``overlapkit.resolve``.

    Raises:
        RecipeError: the recipe cannot be used, lacks a size or figure that the time needs, or asks for what is not
            modelled.
        TypeError: overrides with a recipe that is already loaded.
    """
    facts = derive(read_recipe(recipe, overrides))
    return estimate_of(facts, plan_of(facts))


def estimate_of(
    facts: Facts, plan: Plan, volume: Volume | None = None, *, constants: Constants | None = None
) -> Estimate:
    """The estimate of a recipe whose facts and plan are known; ``volume`` is ``predict(…, approximate=True)``.

    Raises:
        RecipeError: as `estimate`.
    """
    volume = predict(facts, plan, approximate=True) if volume is None else volume
    work = work_of(facts, plan, volume, constants)
    switches = switches_of(work, plan)
    step = step_of(work, switches)
    model = work.model
    kind = kind_of(work)
    low, high = interval_of(work.constants, kind)
    groups = _groups(work, step)
    tokens = model.full_tokens * model.microbatches * model.mesh.dp
    per_gpu = tokens / step.seconds / model.mesh.world_size
    tflops = per_gpu * model_flops_per_token(model, work.kernels) / 1e12
    return Estimate(
        recipe=plan.recipe,
        gpu=work.hardware.gpu.name,
        step_time_s=step.seconds,
        interval_s=(step.seconds * low, step.seconds * high),
        kind=kind,
        tokens_per_step=tokens,
        tokens_per_s_per_gpu=per_gpu,
        model_tflops_per_gpu=tflops,
        mfu=tflops / work.hardware.dense_tflops,
        groups=groups,
        parts=_parts(work, step, groups),
        saves=_saves(work, switches, step),
        assumed=(*volume.assumed, *work.assumed),
        notes=notes_of(facts, plan, work, switches, kind),
        timeline=_timeline(work, step),
    )


def exposed_of_pass(work: Work, step: Step, index: int) -> dict[str, tuple[float, float]]:
    """Seconds of a microbatch's communication that do not hide on one of the work's stages, by axis, there and back."""
    m, stage, passed = work.model.microbatches, work.stages[index], step.passes[index]
    hides = {"tp": stage.tp_hides if step.tp_on else NOTHING, "cp": stage.ring_hides}
    found = {}
    for name, axis in stage.axes.items():
        if name in DATA_AXES or not (axis.forward or axis.backward):
            continue
        left = passed.expert_left if name == "ep" else 1.0
        hidden = hides.get(name, NOTHING)
        found[name] = (axis.forward / m * left - hidden.forward, axis.backward / m * left - hidden.backward)
    return found


def _groups(work: Work, step: Step) -> dict[str, GroupTime]:
    m, of_pass = work.model.microbatches, exposed_of_pass(work, step, step.slowest)
    found = {}
    for name, axis in work.stages[step.slowest].axes.items():
        if name in DATA_AXES:
            exposed = axis.step * step.data_left
        else:
            once = axis.step - axis.sends + axis.sends * step.sends_left
            exposed = m * sum(of_pass.get(name, (0.0, 0.0))) + once
        exposed = min(exposed, axis.total)  # what is left of rounding
        found[name] = GroupTime(
            message_bytes=axis.message_bytes, total_s=axis.total, hidden_s=axis.total - exposed, exposed_s=exposed
        )
    return found


def _parts(work: Work, step: Step, groups: Mapping[str, GroupTime]) -> Parts:
    """What the slowest stage does in a step; the bubble is what is left: fill, drain, and waiting for others."""
    m, stage, passed = work.model.microbatches, work.stages[step.slowest], step.passes[step.slowest]
    compute = stage.layers_forward.plus(stage.layers_backward).plus(stage.ends_forward).plus(stage.ends_backward)
    host = m * (passed.host_forward + passed.host_backward)
    busy = m * compute.total + host + stage.optimizer + sum(group.exposed_s for group in groups.values())
    return Parts(
        gemm_s=m * compute.gemm,
        attention_s=m * compute.attention,
        memory_bound_s=m * compute.memory_bound,
        host_s=host,
        bubble_s=max(step.seconds - busy, 0.0),
        optimizer_s=stage.optimizer,
    )


def _saves(work: Work, switches: Switches, step: Step) -> dict[str, Saving]:
    """What the step takes longer with an overlap switched off, for each that is on and has something to hide."""
    found = {}
    low, high = work.constants.saving_low, work.constants.saving_high
    for name, parts in _SAVES.items():
        if not getattr(switches, parts[0]):
            continue
        without = switches._replace(**dict.fromkeys(parts, False))
        same = (without.tp, without.ep) == (switches.tp, switches.ep)
        seconds = step_of(work, without, step.passes if same else None).seconds - step.seconds
        share = seconds / step.seconds
        ends = sorted((share * low, share * high))
        found[name] = Saving(seconds=seconds, share=share, low_share=ends[0], high_share=ends[1])
    return found


def _timeline(work: Work, step: Step) -> Timeline:
    unique = [_stage_time(work, step, index) for index in range(len(work.stages))]
    model, stage = work.model, work.stages[step.slowest]
    chunks = chunks_of(model)
    return Timeline(
        num_microbatches=model.microbatches,
        vp=chunks,
        stages=tuple(unique[index] for index in work.which),
        slowest=work.which.index(step.slowest),
        p2p_s=stage.sends / (2 * model.microbatches * chunks),
        dp_exposed_s=(stage.reduces + stage.gathers) * step.data_left,
        optimizer_s=stage.optimizer,
    )


def _stage_time(work: Work, step: Step, index: int) -> StageTime:
    stage, passed, exposed = work.stages[index], step.passes[index], exposed_of_pass(work, step, index)

    def made(compute: Seconds, host: float, way: int) -> dict[str, float]:
        by = {"gemm": compute.gemm, "attention": compute.attention, "memory_bound": compute.memory_bound, "host": host}
        return {**by, **{name: pair[way] for name, pair in exposed.items()}}

    return StageTime(
        forward_s=passed.forward,
        backward_s=passed.backward,
        forward_by=made(stage.layers_forward.plus(stage.ends_forward), passed.host_forward, 0),
        backward_by=made(stage.layers_backward.plus(stage.ends_backward), passed.host_backward, 1),
    )
