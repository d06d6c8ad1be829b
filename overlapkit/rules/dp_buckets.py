"""DP: what a bucket is, which stages and chunks have several, and NCCL's user buffers."""

from __future__ import annotations

from overlapkit.facts import Facts
from overlapkit.rules.dp import BUCKET, GRAD_REDUCE, PARAM_GATHER, WITH_STEP, home
from overlapkit.rules.registry import MEGATRON_CORE, MEGATRON_LM, Finding, State, error, info, rule, warning
from overlapkit.versions import parse_version

_DDP = "megatron-core distributed/distributed_data_parallel.py"
_MIB = 1024 * 1024


@rule("DP011", source="megatron-core distributed/distributed_data_parallel_config.py __post_init__")
def nccl_user_buffers_and_segments(f: Facts, s: State) -> Finding:
    """NCCL user buffers and expandable segments.

    With torch before 2.11 (Megatron-Core before 0.18: with any), ``ddp.nccl_ub`` and
    ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` exclude each other.

    Why: NCCL registers memory of a torch MemPool, which expandable segments do not support.
    Fix: remove ``expandable_segments:True`` from PYTORCH_CUDA_ALLOC_CONF.
    """
    given = (f.recipe.env_vars or {}).get("PYTORCH_CUDA_ALLOC_CONF", "")
    if not f.recipe.ddp.nccl_ub or "expandable_segments:True" not in given.split(","):
        return None
    if f.core_in(">=0.18.0rc0") and not f.versions.torch < parse_version("2.11.0a0"):
        return None
    return error(
        "env_vars.PYTORCH_CUDA_ALLOC_CONF",
        "expandable_segments:True excludes ddp.nccl_ub",
        fix="remove expandable_segments:True from it",
        by=MEGATRON_CORE,
        at="validation",
        requested=given,
        value=given,
    )


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
    if not default and size <= 0:
        return None
    if default:
        if f.megatron_lm and f.recipe.ddp.num_buckets is not None:
            return None
        size = default_bucket(f)
    grads, params, parameters = size * f.precision.grad_bytes, size * f.precision.param_bytes, "parameters"
    if f.precision.fp8_param_gather and f.precision.fp8_recipe not in (None, "mxfp8"):
        params, parameters = size, "FP8 parameters"  # MXFP8 ones are gathered in BF16
    kind = "FP32" if f.precision.grad_bytes == 4 else f.precision.compute.upper()
    if not f.dist_opt:
        moves = f"an all-reduce of {_mib(grads)} {kind} gradients"
    else:
        moves = f"a reduce-scatter of {_mib(grads)} {kind} gradients and an all-gather of {_mib(params)} {parameters}"
    origin = ""
    if default:
        ranks = "DP" if f.parallelism.cp == 1 or not f.megatron_lm else "DP · CP"
        origin = f" (unset: the larger of 40,000,000 and 1,000,000 · {ranks})"
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
            return warning(BUCKET, because, requested=asked, fix=f"set {home(f)}.overlap_grad_reduce=true")
        return info(BUCKET, because)
    if s[WITH_STEP]:
        return info(BUCKET, "overlap_param_gather_with_optimizer_step: every stage and chunk has one bucket")
    chunks = p.vp or 1
    if p.pp == 1 and chunks == 1:
        return None
    size = s[BUCKET] if s[BUCKET] is not None else default_bucket(f)
    cut = f"buckets of {size:,} parameters"
    if f.megatron_lm and s[BUCKET] is None and f.recipe.ddp.num_buckets is not None:
        cut = f"{f.recipe.ddp.num_buckets} buckets"
    first = "PP rank 0" + (", chunk 0" if chunks > 1 else "")
    return info(BUCKET, f"only {first} is cut into {cut}; every other stage or chunk has one")


@rule(
    "DP014",
    source="megatron-core distributed/distributed_data_parallel_config.py (0.18); Megatron-LM training/training.py",
)
def two_bucket_rules(f: Facts, s: State) -> Finding:
    """``num_buckets`` and ``bucket_size`` exclude each other, and ``num_buckets`` is at least 1.

    Megatron-Core checks it from 0.18, Megatron-LM's own code before. Only Megatron-LM makes a bucket size of
    ``num_buckets``; Bridge does nothing with it, and writes a bucket size whenever DP is above 1.

    Why: two rules for one size.
    Fix: use ``bucket_size``.
    """
    count = f.recipe.ddp.num_buckets
    in_core = f.core_in(">=0.18.0rc0")
    if count is None or (f.bridge and not in_core):
        return None
    fix = "set ddp.num_buckets=null"
    if s[BUCKET] is None and count > 0:
        if f.megatron_lm or f.fsdp:
            return None
        return warning("ddp.num_buckets", "Bridge makes no bucket size of it", requested=count, value=count, fix=fix)
    return error(
        "ddp.num_buckets",
        "num_buckets and bucket_size are both set" if count > 0 else f"num_buckets is {count}",
        fix=fix,
        by=MEGATRON_CORE if in_core else MEGATRON_LM,
        at="validation" if in_core else "construction",
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
        fix=f"set {home(f)}.bucket_size=null",
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
