"""Facts + Plan + Volume -> the memory of the rank that needs most of it: what stands, and the microbatches in flight.

Per parameter, with BF16 parameters and FP32 gradients: 18 bytes, or with the distributed optimizer 6 + 12 / d over d
ranks (megatron-core distributed optimizer's documentation). Activations: :mod:`overlapkit.cost.activations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

from overlapkit.cost.activations import Kept, kept_of, widths_of
from overlapkit.cost.kernels import kernels_of
from overlapkit.cost.optimizer import held_parameters
from overlapkit.data import load_yaml
from overlapkit.facts import Facts
from overlapkit.plan import Plan
from overlapkit.volume.model import Model
from overlapkit.volume.parameters import Parameters
from overlapkit.volume.predict import Volume
from overlapkit.volume.tp import layers_of

_WIDTHS = {"32": 4, "16": 2, "8": 1}  # bits in a dtype's name -> bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on a rank of the pipeline stage that needs most. ``reserved``: the driver, NCCL, workspaces, fragments."""

    stage: int
    parameters: int
    gradients: int
    optimizer_states: int
    activations: int
    logits: int
    userbuffers: int
    reserved: int

    @property
    def total(self) -> int:
        states = self.parameters + self.gradients + self.optimizer_states
        return states + self.activations + self.logits + self.userbuffers + self.reserved

    def to_dict(self) -> dict[str, int]:
        return {**{name: getattr(self, name) for name in self.__slots__}, "total": self.total}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConstants:
    """Of ``memory`` in ``data/cost.yaml``. ``error``: how far beyond its estimate a rank may go, as a share of it."""

    error: float
    reserved_bytes: float


class Storage(NamedTuple):
    """Bytes per parameter: of a layer's weight, of any other parameter, of a gradient, of the optimizer's states."""

    weight: float
    plain: float
    gradient: float
    states: float


class Sharing(NamedTuple):
    """Ranks that share the optimizer's states of dense and of experts' parameters; with FSDP all that stands."""

    dense: float
    expert: float
    everything: bool


class Held(NamedTuple):
    """What a stage holds: elements of dense and experts' parameters, those of them in embedding and output layer.

    ``layers`` are its dense and MoE layers, ``checkpointed`` those of a chunk that ``recompute_method=block`` takes.
    """

    stage: int
    dense: int
    expert: int
    matrices: int
    layers: tuple[int, int]
    checkpointed: tuple[int, int]
    output: bool
    predicted: int


class StageBytes(NamedTuple):
    """The parts of ``Memory`` on one stage."""

    parameters: float
    gradients: float
    optimizer_states: float
    activations: float
    logits: float
    userbuffers: float
    reserved: float


@lru_cache(maxsize=1)
def memory_constants() -> MemoryConstants:
    """Those that ship with the package."""
    entries = load_yaml("cost.yaml")["memory"]
    return MemoryConstants(**{name: float(entries[name]["value"]) for name in MemoryConstants.__dataclass_fields__})


def memory_of(facts: Facts, plan: Plan, volume: Volume) -> Memory:
    """The memory of the fullest stage. ``volume`` is ``predict(facts, plan, approximate=True)``.

    Activations of MoE layers are those of balanced routing.
    """
    model, settings = volume.model, plan.settings
    report = facts.userbuffers_report if settings["model.tp_comm_overlap"] else None
    kept = kept_of(model, kernels_of(facts), widths_of(facts, model))
    storage, sharing = storage_of(facts), sharing_of(model)
    mesh, overlaps = model.mesh, bool(settings["model.overlap_moe_expert_parallel_comm"])
    vp = (mesh.vp or 1) if mesh.pp > 1 else 1
    parts = []
    for held in held_of(model, volume.parameters):
        waiting = microbatches_in_flight(
            mesh.pp, vp, model.microbatches, held.stage, facts.microbatch_group, ep_overlap=overlaps
        )
        found = stage_bytes(
            held,
            kept,
            storage,
            sharing,
            microbatches=waiting,
            userbuffers=(report.bytes or 0) if report is not None else 0,
        )
        parts.append((sum(found), held.stage, found))
    _, stage, fullest = max(parts)
    return Memory(stage=stage, **{name: ceil(size) for name, size in fullest._asdict().items()})


def capacity_of(facts: Facts) -> float | None:
    """Bytes of a GPU's memory, whose GB are 2^30; None where the GPU or its memory is not known."""
    size = facts.gpu.hbm_gb if facts.gpu is not None else None
    return None if size is None else size * 2.0**30


def most_allowed(capacity: float) -> float:
    """What an estimate may come to, so that a rank stays below ``capacity`` even where it is too low by its error."""
    return capacity / (1 + memory_constants().error)


