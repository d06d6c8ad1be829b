"""The outcomes of a launch file: the first as a whole plan, the others by what they change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from overlapkit.errors import printable
from overlapkit.outcomes import ResolvedOutcome
from overlapkit.plan import Decision, Plan, reason
from overlapkit.render.text import STYLES, grid, print_on, title, verdict, write_plan

if TYPE_CHECKING:
    from rich.console import Console


def print_outcomes(outcomes: Sequence[ResolvedOutcome], stream: IO[str]) -> None:
    """The plan of a recipe, or every outcome of a launch file; those that come to the same stand together."""

    def write(out: Console) -> None:
        first, *others = _together(outcomes)
        write_plan(first[0].plan, out)
        _section("Not seen", first[0].notes, out)
        _section("As it is written" if first[0].taken else "This is when", first[0].when, out)
        _section("And the same when", [_conditions(outcome) for outcome in first[1:]], out)
        for group in others:
            _section("And, when" if group[0].taken else "Or, when", [_conditions(outcome) for outcome in group], out)
            _changes(first[0].plan, group[0].plan, out)

    print_on(stream, write)


def _together(outcomes: Sequence[ResolvedOutcome]) -> list[list[ResolvedOutcome]]:
    """Groups of outcomes with the same settings, environment, sizes and findings, in the order of their first."""
    groups: list[list[ResolvedOutcome]] = []
    for outcome in outcomes:
        same = next((group for group in groups if _same(group[0].plan, outcome.plan)), None)
        if same is None:
            groups.append([outcome])
        else:
            same.append(outcome)
    return groups


def _same(one: Plan, other: Plan) -> bool:
    pairs = ((one.settings, other.settings), (one.env, other.env), (one.parallelism, other.parallelism))
    return all(a == b for a, b in pairs) and not _new(one, other) and not _new(other, one)


def _conditions(outcome: ResolvedOutcome) -> str:
    return ", ".join(outcome.when)


def _section(heading: str, texts: Sequence[str], out: Console) -> None:
    if texts:
        title(out, heading)
        grid(out, [[(text, "")] for text in texts])


def _changes(first: Plan, other: Plan, out: Console) -> None:
    """Settings, environment, errors and warnings of ``other`` that are not the first's."""
    text, style = verdict(other)
    out.print(f"  {text}", style=style)
    rows = [
        [(printable(name), ""), (f"{_value(before)} → {_value(after)}", "")]
        for name, before, after in (*_differences(first.settings, other.settings), *_differences(first.env, other.env))
    ]
    for name, after in other.parallelism.to_dict().items():
        before = getattr(first.parallelism, name)
        if before != after:
            rows.append([(name.upper() if len(name) == 2 else name, ""), (f"{_value(before)} → {_value(after)}", "")])
    if rows:
        grid(out, rows)
    for label, found in (("new", _new(other, first)), ("gone", _new(first, other))):
        if found:
            grid(
                out,
                [[(label, "dim"), (d.code, STYLES[d.severity]), (d.subject, ""), (_finding(d), "")] for d in found],
            )


def _differences(before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield name, before.get(name), after.get(name)


def _new(plan: Plan, other: Plan) -> list[Decision]:
    return [d for d in plan.decisions if d.severity != "info" and d not in other.decisions]


def _finding(decision: Decision) -> str:
    return f"{reason(decision)} → {decision.fix}" if decision.fix else reason(decision)


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return "a configuration" if isinstance(value, dict) else printable(str(value))
