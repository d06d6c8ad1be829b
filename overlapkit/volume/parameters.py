"""The parameters of one rank in the order in which the model names them, and the buckets that DDP lays them out in.

Source: megatron-core distributed/param_and_grad_buffer.py, from 0.18 optimizer/distrib_optimizer.py; the order of a
layer's parameters from transformer/transformer_layer.py, attention.py, mlp.py and moe/*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from overlapkit.volume.latent_attention import LatentAttention
from overlapkit.volume.model import Model
from overlapkit.volume.stages import Chunk

_PARAMETER_ALIGNMENT, _BUCKET_ALIGNMENT, _HIGH_BUSBW_ALIGNMENT = 64, 128, 2**16  # elements


class Parameter(NamedTuple):
    """``elements`` on one rank. ``replicated``: every TP rank holds it whole, and SP sums its gradients over TP.

    ``expert``: its gradients are reduced over expert DP.
    """

    elements: int
    replicated: bool = False
    qk_norm: bool = False
    expert: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """Parameters that stand together, and sums over their elements, counted once however often they are repeated.

    ``padded`` holds the sums of dense and of experts' parameters, each rounded up to where the next may start.
    """

    parameters: tuple[Parameter, ...]
    plain: tuple[int, int]
    padded: tuple[int, int]
    replicated: int
    qk_norm: int


@dataclass(frozen=True, slots=True)
class Parameters:
    """The blocks that chunks are made of. ``matrix`` is the elements of the embedding and of the output layer.

    ``matrix_apart``: both are one matrix that the first and the last stage hold.
    """

    embedding: Block
    dense_layer: Block
    moe_layer: Block
    output: Block
    matrix: int
    matrix_apart: bool


class Buckets(NamedTuple):
    """Elements of each bucket of a chunk, with padding: of the dense parameters and of those of EP's experts."""

    dense: tuple[int, ...]
    expert: tuple[int, ...]


def parameters_of(model: Model) -> Parameters:
    """Every kind of block of the model, as one rank holds it."""
    matrix = model.vocabulary // model.mesh.tp * model.hidden
    apart = model.tied and model.mesh.pp > 1
    positions = [Parameter(model.positions * model.hidden)] if model.positions else []
    has_output = apart or not model.tied
    embeds_again = not model.tied and model.mtp_layers and model.mesh.pp > 1  # for multi-token prediction
    matrices = [Parameter(matrix)] * (has_output + bool(embeds_again))
    return Parameters(
        embedding=_block([Parameter(matrix), *positions]),
        dense_layer=_block(_layer(model, moe=False)),
        moe_layer=_block(_layer(model, moe=True) if model.experts else []),
        output=_block([*_norm(model), *_prediction(model), *matrices]),
        matrix=matrix,
        matrix_apart=apart,
    )


def _block(found: Iterable[Parameter]) -> Block:
    found = tuple(found)
    step = _PARAMETER_ALIGNMENT
    parts = [[each.elements for each in found if each.expert is expert] for expert in (False, True)]
    return Block(
        parameters=found,
        plain=(sum(parts[0]), sum(parts[1])),
        padded=(sum(n + -n % step for n in parts[0]), sum(n + -n % step for n in parts[1])),
        replicated=sum(each.elements for each in found if each.replicated),
        qk_norm=sum(each.elements for each in found if each.qk_norm),
    )


def _norm(model: Model) -> list[Parameter]:
    return [Parameter(model.hidden, replicated=True)] * model.norm_tensors


