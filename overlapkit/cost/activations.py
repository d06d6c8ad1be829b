"""Activations that a microbatch leaves on a rank until its backward pass: bytes per layer, and what goes with them.

Counted are the tensors that autograd keeps, by what reads them backward. With layers that are not fused, biases,
dropout and 16-bit types the sum is that of Korthikanti et al. 2022 (arXiv 2205.05198): s·b·h·(10 + 24/t + 5·a·s/(h·t))
without sequence parallelism, all of it over t with it.
"""

from __future__ import annotations

from typing import NamedTuple

from overlapkit.cost.kernels import Kernels
from overlapkit.facts import Facts
from overlapkit.volume.ep import dispatched_rows
from overlapkit.volume.model import Experts, Model

# Bytes per score of unfused attention: probabilities in 16 bits; with dropout its mask, and what it leaves of them.
_SCORES, _SCORES_WITH_DROPOUT = 2, 5
_STATISTICS = 4  # bytes per row and head that fused attention keeps
_ROUTER = 8  # bytes per token and expert: logits and probabilities in FP32


class Widths(NamedTuple):
    """Bytes per element of an activation and of one that is kept for a GEMM alone; of a dropout's mask, 0 without."""

    kept: float
    gemm_input: float
    mask: float


class Kept(NamedTuple):
    """Bytes of one microbatch on one rank.

    ``dense`` and ``moe`` are what a layer leaves, ``checkpoint`` what one does instead that ``recompute_method=block``
    takes, ``again`` what recomputation makes anew in the backward pass, ``gradients`` those of one layer while it runs
    backward, ``ends`` the final norm, ``logits`` the loss's.
    """

    dense: float
    moe: float
    checkpoint: float
    again: float
    gradients: float
    ends: float
    logits: float


def widths_of(facts: Facts, model: Model) -> Widths:
    """What the precision makes of activations.

    Source: Transformer Engine keeps the inputs of its GEMMs as it quantized them: FP8 1 byte, MXFP8 and NVFP4 with a
    scale per 32 or 16 elements.
    """
    precision = facts.precision
    dropout = facts.recipe.others.get("model", {}).get("hidden_dropout")
    gemm_input = float(model.width)
    if precision.fp4:
        gemm_input = 0.5 + 1 / 16
    elif precision.fp8:
        gemm_input = 1 + (1 / 32 if precision.fp8_recipe == "mxfp8" else 0.0)
    return Widths(float(model.width), gemm_input, 1.0 if dropout else 0.0)


def kept_of(model: Model, kernels: Kernels, widths: Widths) -> Kept:
    """What a microbatch leaves on a rank, by layer, after recomputation."""
    attention = _attention(model, kernels, widths) + _norm(model, widths)
    dropped = _dropped_of_attention(model, kernels, widths)
    mlp, modules, full = _mlp(model, model.ffn, widths), model.recompute.modules, model.recompute.full
    dense, moe = attention + mlp, 0.0
    dropped_mlp, dropped_moe = mlp if "mlp" in modules else 0.0, 0.0
    if model.experts is not None:
        whole, dropped_moe = _experts(model, model.experts, widths)
        moe = attention + whole
    again, checkpoint = dropped + max(dropped_mlp, dropped_moe), _checkpoint(model)
    if full is not None:
        again = max(dense, moe) * (model.recompute.layers if full == "uniform" else 1)
    everywhere = full == "uniform"
    return Kept(
        dense=checkpoint if everywhere else dense - dropped - dropped_mlp,
        moe=checkpoint if everywhere else moe - dropped - dropped_moe,
        checkpoint=checkpoint,
        again=again,
        gradients=_gradients(model),
        ends=_norm(model, widths),
        logits=model.tokens * (model.vocabulary / model.mesh.tp) * _LOSS[model.cross_entropy],
    )


# Bytes per logit: in 16 bits, and FP32 probabilities beside them unless Transformer Engine writes gradients in place.
_LOSS = {"te": 2, "native": 6, "unfused": 6}


def _checkpoint(model: Model) -> float:
    """A layer's input, which full recomputation keeps of every layer, or of the first of several."""
    recompute = model.recompute
    tokens = model.tokens / model.mesh.tp if recompute.distributed else model.local_tokens
    each = tokens * model.hidden * model.width
    return each / recompute.layers if recompute.full == "uniform" else each


