"""DP: what a bucket is, which stages and chunks have several, and NCCL's user buffers."""

from __future__ import annotations

from overlapkit.facts import Facts
from overlapkit.rules.dp_changes import BUCKET, GRAD_REDUCE, PARAM_GATHER, WITH_STEP, home, reduce_on
from overlapkit.rules.registry import MEGATRON_CORE, MEGATRON_LM, Finding, State, error, info, rule, warning
from overlapkit.versions import parse_version

_DDP = "megatron-core distributed/distributed_data_parallel.py"
_WRAPPERS = (
    "Megatron-LM training/training.py and training/models/dist_utils.py; megatron-bridge models/model_provider.py"
)
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
        fix="remove expandable_segments:True from env_vars.PYTORCH_CUDA_ALLOC_CONF",
        by=MEGATRON_CORE,
        at="validation" if f.bridge or f.core_in(">=0.18.0rc0") else "construction",
        requested=given,
        value=given,
    )


@rule("DP012", source=f"{_DDP} and distributed/param_and_grad_buffer.py; {_WRAPPERS}")
def bucket_in_bytes(f: Facts, s: State) -> Finding:
    """What a bucket of this recipe is in bytes.

    ``bucket_size`` counts parameters, not bytes: 134,217,728 parameters are 256 MiB of BF16 and 512 MiB of
    FP32. Unset, it is the larger of 40,000,000 and 1,000,000 times DP; times CP too in Megatron-LM and, as it
    wraps the model with Megatron-LM's own code, in Bridge from 0.5.

    Why: each bucket is one reduce-scatter of gradients and one all-gather of parameters; its bytes decide
    whether the collective reaches its bandwidth.
    Fix: set ``comm_overlap.bucket_size`` in parameters.
    """
    if f.fsdp or f.torch_fsdp2:
        return None
    reduces = s[GRAD_REDUCE] and not _no_buckets(f)
    size = s[BUCKET] if reduces else _asked(f)
    default = reduces and size is None
    if default and not (_wrapped_by_megatron(f) and f.recipe.ddp.num_buckets is not None):
        size = default_bucket(f)
    if size is None or size <= 0:
        return None
    grads, params, parameters = size * f.precision.grad_bytes, size * f.precision.param_bytes, "parameters"
    if f.precision.fp8_param_gather and f.precision.fp8_recipe not in (None, "mxfp8"):
        params, parameters = size, "FP8 parameters"  # MXFP8 ones are gathered in BF16
    kind = "FP32" if f.precision.grad_bytes == 4 else f.precision.compute.upper()
    if not reduces:
        moves = f"{_mib(grads)} of {kind} gradients, {_mib(params)} of {parameters}"
    elif not f.dist_opt:
        moves = f"an all-reduce of {_mib(grads)} {kind} gradients"
    else:
        moves = f"a reduce-scatter of {_mib(grads)} {kind} gradients and an all-gather of {_mib(params)} {parameters}"
    origin = ""
    if default:
        ranks = "DP" if f.parallelism.cp == 1 or not _wrapped_by_megatron(f) else "DP · CP"
        origin = f" (unset: the larger of 40,000,000 and 1,000,000 · {ranks})"
    return info(BUCKET, f"{size:,} parameters{origin}: {moves}")


def _asked(f: Facts) -> int | None:
    """The size that the recipe names, whether it takes effect or not."""
    return f.recipe.ddp.bucket_size if f.asked.bucket_size is None else f.asked.bucket_size


def default_bucket(f: Facts) -> int:
    """Megatron-Core's bucket in parameters where none is set."""
    ranks = f.parallelism.dp * (f.parallelism.cp if _wrapped_by_megatron(f) else 1)
    return max(40_000_000, 1_000_000 * ranks)


def _wrapped_by_megatron(f: Facts) -> bool:
    """Whether Megatron-LM's code wraps the model; Bridge from 0.5 takes it from megatron/training/models."""
    return f.megatron_lm or f.bridge_in(">=0.5.0")


