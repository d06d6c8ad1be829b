"""EP: the gates of expert-parallel all-to-all overlap and of delayed weight gradients.

Bridge checks them in its set-up when the user asks through ``comm_overlap``; Megatron-Core checks them
again when it validates the model, which is where Megatron-LM and raw model values meet them. One code
per gate, in Bridge's order; the versions at which a gate changes stand at the rule.
"""

from __future__ import annotations

from overlapkit.facts import Facts
from overlapkit.rules.registry import BRIDGE, MEGATRON_CORE, MEGATRON_LM, Finding, State, error, rule, warning

_EP_OVERLAP = "model.overlap_moe_expert_parallel_comm"
_DELAY = "model.delay_wgrad_compute"
_SOURCE = "megatron-bridge training/comm_overlap.py; megatron-core transformer/transformer_config.py"


def _ep_gate(f: Facts, s: State, fails: bool, because: str, fix: str, *, bridge_checks: bool = True) -> Finding:
    """An error of the overlap's gate, by whoever meets it first."""
    if not fails or not s[_EP_OVERLAP]:
        return None
    by_bridge = bridge_checks and f.asked.overlap_moe_expert_parallel_comm is True and f.overlap_setup
    by = BRIDGE if by_bridge else MEGATRON_CORE
    return error(_EP_OVERLAP, because, fix=fix, by=by, at="validation", requested=True)


@rule("EP001", source=_SOURCE)
def ep_overlap_needs_ep(f: Facts, s: State) -> Finding:
    """EP overlap needs expert parallelism.

    Why: it hides the all-to-all between expert-parallel ranks; at EP 1 there is none.
    Fix: raise ``model.expert_model_parallel_size``, or turn the overlap off.
    """
    ep = f.parallelism.ep
    fix = "set model.expert_model_parallel_size above 1, or comm_overlap.overlap_moe_expert_parallel_comm=false"
    return _ep_gate(f, s, ep <= 1, f"expert_model_parallel_size is {ep}", fix)


@rule("EP002", source=_SOURCE)
def ep_overlap_needs_experts(f: Facts, s: State) -> Finding:
    """EP overlap needs a model with several experts.

    Why: Bridge compares ``num_moe_experts`` with 1; a dense model has None there and fails with a
    TypeError.
    Fix: turn the overlap off for a dense model.
    """
    experts = f.recipe.model.num_moe_experts
    because = f"num_moe_experts is {'null' if experts is None else experts}"
    fix = "set comm_overlap.overlap_moe_expert_parallel_comm=false"
    return _ep_gate(f, s, experts is None or experts <= 1, because, fix)


@rule("EP003", source=_SOURCE)
def ep_overlap_dispatcher(f: Facts, s: State) -> Finding:
    """EP overlap needs the alltoall or the flex dispatcher.

    Why: the schedule splits a layer around the dispatcher's all-to-all; the allgather dispatcher,
    Megatron-Core's default, has none.
    Fix: set ``model.moe_token_dispatcher_type=alltoall``.
    """
    fails = f.dispatcher not in ("alltoall", "flex")
    return _ep_gate(
        f, s, fails, f"moe_token_dispatcher_type is {f.dispatcher}", "set model.moe_token_dispatcher_type=alltoall"
    )


@rule("EP004", source=_SOURCE)
def ep_overlap_precision(f: Facts, s: State) -> Finding:
    """EP overlap needs BF16 or FP16.

    Why: its kernels and the split layers are written for half precision.
    Fix: set ``mixed_precision=bf16_mixed``.
    """
    return _ep_gate(f, s, f.precision.compute == "fp32", "the model is neither bf16 nor fp16", "set mixed_precision=bf16_mixed")


