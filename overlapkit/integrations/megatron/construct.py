"""The real configuration objects of the installed megatron-core, from a recipe and its plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from overlapkit.errors import RecipeError
from overlapkit.facts import MEGATRON_LM
from overlapkit.integrations.megatron.packages import megatron_core
from overlapkit.plan import Plan
from overlapkit.recipe.sections import Recipe
from overlapkit.render.core_values import core_values
from overlapkit.versions import parse_version

_SIZES = ("num_layers", "hidden_size", "num_attention_heads")
_LAYER_TYPES = "LayerType."
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
# Their checks are about kernels of this machine's Transformer Engine, and about the activation, a function that no
# recipe holds.
_NOT_TO_BE_JUDGED = frozenset(
    {
        *("apply_rope_fusion", "moe_permute_fusion", "use_precision_aware_optimizer"),
        *("activation_func_fp8_input_store", "bias_activation_fusion", "use_te_activation_func"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """Objects of megatron-core, validated by their own constructors.

    ``model`` is a TransformerConfig, or an MLATransformerConfig; ``optimizer`` an OptimizerConfig; ``ddp`` a
    DistributedDataParallelConfig. ``lacking`` are the paths of what the recipe or the plan says in these sections and
    the installed classes have no field for: fields of other versions, and of the frameworks' own subclasses.
    """

    model: Any
    optimizer: Any
    ddp: Any
    lacking: tuple[str, ...]


def construct(recipe: Recipe, plan: Plan) -> Objects:
    """Constructs what the framework would construct, from what the recipe says and the plan's settings.

    What a constructor raises is raised: ValueError and AssertionError, and others where a value is of a kind that it
    does not foresee. It is told the plan's versions of Transformer Engine and torch when it asks, and the recipe's
    PYTORCH_CUDA_ALLOC_CONF, not this machine's: modules and the environment are changed meanwhile, so that only one
    thread may construct at a time. The userbuffers of a model that overlaps are set on it as Bridge does, which
    Megatron-Core's class has no field for.

    Raises:
        MissingPackageError: torch or megatron-core cannot be imported here.
        RecipeError: sizes are missing without which nothing can be constructed, or a variable cannot be set.
    """
    classes = _classes(mla=bool(recipe.model.multi_latent_attention))
    _require_sizes(recipe)
    objects, lacking = {}, list[str]()
    given = _arguments(recipe, plan)
    with _told(recipe, plan):
        for name, made in classes.items():
            known = {field.name for field in fields(made) if field.init}
            lacking += [f"{name}.{field}" for field, value in given[name].items() if field not in known and value]
            found = {field: value for field, value in given[name].items() if field in known}
            objects[name] = made(**{**_others(recipe, name, made), **found})
    if plan.settings["model.tp_comm_overlap_cfg"] is not None:
        objects["model"].tp_comm_overlap_cfg = plan.settings["model.tp_comm_overlap_cfg"]
    return Objects(**objects, lacking=tuple(lacking))


def _arguments(recipe: Recipe, plan: Plan) -> dict[str, dict[str, Any]]:
    """Section -> what its constructor is given, whether or not the installed class has the fields."""
    values = core_values(recipe, plan)
    sections = {name: dict(body) for name, body in values.sections.items()}
    _as_the_framework_has_it(recipe, plan, sections["model"])
    dtype = _dtype(values.dtype)
    sections["model"] |= {"params_dtype": dtype, "pipeline_dtype": dtype}
    sections["optimizer"]["params_dtype"] = dtype
    return sections


def _others(recipe: Recipe, section: str, made: Any) -> dict[str, Any]:
    """What the recipe says and no rule reads, where the class has such a field for a value of this kind."""
    kinds = get_type_hints(made)
    return {
        name: value
        for name, value in recipe.others.get(section, {}).items()
        if name in kinds and name not in _NOT_TO_BE_JUDGED and _takes(kinds[name], value)
    }


def _takes(kind: Any, value: Any) -> bool:
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    plain = {get_origin(option) or option for option in options}
    if Literal in plain:
        plain.add(str)
    return type(value) in plain or (type(value) is int and float in plain)


def _classes(*, mla: bool) -> dict[str, Any]:
    """Section -> class.

    Raises:
        MissingPackageError: torch or megatron-core cannot be imported here.
    """
    megatron_core()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    model = MLATransformerConfig if mla else TransformerConfig
    return {"model": model, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}


@contextmanager
def _told(recipe: Recipe, plan: Plan) -> Iterator[None]:
    """The constructors see the plan's versions, and the recipe's allocator settings."""
    from megatron.core import model_parallel_config
    from megatron.core.distributed import distributed_data_parallel_config
    from megatron.core.optimizer import optimizer_config
    from megatron.core.transformer import transformer_config

    answers = {
        "is_te_min_version": _at_least(plan.target.transformer_engine),
        "get_te_version": lambda: plan.target.transformer_engine,  # for the text of a message alone
        "is_torch_min_version": _at_least(plan.target.torch),
    }
    modules = (model_parallel_config, transformer_config, optimizer_config, distributed_data_parallel_config)
    with ExitStack() as stack:
        for module in modules:
            for name in answers.keys() & vars(module).keys():
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, answers[name])
        stack.callback(_set_variable, _ALLOCATOR, os.environ.get(_ALLOCATOR))
        _set_variable(_ALLOCATOR, (recipe.env_vars or {}).get(_ALLOCATOR))
        yield


def _at_least(installed: str | None) -> Callable[..., bool]:
    def check(version: str, check_equality: bool = True) -> bool:
        if installed is None:
            return False
        have, want = parse_version(installed), parse_version(version)
        return have > want or (check_equality and have == want)

    return check


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
        return
    try:
        os.environ[name] = value
    except ValueError:  # a NUL, or half of a surrogate pair
        raise RecipeError("no variable can have this value", path=f"env_vars.{name}") from None


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _require_sizes(recipe: Recipe) -> None:
    """Megatron-Core's defaults of these are 0, by which it divides. A hand-written recipe may leave them out."""
    model = recipe.model
    missing = [name for name in _SIZES if getattr(model, name) is None]
    if (model.expert_model_parallel_size or 1) > 1 and model.num_moe_experts is None and not recipe.is_dump:
        missing.append("num_moe_experts")
    if missing:
        named = _listed(f"model.{name}" for name in missing)
        problem = f"{named} {'is' if len(missing) == 1 else 'are'} not given"
        raise RecipeError(problem, source=recipe.source, hint="Megatron-Core's configuration needs it")


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _as_the_framework_has_it(recipe: Recipe, plan: Plan, model: dict[str, Any]) -> None:
    """What is neither the recipe's value nor Megatron-Core's default."""
    layout = model.get("pipeline_model_parallel_layout")
    if isinstance(layout, list):  # a dump writes the members of an enum, which the constructor takes by their names
        model["pipeline_model_parallel_layout"] = [[_layer(layer) for layer in stage] for stage in layout]
    for name in ("cuda_graph_scope", "cuda_graph_modules"):
        if model.get(name) == ["full"]:
            model[name] = "full"  # the field's default, which a recipe reads as a list of one
    model.setdefault("gradient_accumulation_fusion", True)  # as both frameworks have it where the kernel is there
    if plan.target.framework == MEGATRON_LM:
        # As validate_args has them: 0 experts are none, and sequences of one length.
        if model.get("num_moe_experts") == 0:
            del model["num_moe_experts"]
        model.pop("variable_seq_lengths", None)
    elif not recipe.is_dump and model.get("num_moe_experts"):
        # What Bridge's MoE recipes have, where Megatron-Core's own default excludes expert TP.
        model.setdefault("add_bias_linear", False)


def _layer(layer: Any) -> Any:
    return layer.removeprefix(_LAYER_TYPES) if isinstance(layer, str) else layer
