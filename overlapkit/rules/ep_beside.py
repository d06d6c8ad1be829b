"""EP: what stands beside EP overlap and needs or excludes it, and EP overlap under Megatron-FSDP."""

from __future__ import annotations

from overlapkit.facts import Facts
from overlapkit.rules.changes import home
from overlapkit.rules.ep import DELAY, EP_OVERLAP, graphs_off, may_overlap, overlap_off
from overlapkit.rules.ep_delay import te_before, te_text
from overlapkit.rules.registry import MEGATRON_CORE, Finding, State, error, rule

_DISPATCH = "model.overlap_dispatch_backward_with_experts_wgrad"
_EARLY_RELEASE = "model.ep_overlap_early_attn_memory_release"
_CONFIG = "megatron-core transformer/transformer_config.py"


@rule("EP032", source=_CONFIG, core=">=0.18.0")
def dispatch_overlap_excludes(f: Facts, s: State) -> Finding:
    """``overlap_dispatch_backward_with_experts_wgrad`` excludes EP overlap and delayed weight gradients.

    It needs Transformer Engine 2.3 as well.

    Why: all three move the experts' weight gradients, each to another place.
    Fix: turn it off, or turn EP overlap and the delay off.
    """
    if not f.recipe.model.overlap_dispatch_backward_with_experts_wgrad:
        return None
    excluded = [name.partition(".")[2] for name in (EP_OVERLAP, DELAY) if s[name]]
    off = f"{_DISPATCH}=false"
    if excluded:
        other = s[EP_OVERLAP] and not te_before(f, "2.3.0")
        fix = f"set {off}, or {overlap_off(f, s)}" if other else f"set {off}"
        return _refused(_DISPATCH, f"{' and '.join(excluded)} {'are' if len(excluded) > 1 else 'is'} on", fix)
    if te_before(f, "2.3.0"):
        return _refused(_DISPATCH, te_text(f, "2.3.0"), f"use a newer one, or set {off}")
    return None


@rule("EP033", source=_CONFIG, core=">=0.16.0")
def early_release_needs_ep_overlap(f: Facts, s: State) -> Finding:
    """``ep_overlap_early_attn_memory_release`` needs EP overlap.

    Bridge's set-up turns an overlap off that stands on the model only (EP022), and Megatron-Core refuses what is
    left.

    Why: it moves attention's backward pass to an earlier place in the overlapped schedule.
    Fix: turn it off, or EP overlap on where its gates allow it.
    """
    if not f.recipe.model.ep_overlap_early_attn_memory_release or s[EP_OVERLAP]:
        return None
    because = "overlap_moe_expert_parallel_comm is off"
    if f.overlap_setup and f.recipe.model.overlap_moe_expert_parallel_comm:
        because = f"{because} after Bridge's set-up"
    off = f"{_EARLY_RELEASE}=false"
    on = f"{home(f)}.overlap_moe_expert_parallel_comm=true"
    return _refused(_EARLY_RELEASE, because, f"set {on}, or {off}" if may_overlap(f, s) else f"set {off}")


def _refused(subject: str, because: str, fix: str) -> Finding:
    return error(subject, because, fix=fix, by=MEGATRON_CORE, at="validation", requested=True, value=True)


@rule(
    "EP034",
    source="megatron-core distributed/fsdp/mcore_fsdp_adapter.py; Megatron-LM training/arguments.py (core 0.19)",
    core=">=0.18.0",
)
def ep_overlap_under_fsdp(f: Facts, s: State) -> Finding:
    """EP overlap under Megatron-FSDP excludes the double buffer and CUDA graphs per layer.

    Graphs of whole iterations are allowed. Megatron-LM from core 0.19 turns the double buffer on with ``nccl_ub``.

    Why: the overlapped schedule calls the parts of a layer one by one, so that FSDP gathers and frees their
    parameters at moments that neither foresees.
    Fix: set ``ddp.fsdp_double_buffer=false``, and turn the graphs off.
    """
    if not f.fsdp or not s[EP_OVERLAP]:
        return None
    ddp = f.recipe.ddp
    because, changes = [], []
    if ddp.fsdp_double_buffer:
        because.append("fsdp_double_buffer is true")
        changes.append("ddp.fsdp_double_buffer=false")
    if ddp.nccl_ub and f.megatron_lm and f.core_in(">=0.19.0"):
        because.append("nccl_ub turns fsdp_double_buffer on")
        changes.append("ddp.nccl_ub=false")
    if f.graph_impl != "none" and not f.full_iteration_graph:
        because.append(f"CUDA graphs per layer ({f.graph_impl})")
        changes.append(graphs_off(f))
    if not changes:
        return None
    return error(
        EP_OVERLAP,
        f"Megatron-FSDP, and {' and '.join(because)}",
        fix=f"set {' and '.join(changes)}",
        by=MEGATRON_CORE,
        at="construction",
        requested=True,
    )
