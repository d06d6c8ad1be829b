"""Expert parallelism: tokens to their experts and back, routing metadata, auxiliary losses and expert biases.

Counts are per MoE layer and microbatch. Rows of an all-to-all that depend on the routing are the balanced expectation.
Source: megatron-core transformer/moe/token_dispatcher.py, router.py and moe_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from overlapkit.volume.model import WIDTHS, Experts, Model
from overlapkit.volume.placement import EP, EXPERT_TP, EXPERT_TP_EP, TP_CP, TP_DP_CP
from overlapkit.volume.rows import Call
from overlapkit.volume.tp import layers_of, recomputed


def calls(model: Model, stage: int) -> Iterator[Call]:
    """The MoE layers' calls of one rank of a stage."""
    chunks, experts = model.stages[stage], model.experts
    layers = layers_of(chunks).moe
    if experts is None or not layers:
        return
    again = recomputed(model, chunks).moe + layers * ("moe" in model.recompute.modules)
    dispatch = {"allgather": _allgather, "alltoall": _alltoall, "flex": _flex}[experts.dispatcher]
    m = model.microbatches
    for phase, count in (("forward", layers * m), ("recompute", again * m), ("backward", layers * m)):
        yield from dispatch(model, experts, phase, count)
    # A checkpoint's first run keeps no gradients, and Megatron-Core computes no auxiliary loss without them.
    yield from _aux_losses(model, experts, "forward", (layers - again) * m)
    yield from _aux_losses(model, experts, "recompute", again * m)
    if experts.bias:
        counted = layers * experts.number
        yield Call("finalize", TP_DP_CP, "all_reduce", model.dtype, 1, counted * model.width)


def _allgather(model: Model, experts: Experts, phase: str, count: int) -> Iterator[Call]:
    """Every rank of expert TP times EP gets all tokens; the outputs are scattered in the precision of the router."""
    ranks = model.mesh.etp * model.mesh.ep
    tokens, dtype, probs = model.local_tokens * ranks, model.dtype, experts.probs_dtype
    hidden = tokens * (experts.latent or model.hidden)
    if phase != "backward":
        yield Call(phase, EXPERT_TP_EP, "all_gather", "bool", count, tokens * experts.number)
        yield Call(phase, EXPERT_TP_EP, "all_gather", probs, count, tokens * experts.number * WIDTHS[probs])
        yield Call(phase, EXPERT_TP_EP, "all_gather", dtype, count, hidden * model.width)
        yield Call(phase, EXPERT_TP_EP, "reduce_scatter", probs, count, hidden * WIDTHS[probs])
        return
    yield Call(phase, EXPERT_TP_EP, "all_gather", probs, count, hidden * WIDTHS[probs])
    yield Call(phase, EXPERT_TP_EP, "reduce_scatter", dtype, count, hidden * model.width)
    yield Call(phase, EXPERT_TP_EP, "reduce_scatter", probs, count, tokens * experts.number * WIDTHS[probs])


def _alltoall(model: Model, experts: Experts, phase: str, count: int) -> Iterator[Call]:
    """Tokens and their probabilities to the experts' ranks, then over expert TP; the outputs the same way back."""
    rows, fixed = dispatched_rows(model, experts)
    ep, etp, dtype, probs = model.mesh.ep, model.mesh.etp, model.dtype, experts.probs_dtype
    width = experts.latent or model.hidden
    hidden, weights = rows * width * model.width, rows * WIDTHS[probs]
    dropped = experts.capacity_factor is not None and not fixed
    exact = fixed or (ep == 1 and not dropped)
    if phase != "backward" and not fixed:
        yield Call(phase, EXPERT_TP_EP, "all_gather", "int64", count, etp * ep * experts.number * 8)
    yield Call(phase, EP, "all_to_all", dtype, 2 * count, hidden, exact=exact)
    yield Call(phase, EP, "all_to_all", probs, count, weights, exact=exact)
    gather, scatter = ("all_gather", "reduce_scatter") if fixed else ("all_gather_list", "reduce_scatter_list")
    outputs = etp * rows * width * WIDTHS[probs]  # go back in the router's precision
    if phase != "backward":
        yield Call(phase, EXPERT_TP, gather, dtype, count, etp * hidden, exact=exact)
        yield Call(phase, EXPERT_TP, gather, probs, count, etp * weights, exact=exact)
        yield Call(phase, EXPERT_TP, scatter, probs, count, outputs, exact=exact)
    else:
        yield Call(phase, EXPERT_TP, scatter, dtype, count, etp * hidden, exact=exact)
        yield Call(phase, EXPERT_TP, scatter, probs, count, etp * weights, exact=exact)
        yield Call(phase, EXPERT_TP, gather, probs, count, outputs, exact=exact)


def _flex(model: Model, experts: Experts, phase: str, count: int) -> Iterator[Call]:
    """DeepEP and HybridEP move tokens without NCCL: the payload, before copies for experts of one rank are merged."""
    payload = model.local_tokens * experts.topk * (experts.latent or model.hidden) * model.width
    calls_each = 2 * count  # dispatch and combine, whose gradients are combine and dispatch
    yield Call(phase, EXPERT_TP_EP, "all_to_all", model.dtype, calls_each, payload, False, False, "source")


def dispatched_rows(model: Model, experts: Experts) -> tuple[int, bool]:
    """Rows that a rank sends to the experts of a layer, and whether that is fixed whatever the routing.

    Padded to capacity: experts times ceil(tokens · topk / experts · factor); else tokens times topk.
    """
    rows = model.local_tokens * experts.topk
    if experts.capacity_factor is None or not experts.padded:
        return rows, False
    return experts.number * ceil(rows / experts.number * experts.capacity_factor), True


def _aux_losses(model: Model, experts: Experts, phase: str, count: int) -> Iterator[Call]:
    """Tokens per expert, summed over the ranks that share a sequence, or with ``global_aux_loss`` over all replicas."""
    for kind in experts.aux_losses:
        group = TP_DP_CP if kind == "global_aux_loss" else TP_CP
        sequences = model.sequences if kind == "seq_aux_loss" else 1
        yield Call(phase, group, "all_reduce", "int64", count, experts.number * sequences * 8)
