"""EP: whether expert parallelism fits, and which dispatcher backend runs on which GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import gcd

from overlapkit.facts import Facts
from overlapkit.rules.changes import asserted, with_sequence_parallel
from overlapkit.rules.ep import EP_OVERLAP, alltoall, fields_of_experts_off, overlap_off, switch_off
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

_BACKENDS = "megatron-bridge training/flex_dispatcher_backend.py"
_PARALLEL_STATE = "megatron-core parallel_state.py initialize_model_parallel"


@rule("EP023", source=_PARALLEL_STATE)
def experts_do_not_fit(f: Facts, s: State) -> Finding:
    """Expert parallelism does not fit the GPUs.

    Expert TP times EP times PP must divide the world size. Expert TP is what the recipe says; unset it
    is 1 from Bridge 0.6 and TP before, as in Megatron-LM.

    Why: Megatron-Core builds the experts' groups from these three and data parallelism alone.
    Fix: change ``model.expert_model_parallel_size`` or ``model.expert_tensor_parallel_size``.
    """
    p = f.parallelism
    if p.expert_dp is not None:
        return None
    return error(
        "model.expert_model_parallel_size",
        f"expert TP {p.etp} · EP {p.ep} · PP {p.pp} = {p.etp * p.ep * p.pp} does not divide {p.world_size} GPUs",
        fix="choose model.expert_model_parallel_size and model.expert_tensor_parallel_size so that the product divides "
        "the GPUs",
        by=MEGATRON_CORE,
        at="initialize_model_parallel",
        requested=p.ep,
        value=p.ep,
    )


@rule(
    "EP024",
    source="megatron-core transformer/transformer_config.py and transformer/moe/moe_layer.py; "
    "Megatron-LM training/arguments.py",
)
def experts_do_not_split(f: Facts, s: State) -> Finding:
    """The experts do not split over the expert-parallel ranks.

    ``num_moe_experts`` must be given and a multiple of EP. Megatron-LM checks both in its arguments, under
    Bridge Megatron-Core checks the second when it builds the layer.

    Why: every rank holds the same number of experts.
    Fix: change ``model.expert_model_parallel_size``.
    """
    ep, experts = f.parallelism.ep, f.recipe.model.num_moe_experts
    if ep == 1 or (experts is not None and experts > 0 and experts % ep == 0):
        return None
    if experts is None and not f.recipe.is_dump:
        return info("model.num_moe_experts", f"EP is {ep}, and num_moe_experts is not given, so not checked")
    because = f"EP is {ep}, and {f'num_moe_experts is {experts}' if experts else 'the model has no experts'}"
    divisor = gcd(ep, experts or 1)
    change = f"model.expert_model_parallel_size={divisor}"
    if experts == 0 and f.bridge:  # EP036
        change = " and ".join((change, *fields_of_experts_off(f)))
    if divisor == 1 and s[EP_OVERLAP]:
        change = f"{change} and {overlap_off(f, s)}"
    if divisor == 1 and f.dispatcher == "flex":
        change = f"{change} and {alltoall(f)}"
    if not passes(_with_ep(f, divisor), s, "DP018"):
        change = f"{change} and ddp.num_distributed_optimizer_instances=1"
    return error(
        "model.expert_model_parallel_size",
        because,
        fix=f"set {change}" if experts else f"set model.num_moe_experts, or {change}",
        by=MEGATRON_LM if f.megatron_lm else MEGATRON_CORE,
        at="construction" if experts and f.bridge else "validation",
        requested=ep,
        value=ep,
    )


def _with_ep(f: Facts, ep: int) -> Facts:
    p = f.parallelism
    ranks, rest = divmod(p.world_size, p.etp * ep * p.pp)
    return replace(f, parallelism=replace(p, ep=ep, expert_dp=None if rest else ranks))


@rule("EP025", source="megatron-core transformer/moe/moe_layer.py forward")
def moe_tensor_parallel_without_sequence_parallel(f: Facts, s: State) -> Finding:
    """MoE layers with TP need sequence parallelism in training.

    Why: the MoE layer raises in its first training forward pass otherwise.
    Fix: set ``model.sequence_parallel=true``.
    """
    p = f.parallelism
    if not f.recipe.model.num_moe_experts or p.tp == 1 or p.sequence_parallel:
        return None
    return error(
        "model.sequence_parallel",
        f"experts with TP {p.tp} and sequence_parallel false",
        fix=f"set {with_sequence_parallel(f, s)}",
        by=MEGATRON_CORE,
        at="first_forward",
        requested=f.recipe.model.sequence_parallel,
        value=False,
    )


@rule("EP026", source=_BACKENDS, megatron_lm=None)
def dispatcher_backend_on_gpu(f: Facts, s: State) -> Finding:
    """A flex dispatcher backend that the GPU does not run.

    DeepEP runs on Ampere, Hopper, B200 and B300, not on GB200 and GB300; HybridEP on Ampere, Hopper and
    Blackwell; NCCL EP on Hopper and Blackwell.

    Why: Bridge's validation looks at the device and raises. Its helper ``apply_flex_dispatcher_backend``
    falls back to alltoall instead, which is what a recipe that calls it gets.
    Fix: choose another ``model.moe_flex_dispatcher_backend``, or ``moe_token_dispatcher_type=alltoall``.
    """
    backend = f.flex_backend
    if f.dispatcher != "flex" or f.gpu is None or backend is None or _runs(f, backend):
        return None
    return error(
        "model.moe_flex_dispatcher_backend",
        f"{backend} does not run on {f.gpu.name}",
        fix=f"set {_other_dispatch(f, s)}",
        by=BRIDGE,
        at="validation",
        requested=f.recipe.model.moe_flex_dispatcher_backend,
        value=backend,
    )


def _runs(f: Facts, backend: str) -> bool:
    """Whether the backend runs on the GPU, as far as both are known."""
    if f.gpu is None or f.gpu.compute_capability is None:
        return True
    major = int(f.gpu.compute_capability.partition(".")[0])
    runs = {
        "deepep": major in (8, 9) or f.gpu.name in ("b200", "b300"),
        "hybridep": major in (8, 9, 10),
        "ncclep": major in (9, 10) or not f.bridge_in(">=0.6.2"),
    }
    return runs.get(backend, True)


def _known_backends(f: Facts) -> tuple[str, ...]:
    """Those that this Megatron-Core has; before 0.16 there is DeepEP alone, with a switch of its own."""
    if f.core_in("<0.16.0"):
        return ()
    return ("deepep", "hybridep", "ncclep") if f.core_in(">=0.19.0") else ("deepep", "hybridep")


def _lacks_ranks(f: Facts, backend: str | None) -> bool:
    """Whether the backend is refused for want of a second rank to dispatch to."""
    alone = f.parallelism.ep * f.parallelism.etp == 1
    return alone and (f.core_in("<0.18.0") or backend in ("deepep", "ncclep"))


def _other_backend(f: Facts, s: State) -> str | None:
    """Another backend, if there is one that passes; NCCL EP needs more than its name."""
    known = [name for name in ("deepep", "hybridep") if name in _known_backends(f) and name != f.flex_backend]
    for backend in known:
        if _runs(f, backend) and not _lacks_ranks(f, backend) and passes(replace(f, flex_backend=backend), s, "EP028"):
            old_switch = " and model.moe_enable_deepep=false" if f.recipe.model.moe_enable_deepep else ""
            return f"model.moe_flex_dispatcher_backend={backend}{old_switch}"
    return None


def _other_dispatch(f: Facts, s: State) -> str:
    backend = _other_backend(f, s)
    return f"{backend}, or {alltoall(f)}" if backend else alltoall(f)


@rule("EP027", source="megatron-core transformer/moe/token_dispatcher.py; Megatron-LM's parser")
def flex_dispatcher_refused(f: Facts, s: State) -> Iterable[Verdict]:
    """The flex dispatcher without a backend that this Megatron-Core has, or without ranks to dispatch to.

    Before core 0.16 the backend is ``moe_enable_deepep``. HybridEP came with core 0.16, NCCL EP with 0.19;
    Megatron-LM's parser refuses a name that it does not know, whatever the dispatcher is. Expert TP times EP must
    be above 1, from core 0.18 not for HybridEP.

    Why: Megatron-Core raises when it builds the dispatcher of an MoE layer.
    Fix: set ``model.moe_flex_dispatcher_backend``, or ``moe_token_dispatcher_type=alltoall``.
    """
    model = f.recipe.model
    if f.megatron_lm:
        yield from _refused_by_parser(f, s)
    if f.dispatcher != "flex" or not model.num_moe_experts:
        return
    other = _other_dispatch(f, s)
    if f.core_in("<0.16.0"):
        if not model.moe_enable_deepep:
            deepep = "" if _lacks_ranks(f, "deepep") else "model.moe_enable_deepep=true, or "
            fix = f"set {deepep}{alltoall(f)}"
            yield _flex_refused("the dispatcher is flex and moe_enable_deepep is false", fix)
    elif f.flex_backend is None:
        yield _flex_refused("the dispatcher is flex and no backend is named", f"set {other}")
    elif f.bridge and f.flex_backend not in _known_backends(f):
        because = f"Megatron-Core {f.versions.megatron_core} does not have {f.flex_backend}"
        yield _backend_refused(f, because, f"set {other}", by=MEGATRON_CORE, at="construction")
    if _lacks_ranks(f, f.flex_backend):
        fix = f"set model.expert_model_parallel_size above 1, or {other}"
        yield _flex_refused("the dispatcher is flex, and expert TP times EP is 1", fix)


def _refused_by_parser(f: Facts, s: State) -> Iterable[Verdict]:
    named = f.recipe.model.moe_flex_dispatcher_backend
    if named is None or named in _known_backends(f):
        return
    because = "this parser has no such flag" if f.core_in("<0.16.0") else f"this parser does not know {named}"
    fix = f"set {_other_backend(f, s) or 'model.moe_flex_dispatcher_backend=null'}"
    yield _backend_refused(f, because, fix, by=MEGATRON_LM, at="validation")


def _flex_refused(because: str, fix: str) -> Verdict:
    subject = "model.moe_token_dispatcher_type"
    return error(subject, because, fix=fix, by=MEGATRON_CORE, at="construction", requested="flex", value="flex")


def _backend_refused(f: Facts, because: str, fix: str, *, by: str, at: str) -> Verdict:
    named = f.recipe.model.moe_flex_dispatcher_backend
    return error(
        "model.moe_flex_dispatcher_backend", because, fix=fix, by=by, at=at, requested=named, value=f.flex_backend
    )


@rule("EP028", source="megatron-bridge scripts/performance/perf_plugins.py (0.5.1)")
def hybridep_domain_too_large(f: Facts, s: State) -> Finding:
    """HybridEP with more expert-parallel ranks than an NVLink domain of 72 has.

    Why: on GPUs with a rack-wide NVLink domain all ranks of an expert-parallel group share it; Bridge's
    performance scripts refuse more than 72. Under Megatron-LM ``NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN``
    can split the group, and the rest of the traffic takes the network.
    Fix: lower ``model.expert_model_parallel_size`` to 72 or less.
    """
    if f.flex_backend != "hybridep" or f.gpu is None or f.gpu.name in ("h100", "b200", "b300"):
        return None
    ep = f.parallelism.ep
    if not f.gpu.blackwell_or_newer or ep <= 72:
        return None
    because, subject = f"HybridEP with EP {ep}: an NVLink domain has 72 GPUs", "model.expert_model_parallel_size"
    # The experts and the GPUs split over a divisor of EP as they do over EP.
    fix = f"set {subject}={max(size for size in range(1, 73) if ep % size == 0)}"
    if f.megatron_lm:
        return warning(subject, because, fix=fix, requested=ep, value=ep)
    return error(subject, because, fix=fix, requested=ep, value=ep)


@rule("EP029", source="megatron-core transformer/transformer_config.py")
def shared_expert_overlap_dispatcher(f: Facts, s: State) -> Finding:
    """``moe_shared_expert_overlap`` needs the alltoall dispatcher.

    From Megatron-Core 0.18 flex too.

    Why: the shared expert runs beside the dispatcher's all-to-all.
    Fix: set ``model.moe_token_dispatcher_type=alltoall``.
    """
    model = f.recipe.model
    if not model.moe_shared_expert_overlap or model.moe_shared_expert_intermediate_size is None:
        return None
    allowed = ("alltoall", "flex") if f.core_in(">=0.18.0") else ("alltoall",)
    if f.dispatcher in allowed:
        return None
    return error(
        "model.moe_shared_expert_overlap",
        f"moe_token_dispatcher_type is {f.dispatcher}",
        fix=f"set {alltoall(f)}, or model.moe_shared_expert_overlap=false",
        by=MEGATRON_CORE,
        at="validation",
        requested=True,
        value=True,
    )


@rule(
    "EP030", source="Megatron-LM's parser; megatron-core model_parallel_config.py", bridge=None, megatron_lm="<0.14.0"
)
def ep_overlap_has_no_flag(f: Facts, s: State) -> Finding:
    """Megatron-LM before core 0.14 has no EP overlap.

    Why: ``--overlap-moe-expert-parallel-comm`` came with 0.14, and ``--delay-wgrad-compute`` is of no use
    without it; the parser refuses an unknown flag.
    Fix: use Megatron-Core 0.14 or newer.
    """
    names = [name for name in ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute") if s[f"model.{name}"]]
    beside = asserted(f, {**s, EP_OVERLAP: False})
    return [
        error(
            f"model.{name}",
            "this parser has no such flag",
            fix="use Megatron-Core 0.14 or newer, or set "
            + " and ".join(switch_off(f, name) + (beside if f"model.{name}" == EP_OVERLAP else [])),
            by=MEGATRON_LM,
            at="validation",
            requested=True,
        )
        for name in names
    ]


@rule("EP035", source="megatron-core transformer/transformer_config.py")
def flex_backend_without_flex(f: Facts, s: State) -> Finding:
    """A choice of the flex dispatcher's backend that does not go with the rest.

    ``moe_enable_deepep`` beside another dispatcher, or beside HybridEP, which is another backend; NCCL EP beside
    another dispatcher.

    Why: Megatron-Core refuses both when it validates the model. Other backends are not looked at until the flex
    dispatcher is built.
    Fix: take it away, or set ``model.moe_token_dispatcher_type=flex``.
    """
    model, named = f.recipe.model, f.recipe.model.moe_flex_dispatcher_backend
    dispatcher = f"moe_token_dispatcher_type is {f.dispatcher}"
    ncclep = named == "ncclep" and f.dispatcher != "flex" and f.core_in(">=0.19.0")
    if model.moe_enable_deepep and f.dispatcher != "flex":
        beside = " and model.moe_flex_dispatcher_backend=null" if ncclep else ""
        return _choice_refused(f"model.moe_enable_deepep=false{beside}", True, dispatcher)
    if model.moe_enable_deepep and named == "hybridep" and f.core_in(">=0.16.0"):
        return _choice_refused("model.moe_enable_deepep=false", True, "moe_flex_dispatcher_backend is hybridep")
    if ncclep:
        return _choice_refused("model.moe_flex_dispatcher_backend=null", named, dispatcher)
    return None


def _choice_refused(fix: str, requested: object, because: str) -> Verdict:
    subject = fix.partition("=")[0]
    return error(
        subject, because, fix=f"set {fix}", by=MEGATRON_CORE, at="validation", requested=requested, value=requested
    )
