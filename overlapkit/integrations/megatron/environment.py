"""The environment of a process against the plan's: what is missing, different, or was set too late."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from overlapkit.errors import printable, shown
from overlapkit.plan import Plan
from overlapkit.recipe import Recipe

_LOG = logging.getLogger("overlapkit.megatron")
_FIRST_ENVIRONMENT = Path("/proc/self/environ")
Problem = Literal["missing", "different", "too late"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFinding:
    """One variable that is not as the plan wants it; ``found`` is None where it is not set.

    ``too late``: the value is right now, and was not when the process started, and CUDA has started since. What reads
    it may have read it before. ``cuda_started`` says of the others that exporting them in this process no longer helps.
    """

    name: str
    expected: str
    found: str | None
    problem: Problem
    cuda_started: bool = False

    def __str__(self) -> str:
        expected = f"{self.name}={printable(self.expected)}"
        if self.problem == "too late":
            return f"{expected} was set after this process started, and CUDA has started: it may have been read before"
        found = "is not set" if self.found is None else f"is {shown(self.found)}"
        too_late = "; CUDA has started, so setting it in this process is too late" if self.cuda_started else ""
        return f"{self.name} {found}, the plan wants {expected}{too_late}"


def check_environment(
    plan_or_recipe: Plan | Recipe | Mapping[str, Any] | str | Path, environ: Mapping[str, str] = os.environ
) -> tuple[EnvironmentFinding, ...]:
    """What a job's environment lacks, has otherwise, or got too late; empty when all is well.

    Call it in the job before CUDA starts, while its own process can still be given another environment. A plan
    expects its ``env``; a recipe (loaded, a mapping, or a path) its plan's ``env`` and its own ``env_vars``, which win
    unless the plan calls them an error. Neither torch nor Megatron-Core is imported. What was set too late is seen in
    the process's own environment, on systems that show in /proc what it started with.

    Raises:
        RecipeError: the recipe cannot be used.
    """
    wanted = expected_environment(plan_or_recipe)
    cuda_started = _cuda_started()
    findings = []
    for name, expected in wanted.items():
        found = environ.get(name)
        if found != expected:
            problem: Problem = "missing" if found is None else "different"
            findings.append(_finding(name, expected, found, problem, cuda_started))
    if cuda_started and environ is os.environ:
        findings += _set_late(wanted, environ)
    return tuple(findings)


def expected_environment(plan_or_recipe: Plan | Recipe | Mapping[str, Any] | str | Path) -> dict[str, str]:
    """The variables that a process needs for a plan or a recipe, as ``check_environment`` takes them."""
    if isinstance(plan_or_recipe, Plan):
        return dict(plan_or_recipe.env)
    from overlapkit.resolver import read_recipe, resolve

    recipe = read_recipe(plan_or_recipe)
    return of_recipe(recipe, resolve(recipe))


def of_recipe(recipe: Recipe, plan: Plan) -> dict[str, str]:
    wrong = {decision.subject for decision in plan.decisions if decision.severity == "error"}
    own = {name: value for name, value in (recipe.env_vars or {}).items() if f"env_vars.{name}" not in wrong}
    return {**plan.env, **own}


def loaded(module: str) -> Any:
    """A module that the process has imported already, whole; None otherwise."""
    found = sys.modules.get(module)
    spec = getattr(found, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else found


def world_size() -> int | None:
    """Processes of the job, where torch.distributed has started."""
    distributed = loaded("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    size: int = distributed.get_world_size()
    return size


def _cuda_started() -> bool:
    cuda = loaded("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


def _finding(name: str, expected: str, found: str | None, problem: Problem, late: bool) -> EnvironmentFinding:
    return EnvironmentFinding(name=name, expected=expected, found=found, problem=problem, cuda_started=late)


def _set_late(wanted: Mapping[str, str], environ: Mapping[str, str]) -> list[EnvironmentFinding]:
    """The variables that are right now and were not when the process started."""
    first = _first_environment()
    if first is None:
        _LOG.warning("CUDA has started, and the system does not show what variables were set before it")
        return []
    return [
        _finding(name, expected, expected, "too late", True)
        for name, expected in wanted.items()
        if environ.get(name) == expected != first.get(name)
    ]


def _first_environment() -> dict[str, str] | None:
    """The environment that the process was started with; None where the system does not show it.

    A process that gives itself another title, as Ray's workers do, writes over it.
    """
    try:
        entries = _FIRST_ENVIRONMENT.read_bytes().split(b"\0")
    except OSError:
        return None
    pairs = [os.fsdecode(entry).partition("=") for entry in entries if entry]
    if not pairs or any(not equals for _, equals, _ in pairs):
        return None
    return {name: value for name, _, value in pairs}