def _no_buckets(f: Facts) -> bool:
    """Whether DDP has none to reduce: FSDP shards layer by layer, and one rank reduces nothing."""
    return f.fsdp or f.torch_fsdp2 or f.parallelism.dp * f.parallelism.cp == 1


def _no_size(f: Facts) -> str:
    """What takes the bucket size away, wherever it is written."""
    sections = {"comm_overlap": f.recipe.comm_overlap, "ddp": f.recipe.ddp}
    said = [name for name, values in sections.items() if getattr(values, "bucket_size", None) is not None]
    return " and ".join(f"{name}.bucket_size=null" for name in said)


def _mib(count: int) -> str:
    return f"{count / _MIB:,.0f} MiB" if count % _MIB == 0 else f"{count / _MIB:,.1f} MiB"


@rule("DP013", source=f"{_DDP}; {_WRAPPERS}")
def effective_buckets(f: Facts, s: State) -> Finding:
    """The effective bucket per stage and chunk.

    Only the first chunk of the first pipeline stage is cut into buckets, and only while gradient reduction
    overlaps. Every other stage and chunk has one bucket, as has everything without ``overlap_grad_reduce``
    or with ``overlap_param_gather_with_optimizer_step``.

    Why: Megatron-Core takes the first stage's reduction to be the only one on the critical path.
    Fix: nothing to do; do not expect ``bucket_size`` to change the other stages.
    """
    p = f.parallelism
    if _no_buckets(f):
        return None
    if not s[GRAD_REDUCE]:
        # Where Bridge passes comm_overlap over, DP003 says what becomes of its value.
        asked = f.recipe.ddp.bucket_size if home(f, "bucket_size") == "ddp" else _asked(f)
        because = "without overlap_grad_reduce every stage and chunk has one bucket"
        if asked is None:
            return info(BUCKET, because)
        return warning(BUCKET, because, requested=asked, fix=f"set {reduce_on(f, s) or _no_size(f)}")
    if s[WITH_STEP]:
        return info(BUCKET, "overlap_param_gather_with_optimizer_step: every stage and chunk has one bucket")
    chunks = p.vp or 1
    if p.pp == 1 and chunks == 1:
        return None
    size = s[BUCKET] if s[BUCKET] is not None else default_bucket(f)
    cut, count = f"buckets of {size:,} parameters", f.recipe.ddp.num_buckets
    if _wrapped_by_megatron(f) and s[BUCKET] is None and count is not None:
        # The size is counted over all chunks of the rank, and cuts the first.
        cut = f"buckets of 1/{count} of the rank's parameters" if chunks > 1 else f"{count} buckets"
    first = "PP rank 0" + (", chunk 0" if chunks > 1 else "")
    return info(BUCKET, f"only {first} is cut into {cut}; every other stage or chunk has one")


@rule(
    "DP014",
    source=f"megatron-core distributed/distributed_data_parallel_config.py (0.18); {_WRAPPERS}",
)
def two_bucket_rules(f: Facts, s: State) -> Finding:
    """``num_buckets`` and ``bucket_size`` exclude each other, and ``num_buckets`` is at least 1.

    Megatron-Core checks it from 0.18, Megatron-LM's own code before. Megatron-LM makes a bucket size of
    ``num_buckets``, Bridge from 0.5 too; but its set-up writes a bucket size whenever DP is above 1.

    Why: two rules for one size.
    Fix: use ``bucket_size``.
    """
    count = f.recipe.ddp.num_buckets
    in_core = f.core_in(">=0.18.0rc0")
    if count is None or (f.bridge and not in_core) or (f.megatron_lm and f.torch_fsdp2):
        return None
    fix = "set ddp.num_buckets=null"
    if s[BUCKET] is None and count > 0:
        if _wrapped_by_megatron(f) or f.fsdp:
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
    if size is None or size > 0 or not s[GRAD_REDUCE] or f.fsdp or f.torch_fsdp2:
        return None
    return warning(
        BUCKET,
        f"{size}: every parameter becomes a bucket of its own",
        requested=size,
        fix=f"set {_no_size(f)}",
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
