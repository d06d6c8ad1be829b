"""FSDP: Megatron-FSDP and PyTorch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from overlapkit.facts import Facts
from overlapkit.rules.changes import asserted
from overlapkit.rules.dp import RAW_STANDS
from overlapkit.rules.dp_changes import (
    DIST_OPT,
    REUSE,
    WITH_STEP,
    dist_opt_on,
    muon_shards_nothing,
    reuse_off,
    step_off,
)
from overlapkit.rules.registry import (
    BRIDGE,
    MEGATRON_CORE,
    MEGATRON_LM,
    Finding,
    State,
    Verdict,
    error,
    info,
    passes,
    rule,
    warning,
)

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_SOURCE = "megatron-bridge training/config.py; Megatron-LM training/arguments.py validate_args"


def _name(f: Facts) -> str:
    return "dist.use_torch_fsdp2" if f.torch_fsdp2 and not f.fsdp else "ddp.use_megatron_fsdp"


@rule("FSDP001", source=_SOURCE)
def one_connection(f: Facts, s: State) -> Finding:
    """FSDP with ``CUDA_DEVICE_MAX_CONNECTIONS=1``.

    Megatron-LM asserts that it is not 1, Bridge from 0.5 too for Megatron-FSDP. Older Bridge does not look,
    no Bridge does for FSDP2: there the job starts, with nothing of FSDP overlapped.

    Why: with one connection the gathers and scatters of FSDP queue up behind the compute they should run
    beside.
    Fix: export ``CUDA_DEVICE_MAX_CONNECTIONS=32``.
    """
    given = f.recipe.env_vars
    if not (f.fsdp or f.torch_fsdp2) or given is None or given.get(_CONNECTIONS) != "1":
        return None
    by = MEGATRON_LM if f.megatron_lm else BRIDGE if f.fsdp and f.bridge_in(">=0.5.0") else None
    because = "FSDP needs more than one device connection"
    return error(
        f"env_vars.{_CONNECTIONS}",
        because if by else f"{because}: its gathers and scatters queue behind compute",
        fix=f"set env_vars.{_CONNECTIONS}=32",
        by=by,
        at="validation" if by else None,
        requested="1",
        value="1",
    )


@rule("FSDP002", source="Megatron-LM training/arguments.py validate_args; megatron-core tensor_parallel/layers.py")
def fsdp_with_tp_or_cp(f: Facts, s: State) -> Finding:
    """FSDP together with TP or CP before Blackwell.

    Why: TP and CP rely on one device connection to start a collective before the GEMM beside it; FSDP needs
    several. With several, the TP and CP collectives may start late and stay exposed.
    Fix: use FSDP with TP 1 and CP 1, or accept that the TP and CP overlap suffers.
    """
    p = f.parallelism
    if not (f.fsdp or f.torch_fsdp2) or (p.tp == 1 and p.cp == 1):
        return None
    if f.gpu is not None and f.gpu.blackwell_or_newer:
        return None
    names = [name for name, size in (("TP", p.tp), ("CP", p.cp)) if size > 1]
    axes, want = " and ".join(names), "want" if len(names) > 1 else "wants"
    return warning(
        _name(f),
        f"FSDP wants several device connections, {axes} {want} one: the overlap of {axes} collectives suffers",
        requested=True,
        value=True,
        fix="use TP 1 and CP 1 with FSDP, or no FSDP",
    )


@rule("FSDP003", source=_SOURCE)
def fsdp_forces_distributed_optimizer(f: Facts, s: State) -> Finding:
    """Megatron-FSDP turns the distributed optimizer on.

    Bridge does so from 0.5, after its overlap set-up, which has then already passed over the data-parallel
    settings: ``ddp``'s own stand. Megatron-LM does from 0.18. Older ones leave it off; before 0.14, for custom
    FSDP, Megatron-LM's parser refused that.

    Why: Megatron-FSDP works with the distributed optimizer only.
    Fix: set ``ddp.use_distributed_optimizer=true`` yourself.
    """
    said = f.recipe.ddp.use_distributed_optimizer
    if not f.fsdp or said or (f.recipe.optimizer.use_distributed_optimizer and not f.overlap_setup):
        return None
    subject, fix = DIST_OPT, f"set {dist_opt_on(f)}"
    if muon_shards_nothing(f):
        fix = f"set optimizer.optimizer=adam and {dist_opt_on(f)}"
    if f.recipe.optimizer.use_distributed_optimizer:
        because = f"true on optimizer only: Bridge turns ddp's on after the overlap set-up, {RAW_STANDS}"
        return warning(subject, because, requested=said, value=True, fix=fix)
    if f.megatron_lm and f.core_in("<0.14.0"):
        because = "custom FSDP needs the distributed optimizer"
        return error(subject, because, fix=fix, by=MEGATRON_LM, at="validation", requested=said, value=False)
    if not (f.bridge_in(">=0.5.0") or (f.megatron_lm and f.core_in(">=0.18.0rc0"))):
        because = "Megatron-FSDP works with the distributed optimizer only, and this version does not turn it on"
        if f.overlap_setup:
            because = f"{because}, {RAW_STANDS}"
        return warning(subject, because, requested=said, value=False, fix=fix)
    if not f.overlap_setup:
        return info(subject, "Megatron-FSDP turns it on", requested=said, value=True)
    because = f"Megatron-FSDP turns it on after the overlap set-up, {RAW_STANDS}"
    return warning(subject, because, requested=said, value=True, fix=fix)


def _leave_fsdp2(f: Facts, s: State) -> str:
    """What turns FSDP2 off, and with it what then does not fit."""
    without = replace(f, torch_fsdp2=False)
    changes, is_now = ["dist.use_torch_fsdp2=false"], f.recipe.checkpoint.ckpt_format
    if f.fsdp and is_now != "fsdp_dtensor":
        changes.append("checkpoint.ckpt_format=fsdp_dtensor")
    elif not f.fsdp and is_now == "torch_dcp":
        changes.append("checkpoint.ckpt_format=torch_dist")
    if not passes(without, s, "DP014"):
        changes.append("ddp.num_buckets=null")
    if not passes(without, s, "DP018"):
        changes.append("ddp.num_distributed_optimizer_instances=1")
    if not passes(without, s, "DP021"):
        changes += reuse_off(f)
    if not passes(without, s, "DP020"):
        changes.append(f"ddp.{REUSE}=true")
    return " and ".join([*changes, *asserted(without, s)])


@rule("FSDP004", source=f"{_SOURCE}; megatron-bridge models/model_provider.py")
def two_kinds_of_fsdp(f: Facts, s: State) -> Finding:
    """Megatron-FSDP and FSDP2 at once.

    Bridge compares the values of ``dist`` in validation, and ddp's when it wraps the model. Megatron-LM's
    conditions for the two cannot both be met.

    Why: they exclude each other.
    Fix: choose one.
    """
    if not (f.fsdp and f.torch_fsdp2):
        return None
    late = f.bridge and not f.recipe.dist.use_megatron_fsdp
    return error(
        "dist.use_torch_fsdp2",
        "use_megatron_fsdp and use_torch_fsdp2 are both true",
        fix=f"set {_leave_fsdp2(f, s)}",
        by=MEGATRON_LM if f.megatron_lm else BRIDGE,
        at="construction" if late else "validation",
        requested=True,
        value=True,
    )


@rule("FSDP005", source="Megatron-LM training/arguments.py validate_args", bridge=None)
def fsdp2_excludes(f: Facts, s: State) -> Finding:
    """What PyTorch's FSDP2 excludes in Megatron-LM.

    Pipeline and expert parallelism, the distributed optimizer, gradient accumulation fusion, FP16, and tied
    embeddings.

    Why: its parser refuses the combination.
    Fix: turn off what is named.
    """
    if not f.torch_fsdp2:
        return None
    p, model = f.parallelism, f.recipe.model
    conflicts = {
        f"PP {p.pp}": p.pp > 1,
        f"EP {p.ep}": p.ep > 1,
        "use_distributed_optimizer": f.dist_opt and not f.fsdp,
        "gradient_accumulation_fusion": f.gradient_accumulation_fusion,
        "fp16": f.precision.compute == "fp16",
        "share_embeddings_and_output_weights": model.share_embeddings_and_output_weights is not False,
    }
    found = [name for name, conflict in conflicts.items() if conflict]
    if not found:
        return None
    return error(
        "dist.use_torch_fsdp2",
        f"FSDP2 excludes {', '.join(found)}",
        fix=f"turn these off, or set {_leave_fsdp2(f, s)}",
        by=MEGATRON_LM,
        at="validation",
        requested=True,
        value=True,
    )


@rule("FSDP006", source=f"{_SOURCE}, training/utils.py", megatron_lm=">=0.14.0rc0")
def checkpoint_format(f: Facts, s: State) -> Finding:
    """The checkpoint format that FSDP takes.

    Megatron-FSDP takes ``fsdp_dtensor`` and nothing else does; the default is ``torch_dist``. Megatron-LM
    refuses any other, whether there are checkpoints or not, and for FSDP2 all but ``torch_dist`` and, without
    TP, ``torch_dcp``. Bridge looks only where a checkpoint is saved or loaded.

    Why: the shards of each are of a kind that the other formats cannot write.
    Fix: set ``checkpoint.ckpt_format``.
    """
    asked = f.recipe.checkpoint
    if (f.fsdp and f.torch_fsdp2) or (f.bridge and asked.save is None and asked.load is None):
        return None
    is_now = asked.ckpt_format or "torch_dist"
    takes, because = "torch_dist", None
    if f.fsdp and is_now != "fsdp_dtensor":
        takes = "fsdp_dtensor"
        because = f"Megatron-FSDP takes {takes}, {'not' if asked.ckpt_format else 'the default is'} {is_now}"
    elif not f.fsdp and is_now == "fsdp_dtensor":
        because = "fsdp_dtensor is Megatron-FSDP's"
    elif f.megatron_lm and f.torch_fsdp2 and is_now != takes and (is_now != "torch_dcp" or f.parallelism.tp > 1):
        because = f"FSDP2 takes torch_dist {'with TP' if f.parallelism.tp > 1 else 'or torch_dcp'}, not {is_now}"
    elif f.megatron_lm and not f.torch_fsdp2 and is_now == "torch_dcp":
        because = "torch_dcp is FSDP2's"
    if because is None:
        return None
    beside = f" and {step_off(f)}" if f.megatron_lm and s[WITH_STEP] else ""  # which wants torch (DP009)
    return error(
        "checkpoint.ckpt_format",
        because,
        fix=f"set checkpoint.ckpt_format={takes}{beside}",
        by=MEGATRON_LM if f.megatron_lm else BRIDGE,
        at="validation",
        requested=asked.ckpt_format,
        value=is_now,
    )


@rule(
    "FSDP007",
    source="Megatron-LM's parser; megatron-core distributed/distributed_data_parallel_config.py",
    bridge=None,
    megatron_lm="<0.14.0",
)
def fsdp_flags_of_later_versions(f: Facts, s: State) -> Iterable[Verdict]:
    """Flags of FSDP and its buffers that Megatron-LM did not have yet.

    ``--use-megatron-fsdp`` came with core 0.14, as a new name of ``--use-custom-fsdp``; ``--use-nccl-ub`` and
    ``--fsdp-double-buffer`` with 0.13.

    Why: the parser refuses a flag that it does not know.
    Fix: use a newer Megatron-Core, or custom FSDP.
    """
    ddp, because = f.recipe.ddp, "this parser has no such flag"
    for subject, asked in (
        ("ddp.use_megatron_fsdp", ddp.use_megatron_fsdp),
        ("dist.use_megatron_fsdp", f.recipe.dist.use_megatron_fsdp),
    ):
        if asked:
            fix = f"set {subject}=false and ddp.use_custom_fsdp=true, or use Megatron-Core 0.14 or newer"
            yield error(subject, because, fix=fix, by=MEGATRON_LM, at="validation", requested=True, value=True)
    if f.core_in("<0.13.0"):
        for subject, asked in (("ddp.nccl_ub", ddp.nccl_ub), ("ddp.fsdp_double_buffer", ddp.fsdp_double_buffer)):
            if asked:
                fix = "use Megatron-Core 0.13 or newer"
                yield error(subject, because, fix=fix, by=MEGATRON_LM, at="validation", requested=True, value=True)


@rule("FSDP008", source="megatron-core optimizer/__init__.py and optimizer/distrib_optimizer.py", megatron_lm=None)
def fsdp2_with_distributed_optimizer(f: Facts, s: State) -> Finding:
    """PyTorch's FSDP2 with the distributed optimizer, behind Bridge.

    Megatron-LM's parser refuses it (FSDP005); Bridge does not look.

    Why: FSDP2 shards the parameters itself and has no gradient buffers. The distributed optimizer takes the module's
    method ``buffers`` for them, and fails with a TypeError.
    Fix: set ``use_distributed_optimizer=false``, or use Megatron-FSDP.
    """
    if not f.torch_fsdp2 or f.fsdp or not f.dist_opt:
        return None
    named = [name for name in ("ddp", "optimizer") if getattr(f.recipe, name).use_distributed_optimizer]
    changes = " and ".join(f"{name}.use_distributed_optimizer=false" for name in named)
    return error(
        "dist.use_torch_fsdp2",
        "FSDP2 has no gradient buffers for the distributed optimizer",
        fix=f"set {changes}",
        by=MEGATRON_CORE,
        at="construction",
        requested=True,
        value=True,
    )


@rule("FSDP009", source=f"{_SOURCE} (0.17)")
def fsdp_excludes(f: Facts, s: State) -> Iterable[Verdict]:
    """What Megatron-FSDP excludes.

    ``dist.use_tp_pp_dp_mapping`` in Bridge. From Bridge 0.5 and Megatron-LM 0.17 ``fsdp_manual_registration``
    without ``nccl_ub``, and comparing weights over the replicas with the strategy ``optim_grads_params``.

    Why: its groups follow the usual order of ranks; registration by hand is NCCL's; and with that strategy no rank
    holds whole weights to compare.
    Fix: turn off what is named.
    """
    recent = f.core_in(">=0.17.0rc0") if f.megatron_lm else f.bridge_in(">=0.5.0")
    ddp, by = f.recipe.ddp, MEGATRON_LM if f.megatron_lm else BRIDGE
    # Megatron-LM looks at the registration without Megatron-FSDP too.
    if ddp.fsdp_manual_registration and not ddp.nccl_ub and recent and (f.fsdp or f.megatron_lm):
        yield _excluded("ddp.fsdp_manual_registration", True, "it needs ddp.nccl_ub", "false", by)
    if not f.fsdp:
        return
    if f.recipe.dist.use_tp_pp_dp_mapping and f.bridge:
        yield _excluded("dist.use_tp_pp_dp_mapping", True, "Megatron-FSDP excludes it", "false", by)
    interval = f.recipe.train.check_weight_hash_across_dp_replicas_interval
    if interval is not None and ddp.data_parallel_sharding_strategy == "optim_grads_params" and recent:
        because = "with the sharding strategy optim_grads_params no rank holds whole weights"
        yield _excluded("train.check_weight_hash_across_dp_replicas_interval", interval, because, "null", by)


def _excluded(subject: str, requested: object, because: str, other: str, by: str) -> Verdict:
    fix = f"set {subject}={other}"
    return error(subject, because, fix=fix, by=by, at="validation", requested=requested, value=requested)
