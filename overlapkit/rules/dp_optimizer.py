"""DP: gradients that come late, instances of the distributed optimizer, MXFP8 parameters, and Muon."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from overlapkit.facts import Facts
from overlapkit.rules.dp_changes import (
    DELAY,
    GRAD_REDUCE,
    ORDINARY,
    PARAM_GATHER,
    REUSE,
    WITH_STEP,
    dist_opt_on,
    gather_off,
    layer_wise,
    no_dist_opt,
    reuse_off,
    step_off,
)
from overlapkit.rules.registry import (
    BRIDGE,
    MEGATRON_CORE,
    MEGATRON_LM,
    TRANSFORMER_ENGINE,
    Finding,
    State,
    Verdict,
    error,
    rule,
)

_INSTANCES = "ddp.num_distributed_optimizer_instances"
_DDP = "megatron-core distributed/distributed_data_parallel.py"


@rule("DP017", source=f"{_DDP}; transformer-engine pytorch/module/base.py backward_dw", megatron_lm=None)
def hooks_before_gradients(f: Facts, s: State) -> Finding:
    """Delayed weight gradients that DDP's hooks do not wait for.

    ``model.delay_wgrad_compute`` is true and ``ddp.delay_wgrad_compute`` is not: Bridge's set-up writes the
    first always, the second with the distributed optimizer only. Megatron-LM has one flag for both,
    Megatron-FSDP looks at the parameters instead.

    Why: DDP's hooks then run in the backward pass, before the delayed GEMM. With ``overlap_grad_reduce`` a
    bucket is reduced before its last weight gradients are in it; without gradient accumulation fusion a
    weight gradient misses the main gradient of its step. The training goes on with wrong gradients.
    Fix: set ``ddp.use_distributed_optimizer=true``, or ``ddp.delay_wgrad_compute=true``.
    """
    if not s["model.delay_wgrad_compute"] or s[DELAY] or f.fsdp or f.torch_fsdp2:
        return None
    because = "model.delay_wgrad_compute is true and ddp's is not"
    if s[GRAD_REDUCE] and f.parallelism.dp * f.parallelism.cp > 1:
        because = f"{because}: a bucket is reduced before its last weight gradients are there"
    elif not f.gradient_accumulation_fusion:
        because = (
            f"{because}: weight gradients come after the hooks, so that they miss the main gradients of their step"
        )
    else:
        return None
    fix = "ddp.delay_wgrad_compute=true"
    if f.overlap_setup and not no_dist_opt(f):
        fix = f"{dist_opt_on(f)}, or {fix}"
    return error(DELAY, because, fix=f"set {fix}", requested=f.recipe.ddp.delay_wgrad_compute)


@rule(
    "DP018",
    source=f"megatron-core parallel_state.py initialize_model_parallel; {_DDP}; "
    "megatron-core optimizer/__init__.py and optimizer/layer_wise_optimizer.py (0.18)",
)
def optimizer_instances(f: Facts, s: State) -> Finding:
    """Several instances of the distributed optimizer.

    Their number divides DP times CP and expert DP. They need the distributed optimizer; from core 0.18 the
    layer-wise one is refused.

    Why: every instance shards over an equal part of the data-parallel ranks, and Megatron-Core asserts it.
    Fix: set ``ddp.num_distributed_optimizer_instances`` to a common divisor, or leave it 1.
    """
    count = f.recipe.ddp.num_distributed_optimizer_instances
    if count is None or count == 1:
        return None
    p = f.parallelism
    at, fix = "construction", f"set {_INSTANCES}=1"
    ranks = {f"DP {p.dp} · CP {p.cp}": p.dp * p.cp}
    if p.expert_dp is not None:  # EP023 says where it is no whole number
        ranks[f"expert DP {p.expert_dp}"] = p.expert_dp
    uneven = [name for name, size in ranks.items() if size % count]
    if uneven:
        because, at = f"{count} does not divide {uneven[0]}", "initialize_model_parallel"
        fix = f"set {_INSTANCES} to a divisor of {gcd(*ranks.values())}"
    elif f.fsdp or f.torch_fsdp2:
        return None
    elif f.core_in(">=0.18.0rc0") and layer_wise(f):
        because = "a layer-wise optimizer has one instance"
    elif not f.dist_opt:
        because = "without the distributed optimizer there is nothing to replicate"
        if (f.recipe.optimizer.optimizer or "adam") in ORDINARY:  # DP022, or it becomes layer-wise
            fix = f"set {dist_opt_on(f)}, or {_INSTANCES}=1"
    else:
        return None
    return error(_INSTANCES, because, fix=fix, by=MEGATRON_CORE, at=at, requested=count, value=count)


@rule("DP019", source="megatron-core optimizer/optimizer_config.py __post_init__", core=">=0.19.0rc0")
def step_overlaps_reused_buffer(f: Facts, s: State) -> Finding:
    """``overlap_param_gather_with_optimizer_step`` with ``reuse_grad_buf_for_mxfp8_param_ag``.

    Megatron-Core refuses it from 0.19. Bridge's ``mixed_precision`` section writes the second; for
    Megatron-FSDP Megatron-LM drops it before, Bridge only after.

    Why: MXFP8 parameters are gathered in the gradient buffer, which the optimizer still reads while it steps.
    Fix: set ``overlap_param_gather_with_optimizer_step=false``.
    """
    if not s[WITH_STEP] or not f.reuses_gradient_buffer("optimizer"):
        return None
    because = f"it excludes {REUSE}"
    return error(WITH_STEP, because, fix=f"set {step_off(f)}", by=MEGATRON_CORE, at="validation", requested=True)


@rule(
    "DP020",
    source="megatron-bridge training/mixed_precision.py finalize (0.4), training/config.py validate (0.5); "
    "megatron-core distributed/param_and_grad_buffer.py; transformer-engine pytorch/tensor/utils.py replace_raw_data",
)
def mxfp8_gather_without_reuse(f: Facts, s: State) -> Finding:
    """MXFP8 parameters are gathered through the gradient buffer.

    ``fp8_param_gather`` with the MXFP8 recipe needs ``reuse_grad_buf_for_mxfp8_param_ag``. Bridge asserts it
    of its ``mixed_precision`` section, from 0.5 not for Megatron-FSDP; Bridge's own MXFP8 names have it.
    Elsewhere the distributed optimizer fails when DDP is made.

    Why: Transformer Engine cannot move an MXFP8 parameter into the buffer that is gathered.
    Fix: set ``reuse_grad_buf_for_mxfp8_param_ag=true``.
    """
    if not f.precision.fp8_param_gather or f.precision.fp8_recipe != "mxfp8" or f.reuses_gradient_buffer("ddp"):
        return None
    section = f.recipe.mixed_precision
    if f.bridge and section is not None:
        if f.fsdp and f.bridge_in(">=0.5.0"):
            return None
        because, by, at = f"fp8_param_gather with mxfp8 needs {REUSE}", BRIDGE, "validation"
        subject, said = f"mixed_precision.{REUSE}", getattr(section, REUSE)
    elif f.dist_opt and not f.fsdp and not f.torch_fsdp2:
        because = "Transformer Engine cannot move MXFP8 parameters into the distributed optimizer's buffer"
        by, at = TRANSFORMER_ENGINE, "construction"
        subject, said = f"ddp.{REUSE}", getattr(f.recipe.ddp, REUSE)
    else:
        return None
    beside = f" and {step_off(f)}" if s[WITH_STEP] and f.core_in(">=0.19.0rc0") else ""  # DP019
    return error(subject, because, fix=f"set {subject}=true{beside}", by=by, at=at, requested=said, value=False)


@rule("DP021", source="megatron-core distributed/distributed_data_parallel_config.py __post_init__")
def reuse_without_fp8_parameters(f: Facts, s: State) -> Finding:
    """``reuse_grad_buf_for_mxfp8_param_ag`` without ``fp8_param_gather``.

    Why: Megatron-Core asserts that the parameters stay in MXFP8. Under Bridge it sees the values of the
    ``mixed_precision`` section, without one those of ``ddp``.
    Fix: set ``fp8_param_gather=true``, or the reuse to false.
    """
    section = f.recipe.mixed_precision
    ddp_alone = f.bridge and section is None
    gathers = f.recipe.ddp.fp8_param_gather if ddp_alone else f.precision.fp8_param_gather
    if gathers or (ddp_alone and gathers is None and not f.recipe.is_dump) or (f.megatron_lm and f.torch_fsdp2):
        return None
    if not f.reuses_gradient_buffer("ddp"):
        return None
    off = [f"mixed_precision.{REUSE}=false"] if f.precision.reuses_gradient_buffer else []
    off += reuse_off(f)
    subject, gather = off[0].partition("=")[0], "mixed_precision.fp8_param_gather" if section else "model.fp8_param"
    other = "ddp.fp8_param_gather" if ddp_alone else gather
    return error(
        subject,
        "fp8_param_gather is false",
        fix=f"set {f'{other}=true, or ' if f.precision.fp8 else ''}{' and '.join(off)}",  # without FP8: CFG023
        by=MEGATRON_CORE,
        at="validation" if f.bridge or f.core_in(">=0.18.0rc0") else "construction",
        requested=True,
        value=True,
    )


@rule(
    "DP022",
    source="Megatron-LM training/arguments.py validate_args; megatron-core optimizer/muon.py (0.17), "
    "optimizer/__init__.py (0.18)",
    core=">=0.16.0rc0",
)
def muon_excludes(f: Facts, s: State) -> Iterable[Verdict]:
    """What Muon and the other emerging optimizers exclude.

    Both kinds of FSDP and checkpoint formats other than ``torch`` and ``torch_dist`` in Megatron-LM. Before
    core 0.18 the distributed optimizer, behind Bridge too, and in Megatron-LM data-parallel overlap, which
    the layer-wise ``dist_muon`` has from 0.17. From 0.18 Megatron-LM makes the layer-wise optimizer of the
    distributed one; it does not overlap with its step.

    Why: Muon steps whole matrices, so that no rank can do with a shard of one.
    Fix: turn off what is named, or use ``optimizer.optimizer=adam``.
    """
    name, old = f.recipe.optimizer.optimizer or "adam", f.core_in("<0.18.0rc0")
    if name in ORDINARY or (old and "muon" not in name):
        return
    if f.megatron_lm:
        overlaps = not old or (name == "dist_muon" and f.core_in(">=0.17.0rc0"))
        ckpt_format = f.recipe.checkpoint.ckpt_format or "torch_dist"
        conflicts = {
            "overlap_grad_reduce": s[GRAD_REDUCE] and not overlaps,
            "overlap_param_gather": s[PARAM_GATHER] and not overlaps,
            "use_distributed_optimizer": f.dist_opt and old,
            "use_torch_fsdp2": f.torch_fsdp2,
            "use_megatron_fsdp": f.fsdp,
            f"the checkpoint format {ckpt_format}": ckpt_format not in ("torch", "torch_dist"),
        }
        yield from _excludes(f, s, name, conflicts, MEGATRON_LM, "validation")
    elif old:
        yield from _excludes(f, s, name, {"use_distributed_optimizer": f.dist_opt}, MEGATRON_CORE, "construction")
    if not old and layer_wise(f):
        with_step = {"overlap_param_gather_with_optimizer_step": s[WITH_STEP]}
        yield from _excludes(f, s, f"{name}, layer-wise,", with_step, MEGATRON_CORE, "construction")


def _excludes(f: Facts, s: State, text: str, conflicts: dict[str, bool], by: str, at: str) -> Iterable[Verdict]:
    found = [conflict for conflict, is_there in conflicts.items() if is_there]
    if not found:
        return
    adam, name = "optimizer.optimizer=adam", f.recipe.optimizer.optimizer
    if s[PARAM_GATHER] and not (f.dist_opt or f.fsdp):  # which DP008 refuses of adam
        adam = f"{adam} and {gather_off(f, s)}"
    because, fix = f"{text} excludes {', '.join(found)}", f"turn these off, or set {adam}"
    yield error("optimizer.optimizer", because, fix=fix, by=by, at=at, requested=name, value=name)
