"""The ways in which a file can start training, each with its plan; a recipe has one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from overlapkit.errors import RecipeError
from overlapkit.megatron_lm.outcome import Outcome
from overlapkit.plan import Plan
from overlapkit.recipe import Recipe, load_recipe
from overlapkit.resolver import resolve

AnyOutcome = TypeVar("AnyOutcome", bound=Outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedOutcome(Outcome):
    """An outcome and its plan."""

    plan: Plan

    def to_dict(self) -> dict[str, Any]:
        """``when``, ``taken``, ``contrary``, ``notes`` and the plan as plain values."""
        return {
            "when": list(self.when),
            "taken": self.taken,
            "contrary": self.contrary,
            "notes": list(self.notes),
            "plan": self.plan.to_dict(),
        }


def load_outcomes(path: str | Path, overrides: Sequence[str] = ()) -> Iterable[Outcome]:
    """The outcomes of a launch script, a list of arguments or Megatron-LM's YAML of arguments; taken first.

    Raises:
        RecipeError: the file cannot be used, or says something that only a run could tell and no override gives.
    """
    from overlapkit.megatron_lm.launches import load_launches

    return load_launches(path, overrides)


def resolved(outcome: Outcome | Recipe) -> ResolvedOutcome:
    """An outcome with its plan.

    Raises:
        RecipeError: the recipe cannot be used.
    """
    if isinstance(outcome, Recipe):
        outcome = Outcome(recipe=outcome)
    same = {spec.name: getattr(outcome, spec.name) for spec in fields(Outcome)}
    return ResolvedOutcome(**same, plan=resolve(outcome.recipe))


def estimated(outcome: ResolvedOutcome) -> ResolvedOutcome:
    """The outcome with what an estimate says in its plan."""
    from overlapkit.cost.decisions import with_estimate
    from overlapkit.facts import derive

    return replace(outcome, plan=with_estimate(derive(outcome.recipe), outcome.plan))


def that_count(outcomes: Sequence[AnyOutcome]) -> Sequence[AnyOutcome]:
    """Those that a launch can come to: one against the file's own values is told, and fails nothing.

    All of them where the file takes none.
    """
    return [outcome for outcome in outcomes if not outcome.contrary] or outcomes


def resolve_recipe(path: str | Path, overrides: Sequence[str] = ()) -> tuple[ResolvedOutcome, ...]:
    """A recipe's one outcome.

    Raises:
        RecipeError: the recipe cannot be used.
    """
    if str(path).endswith(".sh"):
        hint = "a launch script is given as --megatron-lm-args FILE"
        raise RecipeError("a recipe is a YAML file", source=str(path), hint=hint)
    return (resolved(load_recipe(path, overrides)),)


def resolve_launch(path: str | Path, overrides: Sequence[str] = ()) -> tuple[ResolvedOutcome, ...]:
    """Every outcome of a launch file, the one that it takes as it is written first."""
    return tuple(resolved(outcome) for outcome in load_outcomes(path, overrides))
