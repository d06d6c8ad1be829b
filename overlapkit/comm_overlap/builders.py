"""From a recipe to the values of a CommOverlapConfig that is told nothing more."""

from __future__ import annotations

from typing import Any

from overlapkit.comm_overlap.setup import log
from overlapkit.comm_overlap.userbuffers import layers_of
from overlapkit.errors import RecipeError, shown
from overlapkit.plan import SETTINGS, Plan, refuse_errors
from overlapkit.recipe import Recipe

SHORT_PRECISIONS = {"bf16": "bf16_mixed", "fp16": "fp16_mixed"}


def values_of(recipe: Recipe, on_error: str) -> tuple[dict[str, Any], Plan]:
    """The values with which Bridge's set-up ends at the settings of the plan, and the plan.

    Raises:
        PlanError: the plan has errors, and ``on_error`` is ``refuse``.
        RecipeError: nothing here is for Bridge's set-up.
    """
    from overlapkit.facts import MEGATRON_LM
    from overlapkit.render.bridge_userbuffers import complete_layers
    from overlapkit.render.bridge_values import requests
    from overlapkit.resolver import resolve

    if on_error not in ("refuse", "warn"):
        raise RecipeError(f"on_error is refuse or warn, not {shown(on_error)}")
    instead = "overlapkit.integrations.megatron.apply sets its plan on the model's own objects"
    if recipe.software.framework == MEGATRON_LM:
        raise _unusable(recipe, "software.framework", "a recipe for Megatron-LM has no CommOverlapConfig", instead)
    if recipe.comm_overlap is None:
        raise _unusable(
            recipe, "comm_overlap", "null: Bridge's set-up is not run, so it has no CommOverlapConfig", instead
        )
    plan = resolve(recipe)
    if on_error == "refuse":
        refuse_errors(plan)
    log(each for each in plan.decisions if each.subject in SETTINGS or each.severity == "error")
    values = requests(plan.settings, dist_opt=bool(recipe.ddp.use_distributed_optimizer))
    userbuffers = plan.settings["model.tp_comm_overlap_cfg"]
    complete, foreign = complete_layers(userbuffers)
    fits = complete is not None and not foreign
    values["tp_comm_overlap_cfg"] = layers_of(userbuffers) if fits else userbuffers
    values["data_parallel_size"] = plan.parallelism.dp
    return values, plan


def _unusable(recipe: Recipe, path: str, problem: str, hint: str) -> RecipeError:
    from overlapkit.recipe.place import Place

    return Place(recipe.source, recipe.lines, recipe.overridden).error(path, problem, hint)
