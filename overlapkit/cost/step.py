"""Facts + Plan + Volume -> the work of a step, and the time that it takes with some overlaps on and others off.

A step ends when its last stage does: ``(m - 1/v) * w + sum(t) / v`` for the passes of m microbatches through stages
that take t each, w the longest of them, in v chunks (Narayanan et al. 2021 for equal stages), then what communication
is left over, and the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from overlapkit.cost.constants import Constants, load
from overlapkit.cost.hardware import Hardware, hardware_of
from overlapkit.cost.kernels import Kernels, kernels_of
from overlapkit.cost.stage import StageWork, stage_work, sublayers_of
from overlapkit.facts import Facts
from overlapkit.plan import Plan
from overlapkit.rules.dp_changes import GRAD_REDUCE, PARAM_GATHER
from overlapkit.volume.model import Model
from overlapkit.volume.predict import Volume


class Switches(NamedTuple):
    """Which communication hides: TP in userbuffers, gradient reduction, parameter gathers, sends, EP's all-to-all."""

    tp: bool
    grad_reduce: bool
    param_gather: bool
    p2p: bool
    ep: bool


class Work(NamedTuple):
    """A step's work, whatever overlaps. ``stages`` are the different ones, ``which`` says of each stage which it is."""

    hardware: Hardware
    constants: Constants
    model: Model
    kernels: Kernels
    stages: tuple[StageWork, ...]
    which: tuple[int, ...]
    assumed: tuple[str, ...]


class Pass(NamedTuple):
    """Seconds of one microbatch on one stage. ``expert_left`` is the share of EP's communication that is exposed."""

    forward: float
    backward: float
    expert_left: float
    host_forward: float
    host_backward: float


class Step(NamedTuple):
    """Seconds of a step. ``slowest`` is the one of Work.stages that ends last.

    ``data_left`` is the share of its data-parallel communication that is exposed, ``sends_left`` of its sends.
    """

    seconds: float
    slowest: int
    passes: tuple[Pass, ...]
    tp_on: bool  # userbuffers take off what they hide
    data_left: float
    sends_left: float


def work_of(facts: Facts, plan: Plan, volume: Volume, constants: Constants | None = None) -> Work:
    """The work of every stage.

    Raises:
        RecipeError: the GPU or the precision is not modelled.
    """
    constants = constants or load()
    hardware, assumed = hardware_of(facts, constants)
    model, kernels = volume.model, kernels_of(facts)
    report = facts.userbuffers_report
    configuration: Mapping[str, Mapping[str, Any]] = report.buffers if report is not None else {}
    gather_width = gather_width_of(facts)
    sublayers = sublayers_of(hardware, constants, model, kernels, volume.layout, configuration)
    works: list[StageWork] = []
    known: dict[tuple[str, str, bool, float], float] = {}
    keys: dict[Any, int] = {}
    which = []
    for index, stage in enumerate(volume.stages):
        key = kind_of_stage(model, index)
        if key not in keys:
            keys[key] = len(works)
            works.append(
                stage_work(
                    hardware,
                    constants,
                    model,
                    kernels,
                    sublayers,
                    volume.parameters,
                    volume.layout,
                    index,
                    stage.rows,
                    gather_width=gather_width,
                    known=known,
                )
            )
        which.append(keys[key])
    return Work(hardware, constants, model, kernels, tuple(works), tuple(which), assumed)


def gather_width_of(facts: Facts) -> float:
    """Bytes of DP's parameter gathers over those in 16 bits: half of them where parameters are gathered in FP8."""
    precision = facts.precision
    return 0.5 if precision.fp8_param_gather and (precision.fp8 or precision.fp4) else 1.0


def kind_of_stage(model: Model, stage: int) -> tuple[Any, ...]:
    """What a stage's calls and work depend on: its layers, and whether it is the first or the last, which send less."""
    chunks = model.stages[stage]
    first = tuple(chunk.first for chunk in chunks) if len(model.cp_types) > 1 else ()
    layers = tuple((chunk.moe, chunk.embedding, chunk.output) for chunk in chunks)
    return layers, first, stage == 0, stage == len(model.stages) - 1