def storage_of(facts: Facts) -> Storage:
    """Bytes per parameter.

    Quantized weights are kept by rows and by columns, beside the BF16 ones unless the parameters themselves are FP8.
    Source: Transformer Engine pytorch/module/base.py get_weight_workspace; megatron-core optimizer/optimizer_config.py.
    """
    precision, optimizer = facts.precision, facts.recipe.others.get("optimizer", {})
    plain = float(precision.param_bytes)
    weight = plain
    if precision.fp4:
        weight += 2 * (0.5 + 1 / 16)
    elif precision.fp8:
        weight = 2.0 if precision.fp8_param_gather else weight + 2.0
    moments = 1 if facts.recipe.optimizer.optimizer == "sgd" else 2
    states = 4.0 * moments + (0.0 if precision.compute == "fp32" else 4.0)
    if optimizer.get("use_precision_aware_optimizer"):
        names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        states = float(sum(_width(optimizer.get(name)) for name in names))
    if optimizer.get("optimizer_cpu_offload"):
        states *= 1 - float(optimizer.get("optimizer_offload_fraction", 1.0))
    return Storage(weight, plain, float(precision.grad_bytes), states)


def _width(dtype: Any) -> int:
    """Bytes of a dtype by its name, such as bf16 or torch.float32; FP32 where none is given."""
    return next((width for bits, width in _WIDTHS.items() if bits in str(dtype)), 4)


def sharing_of(model: Model) -> Sharing:
    """Who shares states: with a distributed optimizer the data-parallel ranks, CP's among them, of one instance."""
    if not (model.dist_opt or model.fsdp):
        return Sharing(1.0, 1.0, False)
    ranks = model.mesh.dp * model.mesh.cp / model.instances
    return Sharing(ranks, max(model.expert_dp / model.instances, 1.0), model.fsdp)


def held_of(model: Model, found: Parameters) -> tuple[Held, ...]:
    """The different stages, of those that are alike the first, which has most microbatches in flight."""
    different: dict[Any, Held] = {}
    for stage, chunks in enumerate(model.stages):
        dense, expert = held_parameters(model, found, stage)
        layers, ends = layers_of(chunks), chunks[0].embedding + chunks[-1].output
        taken = [chunk.moe[: model.recompute.layers] for chunk in chunks if model.recompute.full == "block"]
        held = Held(
            stage=stage,
            dense=dense,
            expert=expert,
            matrices=min(ends * found.matrix, dense),
            layers=(layers.dense, layers.moe),
            checkpointed=(sum(len(part) - sum(part) for part in taken), sum(map(sum, taken))),
            output=chunks[-1].output,
            predicted=model.mtp_layers if chunks[-1].output else 0,
        )
        different.setdefault(held._replace(stage=0), held)
    return tuple(different.values())


def microbatches_in_flight(pp: int, vp: int, m: int, stage: int, group: int, *, ep_overlap: bool) -> float:
    """Microbatches whose activations a stage holds at most; those of single chunks count by their share.

    1F1B: PP - stage. Interleaved: 2 (PP - stage - 1) + (VP - 1) · group warm-up passes of a chunk and one that runs:
    on the first stage PP · (1 + (PP - 1) / (PP · VP)) microbatches. EP overlap runs one more forward pass before the
    first backward pass. Source: megatron-core pipeline_parallel/schedules.py get_pp_rank_microbatches.
    """
    if vp == 1:
        return float(min(m, pp - stage + ep_overlap))
    return min(m * vp, 2 * (pp - stage - 1) + (vp - 1) * group + 1 + ep_overlap) / vp


def stage_bytes(
    held: Held,
    kept: Kept,
    storage: Storage,
    sharing: Sharing,
    *,
    microbatches: float,
    userbuffers: float,
) -> StageBytes:
    """The memory of one rank of a stage with this many microbatches in flight."""
    elements = held.dense + held.expert
    weights = (elements - held.matrices) * storage.weight + held.matrices * storage.plain
    gradients = elements * storage.gradient
    owned = held.dense / sharing.dense + held.expert / sharing.expert
    dense, moe = held.layers
    if sharing.everything:  # and the layer that runs and the next one are whole
        layers, shard = max(dense + moe, 1), owned / max(elements, 1)
        weights, gradients = weights * (shard + min(2 / layers, 1)), gradients * (shard + min(1 / layers, 1))
    checkpointed = held.checkpointed
    layers_kept = (dense - checkpointed[0]) * kept.dense + (moe - checkpointed[1]) * kept.moe
    activations = microbatches * (layers_kept + sum(checkpointed) * kept.checkpoint) + kept.again + kept.gradients
    logits = 0.0
    if held.output:  # its microbatches do not wait
        activations += kept.ends + held.predicted * max(kept.dense, kept.moe)
        logits = kept.logits * (1 + held.predicted)
    reserved = memory_constants().reserved_bytes
    return StageBytes(weights, gradients, owned * storage.states, activations, logits, userbuffers, reserved)
