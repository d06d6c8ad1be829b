"""DP: gradient reduction and parameter gathering beside compute."""

from __future__ import annotations

from collections.abc import Iterable

from overlapkit.facts import Facts
from overlapkit.rules.dp_changes import (
    ALIGN,
    BUCKET,
    DELAY,
    DIST_OPT,
    GRAD_REDUCE,
    OPT_PARAM_GATHER,
    PARAM_GATHER,
    WITH_STEP,
    dist_opt_on,
    gather_off,
    layer_wise,
    no_dist_opt,
    reduce_on,
    step_off,
)
from overlapkit.rules.registry import (
    MEGATRON_CORE,
    MEGATRON_LM,
    Finding,
    State,
    Verdict,
    error,
    info,
    rule,
    warning,
)

BRIDGE_BUCKET = 128 * 1024 * 1024  # parameters
RAW_STANDS = "so that ddp's own data-parallel values stand, not comm_overlap's"
_SETUP = "megatron-bridge training/comm_overlap.py"
_PARSER = "Megatron-LM training/arguments.py validate_args"
# comm_overlap's field -> the settings that Bridge writes it to.
_WRITTEN_TO = {
    "bucket_size": (BUCKET,),
    "overlap_grad_reduce": (GRAD_REDUCE,),
    "overlap_param_gather": (PARAM_GATHER, OPT_PARAM_GATHER),
    "align_param_gather": (ALIGN,),
    "overlap_param_gather_with_optimizer_step": (WITH_STEP,),
    "delay_wgrad_compute": (DELAY,),
}


@rule("DP001", source=_SETUP, megatron_lm=None)
def dp_defaults(f: Facts, s: State) -> Iterable[Verdict]:
    """Bridge's data-parallel defaults with the distributed optimizer.

    With DP above 1: buckets of 134,217,728 parameters, gradient reduction and parameter gathering beside
    compute, aligned over the stages with PP and VP above 1. With DP 1 all are off. The overlap with the
    optimizer's step is off (an issue with checkpointing upstream). What stood on ``ddp`` and ``optimizer``
    is overwritten; ``ddp.delay_wgrad_compute`` becomes what ``comm_overlap`` says, or null.

    Why: the distributed optimizer reduce-scatters gradients and gathers parameters bucket by bucket, which
    can run beside the backward and the next forward pass.
    Fix: set single values under ``comm_overlap``.
    """
    if not f.overlap_setup or not f.dist_opt_at_setup:
        return
    several = f.parallelism.dp > 1
    aligned = several and f.parallelism.pp > 1 and f.vp_at_setup > 1
    how = "Megatron-FSDP" if f.fsdp else "distributed optimizer"
    because = f"{how} over DP {f.parallelism.dp}" if several else "DP is 1: nothing to reduce or gather"
    yield info(BUCKET, because, value=BRIDGE_BUCKET if several else None)
    for subject in (GRAD_REDUCE, PARAM_GATHER, OPT_PARAM_GATHER):
        yield info(subject, because, value=several)
    interleaved = "with" if f.parallelism.pp > 1 and f.vp_at_setup > 1 else "without"
    yield info(ALIGN, f"{because}, {interleaved} virtual stages" if several else because, value=aligned)
    yield info(WITH_STEP, "off in Bridge unless asked for", value=False)
    yield info(DELAY, "Bridge copies what comm_overlap says, null where it says nothing", value=None)


@rule("DP002", source=_SETUP, megatron_lm=None)
def dp_by_user(f: Facts, s: State) -> Iterable[Verdict]:
    """The user's data-parallel values come last, one by one.

    Why: Bridge applies every value of ``comm_overlap`` that is not null over its own defaults, at DP 1 too,
    and does not check that they fit together.
    Fix: leave them null for Bridge's defaults.
    """
    if not f.overlap_setup or not f.dist_opt_at_setup:
        return
    for name, subjects in _WRITTEN_TO.items():
        asked = getattr(f.asked, name)
        for subject in subjects:
            if asked is not None and asked != s[subject]:
                yield info(subject, "set by comm_overlap", requested=asked, value=asked)


