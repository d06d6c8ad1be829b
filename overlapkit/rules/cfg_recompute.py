"""CFG: activation recomputation, as far as Megatron-Core's configuration refuses it."""

from __future__ import annotations

from collections.abc import Iterable

from overlapkit.facts import Facts
from overlapkit.rules.registry import MEGATRON_CORE, MEGATRON_LM, Finding, State, Verdict, error, refusal, rule, warning

_CONFIG = "megatron-core transformer/transformer_config.py"
_GRANULARITY = "model.recompute_granularity"
_MODULES = "model.recompute_modules"
# In Bridge's recipes of DeepSeek-V4, for a Megatron-Core that is not released yet.
_NEWER = ("mhc",)
_KNOWN = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")


@rule("CFG024", source=f"{_CONFIG}; Megatron-LM training/arguments.py validate_args")
def recompute_fields_do_not_fit(f: Facts, s: State) -> Iterable[Verdict]:
    """Full recomputation needs a method and a number of layers, selective recomputation has neither.

    A hand-written recipe for Bridge may leave both to the model's own recipe; EP007 and EP009 say what EP overlap
    excludes. Selective recomputation with a
    ``recompute_method`` is refused by Megatron-LM only.

    Why: full recomputation redoes whole layers, in blocks of so many; selective recomputation redoes the parts in
    ``recompute_modules``. Megatron-Core refuses what is half of each.
    Fix: set or remove ``model.recompute_method`` and ``model.recompute_num_layers``.
    """
    model = f.recipe.model
    method, layers = model.recompute_method, model.recompute_num_layers
    overlaps = s["model.overlap_moe_expert_parallel_comm"]  # which excludes full recomputation, and a number of layers
    if model.recompute_granularity == "full" and not overlaps:
        unsaid = {"method": (method, "uniform"), "num_layers": (layers, "1")}
        missing = [(f"recompute_{name}", usual) for name, (said, usual) in unsaid.items() if said is None]
        if not missing:
            return
        because = f"full without {' and '.join(name for name, _ in missing)}"
        fix = f"set {' and '.join(f'model.{name}={usual}' for name, usual in missing)}"
        if f.bridge and not f.recipe.is_dump:
            yield warning(_GRANULARITY, f"{because}, unless the model's own recipe sets it", fix=fix, requested="full")
        else:
            yield refusal(_GRANULARITY, because, fix, "full")
    elif model.recompute_granularity == "selective":
        if layers is not None and not overlaps:
            subject = "model.recompute_num_layers"
            yield refusal(subject, "selective recomputation has no number of layers", f"set {subject}=null", layers)
        if method is not None and f.megatron_lm:
            subject, because = "model.recompute_method", "selective recomputation has no method"
            yield refusal(subject, because, f"set {subject}=null", method, by=MEGATRON_LM)


@rule("CFG030", source="megatron-core transformer/transformer_block.py _checkpointed_forward", core="<0.17.0")
def recompute_passes_the_last_layer(f: Facts, s: State) -> Finding:
    """Before core 0.17, uniform full recomputation needs ``recompute_num_layers`` to divide the layers of every chunk.

    A chunk is what a stage holds in one round of virtual stages. Heterogeneous layers and pipeline layouts count as
    they are laid out.

    Why: the forward pass walks a chunk in strides of that many layers and does not stop at the last layer: an
    IndexError in the first step.
    Fix: set ``model.recompute_num_layers`` to a divisor, such as 1, or ``model.recompute_method=block``.
    """
    from overlapkit.volume.stages import layers_per_chunk

    model = f.recipe.model
    stride = model.recompute_num_layers
    uniform = model.recompute_granularity == "full" and model.recompute_method == "uniform"
    if not uniform or stride is None or stride < 1 or model.num_layers is None:
        return None
    cut = sorted(layers for layers in layers_per_chunk(f) if layers > 0 and layers % stride)
    if not cut:
        return None
    return error(
        "model.recompute_num_layers",
        f"{stride} does not divide the {cut[0]} layers of a chunk",
        fix="set model.recompute_num_layers=1",
        by=MEGATRON_CORE,
        at="first_forward",
        requested=stride,
        value=stride,
    )


@rule("CFG025", source=f"{_CONFIG}; megatron-bridge recipes/deepseek (0.6)")
def recompute_modules_do_not_fit(f: Facts, s: State) -> Iterable[Verdict]:
    """Modules that selective recomputation does not know, or cannot redo in this model.

    ``mla_up_proj`` is of multi-latent attention. ``shared_experts`` excludes ``moe_shared_expert_overlap`` and, from
    core 0.19 with more weight shards than TP, local CUDA graphs under FP8 or FP4. ``layernorm`` and ``moe_act`` under
    FP8 need Transformer Engine 2.6 and a scaling other than delayed. ``moe`` excludes Transformer Engine's CUDA graph
    of ``moe_router`` from core 0.16. What a hand-written recipe for Bridge leaves to the model is not looked at.

    ``mhc`` gets a warning where the recipe does not name its Megatron-Core: Bridge's own recipes have it.

    Why: Megatron-Core refuses what it could not compute again in the backward pass.
    Fix: take what is named out of ``model.recompute_modules``.
    """
    model = f.recipe.model
    modules = model.recompute_modules
    if model.recompute_granularity != "selective" or not modules:
        return
    problems = {name: problem for name in modules if (problem := _module_problem(f, name))}
    fix = f"set {_MODULES}=[{', '.join(name for name in modules if name not in problems)}]"
    newer = [name for name in problems if name in _NEWER and "megatron_core" in f.versions.assumed]
    for name in newer:
        yield warning(_MODULES, problems.pop(name), fix=fix, requested=list(modules))
    if problems:
        yield refusal(_MODULES, "; ".join(problems.values()), fix, list(modules))


def _module_problem(f: Facts, name: str) -> str | None:
    known = (*_KNOWN, "gdn_norm_out") if f.core_in(">=0.19.0") else _KNOWN
    if name not in known:
        return f"{name} is none of {', '.join(known)}"
    mla = f.recipe.model.multi_latent_attention
    if name == "mla_up_proj" and not mla and (mla is False or f.recipe.is_dump or f.megatron_lm):
        return "mla_up_proj without multi-latent attention"
    if name in ("layernorm", "moe_act") and f.precision.fp8:
        if f.precision.fp8_recipe == "delayed":
            return f"{name} under FP8 with delayed scaling"
        if not f.te_in(">=2.6.0.dev0"):
            version = f.versions.transformer_engine
            return f"{name} under FP8 needs transformer-engine 2.6 (it is {version or 'not installed'})"
    graphs_router = f.graph_impl == "transformer_engine" and "moe_router" in f.graph_modules
    if name == "moe" and graphs_router and f.core_in(">=0.16.0"):
        return "moe with Transformer Engine's CUDA graph of moe_router"
    return _shared_experts_problem(f) if name == "shared_experts" else None


def _shared_experts_problem(f: Facts) -> str | None:
    model = f.recipe.model
    if model.moe_shared_expert_intermediate_size is None:
        return None
    if model.moe_shared_expert_overlap:
        return "shared_experts with moe_shared_expert_overlap"
    shards = model.tensor_parallel_num_weight_shards or 0
    captured = not f.graph_modules or f.graph_modules & {"moe", "moe_router", "moe_preprocess"}
    if shards // f.parallelism.tp < 2 or f.graph_impl != "local" or not captured or f.core_in("<0.19.0"):
        return None
    if not (f.precision.fp8 or f.precision.fp4):
        return None
    return f"shared_experts with local CUDA graphs, {shards} weight shards and FP8 or FP4"
