"""Compute times of the kinds of sublayers: attention, dense MLP, MoE; of one microbatch on one rank.

Memory-bound traffic is counted in passes over activations of 2 bytes: norm and residual 7 per sublayer, rotary
embedding, biases and layout 4 over the heads, activation one over each input and the output of the MLP's middle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from overlapkit.cost.attention import fused_attention, memory_seconds, unfused_attention
from overlapkit.cost.constants import Constants
from overlapkit.cost.gemm import Linear, experts_linear, gemm_seconds, linear
from overlapkit.cost.hardware import Hardware
from overlapkit.cost.kernels import Kernels
from overlapkit.volume.ep import dispatched_rows
from overlapkit.volume.model import Experts, Model

_NORM_AND_RESIDUAL, _NORM_KERNELS = 7.0, 4.0  # passes over the hidden states; kernels
_NORM = 4.0  # of them the norm's
_UNFUSED_DROPOUT = 3.0  # passes that layers without fused kernels add
# Kernels per sublayer, forward and backward together, beyond the norm's.
_ATTENTION_KERNELS, _LATENT_KERNELS, _UNFUSED_KERNELS, _MLP_KERNELS, _MOE_KERNELS = 8.0, 14.0, 5.0, 6.0, 24.0


class Seconds(NamedTuple):
    """Compute by kind."""

    gemm: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0

    @property
    def total(self) -> float:
        return self.gemm + self.attention + self.memory_bound

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        return Seconds(
            self.gemm + times * other.gemm,
            self.attention + times * other.attention,
            self.memory_bound + times * other.memory_bound,
        )


@dataclass(frozen=True, slots=True)
class Sublayer:
    """``again`` is what selective recomputation redoes backward; ``linears`` are those that TP communicates beside."""

    forward: Seconds
    backward: Seconds
    again: Seconds
    linears: tuple[Linear, ...]


def attention_sublayer(hardware: Hardware, constants: Constants, model: Model, kernels: Kernels) -> Sublayer:
    """Norm, projections (through the latent widths with MLA), rotary embedding and core.

    With CP each rank computes its share of the core. Source: megatron-core transformer/attention.py and
    multi_latent_attention.py.
    """
    tp, tokens, modules = model.mesh.tp, model.tokens, model.recompute.modules
    latent, heads = model.latent_attention, model.heads / tp
    linears: tuple[Linear, ...]
    if latent is None:
        queries = (2 if model.gated_attention else 1) * model.heads
        widths = (queries + 2 * model.kv_heads) * model.head_dim / tp
        channels, launched = float(model.head_dim), _ATTENTION_KERNELS
        linears = (
            _linear(hardware, model, "qkv", tokens, model.hidden, widths),
            _linear(hardware, model, "proj", tokens, heads * model.head_dim, model.hidden),
        )
        ups: tuple[Linear, ...] = ()
    else:
        query = latent.query
        widths, launched = heads * (2 * query + latent.v_head_dim), _LATENT_KERNELS
        channels = (query + latent.v_head_dim) / 2
        downs, ups = _latent_projections(hardware, model, query)
        proj = _linear(hardware, model, "proj", tokens, heads * latent.v_head_dim, model.hidden)
        linears = (*downs, *ups, proj)
    length = model.full_tokens / max(model.sequences, 1)
    if kernels.unfused_attention:
        core = unfused_attention(
            hardware, constants, sequences=model.sequences, length=length, heads=heads, channels=channels
        )
        launched += _UNFUSED_KERNELS
    else:
        core = fused_attention(
            hardware,
            constants,
            sequences=model.sequences,
            length=length,
            heads=heads,
            channels=channels,
            short_windows=kernels.short_windows,
            window=kernels.window,
        )
    forward_core, backward_core = core.forward / model.mesh.cp, core.backward / model.mesh.cp
    moved = _around(model, kernels) + 4 * tokens * widths * 2
    memory = _memory_bound(hardware, constants, moved, _NORM_KERNELS + launched)
    again = Seconds(
        gemm=sum(up.forward for up in ups) if "mla_up_proj" in modules else 0.0,
        attention=forward_core if "core_attn" in modules else 0.0,
        memory_bound=_norm_again(hardware, model),
    )
    return Sublayer(
        Seconds(_forward(linears), forward_core, memory[0]),
        Seconds(_backward(linears), backward_core, memory[1]),
        again,
        linears,
    )


def _latent_projections(hardware: Hardware, model: Model, query: int) -> tuple[tuple[Linear, ...], tuple[Linear, ...]]:
    """MLA's projections to the latent widths, which every TP rank makes whole, and up from them."""
    latent, heads, tokens = model.latent_attention, model.heads / model.mesh.tp, model.tokens
    assert latent is not None
    keys = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
    up_keys = heads * (latent.qk_head_dim + latent.v_head_dim)
    ups = [_linear(hardware, model, "kv_up", tokens, latent.kv_lora_rank, up_keys)]
    if latent.q_lora_rank is None:
        ups.append(_linear(hardware, model, "q", tokens, model.hidden, heads * query))
        return (_linear(hardware, model, "kv_down", tokens, model.hidden, keys),), tuple(ups)
    ups.append(_linear(hardware, model, "q_up", tokens, latent.q_lora_rank, heads * query))
    return (_linear(hardware, model, "down", tokens, model.hidden, latent.q_lora_rank + keys),), tuple(ups)


