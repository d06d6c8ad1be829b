"""DP: what a bucket is, and which stages and chunks have several."""

from __future__ import annotations

from overlapkit.facts import Facts
from overlapkit.rules.dp import BUCKET, GRAD_REDUCE, PARAM_GATHER, WITH_STEP
from overlapkit.rules.registry import MEGATRON_CORE, Finding, State, error, info, rule, warning

_DDP = "megatron-core distributed/distributed_data_parallel.py"
_MIB = 1024 * 1024


@rule("DP012", source=f"{_DDP} and distributed/param_and_grad_buffer.py")
def bucket_in_bytes(f: Facts, s: State) -> Finding:
    """What a bucket of this recipe is in bytes.

    ``bucket_size`` counts parameters, not bytes: 134,217,728 parameters are 256 MiB of BF16 and 512 MiB of
    FP32. Unset, it is the larger of 40,000,000 and 1,000,000 times DP (times CP too in Megatron-LM).

    Why: each bucket is one reduce-scatter of gradients and one all-gather of parameters; its bytes decide
    whether the collective reaches its bandwidth.
    Fix: set ``comm_overlap.bucket_size`` in parameters.
    """
    if f.fsdp or f.parallelism.dp * f.parallelism.cp == 1 or not s[GRAD_REDUCE]:
        return None
    size = s[BUCKET]
    default = size is None
    if default:
        if f.recipe.ddp.num_buckets is not None:
            return None
        size = default_bucket(f)
    grads, params = size * f.precision.grad_bytes, size * f.precision.param_bytes
    kind = "FP32" if f.precision.grad_bytes == 4 else f.precision.compute.upper()
    if not f.dist_opt:
        moves = f"an all-reduce of {_mib(grads)} {kind} gradients"
    else:
        moves = f"a reduce-scatter of {_mib(grads)} {kind} gradients and an all-gather of {_mib(params)} parameters"
    origin = (
        f" (unset: the larger of 40,000,000 and 1,000,000 times {default_bucket(f) // 1_000_000})" if default else ""
    )
    if default and default_bucket(f) == 40_000_000:
        origin = " (unset: Megatron-Core's 40,000,000)"
    return info(BUCKET, f"{size:,} parameters{origin}: {moves}")


def default_bucket(f: Facts) -> int:
    """Megatron-Core's bucket in parameters where none is set."""
    ranks = f.parallelism.dp * (f.parallelism.cp if f.megatron_lm else 1)
    return max(40_000_000, 1_000_000 * ranks)


def _mib(count: int) -> str:
    return f"{count / _MIB:,.0f} MiB" if count % _MIB == 0 else f"{count / _MIB:,.1f} MiB"


@rule("DP013", source=f"{_DDP}; megatron-bridge models/model_provider.py; Megatron-LM training/training.py")
def effective_buckets(f: Facts, s: State) -> Finding:
    """The effective bucket per stage and chunk.

    Only the first chunk of the first pipeline stage is cut into buckets, and only while gradient reduction
    overlaps. Every other stage and chunk has one bucket, as has everything without ``overlap_grad_reduce``
    or with ``overlap_param_gather_with_optimizer_step``.

    Why: Megatron-Core takes the first stage's reduction to be the only one on the critical path.
    Fix: nothing to do; do not expect ``bucket_size`` to change the other stages.
    """
    p = f.parallelism
    if f.fsdp or p.dp * p.cp == 1:
        return None
    if not s[GRAD_REDUCE]:
        asked = f.asked.bucket_size
        because = "without overlap_grad_reduce every stage and chunk has one bucket"
        if asked is not None:
            return warning(BUCKET, because, requested=asked, fix="set comm_overlap.overlap_grad_reduce=true")
        return info(BUCKET, because)
    if s[WITH_STEP]:
        return info(BUCKET, "overlap_param_gather_with_optimizer_step: every stage and chunk has one bucket")
    chunks = p.vp or 1
    if p.pp == 1 and chunks == 1:
        return None
    size = s[BUCKET] if s[BUCKET] is not None else default_bucket(f)
    first = "PP rank 0" + (", chunk 0" if chunks > 1 else "")
    return info(BUCKET, f"only {first} is cut into buckets of {size:,} parameters; every other stage or chunk has one")


@rule("DP014", source="megatron-core distributed/distributed_data_parallel_config.py (0.18)", core=">=0.18.0")
def two_bucket_rules(f: Facts, s: State) -> Finding:
    """``num_buckets`` and ``bucket_size`` exclude each other.

    Why: Megatron-Core refuses both. Bridge writes a bucket size whenever DP is above 1.
    Fix: use one.
    """
    count = f.recipe.ddp.num_buckets
    if count is None or (s[BUCKET] is None and count > 0):
        return None
    because = "num_buckets and bucket_size are both set" if count > 0 else f"num_buckets is {count}"
    return error(
        "ddp.num_buckets",
        because,
        fix="set ddp.num_buckets=null",
        by=MEGATRON_CORE,
        at="construction" if f.megatron_lm else "validation",
        requested=count,
        value=count,
    )


@rule("DP015", source="megatron-core distributed/param_and_grad_buffer.py")
def bucket_of_nothing(f: Facts, s: State) -> Finding:
    """A bucket size of 0 or less.

    A bucket closes as soon as it holds ``bucket_size`` parameters, so that each parameter becomes one.

    Why: hundreds of small collectives are bound by latency.
    Fix: leave ``bucket_size`` null, or count it in parameters.
    """
    size = s[BUCKET]
    if size is None or size > 0 or not s[GRAD_REDUCE]:
        return None
    return warning(
        BUCKET,
        f"{size}: every parameter becomes a bucket of its own",
        requested=size,
        fix="set comm_overlap.bucket_size=null",
    )


@rule("DP016", source=_DDP)
def nothing_to_overlap(f: Facts, s: State) -> Finding:
    """Data-parallel overlap at DP 1.

    Why: with one data-parallel rank (CP counts as data parallel here) there is nothing to reduce or gather.
    Fix: nothing to do.
    """
    p = f.parallelism
    if p.dp * p.cp > 1 or not (s[GRAD_REDUCE] or s[PARAM_GATHER]):
        return None
    return info(GRAD_REDUCE if s[GRAD_REDUCE] else PARAM_GATHER, "DP is 1: there is nothing to overlap")
