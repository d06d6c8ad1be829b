"""EP: the gates of delayed weight gradients, and what Bridge resets on the model."""

from __future__ import annotations

from dataclasses import replace

from overlapkit.facts import Facts
from overlapkit.rules.changes import home
from overlapkit.rules.dp_changes import DELAY as DDP_DELAY
from overlapkit.rules.ep import (
    DELAY,
    DELAY_AND_GRAPHS,
    EP_OVERLAP,
    FLAG,
    GATES,
    SOURCE,
    capture,
    graphs_off,
    may_overlap,
    switch_off,
)
from overlapkit.rules.registry import BRIDGE, MEGATRON_CORE, MEGATRON_LM, Finding, State, error, passes, rule, warning


def _delay_gate(f: Facts, s: State, fails: bool, because: str, fix: str, by: str) -> Finding:
    if not fails or not s[DELAY]:
        return None
    return error(DELAY, because, fix=fix, by=by, at="validation", requested=True)


def _delay_by_bridge(f: Facts) -> bool:
    """Bridge's set-up checks only what the user asks through comm_overlap."""
    return f.overlap_setup and f.asked.delay_wgrad_compute is True


def _newer(f: Facts) -> str:
    """The way out of a Transformer Engine that is too old."""
    return f"use a newer one, or set {' and '.join(switch_off(f, 'delay_wgrad_compute'))}"


def te_before(f: Facts, version: str) -> bool:
    """Transformer Engine older than ``version``, or absent."""
    return not f.te_in(f">={version}")


def te_text(f: Facts, needed: str) -> str:
    version = f.versions.transformer_engine
    return f"transformer-engine is {version if version else 'not installed'}, {needed} is needed"


