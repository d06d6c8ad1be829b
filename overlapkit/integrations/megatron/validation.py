"""The installed megatron-core's own word on a recipe: its dataclasses are constructed with the plan's settings."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

from overlapkit.errors import OverlapkitError, RecipeError
from overlapkit.integrations.megatron.packages import megatron_core, quietly, said_by
from overlapkit.plan import Plan
from overlapkit.recipe import Recipe
from overlapkit.recipe.sections import Model
from overlapkit.resolver import read_recipe, resolve
from overlapkit.rules.installed import not_checked_by_installed_core, refused_by_installed_core
from overlapkit.rules.registry import observed
from overlapkit.versions import parse_version

_SECTION_OF_FILE = {"optimizer_config": "optimizer", "distributed_data_parallel_config": "ddp"}
# Fields that say which layers a stage has, so that no number of layers suits all of them.
_LAYERS_OF_STAGES = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "num_layers_per_virtual_pipeline_stage",
)


def validate(recipe: str | Path | Mapping[str, Any] | Recipe, overrides: Sequence[str] = ()) -> Plan:
    """The plan of a recipe, with what the installed megatron-core says when it constructs the configuration.

    A refusal is a decision CFG018, an error with Megatron-Core's own message, also where a rule found it before. CFG019
    says what could not be checked here: another release than the plan is for, fields that it lacks,
    missing sizes. Heads, hidden size and layers that the recipe does not give are filled in such that they divide,
    which decides nothing; where the recipe names the layers of single stages, no number of layers does that.

    Raises:
        MissingPackageError: megatron-core cannot be imported here.
        RecipeError: the recipe or an override cannot be used.
    """
    loaded = read_recipe(recipe, overrides)
    return validated(loaded, resolve(loaded))


def validated(recipe: Recipe, plan: Plan) -> Plan:
    """``validate`` for a recipe that has its plan."""
    version = str(megatron_core().__version__)
    other = None if _release(version) == _release(plan.target.megatron_core) else plan.target.megatron_core
    not_checked = [] if other is None else [f"megatron-core {version} is installed here, and the plan is for {other}"]
    refusal: Exception | None = None
    try:
        lacking = _construct(_with_sizes(recipe, plan), plan)
        if lacking:
            not_checked.append(f"megatron-core {version} has no field for {', '.join(lacking)}")
    except RecipeError as error:
        not_checked.append(f"nothing was constructed: {error.problem}")
    except OverlapkitError:
        raise
    except Exception as error:  # whatever a constructor raises is its answer
        refusal = error
    said = []
    if refusal is not None:
        section, source = _place(refusal, version)
        named = other if _names_a_release(recipe) else None
        verdict = refused_by_installed_core(section, said_by(refusal), version, named=named)
        said.append(observed("CFG018", verdict, source))
    if not_checked:
        said.append(observed("CFG019", not_checked_by_installed_core(not_checked)))
    return replace(plan, decisions=(*plan.decisions, *said))


def _construct(recipe: Recipe, plan: Plan) -> Sequence[str]:
    """Constructs all three; the fields that the installed classes do not have."""
    from overlapkit.integrations.megatron.construct import construct

    with quietly():
        return construct(recipe, plan).lacking


def _names_a_release(recipe: Recipe) -> bool:
    """Whether the recipe, and not the newest row of the table, says which Megatron-Core the plan is for."""
    software = recipe.software
    return any((software.container, software.megatron_bridge, software.megatron_core))


def _release(version: str) -> object:
    """A release without what follows a plus sign, which says who built it."""
    return parse_version(version.partition("+")[0])


def _with_sizes(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe with the sizes that the constructors need and that it does not give, such that they divide."""
    model, sizes = recipe.model, plan.parallelism
    heads = model.num_attention_heads or lcm(sizes.tp, model.num_query_groups or 1)
    hidden = model.hidden_size or heads * (model.kv_channels or 128)
    layers = model.num_layers
    if layers is None and not _names_layers(model):
        in_bf16 = max(model.num_layers_at_start_in_bf16 or 0, model.num_layers_at_end_in_bf16 or 0)
        layers = sizes.pp * (sizes.vp or 1) * (8 + in_bf16)
        layers -= bool(model.account_for_embedding_in_pipeline_split) + bool(model.account_for_loss_in_pipeline_split)
    model = replace(model, num_attention_heads=heads, hidden_size=hidden, num_layers=layers)
    return replace(recipe, model=model)


def _names_layers(model: Model) -> bool:
    """Whether a field is about single layers or stages: a stage's number, or a list with one entry per layer."""
    per_layer = (model.cp_comm_type, model.moe_layer_freq)
    lists = any(isinstance(value, (str, list, tuple)) and len(value) > 1 for value in per_layer)
    return lists or any(getattr(model, name) is not None for name in _LAYERS_OF_STAGES)


def _place(error: Exception, version: str) -> tuple[str, str | None]:
    """The section of the object that refused, and the file and line of Megatron-Core; None where it is not there."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        _, inside, path = frame.filename.replace("\\", "/").rpartition("/megatron/core/")
        if inside:
            section = _SECTION_OF_FILE.get(Path(path).stem, "model")
            return section, f"megatron-core {version} {path}:{frame.lineno}"
    return "model", None