def _norm(model: Model, widths: Widths) -> float:
    """A norm's input, which is the residual stream, its output, which a GEMM reads, and the mask of the dropout."""
    return model.local_tokens * model.hidden * (widths.kept + widths.gemm_input + widths.mask)


def _attention(model: Model, kernels: Kernels, widths: Widths) -> float:
    """Norm, queries, keys and values, the output, and what the core keeps."""
    tp, tokens = model.mesh.tp, model.tokens
    heads, latent = model.heads / tp, model.latent_attention
    if latent is None:
        keys = max(model.kv_heads / tp, 1)
        inner = (heads + 2 * keys) * model.head_dim
        if not model.positions:  # turned queries and keys are new, and values keep the projection's output alive
            inner += (heads + keys) * model.head_dim
        outputs, latents = heads * model.head_dim, 0.0
    else:
        inner = heads * (2 * latent.query + latent.v_head_dim)
        outputs = heads * latent.v_head_dim
        latents = 2.0 * (latent.kv_lora_rank + (latent.q_lora_rank or 0)) + latent.qk_pos_emb_head_dim
    quantized = widths.gemm_input if widths.gemm_input < widths.kept else 0.0  # beside what the core keeps
    around = tokens * ((inner + outputs + latents) * widths.kept + outputs * quantized)
    return _norm(model, widths) + around + _core(model, kernels, widths)


def _core(model: Model, kernels: Kernels, widths: Widths) -> float:
    heads = model.heads / model.mesh.tp
    if kernels.unfused_attention:
        length = model.full_tokens / max(model.sequences, 1)
        each = _SCORES_WITH_DROPOUT if widths.mask else _SCORES
        return each * heads * model.tokens * length
    return _STATISTICS * heads * model.tokens


def _dropped_of_attention(model: Model, kernels: Kernels, widths: Widths) -> float:
    """What selective recomputation does not keep of it."""
    modules, latent = model.recompute.modules, model.latent_attention
    dropped = _core(model, kernels, widths) if "core_attn" in modules else 0.0
    if "mla_up_proj" in modules and latent is not None:
        dropped += model.tokens * model.heads / model.mesh.tp * (2 * latent.query + latent.v_head_dim) * widths.kept
    return dropped


def _mlp(model: Model, ffn: int, widths: Widths) -> float:
    """The first linear's output, which the activation reads, and the activation's, which the second reads."""
    inner = ffn / model.mesh.tp
    return model.tokens * inner * ((2 if model.gated else 1) * widths.kept + widths.gemm_input)


def _experts(model: Model, experts: Experts, widths: Widths) -> tuple[float, float]:
    """Router, the balanced share of rows that reach the rank's experts, shared expert; and what is not kept of it."""
    mesh, modules = model.mesh, model.recompute.modules
    rows = dispatched_rows(model, experts)[0] * mesh.etp
    inner, width = experts.ffn / mesh.etp, experts.latent or model.hidden
    router = model.local_tokens * experts.number * _ROUTER
    activated = rows * inner * widths.gemm_input
    routed = rows * (width * widths.gemm_input + (2 if model.gated else 1) * inner * widths.kept) + activated
    shared = _mlp(model, experts.shared_ffn, widths) if experts.shared_ffn else 0.0
    whole = router + routed + shared
    norm = model.local_tokens * model.hidden * widths.gemm_input if "layernorm" in modules else 0.0
    if "moe" in modules:
        return whole, whole
    return whole, (activated if "moe_act" in modules else 0.0) + (shared if "shared_experts" in modules else 0.0) + norm


def _gradients(model: Model) -> float:
    """Gradients that a layer has at the same time: of the residual stream, and of the widest output of a GEMM."""
    inner = model.tokens * (2 if model.gated else 1) * model.ffn / model.mesh.tp
    if model.experts is not None:
        rows = dispatched_rows(model, model.experts)[0] * model.mesh.etp
        gates = (2 if model.gated else 1) * model.experts.ffn / model.mesh.etp
        inner = max(inner, rows * (gates + (model.experts.latent or model.hidden)))
    return (model.tokens * model.hidden + inner) * model.width
