"""Times of the attention core and of memory-bound kernels."""

from __future__ import annotations

from math import hypot
from typing import NamedTuple

from overlapkit.cost.constants import Constants
from overlapkit.cost.hardware import Hardware

# Passes over the scores that unfused attention makes beside its GEMMs: scale, mask, softmax and dropout, in halves of a
# read or write. Counted from Megatron-Core's DotProductAttention.
_SCORE_PASSES_FORWARD, _SCORE_PASSES_BACKWARD = 4.5, 6.5
_NARROW_HEAD = 64  # channels
_TILE = 128  # keys that fused attention computes together: a window reaches into one tile more


class Core(NamedTuple):
    """Seconds of one layer and microbatch."""

    forward: float
    backward: float


def memory_seconds(hardware: Hardware, nbytes: float, kernels: float = 1.0) -> float:
    """Seconds of memory-bound kernels that move ``nbytes`` to and from HBM: at its bandwidth, and a part per kernel."""
    return nbytes / hardware.memory_bytes_per_s + kernels * hardware.kernel_s


def fused_attention(
    hardware: Hardware,
    constants: Constants,
    *,
    sequences: float,
    length: float,
    heads: float,
    channels: float,
    short_windows: float,
    window: int,
) -> Core:
    """Causal attention of ``sequences`` of ``length`` tokens: 2 GEMMs forward, 5 backward, half of the scores.

    Source: FlashAttention-2 (Dao 2023), whose backward pass makes the scores again; the rate rises with the length.
    ``short_windows`` is the share of layers whose attention looks back no further than ``window`` tokens.
    """
    rate = hardware.attention_efficiency * length / (length + hardware.attention_half_length)
    if channels <= _NARROW_HEAD:
        rate *= hardware.narrow_head
    flops = 2.0 * sequences * heads * channels * length * length
    forward = flops / (hardware.bf16_flops_per_s * rate)
    forward *= 1 - short_windows + short_windows * min(1.0, 2 * (window + _TILE) / length)
    return Core(forward, forward * 2.5 / constants.attention_backward_efficiency)


def unfused_attention(
    hardware: Hardware, constants: Constants, *, sequences: float, length: float, heads: float, channels: float
) -> Core:
    """Attention that writes its scores out: batched GEMMs over all of them, then passes over what they wrote.

    Source: megatron-core transformer/dot_product_attention.py; the two GEMMs of the forward pass are four backward.
    """
    scores = sequences * heads * length * length
    score_bytes = 2.0 * scores
    flops = 4.0 * scores * channels
    products = hypot(
        flops / (hardware.bf16_flops_per_s * constants.batched_gemm_efficiency),
        2 * score_bytes / hardware.memory_bytes_per_s,
    )
    products += 2 * hardware.kernel_s
    return Core(
        products + memory_seconds(hardware, score_bytes * _SCORE_PASSES_FORWARD, 3),
        2 * products + memory_seconds(hardware, score_bytes * _SCORE_PASSES_BACKWARD, 3),
    )
