"""TP: whether tensor-parallel userbuffers are on, and what keeps them off.

A request of ``auto`` means "on when legal": each rule here and in ``ub`` that finds an obstacle then turns
the overlap off with an info, where a request of true gets what the framework does with it.
"""

from __future__ import annotations

from overlapkit.facts import Facts
from overlapkit.recipe.sections import AUTO
from overlapkit.rules.changes import home, with_sequence_parallel
from overlapkit.rules.registry import (
    BRIDGE,
    KEEP,
    MEGATRON_CORE,
    MEGATRON_LM,
    TRANSFORMER_ENGINE,
    Finding,
    State,
    Verdict,
    error,
    info,
    rule,
    warning,
)

OVERLAP = "model.tp_comm_overlap"
_GATE = "megatron-bridge training/comm_overlap.py; Megatron-LM training/arguments.py"


def off(f: Facts) -> str:
    """The way out of every obstacle."""
    return f"set {home(f)}.tp_comm_overlap=false"


def obstacle(
    f: Facts, because: str, *, fix: str | None = None, by: str | None = None, at: str | None = None
) -> Verdict:
    """TP overlap cannot work: off when it was left to us, an error when it was asked for."""
    if f.tp_request == AUTO:
        return info(OVERLAP, because, value=False, requested=AUTO, fix=fix)
    return error(OVERLAP, because, fix=fix or off(f), by=by, at=at, requested=True)


def drawback(f: Facts, because: str, *, fix: str | None = None) -> Verdict:
    """TP overlap starts but is lost later: off when it was left to us, a warning when it was asked for."""
    if f.tp_request == AUTO:
        return info(OVERLAP, because, value=False, requested=AUTO, fix=fix)
    return warning(OVERLAP, because, requested=True, fix=fix)


def _gated(f: Facts, because: str, fix: str | None) -> Verdict:
    """One of Bridge's three gates: Bridge turns the overlap off and logs it, Megatron-LM refuses to start."""
    if f.tp_request == AUTO:
        return info(OVERLAP, because, value=False, requested=AUTO, fix=fix)
    fix = f"{fix}, or {home(f)}.tp_comm_overlap=false" if fix else off(f)
    if f.megatron_lm:
        return error(OVERLAP, because, fix=fix, by=MEGATRON_LM, at="validation", requested=True)
    if not f.overlap_setup:
        because = f"{because}, and without comm_overlap nothing turns it off: buffers without a use"
    return warning(OVERLAP, because, value=False if f.overlap_setup else KEEP, requested=True, fix=fix)


@rule("TP001", source=_GATE)
def tp_below_two(f: Facts, s: State) -> Finding:
    """TP overlap needs a TP group of at least 2.

    Bridge turns it off and logs a line. Megatron-LM clears sequence parallelism at TP 1 and then refuses
    the overlap for want of it.

    Why: userbuffers overlap the collectives of a tensor-parallel group; one GPU has none.
    Fix: raise ``model.tensor_model_parallel_size``, or do not ask for the overlap.
    """
    if not s[OVERLAP] or f.parallelism.tp > 1:
        return None
    beside = "" if f.sequence_parallel else " and model.sequence_parallel=true"  # TP002
    return _gated(f, "tensor_model_parallel_size is 1", f"set model.tensor_model_parallel_size to 2 or more{beside}")


@rule("TP002", source=_GATE)
def tp_without_sequence_parallel(f: Facts, s: State) -> Finding:
    """TP overlap needs sequence parallelism.

    Bridge turns it off and only logs a line. Megatron-LM refuses to start.

    Why: it overlaps all-gathers and reduce-scatters with GEMMs; without sequence parallelism a layer has
    all-reduces instead.
    Fix: set ``model.sequence_parallel=true``.
    """
    if not s[OVERLAP] or f.parallelism.tp == 1 or f.sequence_parallel:
        return None
    change = with_sequence_parallel(f, s)
    # Bridge names one obstacle at a time; under Megatron-LM what stands behind is an error of its own already.
    suffices = f.megatron_lm or " and " not in change
    fix = f"set {change.partition(' and ')[0]}" if suffices else None
    return _gated(f, "sequence_parallel is false", fix)


@rule(
    "TP003",
    source="megatron-bridge training/comm_overlap.py and training/initialize.py; Megatron-LM training/initialize.py",
)
def tp_without_transformer_engine(f: Facts, s: State) -> Finding:
    """TP overlap needs Transformer Engine.

    Bridge turns it off and logs a line. Megatron-LM, and Bridge without ``comm_overlap``, raise when they set
    up the buffers.

    Why: userbuffers are Transformer Engine's.
    Fix: install Transformer Engine in the training container, or name its version under ``software``.
    """
    if not s[OVERLAP] or f.versions.transformer_engine is not None:
        return None
    because, fix = "Transformer Engine is not installed", "install transformer-engine in the container"
    if f.tp_request is True and not f.overlap_setup:
        by = MEGATRON_LM if f.megatron_lm else BRIDGE
        return error(OVERLAP, because, fix=f"{fix}, or {off(f)}", by=by, at="initialize_ub", requested=True)
    return _gated(f, because, fix)


