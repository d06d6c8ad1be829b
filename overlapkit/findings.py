"""What a checked file says line by line: each decision, and why a file cannot be used, at the key it is about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from overlapkit.check import Checked, Report
from overlapkit.errors import RecipeError
from overlapkit.outcomes import ResolvedOutcome
from overlapkit.plan import Decision, Severity, as_grave_as, reason
from overlapkit.recipe import Recipe
from overlapkit.recipe.place import Place, line_of

UNUSABLE = "RECIPE"  # stands in a rule's place where a file cannot be used
_KEY = re.compile(r"\b[a-z_]+\.[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule, or the reader of a file, says of one place in it.

    ``line`` counts from 1; None: what it is about stands on the command line, or its line is not known. ``when``: the
    conditions of a launch script under which it holds; none: always.
    """

    path: str
    line: int | None
    code: str
    severity: Severity
    subject: str
    message: str
    fix: str | None
    when: tuple[str, ...] = ()


def findings(checked: Checked, least: Severity = "info") -> list[Finding]:
    """The findings of severity ``least`` and graver, the gravest first, each severity in the order of evaluation.

    What holds in every outcome is said once, without conditions.
    """
    found = [] if checked.error is None else [_unusable(checked.path, checked.error, checked.error_when)]
    severities = as_grave_as(least)
    said = list(_of_outcomes(checked.path, checked.outcomes, severities))
    for severity in severities:
        found += [finding for finding in said if finding.severity == severity]
    return found


def exit_code(report: Report, fail_on: str = "error") -> int:
    """2 when a file cannot be used, 1 at a finding of severity ``fail_on`` or graver, else 0; ``never``: no 1."""
    if any(checked.error is not None for checked in report.files):
        return 2
    grave = as_grave_as(fail_on)
    decisions = (d for checked in report.files for outcome in checked.outcomes for d in outcome.plan.decisions)
    return int(any(decision.severity in grave for decision in decisions))


def _unusable(path: str, error: RecipeError, when: tuple[str, ...]) -> Finding:
    here = error.source in (path, None)
    place = error.source if error.line is None else f"{error.source}:{error.line}"
    return Finding(
        path=path,
        line=(error.line or None) if here else None,
        code=UNUSABLE,
        severity="error",
        subject=error.path or "",
        message=error.problem if here else f"{place}: {error.problem}",
        fix=error.hint,
        when=when,
    )


def _of_outcomes(path: str, outcomes: Sequence[ResolvedOutcome], severities: Sequence[Severity]) -> Iterator[Finding]:
    """Every finding with the conditions that its outcomes, and no others, have in common."""
    holds: dict[Finding, list[tuple[str, ...]]] = {}
    for outcome in outcomes:
        for decision in outcome.plan.decisions:
            if decision.severity not in severities:
                continue
            whens = holds.setdefault(_of_decision(path, decision, outcome.recipe), [])
            if outcome.when not in whens:
                whens.append(outcome.when)
    every = [outcome.when for outcome in outcomes]
    for finding, whens in holds.items():
        common = tuple(condition for condition in whens[0] if all(condition in when for when in whens))
        if all(when in whens for when in every if set(common) <= set(when)):
            yield replace(finding, when=common)
        else:
            yield from (replace(finding, when=when) for when in whens)


def _of_decision(path: str, decision: Decision, recipe: Recipe) -> Finding:
    subject = _written_as(decision.subject)
    keys = tuple(dict.fromkeys(_keys(subject, decision.fix, recipe)))
    place = Place(recipe.source, recipe.lines, recipe.overridden)
    overridden = [key for key in keys if place.changed(key)]
    message = reason(decision)
    if overridden:
        message += f"; from the command line: {', '.join(overridden)}"
    return Finding(
        path=path,
        line=_line(subject, keys, overridden, recipe.lines),
        code=decision.code,
        severity=decision.severity,
        subject=decision.subject,
        message=message,
        fix=decision.fix,
    )


def _line(subject: str, keys: Sequence[str], overridden: Sequence[str], lines: Mapping[str, int]) -> int | None:
    """The line of the first key that the recipe has, None where the command line set it.

    Where the recipe has none of them, the line of the subject's section, else the first.
    """
    for key in keys:
        if key in overridden:
            return None
        if lines.get(key):
            return lines[key]
    return line_of(lines, subject) or 1


def _written_as(subject: str) -> str:
    """The key behind what decisions call ``env.NAME`` and ``preset``."""
    if subject == "preset":
        return "comm_overlap.tp_comm_overlap_cfg"
    return f"env_vars.{subject[4:]}" if subject.startswith("env.") else subject


def _keys(subject: str, fix: str | None, recipe: Recipe) -> Iterator[str]:
    """Where a decision may stand, the likeliest first: in comm_overlap if it asks there, then as it is called."""
    section, _, name = subject.partition(".")
    asked = f"comm_overlap.{name}" if section in ("model", "ddp", "optimizer") else subject
    if getattr(recipe.comm_overlap, name, None) is not None:
        yield asked
    yield from (subject, asked)
    if section == "comm_overlap":
        yield f"model.{name}"
    yield from _KEY.findall(fix or "")


def told(finding: Finding) -> str:
    """The message, after the conditions under which it holds."""
    return f"when {' and '.join(finding.when)}: {finding.message}" if finding.when else finding.message
