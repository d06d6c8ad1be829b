"""What every rule owes its reader: a page, a source, and cases on both sides of the versions that it declares.

That each has cases in which it speaks and others in which it is silent is checked in ``test_cases.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from test_cases import CASES, recipe_of

from overlapkit import resolve
from overlapkit.rules import Rule, registered
from overlapkit.versions import Version, parse_version

RANGES = ("bridge", "megatron_lm", "core", "te")
PARAMETERS: list[Any] = CASES


@pytest.mark.parametrize("rule", registered().values(), ids=registered())
def test_page_says_what_why_and_what_to_do(rule: Rule) -> None:
    what, *rest = rule.page.splitlines()
    assert what.endswith("."), "the first line is a summary"
    assert rest[0] == "", "a blank line follows it"
    heads = [line.partition(" ")[0] for line in rest if line.startswith(("Why: ", "Fix: "))]
    assert heads == ["Why:", "Fix:"]
    assert rule.source.strip()


@pytest.mark.parametrize("code", registered())
def test_cases_stand_on_both_sides_of_each_declared_version(code: str) -> None:
    """The rule speaks in a case of the release just inside the bound; another has the release just outside."""
    missing = []
    for name, bound, starts in _bounds(registered()[code]):
        cases = _cases(code, name)
        if not any(fires and _beside(version, bound, after=starts) for version, fires in cases):
            missing.append(f"one that fires just inside {name} {bound}")
        if not any(_beside(version, bound, after=not starts) for version, _ in cases):
            missing.append(f"one just outside {name} {bound}")
    assert missing == []


def _bounds(rule: Rule) -> Iterator[tuple[str, Version, bool]]:
    """Each declared bound, and whether the range starts there (or ends)."""
    for name in RANGES:
        declared = getattr(rule, name)
        if declared is not None and declared.since is not None:
            yield name, declared.since, True
        if declared is not None and declared.before is not None:
            yield name, declared.before, False


def _beside(version: Version, bound: Version, *, after: bool) -> bool:
    """Whether a version is of the minor release that the bound opens, or of the one before."""
    if after:
        return version.series == bound.series and not version < bound
    (major, minor), (bound_major, bound_minor) = version.series, bound.series
    if bound_minor == 0:
        return major == bound_major - 1
    return (major, minor) == (bound_major, bound_minor - 1)


@cache
def _cases(code: str, name: str) -> list[tuple[Version, bool]]:
    """The version that each case of a rule resolves to in one of RANGES, and whether the rule speaks."""
    found = []
    for owner, case in (parameter.values for parameter in PARAMETERS):
        if owner != code:
            continue
        target = resolve(recipe_of(case)).target
        version = {
            "bridge": target.megatron_bridge,
            "megatron_lm": None if target.megatron_bridge else target.megatron_core,
            "core": target.megatron_core,
            "te": target.transformer_engine,
        }[name]
        if version is not None:
            found.append((parse_version(version), case["fires"] is not False))
    return found
