"""Tensor parallelism: the layers, embedding, output layer, loss, and gradients of what every TP rank holds whole.

A pair is a column-parallel projection and the row-parallel one behind it: attention is one, a dense MLP one, a shared
expert one; routed experts have none. Message bytes of each call: one microbatch's hidden states.
Source: megatron-core tensor_parallel/layers.py and mappings.py, transformer/transformer_block.py and moe/moe_layer.py,
distributed/finalize_model_grads.py; Transformer Engine pytorch/cross_entropy.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from overlapkit.volume.model import Model
from overlapkit.volume.parameters import Parameters, blocks_of
from overlapkit.volume.placement import TP
from overlapkit.volume.rows import Call
from overlapkit.volume.stages import Chunk

_SHARED_IN_USERBUFFERS = frozenset({"gather_input", "scatter_output", "gather_gradient"})


class Layers(NamedTuple):
    """How many layers of each kind."""

    dense: int
    moe: int

    @property
    def total(self) -> int:
        return self.dense + self.moe


def layers_of(chunks: tuple[Chunk, ...]) -> Layers:
    moe = sum(sum(chunk.moe) for chunk in chunks)
    return Layers(sum(len(chunk.moe) for chunk in chunks) - moe, moe)


def recomputed(model: Model, chunks: tuple[Chunk, ...]) -> Layers:
    """Whole layers that the backward pass runs forward again: all, or the first of each chunk."""
    full = model.recompute.full
    if full is None:
        return Layers(0, 0)
    if full == "uniform":
        return layers_of(chunks)
    moe = sum(sum(chunk.moe[: model.recompute.layers]) for chunk in chunks)
    return Layers(sum(min(model.recompute.layers, len(chunk.moe)) for chunk in chunks) - moe, moe)


def calls(model: Model, found: Parameters, stage: int) -> Iterator[Call]:
    """TP's calls of one rank of a pipeline stage."""
    chunks = model.stages[stage]
    yield from _pairs(model, chunks)
    yield from _few_key_heads(model, chunks)
    yield from _saved_activations(model, chunks)
    if chunks[0].embedding:
        yield from _embedding(model)
    if chunks[-1].output:
        yield from _output_layer(model)
        yield from _loss(model)
    yield from _replicated_gradients(model, found, chunks)


def _pairs(model: Model, chunks: tuple[Chunk, ...]) -> Iterator[Call]:
    """Forward, backward and recomputed pairs of all layers."""
    layers, again, modules = layers_of(chunks), recomputed(model, chunks), model.recompute.modules
    experts = model.experts
    shared = bool(experts and experts.shared_ffn)
    # A checkpoint within a checkpoint runs once more in either.
    shared_again = again.moe + layers.moe * (("moe" in modules) + ("shared_experts" in modules))
    yield from _pair(model, layers.total, again.total, model.qkv_userbuffers, model.userbuffers)
    mlp_again = again.dense + layers.dense * ("mlp" in modules)
    yield from _pair(model, layers.dense, mlp_again, model.fc1_userbuffers, model.userbuffers)
    if shared and experts is not None:
        taken = model.userbuffers & _SHARED_IN_USERBUFFERS if not experts.shared_overlap else frozenset()
        regather = not experts.shared_overlap
        yield from _pair(model, layers.moe, shared_again, taken & model.fc1_userbuffers, taken, regather=regather)


def _pair(
    model: Model, count: int, again: int, column: frozenset[str], row: frozenset[str], *, regather: bool = True
) -> Iterator[Call]:
    """``count`` pairs per microbatch, ``again`` of them recomputed; ``column`` and ``row`` name what NCCL does not see.

    Without SP an all-reduce forward and one backward. With SP the input is gathered and the output scattered; backward
    the output's gradient is gathered, the input gathered again for the weight gradient (unless it was kept whole), and
    the input's gradient scattered.
    """
    size = model.activation_bytes
    for phase, each in (("forward", count), ("recompute", again)):
        number = each * model.microbatches
        if model.sequence_parallel:
            yield _layer_call(phase, "all_gather", model, number, "gather_input" not in column)
            yield _layer_call(phase, "reduce_scatter", model, number, "scatter_output" not in row)
        else:
            yield Call(phase, TP, "all_reduce", model.dtype, number, size)
    number = count * model.microbatches
    if not model.sequence_parallel:
        yield Call("backward", TP, "all_reduce", model.dtype, number, size)
        return
    yield _layer_call("backward", "all_gather", model, number, "gather_gradient" not in row)
    if regather:
        yield _layer_call("backward", "all_gather", model, number, "regather_input" not in column)
    yield _layer_call("backward", "reduce_scatter", model, number, "scatter_gradient" not in column)


