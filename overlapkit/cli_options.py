"""Options that several verbs have."""

from __future__ import annotations

from enum import Enum

from overlapkit.errors import RecipeError


class DataFormat(str, Enum):
    text = "text"
    json = "json"
    yaml = "yaml"


class FailOn(str, Enum):
    error = "error"
    warning = "warning"
    info = "info"
    never = "never"


def refuse_script(recipe: str) -> None:
    """Raises for a verb that reads a recipe and is given a launch script.

    Raises:
        RecipeError: it is one; the hint says how its recipe is written.
    """
    if recipe.endswith(".sh"):
        hint = f"overlapkit resolve --megatron-lm-args {recipe} --save recipe.yaml writes the script's recipe"
        raise RecipeError("a recipe is a YAML file", source=recipe, hint=hint)
