"""Recipe -> Plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlapkit import rules
from overlapkit.errors import RecipeError, shown
from overlapkit.facts import Facts, derive
from overlapkit.plan import Plan, Target
from overlapkit.presets import NO_PRESET
from overlapkit.recipe import Recipe, load_recipe, recipe_from_mapping


def resolve(
    recipe: str | Path | Mapping[str, Any] | Recipe, overrides: Sequence[str] = (), *, estimate: bool = False
) -> Plan:
    """What will really be on, what will be off and why, and which environment to export.

    ``recipe`` is the path of a YAML file, a mapping of the same form, or a loaded ``Recipe``;
    ``overrides`` are ``section.key=value`` texts in OmegaConf's dotlist form. With ``estimate`` further decisions say
    what each overlap saves of the step and what is exposed (CFG031 to CFG033).

    Raises:
        RecipeError: the recipe or an override cannot be used.
        TypeError: overrides with a recipe that is already loaded.
    """
    facts = derive(read_recipe(recipe, overrides))
    if not estimate:
        return plan(facts)
    from overlapkit.cost.decisions import with_estimate

    return with_estimate(facts, plan(facts))


def read_recipe(recipe: str | Path | Mapping[str, Any] | Recipe, overrides: Sequence[str] = ()) -> Recipe:
    """What ``resolve`` resolves: a path, a mapping or a ``Recipe`` as a ``Recipe``.

    Raises:
        RecipeError: the recipe or an override cannot be used.
        TypeError: overrides with a recipe that is already loaded.
    """
    if isinstance(recipe, Recipe):
        if overrides:
            raise TypeError("give the overrides to load_recipe; this recipe is already loaded")
        return recipe
    if isinstance(recipe, Mapping):
        return recipe_from_mapping(recipe, overrides)
    if isinstance(recipe, (str, Path)):
        return load_recipe(recipe, overrides)
    raise RecipeError(f"a recipe is a path, a mapping or a loaded Recipe, this is {shown(recipe)}")


def plan(facts: Facts) -> Plan:
    """The plan that the rules make of the facts."""
    settings, env, decisions = rules.run(facts)
    preset, userbuffers = facts.preset, settings["model.tp_comm_overlap_cfg"]
    if not settings["model.tp_comm_overlap"]:
        userbuffers, preset = None, NO_PRESET
    elif isinstance(userbuffers, Mapping):  # the caller's own copy: presets are read once
        userbuffers = {layer: dict(options) for layer, options in userbuffers.items()}
    settings["model.tp_comm_overlap_cfg"] = userbuffers
    return Plan(
        recipe=facts.recipe.source,
        target=_target(facts),
        parallelism=facts.parallelism,
        settings=settings,
        preset=preset,
        env=env,
        decisions=decisions,
    )


def _target(facts: Facts) -> Target:
    versions = facts.versions
    return Target(
        framework=facts.framework,
        megatron_bridge=_text(versions.megatron_bridge),
        megatron_core=versions.megatron_core.text,
        transformer_engine=_text(versions.transformer_engine),
        torch=versions.torch.text,
        gpu=facts.gpu.name if facts.gpu else None,
        compute_capability=facts.gpu.compute_capability if facts.gpu else None,
        assumed=versions.assumed,
    )


def _text(version: Any) -> str | None:
    return None if version is None else str(version)
