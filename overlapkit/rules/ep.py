"""EP: the gates of expert-parallel all-to-all overlap.

Bridge checks them in its set-up when the user asks through ``comm_overlap``; Megatron-Core checks them
again when it validates the model, which is where Megatron-LM and raw model values meet them. One code
per gate, in Bridge's order; the versions at which a gate changes stand at the rule. Megatron-LM has the flag
from core 0.14.
"""

from __future__ import annotations

from dataclasses import replace

from overlapkit.facts import Facts
from overlapkit.rules.changes import asserted
from overlapkit.rules.registry import (
    BRIDGE,
    MEGATRON_CORE,
    Finding,
    State,
    error,
    passes,
    rule,
    warning,
)

EP_OVERLAP = "model.overlap_moe_expert_parallel_comm"
DELAY = "model.delay_wgrad_compute"
FLAG = ">=0.14.0"  # Megatron-LM's versions that have the flags
SOURCE = "megatron-bridge training/comm_overlap.py; megatron-core transformer/transformer_config.py"
GATES = (*(f"EP{number:03}" for number in range(1, 14)), "EP032", "EP034")
DELAY_AND_GRAPHS = ("EP018", "EP019", "EP020", "EP021")


# --- what fixes name --------------------------------------------------------------------------


def switch_off(f: Facts, name: str) -> list[str]:
    """What turns a switch off in every section that has it on; the delay stands on ``ddp`` too in Megatron-LM."""
    sections: dict[str, object] = {"comm_overlap": f.recipe.comm_overlap, "model": f.recipe.model}
    if f.megatron_lm and name == "delay_wgrad_compute":
        sections["ddp"] = f.recipe.ddp
    return [f"{section}.{name}=false" for section, values in sections.items() if getattr(values, name, None)]


def overlap_off(f: Facts, s: State) -> str:
    """What turns EP overlap off, and with it all that needs it."""
    changes = switch_off(f, "overlap_moe_expert_parallel_comm")
    if s[DELAY]:
        changes += switch_off(f, "delay_wgrad_compute")
    if f.recipe.model.ep_overlap_early_attn_memory_release and f.core_in(">=0.16.0"):
        changes.append("model.ep_overlap_early_attn_memory_release=false")
    return " and ".join([*changes, *asserted(f, {**s, EP_OVERLAP: False})])


def alltoall(f: Facts) -> str:
    """What changes the dispatcher to alltoall: beside it Megatron-Core refuses what only flex can use (EP035)."""
    model = f.recipe.model
    changes = ["model.moe_token_dispatcher_type=alltoall"]
    if model.moe_enable_deepep:
        changes.append("model.moe_enable_deepep=false")
    if model.moe_flex_dispatcher_backend == "ncclep" and f.core_in(">=0.19.0"):
        changes.append("model.moe_flex_dispatcher_backend=null")
    return " and ".join(changes)


def fields_of_experts_off(f: Facts) -> list[str]:
    """What makes a model that has 0 experts one without (EP036)."""
    width = f.recipe.model.moe_ffn_hidden_size
    return ["model.num_moe_experts=null", *(["model.moe_ffn_hidden_size=null"] if width is not None else [])]


def graphs_off(f: Facts) -> str:
    """What turns CUDA graphs off, be they asked for by an older flag."""
    model = f.recipe.model
    changes = [] if model.cuda_graph_impl in (None, "none") else ["model.cuda_graph_impl=none"]
    changes += [f"model.{name}=false" for name in ("enable_cuda_graph", "external_cuda_graph") if getattr(model, name)]
    return " and ".join(changes)


def graph_field(f: Facts) -> str:
    """Where the captured parts are named: as the user does, else as this Megatron-Core does."""
    model = f.recipe.model
    if model.cuda_graph_scope or (f.core_in("<0.18.0") and not model.cuda_graph_modules):
        return "model.cuda_graph_scope"
    return "model.cuda_graph_modules"


def capture(f: Facts, *parts: str) -> str:
    """What makes CUDA graphs capture these parts alone, whichever fields name some now."""
    model = f.recipe.model
    beside = " and model.cuda_graph_modules=null" if model.cuda_graph_scope and model.cuda_graph_modules else ""
    return f"{graph_field(f)}=[{', '.join(parts)}]{beside}"


