"""What Transformer Engine makes of a userbuffers configuration.

A configuration maps a layer (``qkv_fprop``, …) to options (``method``, ``num_sm``, …); layers that it does not name
get Transformer Engine's own. Source: transformer-engine pytorch/module/base.py initialize_ub.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlapkit.userbuffers.layers import COLUMN_PARALLEL_DGRAD, DEFAULT_METHODS, ROW_PARALLEL_FORWARD

__all__ = ["DEFAULT_METHODS", "Userbuffers", "dgrads_not_bulk", "fp8_reduce_scatters", "methods"]

Userbuffers = Mapping[str, Mapping[str, Any]]


def methods(userbuffers: Userbuffers | None) -> dict[str, Any]:
    """Layer -> how it communicates, for every layer that gets a buffer."""
    named = {layer: entry.get("method", DEFAULT_METHODS.get(layer)) for layer, entry in (userbuffers or {}).items()}
    return {**DEFAULT_METHODS, **named}


def fp8_reduce_scatters(userbuffers: Userbuffers | None, *, rs_dgrad: bool) -> tuple[str, ...]:
    """The layers whose reduce-scatter gets a buffer of one byte per element while the GEMMs are FP8.

    Transformer Engine heeds ``fp8_buf`` for the layers that its own defaults pipeline, whatever their method is here,
    and for dgrad layers that are pipelined. A dgrad layer reduces only with ``tp_comm_overlap_rs_dgrad``; without, its
    pipeline buffer serves the bulk all-gather.
    """
    chosen = methods(userbuffers)
    pipelined = tuple(layer for layer in COLUMN_PARALLEL_DGRAD if rs_dgrad and chosen[layer] == "pipeline")
    layers = ROW_PARALLEL_FORWARD + pipelined
    return tuple(layer for layer in layers if (userbuffers or {}).get(layer, {}).get("fp8_buf"))


def dgrads_not_bulk(userbuffers: Userbuffers | None) -> tuple[str, ...]:
    """The dgrad layers that take the weight gradient's role as the reduce-scatter."""
    chosen = methods(userbuffers)
    return tuple(layer for layer in COLUMN_PARALLEL_DGRAD if chosen[layer] != "bulk")