@rule("DP003", source=_SETUP, megatron_lm=None)
def dp_flags_ignored(f: Facts, s: State) -> Finding:
    """Data-parallel flags without the distributed optimizer.

    Bridge's set-up touches ``ddp`` and ``optimizer`` only when ``ddp.use_distributed_optimizer`` is true. Where
    nothing overlaps and nothing was asked for, that is said too.

    Why: the overlap belongs to the distributed optimizer; without it the flags of ``comm_overlap`` are
    ignored without a word.
    Fix: set ``ddp.use_distributed_optimizer=true``, or the raw ``ddp`` values.
    """
    if not f.overlap_setup or f.dist_opt_at_setup or f.fsdp:  # FSDP003 speaks for Megatron-FSDP
        return None
    without, fix = f"{DIST_OPT} is {_dist_opt_text(f)}", f"set {dist_opt_on(f)}"
    names = [
        name
        for name, subjects in _WRITTEN_TO.items()
        if getattr(f.asked, name) is not None
        and name != "delay_wgrad_compute"
        and any(getattr(f.asked, name) != s[subject] for subject in subjects)
    ]
    several = f.parallelism.dp * f.parallelism.cp > 1
    if not names and several and not (s[GRAD_REDUCE] or s[PARAM_GATHER] or f.torch_fsdp2 or f.dist_opt):
        because = f"{without}, so Bridge sets no data-parallel overlap"
        return info(GRAD_REDUCE, because, fix=None if no_dist_opt(f) else fix)
    return [
        warning(
            subject,
            f"{without}, so Bridge ignores comm_overlap.{name}",
            requested=getattr(f.asked, name),
            # DP009 warns of the overlap with the step, wherever it is asked for.
            fix=f"set comm_overlap.{name}=null" if subject == WITH_STEP or no_dist_opt(f) else fix,
        )
        for name in names
        for subject in _WRITTEN_TO[name][:1]
    ]


def _dist_opt_text(f: Facts) -> str:
    return "not set" if f.recipe.ddp.use_distributed_optimizer is None else "false"


@rule("DP004", source=_SETUP, megatron_lm=None)
def ddp_values_overwritten(f: Facts, s: State) -> Iterable[Verdict]:
    """Values on ``ddp`` and ``optimizer`` that Bridge overwrites.

    Why: with the distributed optimizer Bridge's set-up writes these fields from ``comm_overlap`` or its own
    defaults; an override such as ``ddp.overlap_grad_reduce=false`` has no effect.
    Fix: set the value under ``comm_overlap``.
    """
    if not f.overlap_setup or not f.dist_opt_at_setup:
        return
    for name, subjects in _WRITTEN_TO.items():
        if getattr(f.asked, name) is not None:
            continue
        for subject in subjects:
            said = f.start[subject]
            if f.written(subject) and said != s[subject] and not (name == "delay_wgrad_compute" and not said):
                fix = f"set comm_overlap.{name}={str(said).lower()}"
                if said and subject in (WITH_STEP, DELAY):  # DP009 and EP016 speak of them elsewhere
                    fix = f"set {subject}={'null' if subject == WITH_STEP else 'false'}"
                yield warning(subject, "Bridge overwrites what stands here", requested=said, fix=fix)