def may_overlap(f: Facts, s: State) -> bool:
    """Whether EP overlap, were it asked for, would pass its gates."""
    asked = replace(f.asked, overlap_moe_expert_parallel_comm=True)
    return passes(replace(f, asked=asked), {**s, EP_OVERLAP: True}, *GATES)


# --- the gates --------------------------------------------------------------------------------


def _ep_gate(f: Facts, s: State, fails: bool, because: str, fix: str, *, bridge_checks: bool = True) -> Finding:
    """An error of the overlap's gate, by whoever meets it first."""
    if not fails or not s[EP_OVERLAP]:
        return None
    by = BRIDGE if bridge_checks and _asked_of_bridge(f) else MEGATRON_CORE
    return error(EP_OVERLAP, because, fix=fix, by=by, at="validation", requested=True)


def _asked_of_bridge(f: Facts) -> bool:
    """Bridge's set-up checks only what the user asks through comm_overlap."""
    return f.overlap_setup and f.asked.overlap_moe_expert_parallel_comm is True


@rule("EP001", source=SOURCE, megatron_lm=FLAG)
def ep_overlap_needs_ep(f: Facts, s: State) -> Finding:
    """EP overlap needs expert parallelism.

    Why: it hides the all-to-all between expert-parallel ranks; at EP 1 there is none.
    Fix: raise ``model.expert_model_parallel_size``, or turn the overlap off and with it what needs it.
    """
    ep = f.parallelism.ep
    fix = f"set model.expert_model_parallel_size above 1, or {overlap_off(f, s)}"
    return _ep_gate(f, s, ep <= 1, f"expert_model_parallel_size is {ep}", fix)


@rule("EP002", source=SOURCE, megatron_lm=FLAG)
def ep_overlap_needs_experts(f: Facts, s: State) -> Finding:
    """EP overlap needs a model with several experts.

    Why: Bridge compares ``num_moe_experts`` with 1; a dense model has None there and fails with a
    TypeError. Megatron-Core refuses EP without experts, and a number that EP does not divide (EP024).
    Fix: turn the overlap off for a dense model, and with it what needs it.
    """
    experts = f.recipe.model.num_moe_experts
    because = f"num_moe_experts is {'null' if experts is None else experts}"
    fix = f"set {overlap_off(f, s)}"
    if experts is None and not f.recipe.is_dump:
        fix = f"set model.num_moe_experts, or {overlap_off(f, s)}"
    fails = not experts or (experts == 1 and _asked_of_bridge(f))
    return _ep_gate(f, s, fails, because, fix)


@rule("EP003", source=SOURCE, megatron_lm=FLAG)
def ep_overlap_dispatcher(f: Facts, s: State) -> Finding:
    """EP overlap needs the alltoall or the flex dispatcher.

    Why: the schedule splits a layer around the dispatcher's all-to-all; the allgather dispatcher,
    Megatron-Core's default, has none.
    Fix: set ``model.moe_token_dispatcher_type=alltoall``.
    """
    fails = f.dispatcher not in ("alltoall", "flex")
    return _ep_gate(f, s, fails, f"moe_token_dispatcher_type is {f.dispatcher}", f"set {alltoall(f)}")


@rule("EP004", source=SOURCE, megatron_lm=FLAG)
def ep_overlap_precision(f: Facts, s: State) -> Finding:
    """EP overlap needs BF16 or FP16.

    Where the recipe names no precision, BF16 is taken (CFG004). Megatron-LM then trains in FP32; in Bridge it
    depends on the model's provider, and GPTModelProvider itself has neither.

    Why: its kernels and the split layers are written for half precision.
    Fix: set ``mixed_precision=bf16_mixed``, or ``model.bf16=true`` for Megatron-LM.
    """
    flag = f.megatron_lm and f.recipe.mixed_precision is None
    fix = "set model.bf16=true" if flag else "set mixed_precision=bf16_mixed"
    if f.precision.assumed and s[EP_OVERLAP]:
        where = "without --bf16 or --fp16" if f.megatron_lm else "unless the model's provider sets bf16 or fp16"
        return warning(EP_OVERLAP, f"no precision is named: refused {where}", requested=True, fix=fix)
    return _ep_gate(f, s, f.precision.compute == "fp32", "the model is neither bf16 nor fp16", fix)


