"""CFG: CUDA graphs, as far as Megatron-Core's configuration refuses them."""

from __future__ import annotations

from collections.abc import Iterable

from overlapkit.facts import Facts
from overlapkit.rules.ep import graph_field, graphs_off
from overlapkit.rules.ep_experts import has_dense_layers
from overlapkit.rules.registry import MEGATRON_CORE, MEGATRON_LM, Finding, State, Verdict, refusal, rule

_SOURCE = "megatron-core transformer/transformer_config.py and transformer/cuda_graph_config.py"
_PARTS = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
_WHOLE, _INFERENCE = "full_iteration", "full_iteration_inference"
_IMPL = "model.cuda_graph_impl"


@rule("CFG026", source=f"{_SOURCE}; Megatron-LM training/arguments.py", core=">=0.15.0")
def graph_switches(f: Facts, s: State) -> Iterable[Verdict]:
    """More than one way to ask for CUDA graphs, or one that this Megatron-Core does not have.

    ``enable_cuda_graph`` and ``external_cuda_graph`` are older names of ``cuda_graph_impl``, which exclude it and each
    other. ``cuda_graph_impl=full_iteration`` came with core 0.18; from then on ``cuda_graph_scope`` is an older name
    of ``cuda_graph_modules``, and only one of them may be there.

    Why: Megatron-Core refuses it, Megatron-LM's parser before.
    Fix: keep one of the names.
    """
    model = f.recipe.model
    by = MEGATRON_LM if f.megatron_lm else MEGATRON_CORE
    impl = model.cuda_graph_impl or "none"
    older = [name for name in ("enable_cuda_graph", "external_cuda_graph") if getattr(model, name)]
    if older and (impl != "none" or len(older) > 1):
        named = [f"cuda_graph_impl={impl}", *older] if impl != "none" else older
        gone = older if impl != "none" else older[1:]
        fix = f"set {' and '.join(f'model.{name}=false' for name in gone)}"
        yield refusal(f"model.{gone[0]}", f"{' and '.join(named)} exclude each other", fix, True, by)
    if impl == _WHOLE and f.core_in("<0.18.0"):
        because = f"megatron-core {f.versions.megatron_core} has no such implementation"
        yield refusal(_IMPL, because, f"set {_IMPL}=local and model.cuda_graph_scope=[{_WHOLE}]", impl, by)
    newer = model.cuda_graph_modules or ()
    beside = model.cuda_graph_scope is not None and newer not in ((), ("full",))  # what the field holds untouched
    if f.core_in(">=0.18.0") and beside:
        # Without these the parts are those that CFG027 has looked at.
        subject = "model.cuda_graph_modules"
        yield refusal(subject, "cuda_graph_scope is there too", f"set {subject}=null", list(newer), by)


@rule("CFG027", source=f"{_SOURCE}; Megatron-LM training/arguments.py", core=">=0.16.0")
def graph_parts(f: Facts, s: State) -> Finding:
    """Parts of a layer that CUDA graphs cannot capture, or not together.

    ``moe`` and ``moe_router`` exclude each other and need experts, ``moe_preprocess`` needs ``moe_router``, ``mlp``
    needs a dense layer. ``full`` stands alone. Whole iterations (``full_iteration``) are not of Transformer Engine's
    graphs, and from core 0.18 have no parts beside them.

    Why: Megatron-Core refuses a part that the model does not have, or that is captured twice. ``moe`` alone, which
    needs tokens to be dropped and padded, is not looked at here, nor what a hand-written recipe for Bridge leaves to
    the model: whether it has experts, and in which layers.
    Fix: take what is named out of the parts.
    """
    said = _said(f)
    if said is None:
        return None
    problems = {name: problem for name in said if (problem := _part_problem(f, said, name))}
    if not problems:
        return None
    rest = [name for name in said if name not in problems]
    field = graph_field(f)
    change = f"{field}=[{', '.join(rest)}]" if rest else f"{field}=null"
    off = graphs_off(f)
    if not rest and off:  # nothing named would be the whole layer
        change = f"{change} and {off}"
    at_first = f.megatron_lm and any(name not in _PARTS for name in problems)
    by = MEGATRON_LM if at_first else MEGATRON_CORE
    return refusal(field, "; ".join(dict.fromkeys(problems.values())), f"set {change}", list(said), by)


def _said(f: Facts) -> tuple[str, ...] | None:
    """The parts as this Megatron-Core reads them; None where it reads none."""
    model = f.recipe.model
    newer: tuple[str, ...] | None = model.cuda_graph_modules if f.core_in(">=0.18.0") else None
    older: tuple[str, ...] | None = model.cuda_graph_scope
    return newer if older is None else older


def _part_problem(f: Facts, said: tuple[str, ...], name: str) -> str | None:
    if name == "full":
        return "full has other parts beside it" if len(said) > 1 else None
    migrates = f.core_in(">=0.18.0")
    if name == _INFERENCE and f.core_in(">=0.17.0"):
        return _inference_problem(f, said) if migrates else None
    if name == _WHOLE:
        if f.graph_impl == "transformer_engine":
            return "whole iterations are not in Transformer Engine's graphs"
        return None
    if name not in _PARTS:
        return f"{name} is none of {', '.join(_PARTS)}"
    if f.graph_impl == "none":
        return None
    if migrates and f.full_iteration_graph:
        return "whole iterations have no parts"
    return _layer_problem(f, said, name)


def _inference_problem(f: Facts, said: tuple[str, ...]) -> str | None:
    if _WHOLE in said:
        return f"{_WHOLE} and {_INFERENCE} exclude each other"
    if f.graph_impl in ("transformer_engine", _WHOLE):
        return f"{_INFERENCE} does not go with cuda_graph_impl={f.graph_impl}"
    return None


def _layer_problem(f: Facts, said: tuple[str, ...], name: str) -> str | None:
    model, local = f.recipe.model, f.graph_impl == "local"
    router = "moe_router" in said or (local and "moe_preprocess" in said)  # local graphs take both for either
    if name == "moe_preprocess" and not router:
        return "moe_preprocess without moe_router"
    known = f.recipe.is_dump or f.megatron_lm or model.num_moe_experts is not None
    if (model.num_moe_experts or 0) <= 1:
        if not known:
            return None
        takes_router = name == "moe_preprocess" and local
        return f"{name} without experts" if name in ("moe", "moe_router") or takes_router else None
    if name == "moe" and router:
        return "moe and its router are both there"
    if name != "mlp" or (model.moe_layer_freq is None and not f.recipe.is_dump and not f.megatron_lm):
        return None
    return None if has_dense_layers(model.moe_layer_freq) else "mlp where every layer has experts"


@rule("CFG028", source=_SOURCE, core=">=0.16.0")
def full_recompute_in_graphs(f: Facts, s: State) -> Finding:
    """Full recomputation with CUDA graphs of layers.

    Why: Megatron-Core captures recomputed layers only in graphs of whole iterations: ``cuda_graph_scope`` with
    ``full_iteration`` alone, from core 0.18 ``cuda_graph_impl=full_iteration``.
    Fix: turn the graphs off, or recompute selectively.
    """
    if f.recipe.model.recompute_granularity != "full" or f.graph_impl == "none":
        return None
    said = _said(f)
    if f.full_iteration_graph and (f.core_in(">=0.18.0") or said == (_WHOLE,)):
        return None
    because = f"full recomputation with CUDA graphs of layers ({f.graph_impl})"
    return refusal("model.recompute_granularity", because, f"set {graphs_off(f)}", "full")