@rule(
    "DP005",
    source="megatron-bridge training/config.py _validate_and_sync_distributed_optimizer_settings",
    megatron_lm=None,
)
def distributed_optimizer_on_one_side(f: Facts, s: State) -> Finding:
    """``use_distributed_optimizer`` is true on one side only.

    Bridge makes both true, but after its overlap set-up, which reads ``ddp``'s.

    Why: set on ``optimizer`` only, the job gets a distributed optimizer without Bridge's data-parallel
    defaults and without what ``comm_overlap`` says of them; the raw ``ddp`` values stand.
    Fix: set it on both.
    """
    ddp, optimizer = bool(f.recipe.ddp.use_distributed_optimizer), bool(f.recipe.optimizer.use_distributed_optimizer)
    if ddp == optimizer or f.fsdp:
        return None
    if ddp:
        subject, because = "optimizer.use_distributed_optimizer", "Bridge turns it on, as ddp has it"
        if f.recipe.optimizer.use_distributed_optimizer is None or f.recipe.is_dump:
            return info(subject, because, value=True)
        return warning(subject, because, requested=False, value=True, fix=f"set {subject}=true")
    because = "true on optimizer only: Bridge turns ddp's on"
    if f.overlap_setup:
        nothing = "" if s[GRAD_REDUCE] or s[PARAM_GATHER] else ": nothing overlaps"
        because = f"{because} after the overlap set-up, {RAW_STANDS}{nothing}"
    return warning(DIST_OPT, because, requested=False, value=True, fix=f"set {dist_opt_on(f)}")


@rule(
    "DP006",
    source="megatron-bridge training/config.py _validate_and_sync_distributed_optimizer_settings",
    bridge=">=0.5.0",
    megatron_lm=None,
)
def param_gather_in_step(f: Facts, s: State) -> Iterable[Verdict]:
    """From 0.5 Bridge keeps ``overlap_param_gather`` the same on ``ddp`` and ``optimizer``.

    Why: one true makes both true, in validation.
    Fix: set it under ``comm_overlap``.
    """
    if s[PARAM_GATHER] == s[OPT_PARAM_GATHER]:
        return
    for subject in (PARAM_GATHER, OPT_PARAM_GATHER):
        if not s[subject]:
            yield info(subject, "true on the other side: Bridge makes both true", value=True)


@rule("DP007", source=f"{_PARSER}; megatron-core distributed/distributed_data_parallel.py")
def param_gather_without_grad_reduce(f: Facts, s: State) -> Finding:
    """Parameter gathering overlaps, gradient reduction does not.

    Megatron-LM refuses it. Bridge accepts it.

    Why: without ``overlap_grad_reduce`` there is one bucket, so one all-gather of everything before the
    first layer: little to hide.
    Fix: overlap both or neither.
    """
    if not s[PARAM_GATHER] or s[GRAD_REDUCE]:
        return None
    both = reduce_on(f, s)
    fix = f"set {f'{both}, or ' if both else ''}{gather_off(f, s)}"
    if f.megatron_lm:
        because = "overlap_param_gather needs overlap_grad_reduce"
        return error(PARAM_GATHER, because, fix=fix, by=MEGATRON_LM, at="validation", requested=True)
    if f.fsdp or f.torch_fsdp2 or f.parallelism.dp * f.parallelism.cp == 1:
        return None
    because = "without overlap_grad_reduce there is one bucket, so one all-gather and little to hide"
    reads_overlap = f.overlap_setup and f.dist_opt_at_setup
    asked = f.asked.overlap_param_gather if reads_overlap else True
    return warning(PARAM_GATHER, because, requested=asked, fix=fix)


@rule("DP008", source=f"{_PARSER}; megatron-core distributed/param_and_grad_buffer.py start_param_sync (0.17)")
def param_gather_needs_distributed_optimizer(f: Facts, s: State) -> Finding:
    """Parameter gathering overlaps only with the distributed optimizer.

    Megatron-LM refuses it otherwise; Megatron-FSDP and, from 0.17, a layer-wise optimizer such as
    ``dist_muon`` count as well. Bridge checks nothing: Megatron-Core before 0.17 ignores the flag, newer ones
    take it for the layer-wise optimizer and fail at the first gather.

    Why: without it every rank holds all parameters and gathers none.
    Fix: set ``ddp.use_distributed_optimizer=true``.
    """
    if not s[PARAM_GATHER] or f.dist_opt or f.fsdp or (f.core_in(">=0.17.0rc0") and layer_wise(f)):
        return None
    because = "use_distributed_optimizer is false"
    fix = f"set {gather_off(f, s) if no_dist_opt(f) else dist_opt_on(f)}"
    if f.megatron_lm:
        return error(PARAM_GATHER, because, fix=fix, by=MEGATRON_LM, at="validation", requested=True)
    if f.torch_fsdp2 or f.parallelism.dp * f.parallelism.cp == 1:
        return None
    if f.core_in(">=0.17.0rc0"):
        return error(PARAM_GATHER, because, fix=fix, by=MEGATRON_CORE, at="first_forward", requested=True)
    return warning(PARAM_GATHER, f"{because}, so Megatron-Core ignores it", fix=fix, requested=True)