@rule("EP005", source=SOURCE, megatron_lm=FLAG)
def ep_overlap_torch(f: Facts, s: State) -> Finding:
    """EP overlap needs PyTorch 2.6.

    Why: with older versions it hangs.
    Fix: use a newer container.
    """
    from overlapkit.versions import parse_version

    torch = f.versions.torch
    fix = f"use torch 2.6 or newer, or set {overlap_off(f, s)}"
    return _ep_gate(f, s, torch < parse_version("2.6.0"), f"torch is {torch}, 2.6.0 is needed", fix)


@rule("EP006", source=SOURCE, megatron_lm=FLAG)
def ep_overlap_needs_vp(f: Facts, s: State) -> Finding:
    """With PP above 1, EP overlap needs virtual stages.

    Why: it runs inside the interleaved schedule. A VP of 1 passes.
    Fix: set ``model.virtual_pipeline_model_parallel_size``.
    """
    vp = f.recipe.model.virtual_pipeline_model_parallel_size if f.overlap_setup else f.parallelism.vp
    fails = f.parallelism.pp > 1 and vp is None
    because = f"PP is {f.parallelism.pp} and virtual_pipeline_model_parallel_size is null"
    of_layout = f.parallelism.vp
    fix = f"set model.virtual_pipeline_model_parallel_size{f'={of_layout}' if of_layout else ' above 1'}"
    return _ep_gate(f, s, fails, because, fix)


@rule("EP007", source=SOURCE, megatron_lm=FLAG)
def ep_overlap_full_recompute(f: Facts, s: State) -> Finding:
    """EP overlap excludes full activation recomputation.

    Why: a recomputed layer would dispatch again inside the other microbatch's backward pass.
    Fix: set ``model.recompute_granularity=selective`` or null.
    """
    fails = f.recipe.model.recompute_granularity == "full"
    return _ep_gate(f, s, fails, "recompute_granularity is full", "set model.recompute_granularity=selective")


@rule("EP008", source=SOURCE, megatron_lm=FLAG)
def ep_overlap_recompute_method(f: Facts, s: State) -> Finding:
    """EP overlap excludes a recompute method.

    Why: ``recompute_method`` belongs to full recomputation.
    Fix: set ``model.recompute_method=null``.
    """
    method = f.recipe.model.recompute_method
    return _ep_gate(f, s, method is not None, f"recompute_method is {method}", "set model.recompute_method=null")


@rule("EP009", source=SOURCE, megatron_lm=FLAG)
def ep_overlap_recompute_layers(f: Facts, s: State) -> Finding:
    """EP overlap excludes ``recompute_num_layers``.

    Why: it belongs to full recomputation.
    Fix: set ``model.recompute_num_layers=null``.
    """
    layers = f.recipe.model.recompute_num_layers
    return _ep_gate(
        f, s, layers is not None, f"recompute_num_layers is {layers}", "set model.recompute_num_layers=null"
    )


@rule("EP010", source=SOURCE, core=">=0.17.0")
def ep_overlap_moe_recompute(f: Facts, s: State) -> Finding:
    """EP overlap excludes recomputing the whole MoE layer.

    Megatron-Core checks it from 0.17, Bridge's set-up from 0.6.

    Why: recomputing ``moe`` repeats the dispatch.
    Fix: take ``moe`` out of ``model.recompute_modules``; ``moe_act`` is allowed.
    """
    modules = f.recipe.model.recompute_modules or ()
    fix = f"set model.recompute_modules=[{', '.join(name for name in modules if name != 'moe')}]"
    return _ep_gate(f, s, "moe" in modules, "recompute_modules contains moe", fix, bridge_checks=f.bridge_in(">=0.6.0"))


@rule("EP011", source=SOURCE, megatron_lm=FLAG)
def ep_overlap_shared_expert(f: Facts, s: State) -> Finding:
    """EP overlap excludes ``moe_shared_expert_overlap``.

    Why: both want to run beside the dispatch.
    Fix: set ``model.moe_shared_expert_overlap=false``.
    """
    fails = bool(f.recipe.model.moe_shared_expert_overlap)
    return _ep_gate(f, s, fails, "moe_shared_expert_overlap is true", "set model.moe_shared_expert_overlap=false")


