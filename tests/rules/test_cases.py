"""Runs the YAML cases of every rule: a recipe, and what the rule says of it.

A file ``cases/<CODE>.yaml`` holds a list of cases:

    - name: what the case shows
      base: bridge            # one of ``bases.yaml``; bridge unless said otherwise
      set: {model.tensor_model_parallel_size: 1, env_vars: {}}   # dotted keys over the base; "absent" removes a key
      fires:                  # false where the rule says nothing; else what its decision holds, or a list
        severity: warning
        subject: model.tp_comm_overlap
        value: false
        because: contains this text
      settings: {model.tp_comm_overlap: false}    # optional, of the whole plan
      env: {UB_SKIPMC: "1", OTHER: null}          # optional; null: not exported
      ok: true                                    # optional
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from overlapkit import resolve
from overlapkit.plan import Decision, Plan
from overlapkit.rules import registered

FOLDER = Path(__file__).parent
BASES: dict[str, Any] = yaml.safe_load((FOLDER / "bases.yaml").read_text())
CASES = [
    pytest.param(path.stem, case, id=f"{path.stem}: {case['name']}")
    for path in sorted((FOLDER / "cases").glob("*.yaml"))
    for case in yaml.safe_load(path.read_text())
]
KEYS = {"name", "base", "set", "fires", "settings", "env", "ok"}
TEXTS = ("because", "fix")


def recipe_of(case: dict[str, Any]) -> dict[str, Any]:
    """The base with the case's dotted keys set; a null in ``set`` stays null, "absent" removes the key."""
    recipe = copy.deepcopy(BASES[case.get("base", "bridge")])
    for path, value in (case.get("set") or {}).items():
        *sections, key = path.split(".")
        node = recipe
        for section in sections:
            node = node.setdefault(section, {})
        if value == "absent":
            node.pop(key, None)
        else:
            node[key] = copy.deepcopy(value)  # anchors share it with other cases
    return recipe


@pytest.mark.parametrize(("code", "case"), CASES)
def test_case(code: str, case: dict[str, Any]) -> None:
    assert set(case) <= KEYS, f"unknown keys {set(case) - KEYS}"
    plan = resolve(recipe_of(case))
    mine = [decision for decision in plan.decisions if decision.code == code]
    expected = case["fires"]
    if expected is False:
        assert mine == []
    else:
        for one in expected if isinstance(expected, list) else [expected]:
            assert any(_matches(decision, one) for decision in mine), f"{one} not among {mine}"
    _check_plan(plan, case)


def _matches(decision: Decision, expected: dict[str, Any]) -> bool:
    return all(
        value in (getattr(decision, name) or "") if name in TEXTS else getattr(decision, name) == value
        for name, value in expected.items()
    )


def _check_plan(plan: Plan, case: dict[str, Any]) -> None:
    for name, value in (case.get("settings") or {}).items():
        assert plan.settings[name] == value, name
    for name, value in (case.get("env") or {}).items():
        assert plan.env.get(name) == value, name
    if "ok" in case:
        assert plan.ok is case["ok"], [d for d in plan.decisions if d.severity == "error"]


def test_every_rule_has_cases_that_fire_and_that_do_not() -> None:
    fires: dict[str, set[bool]] = {code: set() for code in registered()}
    for parameter in CASES:
        code, case = parameter.values
        assert code in fires, f"{code} is no rule"
        fires[code].add(case["fires"] is not False)
    assert {code: found for code, found in fires.items() if found != {True, False}} == {}
