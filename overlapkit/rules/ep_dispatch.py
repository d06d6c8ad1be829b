"""EP: whether expert parallelism fits, and which dispatcher backend runs on which GPU."""

from __future__ import annotations

from overlapkit.facts import Facts
from overlapkit.rules.registry import BRIDGE, MEGATRON_CORE, MEGATRON_LM, Finding, State, error, info, rule, warning

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
        fix="choose an expert_model_parallel_size so that the product divides the GPUs",
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
    because = (
        f"EP is {ep}, and num_moe_experts is {experts}" if experts else f"EP is {ep}, and the model has no experts"
    )
    return error(
        "model.expert_model_parallel_size",
        because,
        fix="set model.num_moe_experts to a multiple of it" if experts else "set model.num_moe_experts, or EP to 1",
        by=MEGATRON_LM if f.megatron_lm else MEGATRON_CORE,
        at="construction" if experts and f.bridge else "validation",
        requested=ep,
        value=ep,
    )


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
        fix="set model.sequence_parallel=true",
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
    if f.dispatcher != "flex" or f.gpu is None or f.gpu.compute_capability is None:
        return None
    major = int(f.gpu.compute_capability.partition(".")[0])
    runs = {
        "deepep": major in (8, 9) or f.gpu.name in ("b200", "b300"),
        "hybridep": major in (8, 9, 10),
        "ncclep": major in (9, 10) or not f.bridge_in(">=0.6.1"),
    }
    backend = f.flex_backend
    if backend is None or runs.get(backend, True):
        return None
    return error(
        "model.moe_flex_dispatcher_backend",
        f"{backend} does not run on {f.gpu.name}",
        fix="set model.moe_flex_dispatcher_backend=hybridep, or model.moe_token_dispatcher_type=alltoall",
        by=BRIDGE,
        at="validation",
        requested=f.recipe.model.moe_flex_dispatcher_backend,
        value=backend,
    )


@rule("EP027", source="megatron-core transformer/moe/token_dispatcher.py")
def flex_without_backend(f: Facts, s: State) -> Finding:
    """The flex dispatcher without a backend.

    A backend of null, or before core 0.16 no ``moe_enable_deepep``.

    Why: Megatron-Core raises when it builds the dispatcher of an MoE layer.
    Fix: set ``model.moe_flex_dispatcher_backend``, or ``moe_token_dispatcher_type=alltoall``.
    """
    model = f.recipe.model
    if f.dispatcher != "flex" or not model.num_moe_experts:
        return None
    if f.core_in("<0.16.0"):
        missing, named = not model.moe_enable_deepep, "model.moe_enable_deepep=true"
        because = "the dispatcher is flex and moe_enable_deepep is false"
    else:
        missing, named = f.flex_backend is None, "model.moe_flex_dispatcher_backend"
        because = "the dispatcher is flex and no backend is named"
    if not missing:
        return None
    return error(
        "model.moe_token_dispatcher_type",
        because,
        fix=f"set {named}, or model.moe_token_dispatcher_type=alltoall",
        by=MEGATRON_CORE,
        at="construction",
        requested="flex",
        value="flex",
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
    because, fix = f"HybridEP with EP {ep}: an NVLink domain has 72 GPUs", "set model.expert_model_parallel_size to 64"
    subject = "model.expert_model_parallel_size"
    if f.megatron_lm:
        return warning(subject, because, fix=f"{fix} or less", requested=ep, value=ep)
    return error(subject, because, fix=f"{fix} or less", requested=ep, value=ep)


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
        fix="set model.moe_token_dispatcher_type=alltoall, or moe_shared_expert_overlap=false",
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
    return [
        error(
            f"model.{name}",
            "this parser has no such flag",
            fix="use Megatron-Core 0.14 or newer",
            by=MEGATRON_LM,
            at="validation",
            requested=True,
        )
        for name in names
    ]
