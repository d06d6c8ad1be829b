"""Data parallelism: gradients and parameters in buckets, over DP times CP, and over expert DP for EP's experts.

Source: megatron-core distributed/distributed_data_parallel.py and param_and_grad_buffer.py, optimizer/optimizer.py
(ChainedOptimizer) and distrib_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from overlapkit.volume.model import Model
from overlapkit.volume.parameters import Parameters, blocks_of, buckets_of
from overlapkit.volume.placement import DP_CP, DP_CP_INNER, EXPERT_DP, EXPERT_DP_INNER, INSTANCES
from overlapkit.volume.rows import Call


def calls(model: Model, found: Parameters, stage: int) -> Iterator[Call]:
    """DP's calls of one rank of a stage; without FSDP they do not depend on the number of microbatches.

    Only the first chunk of the first stage is cut into several buckets, and only while gradient reduction overlaps.
    """
    dense_group, expert_group = (DP_CP_INNER, EXPERT_DP_INNER) if model.instances > 1 else (DP_CP, EXPERT_DP)
    chunks = model.stages[stage]
    if model.fsdp:
        yield from _sharded(model, found, stage)
        return
    # Without overlap the optimizer of the dense and that of the experts' parameters each gather every bucket.
    twice = model.expert_parameters_apart and any(any(chunk.moe) for chunk in chunks)
    gathers = 2 if twice and not model.overlap_param_gather else 1
    reductions = _reduction_phases(model, stage)
    done: dict[tuple[int, int, bool, bool, bool], list[Call]] = {}
    for index, chunk in enumerate(chunks):
        cut = stage == 0 and index == 0 and not model.gather_with_step
        moe = sum(chunk.moe)
        key = (len(chunk.moe) - moe, moe, chunk.embedding, chunk.output, cut)
        if key not in done:
            buckets = buckets_of(model, found, chunk, _bucket_size(model, found) if cut else None)
            done[key] = [
                *_buckets(model, buckets.dense, dense_group, model.mesh.dp * model.mesh.cp, reductions, gathers),
                *_buckets(model, buckets.expert, expert_group, model.expert_dp, reductions, gathers),
            ]
        yield from done[key]


def _bucket_size(model: Model, found: Parameters) -> int | None:
    """Elements; ``num_buckets`` divides all that the rank holds."""
    if model.num_buckets is None:
        return model.bucket_size
    held = sum(count * sum(block.plain) for chunk in model.stages[0] for count, block in blocks_of(found, chunk))
    return held // model.num_buckets


def _reduction_phases(model: Model, stage: int) -> tuple[str, ...]:
    """When each bucket's gradients are reduced: once, or twice with several optimizer instances.

    Where the schedule starts the reduction (interleaved, else on all stages but the first), the buckets never learn
    which gradients to wait for, and finalisation takes the reduction of several instances, which leaves no handle, for
    one that has not begun.
    """
    if not model.overlap_grad_reduce:
        return ("finalize",)
    by_schedule = model.mesh.pp > 1 and model.aligned_reduction and (model.mesh.vp is not None or stage > 0)
    return ("backward", "finalize") if by_schedule and model.instances > 1 else ("backward",)


def _buckets(
    model: Model, buckets: tuple[int, ...], group: str, ranks: int, reductions: tuple[str, ...], gathers: int
) -> Iterator[Call]:
    gather_phase = "forward" if model.overlap_param_gather else "optimizer"
    for elements in buckets:
        grads = elements * model.grad_width
        for phase in reductions:
            yield Call(phase, group, "reduce_scatter" if model.dist_opt else "all_reduce", model.grad_dtype, 1, grads)
            if model.instances > 1:
                shard = grads // (ranks // model.instances)
                yield Call(phase, INSTANCES, "all_reduce", model.grad_dtype, 1, shard)
        if model.dist_opt:
            nbytes, exact = elements * model.width, not model.narrow_parameters
            yield Call(gather_phase, group, "all_gather", model.dtype, gathers, nbytes, exact=exact)


def _sharded(model: Model, found: Parameters, stage: int) -> Iterator[Call]:
    """FSDP: every layer's parameters are gathered forward and backward, its gradients scattered, in each microbatch."""
    m = model.microbatches
    for chunk in model.stages[stage]:
        for count, block in blocks_of(found, chunk):
            for group, elements in zip((DP_CP, EXPERT_DP), block.plain, strict=True):
                if not elements:
                    continue
                gathered, exact = elements * model.width, not model.narrow_parameters
                for phase in ("forward", "backward"):
                    yield Call(phase, group, "all_gather", model.dtype, count * m, gathered, exact=exact)
                grads = elements * model.grad_width
                yield Call("backward", group, "reduce_scatter", model.grad_dtype, count * m, grads)