@rule("EP005", source=_SOURCE)
def ep_overlap_torch(f: Facts, s: State) -> Finding:
    """EP overlap needs PyTorch 2.6.

    Why: with older versions it hangs.
    Fix: use a newer container.
    """
    from overlapkit.versions import parse_version

    torch = f.versions.torch
    return _ep_gate(f, s, torch < parse_version("2.6.0"), f"torch is {torch}, 2.6.0 is needed", "use torch 2.6 or newer")


@rule("EP006", source=_SOURCE)
def ep_overlap_needs_vp(f: Facts, s: State) -> Finding:
    """With PP above 1, EP overlap needs virtual stages.

    Why: it runs inside the interleaved schedule. A VP of 1 passes.
    Fix: set ``model.virtual_pipeline_model_parallel_size``.
    """
    vp = f.recipe.model.virtual_pipeline_model_parallel_size if f.overlap_setup else f.parallelism.vp
    fails = f.parallelism.pp > 1 and vp is None
    because = f"PP is {f.parallelism.pp} and virtual_pipeline_model_parallel_size is null"
    return _ep_gate(f, s, fails, because, "set model.virtual_pipeline_model_parallel_size")


@rule("EP007", source=_SOURCE)
def ep_overlap_full_recompute(f: Facts, s: State) -> Finding:
    """EP overlap excludes full activation recomputation.

    Why: a recomputed layer would dispatch again inside the other microbatch's backward pass.
    Fix: set ``model.recompute_granularity=selective`` or null.
    """
    fails = f.recipe.model.recompute_granularity == "full"
    return _ep_gate(f, s, fails, "recompute_granularity is full", "set model.recompute_granularity=selective")


@rule("EP008", source=_SOURCE)
def ep_overlap_recompute_method(f: Facts, s: State) -> Finding:
    """EP overlap excludes a recompute method.

    Why: ``recompute_method`` belongs to full recomputation.
    Fix: set ``model.recompute_method=null``.
    """
    method = f.recipe.model.recompute_method
    return _ep_gate(f, s, method is not None, f"recompute_method is {method}", "set model.recompute_method=null")


@rule("EP009", source=_SOURCE)
def ep_overlap_recompute_layers(f: Facts, s: State) -> Finding:
    """EP overlap excludes ``recompute_num_layers``.

    Why: it belongs to full recomputation.
    Fix: set ``model.recompute_num_layers=null``.
    """
    layers = f.recipe.model.recompute_num_layers
    return _ep_gate(f, s, layers is not None, f"recompute_num_layers is {layers}", "set model.recompute_num_layers=null")


@rule("EP010", source=_SOURCE, bridge=">=0.4.0", megatron_lm=">=0.17.0")
def ep_overlap_moe_recompute(f: Facts, s: State) -> Finding:
    """EP overlap excludes recomputing the whole MoE layer.

    Megatron-Core checks it from 0.17, Bridge's set-up from 0.6.

    Why: recomputing ``moe`` repeats the dispatch.
    Fix: take ``moe`` out of ``model.recompute_modules``; ``moe_act`` is allowed.
    """
    modules = f.recipe.model.recompute_modules or ()
    fix = "remove moe from model.recompute_modules"
    return _ep_gate(
        f, s, "moe" in modules, "recompute_modules contains moe", fix, bridge_checks=f.bridge_in(">=0.6.0")
    )


@rule("EP011", source=_SOURCE)
def ep_overlap_shared_expert(f: Facts, s: State) -> Finding:
    """EP overlap excludes ``moe_shared_expert_overlap``.

    Why: both want to run beside the dispatch.
    Fix: set ``model.moe_shared_expert_overlap=false``.
    """
    fails = bool(f.recipe.model.moe_shared_expert_overlap)
    return _ep_gate(f, s, fails, "moe_shared_expert_overlap is true", "set model.moe_shared_expert_overlap=false")


