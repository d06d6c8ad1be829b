"""Time of the optimizer's step on one rank."""

from __future__ import annotations

from itertools import chain

from overlapkit.cost.attention import memory_seconds
from overlapkit.cost.constants import Constants
from overlapkit.cost.hardware import Hardware
from overlapkit.volume.model import Model
from overlapkit.volume.parameters import Parameters, blocks_of
from overlapkit.volume.stages import Chunk


def held_parameters(model: Model, found: Parameters, stage: int) -> tuple[int, int]:
    """Elements on one rank of a stage: those reduced over DP, those reduced over expert DP."""
    chunks = model.stages[stage]
    moe = chunks[0].moe if len(chunks) == 1 else tuple(chain.from_iterable(chunk.moe for chunk in chunks))
    whole = Chunk(0, moe, embedding=chunks[0].embedding, output=chunks[-1].output)
    blocks = blocks_of(found, whole)
    return sum(n * block.plain[0] for n, block in blocks), sum(n * block.plain[1] for n, block in blocks)


def updated_parameters(model: Model, dense: int, expert: int) -> float:
    """Elements that a rank updates: its share with a distributed optimizer or FSDP, else all that it holds."""
    if not (model.dist_opt or model.fsdp):
        return float(dense + expert)
    ranks = model.mesh.dp * model.mesh.cp / model.instances
    return dense / ranks + expert / max(model.expert_dp / model.instances, 1)


def optimizer_seconds(hardware: Hardware, constants: Constants, model: Model, dense: int, expert: int) -> float:
    """Adam's traffic for what the rank updates, two passes over its gradients (norm, scaling), and a fixed part."""
    updated = memory_seconds(hardware, updated_parameters(model, dense, expert) * constants.optimizer_bytes)
    gradients = float((dense + expert) * model.grad_width * 2)
    if model.fsdp:
        gradients = updated_parameters(model, dense, expert) * model.grad_width * 2
    return updated + memory_seconds(hardware, gradients) + constants.step_s