def mlp_sublayer(hardware: Hardware, constants: Constants, model: Model, kernels: Kernels) -> Sublayer:
    """Norm, two linears and the activation between them. Source: megatron-core transformer/mlp.py."""
    linears, moved = _mlp(hardware, model, model.ffn)
    memory = _memory_bound(hardware, constants, moved + _around(model, kernels), _NORM_KERNELS + _MLP_KERNELS)
    again = Seconds(memory_bound=_norm_again(hardware, model))
    if "mlp" in model.recompute.modules:
        again = again.plus(Seconds(_forward(linears), 0.0, memory_seconds(hardware, moved)))
    return Sublayer(
        Seconds(_forward(linears), 0.0, memory[0]), Seconds(_backward(linears), 0.0, memory[1]), again, linears
    )


def moe_sublayer(
    hardware: Hardware, constants: Constants, model: Model, experts: Experts, kernels: Kernels
) -> Sublayer:
    """Router, the rank's experts on their balanced share of tokens, shared expert. Routed experts have no TP calls.

    Source: megatron-core transformer/moe/moe_layer.py.
    """
    mesh, hidden, modules = model.mesh, model.hidden, model.recompute.modules
    local = max(experts.number // mesh.ep, 1)
    width = experts.latent or hidden
    rows = dispatched_rows(model, experts)[0] * mesh.etp
    gates = 2 if model.gated else 1
    inner = experts.ffn / mesh.etp
    grads = model.grad_width
    routed = (
        experts_linear(hardware.rate, "fc1", rows / local, width, gates * inner, local, grads, constants),
        experts_linear(hardware.rate, "fc2", rows / local, inner, width, local, grads, constants),
    )
    activation = (gates + 1) * rows * inner * 2
    permuted = constants.permute_passes * rows * width * 2
    moved = permuted * (constants.fused_permute if kernels.fused_experts else 1.0) + activation
    if model.biases:  # read and written over both outputs
        moved += 4 * rows * (gates * inner + width)
    shared: tuple[Linear, ...] = ()
    if experts.shared_ffn:
        shared, shared_moved = _mlp(hardware, model, experts.shared_ffn)
        moved += shared_moved
    latent = _latent_experts(hardware, model, experts)
    router = gemm_seconds(hardware.plain, model.local_tokens, experts.number, hidden)
    moved += _around(model, kernels, dropout=False)
    forward = _forward(routed) + _forward(shared) + _forward(latent) + router
    backward = _backward(routed) + _backward(shared) + _backward(latent) + 2 * router
    memory = _memory_bound(hardware, constants, moved, _NORM_KERNELS + _MOE_KERNELS)
    again = Seconds(memory_bound=_norm_again(hardware, model))
    if "moe" in modules:
        again = again.plus(Seconds(forward, 0.0, memory[0]))
    elif "moe_act" in modules:
        again = again.plus(Seconds(0.0, 0.0, memory_seconds(hardware, activation)))
    if "shared_experts" in modules and "moe" not in modules:
        again = again.plus(Seconds(_forward(shared)))
    return Sublayer(Seconds(forward, 0.0, memory[0]), Seconds(backward, 0.0, memory[1]), again, shared)


def _latent_experts(hardware: Hardware, model: Model, experts: Experts) -> tuple[Linear, ...]:
    if experts.latent is None:
        return ()
    tokens = model.local_tokens
    return (
        _linear(hardware, model, "latent_down", tokens, model.hidden, experts.latent),
        _linear(hardware, model, "latent_up", tokens, experts.latent, model.hidden),
    )


def output_layer(hardware: Hardware, model: Model) -> tuple[Seconds, Seconds]:
    """Logits in the plain precision and the cross-entropy's 5 passes over them: forward, backward.

    Of the passes a third is forward. Source: megatron-core models/common/language_module.
    """
    columns = model.vocabulary / model.mesh.tp
    logits = gemm_seconds(hardware.plain, model.tokens, columns, model.hidden)
    loss = memory_seconds(hardware, 5 * model.tokens * columns * 2, 6)
    return Seconds(logits, 0.0, loss / 3), Seconds(2 * logits, 0.0, 2 * loss / 3)


def embedding(hardware: Hardware, model: Model) -> tuple[Seconds, Seconds]:
    """Reading and writing the rows of the table, forward and backward."""
    each = memory_seconds(hardware, 2 * model.activation_bytes)
    return Seconds(memory_bound=each), Seconds(memory_bound=each)


def prediction_layer(hardware: Hardware, model: Model) -> Linear:
    """The projection of a multi-token-prediction layer, from its two inputs side by side."""
    return _linear(hardware, model, "eh_proj", model.tokens, 2 * model.hidden, model.hidden / model.mesh.tp)


def _linear(hardware: Hardware, model: Model, name: str, tokens: float, inputs: float, outputs: float) -> Linear:
    return linear(hardware.rate, name, tokens, inputs, outputs, model.grad_width)


def _mlp(hardware: Hardware, model: Model, ffn: int) -> tuple[tuple[Linear, ...], float]:
    """Its linears, and the bytes that its activation moves."""
    inner, gates = ffn / model.mesh.tp, 2 if model.gated else 1
    linears = (
        _linear(hardware, model, "fc1", model.tokens, model.hidden, gates * inner),
        _linear(hardware, model, "fc2", model.tokens, inner, model.hidden),
    )
    return linears, (gates + 1) * model.tokens * inner * 2


def _around(model: Model, kernels: Kernels, *, dropout: bool = True) -> float:
    """Bytes of norm, residual and, in layers without fused kernels, dropout."""
    passes = _NORM_AND_RESIDUAL + (_UNFUSED_DROPOUT if dropout and kernels.unfused_attention else 0.0)
    return passes * model.local_tokens * model.hidden * 2


def _norm_again(hardware: Hardware, model: Model) -> float:
    if "layernorm" not in model.recompute.modules:
        return 0.0
    return memory_seconds(hardware, _NORM * model.local_tokens * model.hidden * 2)


def _memory_bound(hardware: Hardware, constants: Constants, nbytes: float, kernels: float) -> tuple[float, float]:
    """Seconds forward and backward; ``kernels`` of both."""
    return (
        memory_seconds(hardware, nbytes, kernels / 2),
        memory_seconds(hardware, constants.memory_bound_backward * nbytes, kernels / 2),
    )


def _forward(linears: tuple[Linear, ...]) -> float:
    return sum(each.forward for each in linears)


def _backward(linears: tuple[Linear, ...]) -> float:
    return sum(each.dgrad + each.wgrad for each in linears)
