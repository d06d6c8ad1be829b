"""Model FLOPs: what the model needs, not what the GPU does."""

from __future__ import annotations

from overlapkit.cost.kernels import Kernels
from overlapkit.volume.model import Model


def model_flops_per_token(model: Model, kernels: Kernels) -> float:
    """FLOPs of forward and backward pass per token: 6 per parameter that a token meets, and causal attention by half,
    a window by its tokens.

    Embedding look-ups, recomputation and norms are not counted. Source: megatron-core's convention in
    Megatron-LM training/training.py num_floating_point_operations.
    """
    layers = [moe for chunks in model.stages for chunk in chunks for moe in chunk.moe]
    predicted = model.mtp_layers
    moe_layers, attentions = sum(layers), len(layers)
    weights = attentions * _attention(model) + (attentions - moe_layers) * _mlp(model, model.ffn)
    weights += moe_layers * _experts(model) if moe_layers else 0.0
    weights += predicted * 2 * model.hidden * model.hidden
    weights += model.vocabulary * model.hidden * (1 + predicted)
    length = model.full_tokens / max(model.sequences, 1)
    latent = model.latent_attention
    channels = float(model.head_dim)
    if latent is not None:
        channels = (latent.query + latent.v_head_dim) / 2
    seen = (1 - kernels.short_windows) * length + kernels.short_windows * min(2.0 * kernels.window, length)
    scores = attentions * 2 * seen * model.heads * channels
    return 6 * weights + 3 * scores


def _attention(model: Model) -> float:
    latent, heads, hidden = model.latent_attention, model.heads, model.hidden
    if latent is None:
        return hidden * ((3 if model.gated_attention else 2) * heads + 2 * model.kv_heads) * model.head_dim
    query = latent.query
    rank = latent.q_lora_rank
    queries = hidden * heads * query if rank is None else rank * (hidden + heads * query)
    keys = hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
    keys += latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim)
    return queries + keys + heads * latent.v_head_dim * hidden


def _mlp(model: Model, ffn: int) -> float:
    return (3 if model.gated else 2) * model.hidden * ffn


def _experts(model: Model) -> float:
    experts = model.experts
    assert experts is not None
    width = experts.latent or model.hidden
    routed = experts.topk * (3 if model.gated else 2) * width * experts.ffn
    shared = _mlp(model, experts.shared_ffn) if experts.shared_ffn else 0.0
    around = 2 * model.hidden * width if experts.latent else 0.0
    return routed + shared + around + experts.number * model.hidden
