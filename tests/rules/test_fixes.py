"""Follows the fixes in the plans of all cases: what a fix says to set must work, and lead into no other error.

A fix is prose in which changes of the recipe stand as on the command line:

    set ddp.overlap_grad_reduce=true and model.a=[x, y], or comm_overlap.b=null

Alternatives are parted by "or", the changes of one by "and". An alternative that asks for anything else, such as "use
torch 2.6 or newer", is for people, and is not followed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
from test_cases import CASES, recipe_of

from overlapkit import RecipeError, resolve
from overlapkit.plan import Decision, Plan

# (the fix's rule, the rule that then finds an error) -> why the fix is right all the same.
EXCEPTIONS = {
    ("FSDP005", "CFG023"): "Megatron-LM drops fp8_param_gather for FSDP2; without FSDP2 what the user wrote is refused",
    ("CFG012", "EP014"): "it changes no setting: it replaces guessed versions by the container's, and the Transformer "
    "Engine that is really there lacks what the guessed one had",
}
# So many alternatives are followed at least: a new wording must not take fixes out of this test unnoticed.
AT_LEAST = {"alternatives": 800, "rules": 80}

_CHANGE = r"\w+(?:\.\w+)*=(?:\[[^\]]*\]|[^\s,\[\]]+)"
_CHANGES = re.compile(rf"(?:set )?({_CHANGE}(?: and {_CHANGE})*)")


def alternatives(fix: str) -> list[tuple[str, ...]]:
    """The overrides of each alternative that consists of changes alone."""
    found = (_CHANGES.fullmatch(part) for part in re.split(r",? or ", fix))
    return [tuple(re.findall(_CHANGE, match[1])) for match in found if match]


class Advice(NamedTuple):
    """One alternative of a decision's fix, in a case of some rule."""

    case: str
    recipe: dict[str, Any]
    before: Plan
    decision: Decision
    overrides: tuple[str, ...]


@lru_cache(maxsize=1)
def all_advice() -> tuple[Advice, ...]:
    return tuple(advice for parameter in CASES for advice in _advice(str(parameter.id), parameter.values[1]))


def _advice(name: str, case: Any) -> Iterator[Advice]:
    recipe = recipe_of(case)
    plan = resolve(recipe)
    for decision in plan.decisions:
        if decision.severity != "info" and decision.fix:
            for overrides in alternatives(decision.fix):
                yield Advice(name, recipe, plan, decision, overrides)


def _found(plan: Plan, *severities: str) -> set[tuple[str, str]]:
    return {(decision.code, decision.subject) for decision in plan.decisions if decision.severity in severities}


def complaints(advice: Advice) -> Iterator[str]:
    """What is wrong with following this advice."""
    code, subject = advice.decision.code, advice.decision.subject
    try:
        after = resolve(advice.recipe, advice.overrides)
    except RecipeError as error:
        yield f"is refused: {error}"
        return
    if (code, subject) in _found(after, "error", "warning"):
        yield f"leaves {code} of {subject}"
    for other, what in sorted(_found(after, "error") - _found(advice.before, "error")):
        if (code, other) not in EXCEPTIONS:
            yield f"leads into {other} of {what}"


@pytest.mark.parametrize("code", sorted({str(parameter.values[0]) for parameter in CASES}))
def test_a_fix_that_is_followed_works(code: str) -> None:
    """Fixes of this rule, in whichever rule's cases it speaks."""
    mine = [advice for advice in all_advice() if advice.decision.code == code]
    wrong = [
        f"{advice.case}: {' '.join(advice.overrides)} {complaint}"
        for advice in mine
        for complaint in complaints(advice)
    ]
    assert not wrong, "\n".join(wrong)


def test_fixes_are_followed() -> None:
    followed = {
        "alternatives": len(all_advice()),
        "rules": len({advice.decision.code for advice in all_advice()}),
    }
    assert all(followed[what] >= least for what, least in AT_LEAST.items()), followed


@pytest.mark.parametrize(("code", "other"), EXCEPTIONS)
def test_an_exception_is_still_needed(code: str, other: str) -> None:
    mine = (advice for advice in all_advice() if advice.decision.code == code)
    assert any(other in {found for found, _ in _found(resolve(one.recipe, one.overrides), "error")} for one in mine)


@pytest.mark.parametrize(
    ("fix", "expected"),
    [
        ("set a.b=true and c.d=[x, y], or e.f=null", [("a.b=true", "c.d=[x, y]"), ("e.f=null",)]),
        ("use a newer one, or set a.b=:4096:8", [("a.b=:4096:8",)]),
        ("set a=b and choose a smaller c.d, or set e.f above 1, or g.h=1", [("g.h=1",)]),
    ],
)
def test_only_changes_of_the_recipe_are_followed(fix: str, expected: list[tuple[str, ...]]) -> None:
    assert alternatives(fix) == expected
