"""Recipes: YAML files, mappings and Bridge dumps, typed and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlapkit.errors import RecipeError, shown
from overlapkit.recipe.build import build_recipe
from overlapkit.recipe.place import Place
from overlapkit.recipe.sections import Recipe

__all__ = ["Recipe", "load_recipe", "recipe_from_mapping"]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A YAML recipe, with ``section.key=value`` overrides in OmegaConf's dotlist form.

    Raises:
        RecipeError: the file or an override cannot be used; the text names file, line and field.
    """
    from overlapkit.recipe import yaml_source

    source = str(path)
    document = yaml_source.parse(yaml_source.read_text(path), source)
    return _finish(document.value, source, overrides, document.lines)


def recipe_from_mapping(
    value: Mapping[str, Any],
    overrides: Sequence[str] = (),
    source: str = "mapping",
    lines: Mapping[str, int] | None = None,
) -> Recipe:
    """A recipe from plain Python values of the form of the YAML file.

    ``lines`` gives the 1-based line of a dotted path where ``source`` is a file that the values were read from.

    Raises:
        RecipeError: a value or an override cannot be used.
    """
    from overlapkit.recipe.plain import plain_tree

    return _finish(plain_tree(value, source), source, overrides, lines or {})


def _finish(value: dict[str, Any], source: str, overrides: Sequence[str], lines: Mapping[str, int]) -> Recipe:
    from overlapkit.recipe.interpolation import has_interpolation, resolve_interpolations

    if isinstance(overrides, (str, bytes)) or not all(isinstance(override, str) for override in overrides):
        raise RecipeError(f"overrides are a list of section.key=value texts, not {shown(overrides)}", source=source)
    overridden: frozenset[str] = frozenset()
    if overrides:
        from overlapkit.recipe.overrides import apply_overrides

        value, overridden = apply_overrides(value, overrides)
    place = Place(source, lines, overridden)
    if has_interpolation(value):
        value = resolve_interpolations(value, place.error)
    return build_recipe(value, place)