def _layer_call(phase: str, op: str, model: Model, count: int, observable: bool) -> Call:
    evidence = "run" if observable else "source"
    exact = not (model.narrow_inputs and op == "all_gather")
    return Call(phase, TP, op, model.dtype, count, model.activation_bytes, observable, exact, evidence)


def _few_key_heads(model: Model, chunks: tuple[Chunk, ...]) -> Iterator[Call]:
    """With fewer key/value heads than TP ranks, each gathers the QKV projection's whole output and takes its part."""
    if model.kv_heads >= model.mesh.tp or model.latent_attention is not None:
        return
    outputs = (model.heads + 2 * model.kv_heads) * model.head_dim
    size = model.tokens * outputs * model.width
    layers, m = layers_of(chunks).total, model.microbatches
    yield Call("forward", TP, "all_gather", model.dtype, layers * m, size)
    yield Call("recompute", TP, "all_gather", model.dtype, recomputed(model, chunks).total * m, size)
    yield Call("backward", TP, "reduce_scatter", model.dtype, layers * m, size)


def _saved_activations(model: Model, chunks: tuple[Chunk, ...]) -> Iterator[Call]:
    """Each checkpoint's input, saved in TP parts, is gathered before it is used; SP excludes it."""
    if not model.recompute.distributed or model.sequence_parallel:
        return
    per = model.recompute.layers
    uniform = model.recompute.full == "uniform"
    saved = sum(-(-len(chunk.moe) // per) if uniform else min(per, len(chunk.moe)) for chunk in chunks)
    yield Call("recompute", TP, "all_gather", model.dtype, saved * model.microbatches, model.activation_bytes)


def _embedding(model: Model) -> Iterator[Call]:
    """Partial embeddings are summed; with SP scattered too, unless learned positions are added to the whole first."""
    m, size = model.microbatches, model.activation_bytes
    if not model.sequence_parallel:
        yield Call("forward", TP, "all_reduce", model.dtype, m, size)
        return
    yield Call("forward", TP, "all_reduce" if model.positions else "reduce_scatter", model.dtype, m, size)
    yield Call("backward", TP, "all_gather", model.dtype, m, size)


def _output_layer(model: Model) -> Iterator[Call]:
    m, size = model.microbatches * (1 + model.mtp_layers), model.activation_bytes
    if not model.sequence_parallel:
        yield Call("backward", TP, "all_reduce", model.dtype, m, size)
        return
    yield Call("forward", TP, "all_gather", model.dtype, m, size)
    yield Call("backward", TP, "all_gather", model.dtype, m, size)
    yield Call("backward", TP, "reduce_scatter", model.dtype, m, size)


def _loss(model: Model) -> Iterator[Call]:
    """Vocabulary-parallel cross-entropy: per token the maximum, the target's logit, the sum of exponentials, in FP32.

    Fused, the last two are one call; Transformer Engine gathers all three of every rank.
    """
    m, per_token = model.microbatches * (1 + model.mtp_layers), 4 * model.tokens
    if model.cross_entropy == "te":
        yield Call("forward", TP, "all_gather", "float32", m, 3 * per_token * model.mesh.tp, evidence="source")
    elif model.cross_entropy == "native":
        yield Call("forward", TP, "all_reduce", "float32", m, per_token)
        yield Call("forward", TP, "all_reduce", "float32", m, 2 * per_token)
    else:
        yield Call("forward", TP, "all_reduce", "float32", 3 * m, per_token)


def _replicated_gradients(model: Model, found: Parameters, chunks: tuple[Chunk, ...]) -> Iterator[Call]:
    """Once per step: with SP the gradients of norms, row-parallel biases and routers; without it those of QK norms."""
    elements = 0
    for chunk in chunks:
        for count, block in blocks_of(found, chunk):
            elements += count * (block.replicated if model.sequence_parallel else block.qk_norm)
    if elements:
        yield Call("finalize", TP, "all_reduce", model.grad_dtype, 1, elements * model.grad_width)