@rule("DP009", source=f"{_PARSER}; {_SETUP}; megatron-core optimizer/__init__.py")
def gather_with_step(f: Facts, s: State) -> Finding:
    """``overlap_param_gather_with_optimizer_step`` and what it needs.

    The distributed optimizer, ``overlap_param_gather`` and virtual stages. Megatron-LM refuses it without,
    and with distributed checkpoints: its default and every format but ``torch``. Bridge leaves it off because
    of an issue with checkpointing, and checks nothing; without a second chunk to step through, Megatron-Core
    fails.

    Why: the first chunk's all-gather starts while the optimizer still steps through the others.
    Fix: leave it off.
    """
    if not s[WITH_STEP]:
        return None
    fix = f"set {step_off(f)}"
    needs = {
        "the distributed optimizer": f.dist_opt,
        "overlap_param_gather": s[OPT_PARAM_GATHER],
        "virtual stages": (f.parallelism.vp or 1) > 1,
    }
    missing = " and ".join(name for name, met in needs.items() if not met)
    if missing and f.megatron_lm:
        return error(WITH_STEP, f"it needs {missing}", fix=fix, by=MEGATRON_LM, at="validation", requested=True)
    if missing:
        if f.dist_opt and not f.fsdp and not needs["virtual stages"]:
            return error(WITH_STEP, f"it needs {missing}", fix=fix, by=MEGATRON_CORE, at="construction", requested=True)
        return warning(WITH_STEP, f"it needs {missing}", fix=fix, requested=True)
    if not f.megatron_lm:
        because = "upstream leaves it off because of an issue with checkpointing"
        return warning(WITH_STEP, because, fix=fix, requested=True)
    said = f.recipe.checkpoint.ckpt_format
    if said == "torch":
        return None
    because = f"Megatron-LM refuses it with distributed checkpoints{f' such as {said}' if said else ', its default'}"
    if not f.torch_fsdp2 and not f.fsdp:  # which take other formats (FSDP006)
        fix = f"{fix}, or checkpoint.ckpt_format=torch"
    return error(WITH_STEP, because, fix=fix, by=MEGATRON_LM, at="validation", requested=True)


@rule("DP010", source="megatron-bridge training/mixed_precision.py setup", megatron_lm=None)
def grad_reduce_precision_lost(f: Facts, s: State) -> Finding:
    """``ddp.grad_reduce_in_fp32`` is overwritten by the mixed-precision section.

    Why: Bridge copies the section's value over ddp's, so an override of ddp's is lost; FP32 doubles the bytes
    of every gradient reduction.
    Fix: set ``mixed_precision.grad_reduce_in_fp32``.
    """
    said = f.recipe.ddp.grad_reduce_in_fp32
    final = f.precision.grad_reduce_in_fp32
    if f.recipe.mixed_precision is None or said is None or said == final or not f.written("ddp.grad_reduce_in_fp32"):
        return None
    effect = "stays FP32, twice the bytes of BF16" if final else "stays in the parameters' precision"
    return warning(
        "ddp.grad_reduce_in_fp32",
        f"the mixed-precision section overwrites it: gradient reduction {effect}",
        requested=said,
        value=final,
        fix=f"set mixed_precision.grad_reduce_in_fp32={str(said).lower()}",
    )