def switches_of(work: Work, plan: Plan) -> Switches:
    """What the plan has on, where it has something to hide."""
    model, settings = work.model, plan.settings
    return Switches(
        tp=bool(settings["model.tp_comm_overlap"]) and model.mesh.tp > 1,
        grad_reduce=bool(settings[GRAD_REDUCE]) or model.fsdp,
        param_gather=bool(settings[PARAM_GATHER]) or model.fsdp,
        p2p=bool(settings["model.overlap_p2p_comm"]) and model.mesh.pp > 1,
        ep=bool(settings["model.overlap_moe_expert_parallel_comm"]) and model.mesh.ep > 1,
    )


def step_of(work: Work, switches: Switches, passes: tuple[Pass, ...] | None = None) -> Step:
    """The step with these overlaps; ``passes`` are those of a step that differs in data and pipeline overlaps alone."""
    model, c = work.model, work.constants
    m, v = model.microbatches, chunks_of(model)
    passes = passes or tuple([_pass(c, stage, switches) for stage in work.stages])
    times = [each.forward + each.backward for each in passes]
    longest = max(times)
    body = (m - 1 / v) * longest + sum([times[index] for index in work.which]) / v
    sends_left = 1 - c.pipeline_hidden if switches.p2p and v > 1 else 1.0
    best = Step(-1.0, 0, passes, switches.tp, 1.0, sends_left)
    for index, stage in enumerate(work.stages):
        total = stage.reduces + stage.gathers
        exposed = total - _data_hidden(work, stage, switches, longest)
        end = body + exposed + stage.sends * sends_left + stage.others + stage.optimizer
        if end > best.seconds:
            best = Step(end, index, passes, switches.tp, exposed / total if total else 0.0, sends_left)
    return best


def step_seconds(work: Work, switches: Switches) -> float:
    """Seconds of one step, as :func:`step_of`."""
    return step_of(work, switches).seconds


def chunks_of(model: Model) -> int:
    """Model chunks per stage."""
    return (model.mesh.vp or 1) if model.mesh.pp > 1 else 1


def _pass(c: Constants, stage: StageWork, switches: Switches) -> Pass:
    """Communication of a microbatch stays beside compute, or makes the pass longer; then the host may be slower."""
    forward, backward = stage.forward, stage.backward
    if switches.tp:
        forward, backward = forward - stage.tp_hides.forward, backward - stage.tp_hides.backward
    there, back = stage.expert
    left, launches = 1.0, 1.0
    beside = switches.ep and there + back > 0
    if beside:
        left -= c.expert_hidden * min(1.0, (forward + backward) / (there + back))
        launches = c.host_expert_overlap
    forward, backward = forward + there * left, backward + back * left
    host = stage.host
    launched = (host.forward * launches, host.backward * launches)
    waits = _waits(launched, (forward, backward), together=beside)
    host_forward, host_backward = waits[0] + host.sync / 2, waits[1] + host.sync / 2
    return Pass(
        forward + host_forward + stage.ends_forward.total,
        backward + host_backward + stage.ends_backward.total,
        left,
        host_forward,
        host_backward,
    )


def _waits(launches: tuple[float, float], busy: tuple[float, float], *, together: bool) -> tuple[float, float]:
    """Seconds that the GPU, ``busy`` forward and backward, waits for the host's launches in either pass.

    ``together``: with EP overlap one microbatch's forward pass runs beside another's backward pass, so that the host
    has the time of both for the launches of both.
    """
    if not together:
        return max(launches[0] - busy[0], 0.0), max(launches[1] - busy[1], 0.0)
    launched = sum(launches)
    late = max(launched - sum(busy), 0.0)
    share = launches[0] / launched if launched else 0.0
    return late * share, late * (1 - share)


# Of a pass's time: backward takes 2 of 3 parts.
_FORWARD_SHARE, _BACKWARD_SHARE = 1 / 3, 2 / 3


def _data_hidden(work: Work, stage: StageWork, switches: Switches, longest: float) -> float:
    """Seconds of data-parallel communication that hide.

    They hide in the passes of the last and first microbatches: of one, of as many as there are stages with a pipeline,
    of all under FSDP. A stage that waits for a slower one hides in its waiting too, so the longest pass counts.
    """
    model = work.model
    hideable = stage.reduces * switches.grad_reduce + stage.gathers * switches.param_gather
    share = _BACKWARD_SHARE * switches.grad_reduce + _FORWARD_SHARE * switches.param_gather
    passes = model.microbatches if model.fsdp else min(model.mesh.pp, model.microbatches)
    return work.constants.data_parallel_hidden * min(hideable, passes * longest * share)