@rule("EP012", source=_SOURCE)
def ep_overlap_mtp(f: Facts, s: State) -> Finding:
    """EP overlap allows at most one MTP layer.

    Up to Bridge 0.5 and Megatron-Core 0.18 the value must be null or 1, so that 0 fails too; later
    null, 0 or 1. Megatron-Core 0.16 and 0.17 want PP above 1 with an MTP layer.

    Why: the schedule handles one extra layer at the end.
    Fix: set ``model.mtp_num_layers`` to 1 or null.
    """
    mtp = f.recipe.model.mtp_num_layers
    zero_passes = f.bridge_in(">=0.6.0") if f.bridge else f.core_in(">=0.19.0")
    allowed = (None, 0, 1) if zero_passes else (None, 1)
    if mtp == 1 and f.parallelism.pp == 1 and f.core_in(">=0.16.0,<0.18.0"):
        return _ep_gate(
            f, s, True, "an MTP layer needs PP above 1 here", "set model.mtp_num_layers=null", bridge_checks=False
        )
    return _ep_gate(f, s, mtp not in allowed, f"mtp_num_layers is {mtp}", "set model.mtp_num_layers to 1 or null")


@rule("EP013", source="megatron-core transformer/transformer_config.py", core=">=0.16.0")
def ep_overlap_graphs(f: Facts, s: State) -> Finding:
    """EP overlap and CUDA graphs of the MoE or MLP part exclude each other.

    Megatron-Core 0.16 and 0.17 want every CUDA graph to be Transformer Engine's.

    Why: the overlap splits the layer where such a graph would capture it whole.
    Fix: take ``moe`` and ``mlp`` out of ``model.cuda_graph_modules``.
    """
    captured = sorted(f.graph_modules & {"moe", "mlp"})
    if f.graph_impl == "transformer_engine" and captured:
        because = f"cuda_graph_modules contains {' and '.join(captured)}"
        return _ep_gate(f, s, True, because, f"remove {' and '.join(captured)} from it", bridge_checks=False)
    fails = f.graph_impl not in ("none", "transformer_engine") and f.core_in("<0.18.0")
    because = f"cuda_graph_impl is {f.graph_impl}"
    return _ep_gate(f, s, fails, because, "set model.cuda_graph_impl=transformer_engine or none", bridge_checks=False)


# --- delayed weight gradients -------------------------------------------------------------------


def _delay_gate(f: Facts, s: State, fails: bool, because: str, fix: str, by: str) -> Finding:
    if not fails or not s[_DELAY]:
        return None
    return error(_DELAY, because, fix=fix, by=by, at="validation", requested=True)


def _delay_by_bridge(f: Facts) -> bool:
    """Bridge's set-up checks only what the user asks through comm_overlap."""
    return f.overlap_setup and f.asked.delay_wgrad_compute is True


def _te_before(f: Facts, version: str) -> bool:
    """Transformer Engine older than ``version``, or absent."""
    return not f.te_in(f">={version}")


def _te_text(f: Facts, needed: str) -> str:
    version = f.versions.transformer_engine
    return f"transformer-engine is {version if version else 'not installed'}, {needed} is needed"


