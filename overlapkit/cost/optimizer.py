"""Time of the optimizer's step on one rank."""

from __future__ import annotations

from overlapkit.cost.attention import memory_seconds
from overlapkit.cost.constants import Constants
from overlapkit.cost.hardware import Hardware
from overlapkit.volume.model import Model
from overlapkit.volume.parameters import Parameters, blocks_of


def held_parameters(model: Model, found: Parameters, stage: int) -> tuple[int, int]:
    """Elements on one rank of a stage: those reduced over DP, those reduced over expert DP."""
    dense = expert = 0
    for chunk in model.stages[stage]:
        for count, block in blocks_of(found, chunk):
            dense += count * block.plain[0]
            expert += count * block.plain[1]
    return dense, expert


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