@rule(
    "EP014",
    source="megatron-bridge training/comm_overlap.py; Megatron-LM training/arguments.py",
    megatron_lm=FLAG,
)
def delayed_wgrad_grad_reduce(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` beside overlapped gradient reduction needs a newer Transformer Engine.

    2.7 for Bridge, 2.8 for Megatron-LM. Bridge looks at ``ddp`` as it stands before its own set-up, and
    at the user's ``comm_overlap``.

    Why: the gradient is ready only after the delayed GEMM, which older versions do not tell DDP.
    Fix: use a newer Transformer Engine, or turn the delay off.
    """
    if f.megatron_lm:
        fails = s["ddp.overlap_grad_reduce"] and te_before(f, "2.8.0")
        return _delay_gate(f, s, fails, f"with overlap_grad_reduce {te_text(f, '2.8.0')}", _newer(f), MEGATRON_LM)
    reduces = bool(f.recipe.ddp.overlap_grad_reduce or f.asked.overlap_grad_reduce)
    fails = _delay_by_bridge(f) and reduces and te_before(f, "2.7.0")
    return _delay_gate(f, s, fails, f"with overlap_grad_reduce {te_text(f, '2.7.0')}", _newer(f), BRIDGE)


@rule(
    "EP015",
    source="megatron-bridge training/comm_overlap.py; Megatron-LM training/arguments.py",
    megatron_lm=FLAG,
)
def delayed_wgrad_fusion(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` and gradient accumulation fusion by Transformer Engine version.

    Bridge wants 2.7 when the fusion is on, Megatron-LM wants 2.7 when it is off.

    Why: the delayed GEMM writes the gradient by another path; the two frameworks guard opposite cases.
    Fix: use Transformer Engine 2.7 or newer, or turn the delay off.
    """
    if f.megatron_lm:
        fails = not f.gradient_accumulation_fusion and te_before(f, "2.7.0")
        because = f"without gradient_accumulation_fusion {te_text(f, '2.7.0')}"
        return _delay_gate(f, s, fails, because, _newer(f), MEGATRON_LM)
    fails = _delay_by_bridge(f) and f.gradient_accumulation_fusion and te_before(f, "2.7.0")
    because = f"with gradient_accumulation_fusion {te_text(f, '2.7.0')}"
    return _delay_gate(f, s, fails, because, _newer(f), BRIDGE)


@rule("EP016", source=SOURCE, megatron_lm=FLAG)
def delayed_wgrad_needs_ep_overlap(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` needs EP overlap.

    Bridge also accepts an overlap that stands on the model only, but then resets it, and Megatron-Core
    refuses what is left.

    Why: the delayed weight gradients fill the other microbatch's all-to-all.
    Fix: turn the delay off, or EP overlap on where its gates allow it.
    """
    if not s[DELAY]:
        return None
    off = " and ".join(switch_off(f, "delay_wgrad_compute"))
    fix = f"set {home(f)}.overlap_moe_expert_parallel_comm=true, or {off}" if may_overlap(f, s) else f"set {off}"
    asked = bool(f.recipe.model.overlap_moe_expert_parallel_comm or f.asked.overlap_moe_expert_parallel_comm)
    if _delay_by_bridge(f) and not asked:
        return _delay_gate(f, s, True, "overlap_moe_expert_parallel_comm is off", fix, BRIDGE)
    return _delay_gate(
        f,
        s,
        not s[EP_OVERLAP],
        "overlap_moe_expert_parallel_comm is off after Bridge's set-up"
        if f.overlap_setup
        else "overlap_moe_expert_parallel_comm is off",
        fix,
        MEGATRON_CORE,
    )


@rule("EP017", source=SOURCE, bridge="<0.4.0", megatron_lm=">=0.14.0,<0.17.0")
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


def _capture_nothing(f: Facts) -> str:
    empty = capture(f)
    return empty if f.graph_impl == "none" else f"{empty} and {graphs_off(f)}"


_GRAPH_SOURCE = "megatron-bridge training/comm_overlap.py (0.4); Megatron-LM training/arguments.py (core 0.17)"


@rule("EP018", source=_GRAPH_SOURCE, bridge=">=0.4.0", megatron_lm=">=0.17.0")
def delayed_wgrad_graph_te(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` with captured weight gradients needs Transformer Engine 2.12.

    Captured are those of attention, and of a shared expert when ``moe_router`` is captured.

    Why: older versions cannot run a delayed GEMM inside a CUDA graph. The parts count even where
    ``cuda_graph_impl`` is none.
    Fix: use a newer Transformer Engine, or capture nothing.
    """
    because = f"with captured weight gradients {te_text(f, '2.12.0')}"
    fix = f"use a newer one, or set {_capture_nothing(f)}"
    return _graph_gate(f, s, te_before(f, "2.12.0"), because, fix)


@rule("EP019", source=_GRAPH_SOURCE, bridge=">=0.4.0", megatron_lm=">=0.17.0")
def delayed_wgrad_graph_fusion(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` with captured weight gradients needs gradient accumulation fusion.

    Why: without it gradients do not stay at one address, which a CUDA graph needs.
    Fix: set ``model.gradient_accumulation_fusion=true``.
    """
    # An old Transformer Engine has neither the fusion (EP015) nor such a capture (EP018).
    change = _capture_nothing(f) if te_before(f, "2.12.0") else "model.gradient_accumulation_fusion=true"
    because = "captured weight gradients without gradient_accumulation_fusion"
    return _graph_gate(f, s, not f.gradient_accumulation_fusion, because, f"set {change}")


@rule("EP020", source=_GRAPH_SOURCE, bridge=">=0.4.0", megatron_lm=">=0.17.0")
def delayed_wgrad_graph_bias(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` with captured attention excludes attention biases.

    Megatron-LM's parser has the biases on unless ``--disable-bias-linear`` is given.

    Why: the bias gradient of a delayed GEMM is not captured.
    Fix: set ``model.add_bias_linear=false`` and ``model.add_qkv_bias=false``.
    """
    model = f.recipe.model
    names = [name for name in ("add_bias_linear", "add_qkv_bias") if getattr(model, name)]
    if f.megatron_lm and model.add_bias_linear is None:
        names.insert(0, "add_bias_linear")
    fails = "attn" in f.graph_modules and bool(names)
    return _graph_gate(
        f,
        s,
        fails,
        f"captured attention with {' and '.join(names)}",
        f"set {' and '.join(f'model.{name}=false' for name in names)}",
    )


@rule("EP021", source="megatron-core transformer/transformer_config.py", core=">=0.16.0")
def delayed_wgrad_partial_graph(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` with Transformer Engine's CUDA graphs needs Transformer Engine 2.10.

    Why: Megatron-Core refuses older versions.
    Fix: use a newer Transformer Engine, or turn CUDA graphs off.
    """
    fails = f.graph_impl == "transformer_engine" and te_before(f, "2.10.0")
    because = f"with cuda_graph_impl=transformer_engine {te_text(f, '2.10.0')}"
    return _delay_gate(f, s, fails, because, f"use a newer one, or set {graphs_off(f)}", MEGATRON_CORE)


@rule(
    "EP031",
    source="megatron-core extensions/transformer_engine.py TELinear; Megatron-LM training/arguments.py",
    megatron_lm=FLAG,
)
def delayed_wgrad_layers(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` needs the layers of Transformer Engine 2.3 or newer.

    Megatron-LM checks ``transformer_impl`` in its arguments; Megatron-Core checks the version when it builds a
    layer.

    Why: only these layers can compute the weight gradient apart from the input gradient.
    Fix: use a newer Transformer Engine, and ``model.transformer_impl=transformer_engine``.
    """
    impl = f.recipe.model.transformer_impl
    if f.megatron_lm and impl not in (None, "transformer_engine"):
        off = " and ".join(switch_off(f, "delay_wgrad_compute"))
        fix = f"set {off if te_before(f, '2.3.0') else 'model.transformer_impl=transformer_engine'}"
        return _delay_gate(f, s, True, f"transformer_impl is {impl}", fix, MEGATRON_LM)
    if not s[DELAY] or not te_before(f, "2.3.0"):
        return None
    return error(
        DELAY,
        te_text(f, "2.3.0"),
        fix=_newer(f),
        by=MEGATRON_CORE,
        at="construction",
        requested=True,
    )


@rule("EP022", source="megatron-bridge training/comm_overlap.py", megatron_lm=None)
def model_ep_values_reset(f: Facts, s: State) -> Finding:
    """EP values on the model that Bridge's set-up resets.

    Why: Bridge writes what ``comm_overlap`` says, and false where it says nothing; a true on the model
    is lost.
    Fix: set the value under ``comm_overlap`` where its gates allow it, or take it off the model.
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
            fix=f"set {_asked_for(f, s, name)}",
        )
        for name in names
    ]


def _asked_for(f: Facts, s: State, name: str) -> str:
    """What makes Bridge keep the value, where its gates allow it; else what leaves nothing to reset."""
    overlap, delay = "overlap_moe_expert_parallel_comm", s[DELAY] or name == "delay_wgrad_compute"
    asked = replace(f.asked, overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=delay)
    state = {**s, EP_OVERLAP: True, DELAY: delay, DDP_DELAY: s[DDP_DELAY] or f.dist_opt_at_setup}
    gates_of_delay = ("EP014", "EP015", "EP017", *DELAY_AND_GRAPHS, "EP031", "DP017", "UB029")
    if not passes(replace(f, asked=asked), state, *GATES, *gates_of_delay):
        return f"model.{name}=false"
    names = (name,) if s[EP_OVERLAP] or name == overlap else (overlap, name)
    return " and ".join(f"comm_overlap.{each}=true" for each in names)
