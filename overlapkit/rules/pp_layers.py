"""PP: whether the layers split over stages and virtual stages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from overlapkit.facts import Facts
from overlapkit.parallelism import counted_layers
from overlapkit.rules.registry import BRIDGE, MEGATRON_CORE, MEGATRON_LM, Finding, State, error, rule

_HYBRID_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")  # these say which stage holds what
_SIZES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_ACCOUNTS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_SIZES_OF_PP = "model.pipeline_model_parallel_size or model.virtual_pipeline_model_parallel_size"


@rule(
    "PP006",
    source="megatron-core transformer/transformer_config.py and transformer_block.py; Megatron-LM "
    "training/arguments.py; megatron-bridge models/gpt_provider.py",
)
def layers_do_not_split(f: Facts, s: State) -> Finding:
    """The layers do not split over PP and VP.

    ``num_layers`` must be a multiple of PP times VP, unless first or last stages, an account for
    embedding and loss, or an explicit layout say otherwise; these have to fit as well, and to stand alone.

    Why: every stage and chunk builds the same number of layers. What no framework checks trains a model of
    another size: first and last stages that leave layers without a stage, before Megatron-Core 0.16.
    Fix: change PP or VP, or give a ``pipeline_model_parallel_layout``; take away what does not go with the rest.
    """
    if any(f.written(f"model.{name}") for name in _HYBRID_PATTERNS):
        return None
    problem = _layer_problem(f)
    if problem is None:
        return None
    # A hybrid model's layers are built by a rule of their own; the configuration is looked at as any other.
    if f.recipe.model.is_hybrid_model and problem.at != "validation":
        return None
    name, fix = "num_layers", f"change {_SIZES_OF_PP}, or give a layout"
    if f.stages is not None:
        name, fix = "pipeline_model_parallel_layout", "mend model.pipeline_model_parallel_layout"
    said = getattr(f.recipe.model, name)
    fix = problem.fix or fix
    return error(f"model.{name}", problem.because, fix=fix, by=problem.by, at=problem.at, requested=said, value=said)


@dataclass(frozen=True, slots=True)
class _Problem:
    """Why the layers do not split over PP and VP, and who says so when.

    ``by`` and ``at`` are a decision's ``raised_by`` and ``raised_at``; both None: the launch goes on with
    another number of layers. ``fix``: what mends this one, where PP, VP or the layout need not change.
    """

    because: str
    by: str | None
    at: str | None
    fix: str | None = None


def _core(because: str, fix: str | None = None) -> _Problem:
    return _Problem(because, MEGATRON_CORE, "validation", fix)


def _silent(because: str) -> _Problem:
    return _Problem(because, None, None)


def _layer_problem(f: Facts) -> _Problem | None:
    """What keeps the layers from splitting over PP and VP; None when they do.

    Source: megatron-core transformer/transformer_config.py (validation) and
    transformer/transformer_block.py get_num_layers_to_build (construction); Megatron-LM
    training/arguments.py; megatron-bridge models/gpt_provider.py.
    """
    if f.stages is not None:
        return _layout_problem(f, f.stages)
    model = f.recipe.model
    counted = counted_layers(f.recipe)
    if counted is None or model.num_layers is None:
        return None
    extra = counted - model.num_layers
    if model.num_layers_in_first_pipeline_stage is None and model.num_layers_in_last_pipeline_stage is None:
        return None if model.is_hybrid_model and not extra else _even_problem(f, model.num_layers, extra)
    problem = _uneven_problem(f, model.num_layers)
    splits_evenly = _even_problem(f, model.num_layers, 0) is None
    given = [f"model.{name}" for name in _SIZES if getattr(model, name) is not None]
    change = f"change {' or '.join(given)}"
    if extra:
        because = "layers of the first or last stage are given, and embedding or loss count as a layer: not both"
        if problem is None:
            return _core(because, _take_away(f, *_ACCOUNTS))
        even = _take_away(f, *_SIZES, *_ACCOUNTS)
        return _core(because, even if splits_evenly else f"{_take_away(f, *_ACCOUNTS)} and {change}")
    if problem is None:
        return None
    return replace(problem, fix=_take_away(f, *_SIZES) if splits_evenly else change)


def _take_away(f: Facts, *names: str) -> str:
    """Changes that leave none of these sizes and accounts."""
    said = [(name, getattr(f.recipe.model, name)) for name in names]
    changes = [
        f"model.{name}={'null' if name in _SIZES else 'false'}"
        for name, value in said
        if value or (name in _SIZES and value is not None)
    ]
    return f"set {' and '.join(changes)}"


def _even_problem(f: Facts, layers: int, extra: int) -> _Problem | None:
    pp = f.parallelism.pp
    vp = f.parallelism.vp if pp > 1 or extra else None
    chunks = pp * (vp or 1)
    if (layers + extra) % chunks == 0:
        return None
    counted = f"{layers} layers" + (f" and {extra} for embedding and loss" if extra else "")
    parts = f"{pp} stages" if vp is None or vp == 1 else f"{pp} stages times {vp} virtual stages = {chunks}"
    because = f"{counted} are not a multiple of {parts}"
    fix = _take_away(f, *_ACCOUNTS) if extra and layers % chunks == 0 else None
    if f.megatron_lm and vp is None:
        return _Problem(because, MEGATRON_LM, "validation", fix)
    if extra:
        return _core(because, fix)
    if f.bridge and vp is not None and layers // pp % vp:
        return _Problem(because, BRIDGE, "construction")
    return _Problem(because, MEGATRON_CORE, "construction")


def _layout_problem(f: Facts, stages: tuple[str, ...]) -> _Problem | None:
    model, pp = f.recipe.model, f.parallelism.pp
    if len(stages) % pp:
        because = f"the layout has {len(stages)} stages, not a multiple of PP {pp}"
        return _Problem(because, MEGATRON_LM, "validation") if f.megatron_lm else _core(because)
    if any(getattr(model, name) is not None for name in _SIZES) or any(getattr(model, name) for name in _ACCOUNTS):
        because = "a layout says it all: no layers of the first or last stage, no account for embedding or loss"
        bare = replace(model, **dict.fromkeys((*_SIZES, *_ACCOUNTS)))
        rest = _layout_problem(replace(f, recipe=replace(f.recipe, model=bare)), stages)
        mend = " and mend model.pipeline_model_parallel_layout" if rest else ""
        return _core(because, f"{_take_away(f, *_SIZES, *_ACCOUNTS)}{mend}")
    vp = model.virtual_pipeline_model_parallel_size
    if vp is not None and vp != len(stages) // pp:
        chunks = len(stages) // pp
        because = f"the layout has {chunks} virtual stages, virtual_pipeline_model_parallel_size is {vp}"
        fix = f"set model.virtual_pipeline_model_parallel_size={chunks if chunks > 1 else 'null'}"
        return _Problem(because, MEGATRON_LM if f.megatron_lm else MEGATRON_CORE, "validation", fix)
    everything = "".join(stages)
    if not everything.startswith("E") or not everything.endswith("L"):
        return _core("the layout does not begin with the embedding and end with the loss")
    if everything.count("E") != 1 or everything.count("L") != 1:
        return _core("the layout has more than one embedding or loss")
    if model.num_layers is not None and everything.count("t") != model.num_layers:
        return _core(f"the layout has {everything.count('t')} transformer layers, num_layers is {model.num_layers}")
    if everything.count("m") != (model.mtp_num_layers or 0):
        return _core(
            f"the layout has {everything.count('m')} MTP layers, mtp_num_layers is {model.mtp_num_layers or 0}"
        )
    return _mtp_problem(f, stages)


def _mtp_problem(f: Facts, stages: tuple[str, ...]) -> _Problem | None:
    """Where MTP layers may stand: last of all layers, in one stage, in the last virtual stage of its rank."""
    holders = [index for index, stage in enumerate(stages) if "m" in stage]
    if not holders:
        return None
    everything = "".join(stages)
    if "t" in everything[everything.index("m") :]:
        return _core("the layout has transformer layers behind the MTP layers")
    if len(holders) > 1:
        return _core("the layout has MTP layers in more than one stage")
    if holders[0] < len(stages) - f.parallelism.pp:
        return _core("the layout's MTP layers are not in the last virtual stage of their rank")
    if holders[0] != len(stages) - 1 and f.core_in(">=0.15.0,<0.16.0"):
        return _core("the layout's MTP layers are not in the last stage, beside the loss, as before Megatron-Core 0.16")
    return None


def _uneven_problem(f: Facts, layers: int) -> _Problem | None:
    model, vp = f.recipe.model, f.parallelism.vp
    middle, stages = layers, f.parallelism.pp
    for name, count in (
        ("first", model.num_layers_in_first_pipeline_stage),
        ("last", model.num_layers_in_last_pipeline_stage),
    ):
        if count is None:
            continue
        if count <= 0:
            return _core(f"the {name} stage has {count} layers")
        if vp is not None and count % vp:
            return _core(f"the {name} stage's {count} layers are not a multiple of {vp} virtual stages")
        middle, stages = middle - count, stages - 1
    left = f"{middle} layers are left for {stages} stages in the middle"
    if (middle != 0) != (stages != 0) and f.core_in(">=0.16.0"):
        return _core(left)
    if stages <= 0:
        return _silent(f"{left}: the model would not have {layers} layers") if middle or stages else None
    if middle % stages:
        return _core(f"{left}, not a multiple")
    if vp is not None and middle // stages % vp:
        return _core(f"{middle // stages} layers of a middle stage are not a multiple of {vp} virtual stages")
    return _silent(f"{left}: the model would not have {layers} layers") if middle < 0 else None


@rule("PP016", source="Megatron-LM training/arguments.py validate_args")
def layers_per_virtual_stage(f: Facts, s: State) -> Finding:
    """``num_layers_per_virtual_pipeline_stage``, which is Megatron-LM's.

    The layers of a stage must be a multiple of it, and it stands alone: VP by its number, a layout, and layers of the
    first or last stage each exclude it. Bridge has no such field.

    Why: VP is the layers of a stage divided by it.
    Fix: set ``model.virtual_pipeline_model_parallel_size``.
    """
    model, pp = f.recipe.model, f.parallelism.pp
    each, layers = model.num_layers_per_virtual_pipeline_stage, counted_layers(f.recipe)
    if each is None:
        return None
    name, instead = "num_layers_per_virtual_pipeline_stage", "model.virtual_pipeline_model_parallel_size"
    change = f"model.{name}=null"
    others = (instead.partition(".")[2], "pipeline_model_parallel_layout", *_SIZES)
    beside = [other for other in others if getattr(model, other) is not None]
    if f.bridge:
        because = "Bridge has no such field"
        if not beside and layers is not None and layers % (pp * each) == 0:
            change = f"{change} and {instead}={layers // (pp * each)}"
    elif beside:
        because = f"Megatron-LM takes no {beside[0]} beside it"
    elif layers is not None and layers % (pp * each):
        stage = f", {layers // pp} a stage" if layers % pp == 0 else ""
        because = f"{layers} layers over PP {pp}{stage}, do not divide into chunks of {each}"
    else:
        return None
    by = BRIDGE if f.bridge else MEGATRON_LM
    return error(f"model.{name}", because, fix=f"set {change}", by=by, at="validation", requested=each, value=each)
