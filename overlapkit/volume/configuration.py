"""A recipe with some overrides, as facts, plan and volume: what comparisons of volumes are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlapkit.facts import Facts, derive
from overlapkit.plan import Plan
from overlapkit.resolver import plan, read_recipe
from overlapkit.volume.predict import Volume, predict


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One way to run a recipe. ``overrides`` are those that make it, the last one counts."""

    overrides: tuple[str, ...]
    facts: Facts
    plan: Plan
    volume: Volume

    @property
    def job_bytes(self) -> int:
        """Ring-equivalent bytes that all ranks together send per optimizer step."""
        return sum(stage.wire_bytes() * sum(map(len, stage.ranks)) for stage in self.volume.stages)


def configure(
    recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, data_broadcast: bool = False
) -> Configuration:
    """The configuration of a recipe and ``section.key=value`` overrides.

    Raises:
        RecipeError: the recipe cannot be used, lacks a size that a number needs, or asks for what is not modelled.
    """
    facts = derive(read_recipe(recipe, overrides))
    decided = plan(facts)
    volume = predict(facts, decided, data_broadcast=data_broadcast)
    return Configuration(overrides=tuple(overrides), facts=facts, plan=decided, volume=volume)
