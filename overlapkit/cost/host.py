"""Time of the host: launching kernels, and waiting for the routing of dropless MoE layers."""

from __future__ import annotations

from typing import NamedTuple

from overlapkit.cost.constants import Constants
from overlapkit.cost.kernels import Kernels
from overlapkit.volume.model import Model


class Host(NamedTuple):
    """Seconds of one microbatch on one stage; ``sync`` of a forward and backward pass together."""

    forward: float
    backward: float
    sync: float


def host_of(constants: Constants, model: Model, kernels: Kernels, *, layers: int, moe_layers: int) -> Host:
    """Of ``layers`` layers, each with two sublayers, ``moe_layers`` of them with experts.

    CUDA graphs of parts of a layer leave a share of the launches, those of a whole iteration none.
    """
    c = constants
    each = (c.host_unfused_s if kernels.unfused_attention else c.host_s) + (c.host_tp_s if model.mesh.tp > 1 else 0.0)
    flex = model.experts is not None and model.experts.dispatcher == "flex"
    moe = c.host_moe_flex if flex else c.host_moe_all_to_all
    left = {"none": 1.0, "parts": c.host_captured, "all": 0.0}[kernels.captured]
    forward = each * left * (2 * layers - moe_layers + moe_layers * moe)
    again = c.host_backward_recompute if model.recompute.full is not None else 1.0
    return Host(forward, forward * c.host_backward * again, moe_layers * _sync(c, model, kernels, flex=flex))


def _sync(c: Constants, model: Model, kernels: Kernels, *, flex: bool) -> float:
    """Only a dropless layer's sizes come from the GPU; what is captured whole cannot ask for them."""
    experts = model.experts
    if kernels.captured == "all" or experts is None or (experts.capacity_factor is not None and experts.padded):
        return 0.0
    return c.sync_flex_s if flex else c.sync_all_to_all_s
