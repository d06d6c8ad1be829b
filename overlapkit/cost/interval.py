"""How far a step may be from its estimate, by the kind of case, as held-out ones were, and what makes it worse."""

from __future__ import annotations

from overlapkit.cost.constants import Constants
from overlapkit.cost.step import Switches, Work
from overlapkit.facts import Facts
from overlapkit.plan import Plan

_NOT_MEASURED = "not_measured"


def kind_of(work: Work) -> str:
    """The kind of case: a key of ``intervals`` in ``data/cost.yaml``."""
    kernels, dense = work.kernels, work.model.experts is None
    if work.hardware.gpu.name not in work.constants.measured_gpus:
        return _NOT_MEASURED
    if not dense:
        unknown = kernels.unfused_attention or work.model.fsdp
        return _NOT_MEASURED if unknown else "moe_eager" if kernels.captured == "none" else "moe"
    return "dense_fsdp" if work.model.fsdp else "dense_unfused" if kernels.unfused_attention else "dense"


def interval_of(constants: Constants, kind: str) -> tuple[float, float]:
    """What a step takes over its estimate in 80 % of the held-out cases of this kind: lower and upper end."""
    found = constants.intervals[kind]
    return found.low, found.high


def notes_of(facts: Facts, plan: Plan, work: Work, switches: Switches, kind: str) -> tuple[str, ...]:
    """Why this estimate is less certain than others, a sentence each."""
    notes = []
    gpu = work.hardware.gpu
    errors = [decision.code for decision in plan.decisions if decision.severity == "error"]
    if errors:
        notes.append(
            f"this launch would fail ({', '.join(dict.fromkeys(errors))}): the time is of a run without the error"
        )
    if gpu.name not in work.constants.measured_gpus:
        notes.append(f"no step times on {gpu.name} were at hand: the interval is assumed")
    elif kind == _NOT_MEASURED:
        notes.append("no step times of this kind were at hand: the interval is assumed")
    inside, host = facts.nvlink_domain_size, facts.gpus_per_node
    if inside is not None and host is not None and inside < host:
        notes.append(f"NVLink joins {inside} GPUs of a host of {host}: the time is as if it joined all of them")
    if kind == "moe_eager":
        notes.append("MoE layers that the host launches kernel by kernel are estimated worst, mostly as too fast")
        if switches.ep and gpu.blackwell_or_newer:
            notes.append(f"EP overlap without CUDA graphs on {gpu.name}: the host may well be slower than the GPU")
    if switches.tp or switches.ep:
        notes.append("what an overlap saves was measured for EP overlap alone; no pair of runs measures the others")
    return tuple(notes)
