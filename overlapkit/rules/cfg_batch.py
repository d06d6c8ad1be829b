"""CFG: whether the batches split over the data-parallel ranks."""

from __future__ import annotations

from overlapkit.facts import Facts
from overlapkit.rules.registry import BRIDGE, MEGATRON_CORE, MEGATRON_LM, Finding, State, error, info, rule


@rule(
    "CFG005",
    source="megatron-core num_microbatches_calculator.py; megatron-bridge training/config.py validate (0.5); "
    "Megatron-LM training/arguments.py validate_args (0.18)",
)
def global_batch_not_divisible(f: Facts, s: State) -> Finding:
    """The global batch does not split into microbatches.

    ``global_batch_size`` must be a multiple of ``micro_batch_size`` times the data-parallel size. Bridge from
    0.5 and Megatron-LM from 0.18 say so first, of the evaluation batch, which is the same unless set (CFG016).

    ``decrease_batch_size_if_needed`` rounds it down, where that check does not come first; a batch that ramps up
    is not looked at.

    Why: every data-parallel rank runs the same whole number of microbatches.
    Fix: change one of the sizes; data parallelism is the GPUs divided by TP, PP and CP.
    """
    train, dp = f.recipe.train, f.parallelism.dp
    micro, batch = train.micro_batch_size, train.global_batch_size
    if micro is None or batch is None or batch % (micro * dp) == 0 or train.rampup_batch_size is not None:
        return None
    by = MEGATRON_CORE
    evaluation = f.recipe.validation.eval_micro_batch_size or micro
    if f.recipe.validation.eval_global_batch_size is None and batch % (evaluation * dp):
        if f.bridge_in(">=0.5.0"):
            by = BRIDGE
        elif f.megatron_lm and f.core_in(">=0.18.0"):
            by = MEGATRON_LM
    if train.decrease_batch_size_if_needed and by == MEGATRON_CORE:
        rounded = batch // (micro * dp) * micro * dp
        because = f"not a multiple of {micro * dp}: decrease_batch_size_if_needed makes it {rounded}"
        return info("train.global_batch_size", because, requested=batch, value=rounded)
    # What the interleaved schedule wants of the same number (PP007, PP008).
    group = max(f.microbatch_group, f.parallelism.pp) if f.interleaved else 1
    groups = f", {micro * dp} times groups of {group} microbatches" if group > 1 else ""
    return error(
        "train.global_batch_size",
        f"{batch} is not a multiple of micro_batch_size {micro} times DP {dp}",
        fix=f"set train.global_batch_size to a multiple of {micro * dp * group}{groups}",
        by=by,
        at="validation",
        requested=batch,
        value=batch,
    )


@rule(
    "CFG016",
    source="megatron-bridge training/config.py validate; Megatron-LM training/arguments.py validate_args",
    bridge=">=0.5.0",
    megatron_lm=">=0.18.0rc0",
)
def evaluation_batch_not_divisible(f: Facts, s: State) -> Finding:
    """The evaluation batch does not split into microbatches.

    ``eval_global_batch_size`` must be a multiple of ``eval_micro_batch_size`` times the data-parallel size in
    evaluation: in Bridge from 0.6 ``dist.eval_context_parallel_size`` can make that another. Where neither is set,
    CFG005 speaks of the one batch. It is checked without evaluation too.

    Why: the framework asserts it when it validates the configuration.
    Fix: change the sizes.
    """
    said, train, p = f.recipe.validation, f.recipe.train, f.parallelism
    cp = f.recipe.dist.eval_context_parallel_size if f.bridge_in(">=0.6.0") else None
    if said.eval_global_batch_size is None and cp is None:
        return None
    ranks = p.tp * p.pp * (cp or p.cp)
    if p.world_size % ranks:
        because = f"TP {p.tp} · PP {p.pp} · CP {cp} = {ranks} does not divide {p.world_size} GPUs"
        fix = "set dist.eval_context_parallel_size=null"
        subject = "dist.eval_context_parallel_size"
        return error(subject, because, fix=fix, by=BRIDGE, at="validation", requested=cp, value=cp)
    dp = p.dp if cp is None else p.world_size // ranks
    micro, batch = said.eval_micro_batch_size or train.micro_batch_size, said.eval_global_batch_size
    subject = "train.global_batch_size" if batch is None else "validation.eval_global_batch_size"
    batch = train.global_batch_size if batch is None else batch
    if micro is None or batch is None or batch % (micro * dp) == 0:
        return None
    return error(
        subject,
        f"{batch} is not a multiple of micro_batch_size {micro} times DP {dp} in evaluation",
        fix=f"set validation.eval_global_batch_size={-(-batch // (micro * dp)) * micro * dp}",
        by=BRIDGE if f.bridge else MEGATRON_LM,
        at="validation",
        requested=batch,
        value=batch,
    )