@rule("EP014", source="megatron-bridge training/comm_overlap.py; Megatron-LM training/arguments.py", megatron_lm=">=0.14.0")
def delayed_wgrad_grad_reduce(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` beside overlapped gradient reduction needs a newer Transformer Engine.

    2.7 for Bridge, 2.8 for Megatron-LM. Bridge looks at ``ddp`` as it stands before its own set-up, and
    at the user's ``comm_overlap``.

    Why: the gradient is ready only after the delayed GEMM, which older versions do not tell DDP.
    Fix: use a newer Transformer Engine, or set ``overlap_grad_reduce=false`` in both places.
    """
    if f.megatron_lm:
        fails = s["ddp.overlap_grad_reduce"] and _te_before(f, "2.8.0")
        return _delay_gate(f, s, fails, f"with overlap_grad_reduce {_te_text(f, '2.8.0')}", "use a newer one", MEGATRON_LM)
    reduces = bool(f.recipe.ddp.overlap_grad_reduce or f.asked.overlap_grad_reduce)
    fails = _delay_by_bridge(f) and reduces and _te_before(f, "2.7.0")
    return _delay_gate(f, s, fails, f"with overlap_grad_reduce {_te_text(f, '2.7.0')}", "use a newer one", BRIDGE)


@rule("EP015", source="megatron-bridge training/comm_overlap.py; Megatron-LM training/arguments.py", megatron_lm=">=0.14.0")
def delayed_wgrad_fusion(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` and gradient accumulation fusion by Transformer Engine version.

    Bridge wants 2.7 when the fusion is on, Megatron-LM wants 2.7 when it is off.

    Why: the delayed GEMM writes the gradient by another path; the two frameworks guard opposite cases.
    Fix: use Transformer Engine 2.7 or newer.
    """
    if f.megatron_lm:
        fails = not f.gradient_accumulation_fusion and _te_before(f, "2.7.0")
        because = f"without gradient_accumulation_fusion {_te_text(f, '2.7.0')}"
        return _delay_gate(f, s, fails, because, "use a newer one", MEGATRON_LM)
    fails = _delay_by_bridge(f) and f.gradient_accumulation_fusion and _te_before(f, "2.7.0")
    return _delay_gate(f, s, fails, f"with gradient_accumulation_fusion {_te_text(f, '2.7.0')}", "use a newer one", BRIDGE)


@rule("EP016", source=_SOURCE)
def delayed_wgrad_needs_ep_overlap(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` needs EP overlap.

    Bridge also accepts an overlap that stands on the model only, but then resets it, and Megatron-Core
    refuses what is left.

    Why: the delayed weight gradients fill the other microbatch's all-to-all.
    Fix: set ``comm_overlap.overlap_moe_expert_parallel_comm=true``, or turn the delay off.
    """
    fix = "set comm_overlap.overlap_moe_expert_parallel_comm=true, or delay_wgrad_compute=false"
    asked = bool(f.recipe.model.overlap_moe_expert_parallel_comm or f.asked.overlap_moe_expert_parallel_comm)
    if _delay_by_bridge(f) and not asked:
        return _delay_gate(f, s, True, "overlap_moe_expert_parallel_comm is off", fix, BRIDGE)
    return _delay_gate(
        f, s, not s[_EP_OVERLAP], "overlap_moe_expert_parallel_comm is off after Bridge's set-up" if f.overlap_setup
        else "overlap_moe_expert_parallel_comm is off", fix, MEGATRON_CORE
    )


@rule("EP017", source=_SOURCE, bridge="<0.4.0", megatron_lm=">=0.14.0,<0.17.0")
def delayed_wgrad_legacy_gemm(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` excludes the legacy grouped GEMM.

    Up to Bridge 0.3 and Megatron-Core 0.16; later versions no longer have it.

    Why: only Transformer Engine's grouped GEMM can be delayed.
    Fix: set ``model.moe_use_legacy_grouped_gemm=false``.
    """
    fails = bool(f.recipe.model.moe_use_legacy_grouped_gemm)
    by = BRIDGE if _delay_by_bridge(f) else MEGATRON_CORE
    return _delay_gate(
        f, s, fails, "moe_use_legacy_grouped_gemm is true", "set model.moe_use_legacy_grouped_gemm=false", by
    )


def _wgrad_in_graph(f: Facts) -> bool:
    """Whether a CUDA graph captures a weight gradient that would be delayed."""
    model = f.recipe.model
    shared = model.moe_shared_expert_intermediate_size is not None and not model.moe_shared_expert_overlap
    return "attn" in f.graph_modules or ("moe_router" in f.graph_modules and shared)


def _graph_gate(f: Facts, s: State, fails: bool, because: str, fix: str) -> Finding:
    """Bridge's graph conditions from 0.4; Megatron-LM has them where gradients are reduced beside the backward."""
    applies = s["ddp.overlap_grad_reduce"] if f.megatron_lm else _delay_by_bridge(f)
    by = MEGATRON_LM if f.megatron_lm else BRIDGE
    return _delay_gate(f, s, fails and applies and _wgrad_in_graph(f), because, fix, by)


_GRAPH_SOURCE = "megatron-bridge training/comm_overlap.py (0.4); Megatron-LM training/arguments.py (core 0.17)"


@rule("EP018", source=_GRAPH_SOURCE, bridge=">=0.4.0", megatron_lm=">=0.17.0")
def delayed_wgrad_graph_te(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` with captured weight gradients needs Transformer Engine 2.12.

    Captured are those of attention, and of a shared expert when ``moe_router`` is captured.

    Why: older versions cannot run a delayed GEMM inside a CUDA graph.
    Fix: use a newer Transformer Engine, or capture less.
    """
    return _graph_gate(
        f, s, _te_before(f, "2.12.0"), f"with captured weight gradients {_te_text(f, '2.12.0')}",
        "use a newer one, or take attn and moe_router out of model.cuda_graph_modules",
    )


@rule("EP019", source=_GRAPH_SOURCE, bridge=">=0.4.0", megatron_lm=">=0.17.0")
def delayed_wgrad_graph_fusion(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` with captured weight gradients needs gradient accumulation fusion.

    Why: without it gradients do not stay at one address, which a CUDA graph needs.
    Fix: set ``model.gradient_accumulation_fusion=true``.
    """
    return _graph_gate(
        f, s, not f.gradient_accumulation_fusion, "captured weight gradients without gradient_accumulation_fusion",
        "set model.gradient_accumulation_fusion=true",
    )


@rule("EP020", source=_GRAPH_SOURCE, bridge=">=0.4.0", megatron_lm=">=0.17.0")
def delayed_wgrad_graph_bias(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` with captured attention excludes attention biases.

    Why: the bias gradient of a delayed GEMM is not captured.
    Fix: set ``model.add_bias_linear=false`` and ``model.add_qkv_bias=false``.
    """
    model = f.recipe.model
    names = [name for name in ("add_bias_linear", "add_qkv_bias") if getattr(model, name)]
    fails = "attn" in f.graph_modules and bool(names)
    return _graph_gate(
        f, s, fails, f"captured attention with {' and '.join(names)}",
        f"set {' and '.join(f'model.{name}=false' for name in names)}",
    )


@rule("EP021", source="megatron-core transformer/transformer_config.py", core=">=0.16.0")
def delayed_wgrad_partial_graph(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` with Transformer Engine's CUDA graphs needs Transformer Engine 2.10.

    Why: Megatron-Core refuses older versions.
    Fix: use a newer Transformer Engine, or ``model.cuda_graph_impl=none``.
    """
    fails = f.graph_impl == "transformer_engine" and _te_before(f, "2.10.0")
    because = f"with cuda_graph_impl=transformer_engine {_te_text(f, '2.10.0')}"
    return _delay_gate(f, s, fails, because, "use a newer one, or set model.cuda_graph_impl=none", MEGATRON_CORE)


@rule("EP022", source="megatron-bridge training/comm_overlap.py", megatron_lm=None)
def model_ep_values_reset(f: Facts, s: State) -> Finding:
    """EP values on the model that Bridge's set-up resets.

    Why: Bridge writes what ``comm_overlap`` says, and false where it says nothing; a true on the model
    is lost.
    Fix: set the value under ``comm_overlap``.
    """
    if not f.overlap_setup:
        return None
    names = [
        name
        for name in ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
        if getattr(f.recipe.model, name) and not s[f"model.{name}"] and getattr(f.asked, name) is None
    ]
    return [
        warning(
            f"model.{name}",
            "Bridge resets what stands on the model, because comm_overlap does not ask for it",
            requested=True,
            fix=f"set comm_overlap.{name}=true",
        )
        for name in names
    ]