@rule("EP012", source=SOURCE, megatron_lm=FLAG)
def ep_overlap_mtp(f: Facts, s: State) -> Finding:
    """EP overlap allows at most one MTP layer.

    Up to Bridge 0.5 and Megatron-Core 0.18 the value must be null or 1, so that 0 fails too; later
    null, 0 or 1. Megatron-Core 0.16 and 0.17 want PP above 1 with an MTP layer.

    Why: the schedule handles one extra layer at the end.
    Fix: set ``model.mtp_num_layers`` to null or 1.
    """
    mtp = f.recipe.model.mtp_num_layers
    zero_passes = f.bridge_in(">=0.6.0") if f.bridge else f.core_in(">=0.19.0")
    allowed = (None, 0, 1) if zero_passes else (None, 1)
    none_at_all = f.parallelism.pp == 1 and f.core_in(">=0.16.0,<0.18.0")
    fix = f"set model.mtp_num_layers=null{'' if none_at_all or not mtp else ', or model.mtp_num_layers=1'}"
    if mtp == 1 and none_at_all:
        return _ep_gate(f, s, True, "an MTP layer needs PP above 1 here", fix, bridge_checks=False)
    return _ep_gate(f, s, mtp not in allowed, f"mtp_num_layers is {mtp}", fix)


@rule(
    "EP013",
    source="megatron-core transformer/transformer_config.py and transformer/transformer_layer.py",
    core=">=0.16.0",
)
def ep_overlap_graphs(f: Facts, s: State) -> Finding:
    """EP overlap and CUDA graphs of the MoE or MLP part exclude each other.

    Transformer Engine's graphs without ``cuda_graph_modules`` capture the whole layer, which fails when they
    are replayed. Megatron-Core 0.16 and 0.17 want every CUDA graph to be Transformer Engine's.

    Why: the overlap splits the layer where such a graph would capture it whole.
    Fix: turn CUDA graphs off, or let Transformer Engine capture ``attn`` or ``moe_router`` only, where EP018 to
    EP021 allow it beside a delay.
    """
    captured = sorted(f.graph_modules & {"moe", "mlp"})
    if not s[EP_OVERLAP] or f.graph_impl == "none":
        return None
    if f.graph_impl == "transformer_engine" and captured:
        because = _where_captured(f, captured)
        return _ep_gate(f, s, True, because, _graph_fix(f, s), bridge_checks=False)
    if f.graph_impl == "transformer_engine" and not f.graph_modules:
        return error(
            EP_OVERLAP,
            f"{graph_field(f).partition('.')[2]} is empty, so that CUDA graphs capture the whole layer",
            fix=_graph_fix(f, s),
            by=MEGATRON_CORE,
            at="first_forward",
            requested=True,
        )
    fails = f.graph_impl != "transformer_engine" and f.core_in("<0.18.0")
    return _ep_gate(f, s, fails, f"cuda_graph_impl is {f.graph_impl}", _graph_fix(f, s), bridge_checks=False)


def _where_captured(f: Facts, parts: list[str]) -> str:
    """The field that names these parts; both fields where each names some."""
    fields = {name: getattr(f.recipe.model, name) or () for name in ("cuda_graph_scope", "cuda_graph_modules")}
    named = {field: [part for part in parts if part in given] for field, given in fields.items()}
    return " and ".join(f"{field} contains {' and '.join(found)}" for field, found in named.items() if found)


def _graph_fix(f: Facts, s: State) -> str:
    """No graphs, or Transformer Engine's of the parts that pass."""
    rest = sorted(f.graph_modules - {"moe", "mlp"})
    choices = [rest] if rest and f.graph_impl == "transformer_engine" else [["attn"], ["moe_router"]]
    fix = f"set {graphs_off(f)}"
    if fix != "set model.cuda_graph_impl=none":
        return fix
    impl = "" if f.graph_impl == "transformer_engine" else "model.cuda_graph_impl=transformer_engine and "
    for parts in choices:
        captured = replace(f, graph_impl="transformer_engine", graph_modules=frozenset(parts))
        if passes(captured, s, *DELAY_AND_GRAPHS, "EP034", "ENV015"):
            fix += f", or {impl}{capture(f, *parts)}"
    return fix
