"""Whose variables a task gets: the plan's, and those that the user set, which stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import nemo_run as run

from overlapkit.errors import RecipeError, printable, shown
from overlapkit.plan import Plan
from overlapkit.recipe.sections import Recipe
from overlapkit.resolver import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """``variables``: each name of the plan and of the recipe with the value that the process gets.

    ``kept`` are those among them that the user set on the executor or the script, which nobody overwrites; ``private``
    are those among the kept that the plan does not know, such as a token, whose values are written down nowhere.
    """

    variables: Mapping[str, str]
    kept: frozenset[str]
    private: frozenset[str]

    @property
    def added(self) -> dict[str, str]:
        """What is to be set beside the user's own."""
        return {name: value for name, value in self.variables.items() if name not in self.kept}

    @property
    def told(self) -> dict[str, str]:
        """What may stand in arguments, configurations and stored plans."""
        return {name: value for name, value in self.variables.items() if name not in self.private}


def text_variables(variables: Any, owner: str) -> dict[str, str]:
    """The variables of an executor or a script.

    Raises:
        RecipeError: they are no mapping of texts, which nemo-run would find out while it submits.
    """
    if not isinstance(variables, Mapping):
        raise RecipeError(f"a mapping of names to texts, not {shown(variables)}", source=owner)
    for name, value in variables.items():
        if not isinstance(name, str):
            raise RecipeError(f"a variable's name is text, not {shown(name)}", source=owner)
        if not isinstance(value, str):  # which may be a secret: its type is enough
            problem = f"the value is of type {type(value).__name__}, and an environment holds text"
            raise RecipeError(problem, source=owner, path=name, hint="write it in quotes, or take it out")
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise RecipeError("no environment can hold it", source=owner, path=name or "''")
    return dict(variables)


def owners(executor: Any) -> list[Any]:
    """The executor, and the resources of each task of its group, which have variables of their own."""
    group = [each for each in getattr(executor, "resource_group", None) or [] if each is not executor]
    return [executor, *group]


def without(variables: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """The variables that are not ours by name and value."""
    return {name: value for name, value in variables.items() if ours.get(name) != value}


def users_variables(task: Any, executor: Any, ours: Mapping[str, str], *, group_index: int) -> dict[str, str]:
    """What the user set for the task's processes, the nearest to the process last: ``ours`` are a plugin's.

    Raises:
        RecipeError: a variable is no text.
    """
    kind = type(executor).__name__
    found = without(text_variables(executor.env_vars, f"{kind}.env_vars"), ours)
    group = getattr(executor, "resource_group", None) or []
    for index, request in enumerate(group):
        own = without(text_variables(request.env_vars, f"{kind}.env_vars of task {index}"), ours)
        if index == group_index:
            found |= own
    for entry in getattr(executor, "env_list", None) or []:  # Kubernetes takes the last of a name, and these follow
        if isinstance(entry, Mapping) and "value" in entry:
            found |= text_variables({entry.get("name"): entry["value"]}, f"{kind}.env_list")
    if isinstance(task, run.Script):
        found |= text_variables(task.env or {}, "run.Script.env")
    return found


def plan_for(recipe: Recipe, given: Mapping[str, str]) -> Plan:
    """The plan of a recipe whose process has the plan's variables, over them the recipe's, over them ``given``.

    That environment is judged as a whole, as one that a recipe's env_vars describe.
    """
    if recipe.env_vars is None and not given:
        return resolve(recipe)
    exported = resolve(replace(recipe, env_vars=None)).env
    return resolve(replace(recipe, env_vars={**exported, **(recipe.env_vars or {}), **given}))


def environment_of(
    plan: Plan, recipe: Recipe | None, given: Mapping[str, str], measuring: Mapping[str, str]
) -> Environment:
    """What the process will see of the variables of the plan, of the recipe, and of what is to be measured."""
    wanted = {**plan.env, **((recipe.env_vars if recipe else None) or {}), **measuring}
    kept = frozenset(name for name in wanted if name in given)
    variables = {**wanted, **{name: given[name] for name in kept}}
    return Environment(variables=variables, kept=kept, private=kept - set(plan.env) - set(measuring))


def differences(plan: Plan, environment: Environment) -> tuple[str, ...]:
    """In sentences, where the process gets another value than the plan's, with the code of the rule that judges it."""
    codes = {decision.subject: decision.code for decision in plan.decisions}
    said = []
    for name, value in plan.env.items():
        given = environment.variables[name]
        if given != value:
            code = codes.get(f"env_vars.{name}")
            owner = "set by the user, stays" if name in environment.kept else "of the recipe's env_vars"
            said.append(f"{f'{code} ' if code else ''}{name}={printable(given)} {owner}; the plan takes {value}")
    return tuple(said)
