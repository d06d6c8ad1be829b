"""Context parallelism: what attention exchanges so that every query sees every key.

Not run here: read from Transformer Engine pytorch/attention/dot_product_attention/context_parallel.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from overlapkit.volume.model import Model
from overlapkit.volume.placement import CP, CP_INNER, CP_OUTER
from overlapkit.volume.rows import Call


def calls(model: Model, stage: int) -> Iterator[Call]:
    """CP's calls of one rank of a stage, by the ``cp_comm_type`` of each layer."""
    if model.mesh.cp == 1:
        return
    for kind, layers, again in _layers(model, stage):
        m = model.microbatches
        for phase, count in (("forward", layers * m), ("recompute", again * m), ("backward", layers * m)):
            yield from _EXCHANGES[kind](model, phase, count)


def _layers(model: Model, stage: int) -> Iterator[tuple[str, int, int]]:
    """(kind, layers, layers whose attention is computed again)."""
    chunks, kinds, full = model.stages[stage], model.cp_types, model.recompute.full
    core = "core_attn" in model.recompute.modules
    for kind in dict.fromkeys(kinds):
        layers = again = 0
        for chunk in chunks:
            # Layers of multi-token prediction exchange as the last one.
            places = (min(chunk.first + index, len(kinds) - 1) for index in range(len(chunk.moe)))
            of_kind = [kinds[place] == kind for place in places]
            redone = of_kind if core or full == "uniform" else of_kind[: model.recompute.layers] if full else []
            layers, again = layers + sum(of_kind), again + sum(redone)
        yield kind, layers, again


def _key_bytes(model: Model) -> int:
    """One rank's keys of one layer and microbatch; its values are as many, on average with latent attention."""
    latent = model.latent_attention
    if latent is not None:
        both = latent.query + latent.v_head_dim
        return model.tokens * model.heads // model.mesh.tp * both * model.width // 2
    return model.tokens * max(model.kv_heads // model.mesh.tp, 1) * model.head_dim * model.width


def _query_bytes(model: Model) -> int:
    channels = model.head_dim if model.latent_attention is None else model.latent_attention.query
    return model.tokens * model.heads // model.mesh.tp * channels * model.width


def _p2p(model: Model, phase: str, count: int) -> Iterator[Call]:
    yield from _ring(model, phase, count, CP, model.mesh.cp)


def _ring(model: Model, phase: str, count: int, group: str, ranks: int) -> Iterator[Call]:
    """Keys and values go once around; backward their gradients follow one step behind, to the rank they belong to.

    ``ranks`` is at least 2.
    """
    block = 2 * _key_bytes(model)
    there, back = [(ranks - 1, block)], [(2, block), (ranks - 2, 2 * block)]
    for times, size in back if phase == "backward" else there:
        yield Call(phase, group, "send", model.dtype, count * times, size, evidence="source", onward=True)
        yield Call(phase, group, "recv", model.dtype, count * times, size, evidence="source")


def _all_gather(model: Model, phase: str, count: int) -> Iterator[Call]:
    """Keys and values of the whole sequence, gathered again backward, where their gradients are scattered."""
    gathered = model.mesh.cp * _key_bytes(model)
    yield Call(phase, CP, "all_gather", model.dtype, 2 * count, gathered, evidence="source")
    if phase == "backward":
        yield Call(phase, CP, "reduce_scatter", model.dtype, 2 * count, gathered, evidence="source")


def _a2a(model: Model, phase: str, count: int) -> Iterator[Call]:
    """Sequence parts against heads: queries, keys, values there and outputs back; backward the same of gradients."""
    yield Call(phase, CP, "all_to_all", model.dtype, 2 * count, _query_bytes(model), evidence="source")
    yield Call(phase, CP, "all_to_all", model.dtype, 2 * count, _key_bytes(model), evidence="source")


def _a2a_and_p2p(model: Model, phase: str, count: int) -> Iterator[Call]:
    """All-to-all within the inner groups, a ring over the outer ones; backward the outputs change places once more."""
    queries = 2 if phase != "backward" else 3
    yield Call(phase, CP_INNER, "all_to_all", model.dtype, queries * count, _query_bytes(model), evidence="source")
    yield Call(phase, CP_INNER, "all_to_all", model.dtype, 2 * count, _key_bytes(model), evidence="source")
    yield from _ring(model, phase, count, CP_OUTER, model.cp_levels[1])


_EXCHANGES = {"p2p": _p2p, "all_gather": _all_gather, "a2a": _a2a, "a2a+p2p": _a2a_and_p2p}