def _prediction(model: Model) -> list[Parameter]:
    """What a multi-token-prediction layer has beyond a layer: a projection of two inputs, and three norms."""
    each = [Parameter(2 * model.hidden * model.hidden // model.mesh.tp), *_norm(model) * 3]
    return each * model.mtp_layers


def _latent(model: Model, latent: LatentAttention) -> list[Parameter]:
    """Multi-latent attention's projections: down to the latent widths whole on every rank, up from them in parts."""
    heads, hidden = model.heads // model.mesh.tp, model.hidden
    rank, keys = latent.q_lora_rank, latent.kv_lora_rank
    found = [Parameter(heads * latent.v_head_dim * hidden)]
    if rank is None:
        found.append(Parameter(hidden * heads * latent.query))
    else:
        found += [Parameter(hidden * rank, replicated=True), Parameter(rank * heads * latent.query)]
        found.append(Parameter(rank, replicated=True))
    found.append(Parameter(hidden * (keys + latent.qk_pos_emb_head_dim), replicated=True))
    found += [Parameter(keys * heads * (latent.qk_head_dim + latent.v_head_dim)), Parameter(keys, replicated=True)]
    return [*found, *_norm(model), *_norm(model)]


def _layer(model: Model, *, moe: bool) -> list[Parameter]:
    """One layer: attention's output projection comes before the QKV projection that feeds it."""
    tp, hidden = model.mesh.tp, model.hidden
    if model.latent_attention is not None:
        return _latent(model, model.latent_attention) + (_experts(model) if moe else _mlp(model, model.ffn))
    attention = model.heads * model.head_dim
    queries = 2 * attention if model.gated_attention else attention
    qkv = (queries + 2 * model.kv_heads * model.head_dim) // tp
    norm = _norm(model)
    found = [] if model.fused_norms else list(norm)
    found.append(Parameter(attention // tp * hidden))
    if model.biases:
        found.append(Parameter(hidden, replicated=True))
    if model.fused_norms:
        found += norm
    found.append(Parameter(qkv * hidden))
    if model.biases or model.qkv_bias:
        found.append(Parameter(qkv))
    if model.qk_norm:
        found += [Parameter(model.head_dim, replicated=True, qk_norm=True)] * (2 * model.norm_tensors)
    found += norm  # also where it is part of the MLP's first projection, which begins with it
    return found + (_experts(model) if moe else _mlp(model, model.ffn))


def _mlp(model: Model, ffn: int) -> list[Parameter]:
    tp = model.mesh.tp
    inner = (2 if model.gated else 1) * ffn // tp
    found = [Parameter(inner * model.hidden)]
    if model.biases:
        found.append(Parameter(inner))
    found.append(Parameter(ffn // tp * model.hidden))
    if model.biases:
        found.append(Parameter(model.hidden, replicated=True))
    return found


def _experts(model: Model) -> list[Parameter]:
    """Router, the experts of the rank, shared expert."""
    experts, mesh, hidden = model.experts, model.mesh, model.hidden
    assert experts is not None
    local, apart = experts.number // mesh.ep, model.expert_parameters_apart
    width = experts.latent or hidden
    inner = (2 if model.gated else 1) * experts.ffn // mesh.etp
    first = Parameter(inner * width + (inner if model.biases else 0), expert=apart)
    second = Parameter(experts.ffn // mesh.etp * width + (width if model.biases else 0), expert=apart)
    found = [Parameter(experts.number * hidden, replicated=True)]
    if experts.latent is not None:
        found += [Parameter(hidden * experts.latent, replicated=True)] * 2
    if experts.order == "merged":
        found += [each._replace(elements=each.elements * local) for each in (first, second)]
    else:
        found += [first, second] * local if experts.order == "one_by_one" else [first] * local + [second] * local
    if experts.shared_ffn:
        if experts.shared_gate:
            found.append(Parameter(hidden, replicated=True))
        found += _mlp(model, experts.shared_ffn)
    return found


def blocks_of(found: Parameters, chunk: Chunk) -> list[tuple[int, Block]]:
    """(how often, block) of a chunk, whatever the order of its layers."""
    moe = sum(chunk.moe)
    counts = [
        (int(chunk.embedding), found.embedding),
        (len(chunk.moe) - moe, found.dense_layer),
        (moe, found.moe_layer),
        (int(chunk.output), found.output),
    ]
    return [(count, block) for count, block in counts if count]


def buckets_of(model: Model, found: Parameters, chunk: Chunk, bucket_size: int | None) -> Buckets:
    """The buckets of a chunk; ``bucket_size`` in elements, None for one per buffer.

    With the distributed optimizer each parameter starts at a multiple of 64 elements, each bucket ends at one of 128
    and of the ranks that share it, and an embedding that two stages hold has a bucket of its own.
    """
    dense_ranks = model.mesh.dp * model.mesh.cp // model.instances
    expert_ranks = max(model.expert_dp // model.instances, 1)
    dense, expert = (_filled(model, found, chunk, bucket_size, expert=expert) for expert in (False, True))
    return Buckets(_ended(model, dense, dense_ranks), _ended(model, expert, expert_ranks))


def _filled(model: Model, found: Parameters, chunk: Chunk, bucket_size: int | None, *, expert: bool) -> Iterable[int]:
    if bucket_size is None:
        return _one_bucket(model, found, chunk, expert=expert)
    return _cut(model, found, chunk, bucket_size, expert=expert)


def _ended(model: Model, buckets: Iterable[int], ranks: int) -> tuple[int, ...]:
    """Buckets padded at their ends."""
    if not model.dist_opt:
        return tuple(buckets)
    step = lcm(ranks, _BUCKET_ALIGNMENT, _HIGH_BUSBW_ALIGNMENT if model.high_busbw_buckets else 1)
    return tuple(size + -size % step for size in buckets)


def _one_bucket(model: Model, found: Parameters, chunk: Chunk, *, expert: bool) -> list[int]:
    """The whole buffer, apart from a matrix with a bucket of its own.

    The padding behind the last parameter is part of the bucket's own.
    """
    blocks = blocks_of(found, chunk)
    if not model.dist_opt:
        sums = [sum(count * block.plain[expert] for count, block in blocks)]
    else:
        sums = [sum(count * block.padded[expert] for count, block in blocks)]
        if found.matrix_apart and not expert and (chunk.embedding or chunk.output):
            sums = [sums[0] - (found.matrix + -found.matrix % _PARAMETER_ALIGNMENT), found.matrix]
    return [size for size in sums if size]


def _cut(model: Model, found: Parameters, chunk: Chunk, bucket_size: int, *, expert: bool) -> Iterator[int]:
    """Buckets that close once they hold ``bucket_size`` elements, filled from the last parameter to the first."""
    step = _PARAMETER_ALIGNMENT if model.dist_opt else 1
    separates = found.matrix_apart and model.dist_opt
    filled, empty = 0, True
    for parameter, is_matrix in _backwards(found, chunk):
        if parameter.expert is not expert:
            continue
        filled += -filled % step
        alone = is_matrix and separates
        if alone and not empty:
            yield filled
            filled = 0
        filled, empty = filled + parameter.elements, False
        if alone or filled >= bucket_size:
            yield filled
            filled, empty = 0, True
    if not empty:
        yield filled


def _backwards(found: Parameters, chunk: Chunk) -> Iterator[tuple[Parameter, bool]]:
    """The chunk's parameters from the last to the first, and whether each is the embedding's or output's matrix."""
    if chunk.output:
        block = found.output.parameters
        yield from ((each, not each.replicated) for each in reversed(block))
    layers = {moe: tuple(reversed((found.dense_layer, found.moe_layer)[moe].parameters)) for moe in (False, True)}
    for moe in reversed(chunk.moe):
        for each in layers[moe]:
            yield each, False
    if chunk.embedding:
        block = found.embedding.parameters
        yield from ((each, index == 0) for index, each in reversed(tuple(enumerate(block))))