@rule("TP004", source="transformer-engine pytorch/module/base.py initialize_ub", te=">=1.9")
def leaves_nvlink_domain(f: Facts, s: State) -> Finding:
    """The TP group leaves the NVLink domain.

    All GPUs of a TP group must reach each other over NVLink: those of one node, or, on GB200 and GB300
    with Transformer Engine 2.2 or newer, those of one rack-wide domain (MNNVL).

    Why: userbuffers write into the memory of the other ranks directly; across nodes Transformer Engine
    refuses to set them up.
    Fix: lower ``model.tensor_model_parallel_size`` to a size that divides the GPUs of a node, or name
    ``cluster.nvlink_domain_size``.
    """
    tp = f.parallelism.tp
    if not s[OVERLAP] or tp == 1:
        return None
    domain, node = f.nvlink_domain_size, f.gpus_per_node
    if domain is not None and tp > domain:
        return obstacle(
            f,
            f"TP {tp} is larger than the NVLink domain of {domain} GPUs",
            fix=f"set model.tensor_model_parallel_size to {domain} or less, or {off(f)}",
            by=TRANSFORMER_ENGINE,
            at="initialize_ub",
        )
    if domain is None or node is None or node % tp == 0:
        return None
    if domain > node and f.te_in(">=2.2.0"):
        return None
    reason = f"TP {tp} spans nodes of {node} GPUs"
    if domain > node:
        reason += f", which needs transformer-engine 2.2 (this is {f.versions.transformer_engine})"
    return obstacle(
        f,
        reason,
        fix=f"set model.tensor_model_parallel_size to a divisor of {node}, or {off(f)}",
        by=TRANSFORMER_ENGINE,
        at="initialize_ub",
    )


@rule("TP005", source="transformer-engine pytorch/module/base.py initialize_ub")
def bootstrap_left_to_chance(f: Facts, s: State) -> Finding:
    """``tp_comm_bootstrap_backend`` is null.

    Transformer Engine then takes MPI where torch has it, else gloo, else nccl.

    Why: NGC's torch has MPI, and a job that was not started by mpirun aborts in it.
    Fix: set ``comm_overlap.tp_comm_bootstrap_backend=nccl``.
    """
    if not s[OVERLAP] or s["model.tp_comm_bootstrap_backend"] is not None:
        return None
    return warning(
        "model.tp_comm_bootstrap_backend",
        "null lets Transformer Engine try MPI first, which aborts a job not started by mpirun",
        fix=f"set {home(f)}.tp_comm_bootstrap_backend=nccl",
    )


@rule("TP006", source="megatron-core extensions/transformer_engine.py TELinear; megatron-bridge peft/utils.py")
def adapters_without_buffers(f: Facts, s: State) -> Finding:
    """LoRA adapters and TP overlap.

    Bridge builds its adapters from Megatron-Core's own linear layers, which use no userbuffers, and gathers
    their input itself. Megatron-LM has no adapters of its own; those of older third-party launchers are
    Transformer Engine linears without a buffer name.

    Why: Megatron-Core asserts that every Transformer Engine linear names its buffer while the overlap is on.
    Fix: turn TP overlap off for LoRA under Megatron-LM.
    """
    if not s[OVERLAP] or f.recipe.peft is None:
        return None
    if f.bridge:
        return info("peft", f"Bridge's {f.recipe.peft} adapters use no userbuffers, the layers that they adapt do")
    return obstacle(
        f,
        f"{f.recipe.peft} adapters are linears without a userbuffers name",
        by=MEGATRON_CORE,
        at="construction",
    )


@rule(
    "TP007",
    source="Megatron-LM training/determinism.py (core 0.19); megatron-bridge recipes/utils/determinism_utils.py",
)
def not_deterministic(f: Facts, s: State) -> Finding:
    """TP overlap in deterministic mode.

    Megatron-LM refuses it from core 0.19. Bridge's determinism overrides (0.5) turn it off; Bridge itself
    does not check.

    Why: the reductions inside userbuffers have no fixed order.
    Fix: set ``comm_overlap.tp_comm_overlap=false``.
    """
    if not s[OVERLAP] or not f.recipe.model.deterministic_mode:
        return None
    because = "deterministic_mode is true, and the order of userbuffers' reductions is not fixed"
    if f.megatron_lm and f.core_in(">=0.19.0"):
        return obstacle(f, because, by=MEGATRON_LM, at="validation")
    return drawback(f, because, fix=off(f))


@rule("TP008", source="megatron-core model_parallel_config.py; megatron-bridge models/transformer_config.py")
def sequence_parallel_at_tp_one(f: Facts, s: State) -> Finding:
    """Sequence parallelism at TP 1.

    Bridge before 0.4 hands it on and Megatron-Core refuses it; from 0.4 Bridge clears it, as Megatron-LM's
    parser does.

    Why: there is no TP group to split the sequence over.
    Fix: set ``model.sequence_parallel=false``.
    """
    if not f.sequence_parallel or f.parallelism.tp > 1:
        return None
    subject, fix = "model.sequence_parallel", "set model.sequence_parallel=false"
    if f.bridge_in("<0.4.0"):
        because = "sequence parallelism at TP 1"
        return error(subject, because, fix=fix, by=MEGATRON_CORE, at="validation", requested=True, value=True)
    who = "Megatron-LM" if f.megatron_lm else "Bridge"
    return warning(subject, f"TP is 1: {who} clears it", requested=True, value=False, fix=fix)
