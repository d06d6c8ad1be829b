"""What a launch file comes to, as recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlapkit.recipe.sections import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One way in which a launch file starts training, as a recipe.

    ``when`` names the branches that lead here, ``taken`` whether the file takes them as it is written. ``contrary``:
    the file's own values say that it does not go this way. ``notes`` say what could not be seen, one line each.
    ``mapping`` is the recipe in the form of a YAML file.
    """

    when: tuple[str, ...] = ()
    taken: bool = True
    contrary: bool = False
    notes: tuple[str, ...] = ()
    recipe: Recipe
    mapping: Mapping[str, Any] | None = None
