"""A report on many files: a summary that a person scans, and plain values for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

from overlapkit.check import Checked, Report
from overlapkit.errors import RecipeError, printable
from overlapkit.findings import UNUSABLE, Finding, findings, told
from overlapkit.outcomes import ResolvedOutcome
from overlapkit.plan import Severity, as_grave_as
from overlapkit.render.text import STYLES, grid, print_on

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
_VERDICTS = {"ok": "green", "fails": "bold red", "unusable": "bold red"}


def print_report(
    report: Report, stream: IO[str], *, least: Severity = "warning", name_passed_over: bool = False
) -> None:
    """One line per file, below it what was found of severity ``least`` and graver, then the totals.

    The files that were passed over are counted, and named where ``name_passed_over`` asks for it.
    """

    def write(out: Console) -> None:
        for checked in report.files:
            _file(checked, least, out)
        for passed in report.passed_over if name_passed_over else ():
            out.print(printable(f"passed over  {passed.path}  {passed.why}", limit=1000), style="dim", soft_wrap=True)
        out.print()
        out.print(_totals_line(totals(report)), style="bold")

    print_on(stream, write)


def _file(checked: Checked, least: Severity, out: Console) -> None:
    every = findings(checked)
    verdict = _verdict(checked)
    remarks = [_counted(number, severity) for severity, number in _by_severity(every).items() if number]
    if len(checked.outcomes) > 1:
        remarks.append(_counted(len(checked.outcomes), "outcome"))
    out.print(f"{verdict:<8}  ", style=_VERDICTS[verdict], end="")
    out.print(printable(checked.path, limit=300), style="bold", end="  ", soft_wrap=True)
    out.print(", ".join(remarks), soft_wrap=True)
    shown = as_grave_as(least)
    rows = [row for finding in every if finding.severity in shown for row in _rows(finding)]
    notes = dict.fromkeys(note for outcome in checked.outcomes for note in outcome.notes)
    rows += [[("note", "dim"), ("", ""), ("", ""), (note, "dim")] for note in notes]
    if rows:
        grid(out, rows)


def _rows(finding: Finding) -> list[list[tuple[str, str]]]:
    line = "" if finding.line is None else f"line {finding.line}"
    rows = [[(finding.code, STYLES[finding.severity]), (line, ""), (finding.subject, ""), (told(finding), "")]]
    if finding.fix:
        rows.append([("", ""), ("", ""), ("", ""), (f"→ {finding.fix}", "green")])
    return rows


def _verdict(checked: Checked) -> str:
    if checked.error is not None:
        return "unusable"
    return "ok" if checked.ok else "fails"


def _by_severity(every: Iterable[Finding]) -> dict[str, int]:
    """Errors and warnings of rules."""
    counts = {"error": 0, "warning": 0}
    for finding in every:
        if finding.code != UNUSABLE and finding.severity in counts:
            counts[finding.severity] += 1
    return counts


def totals(report: Report) -> dict[str, int]:
    """How many files there are of each kind, and how many errors and warnings of rules in them."""
    verdicts = [_verdict(checked) for checked in report.files]
    counts = _by_severity(finding for checked in report.files for finding in findings(checked))
    return {
        "files": len(verdicts),
        **{verdict: verdicts.count(verdict) for verdict in _VERDICTS},
        "errors": counts["error"],
        "warnings": counts["warning"],
        "passed_over": len(report.passed_over),
    }


def _totals_line(total: dict[str, int]) -> str:
    verdicts = ", ".join(f"{total[verdict]} {verdict}" for verdict in _VERDICTS if total[verdict])
    found = [_counted(total[f"{what}s"], what) for what in ("error", "warning") if total[f"{what}s"]]
    passed = [f"{_counted(total['passed_over'], 'file')} passed over"] if total["passed_over"] else []
    files = f"{_counted(total['files'], 'file')} checked"
    return " · ".join([f"{files}: {verdicts}" if verdicts else files, *found, *passed])


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def to_dict(report: Report) -> dict[str, Any]:
    """The report as plain values, the form of ``--format json``; plans as ``resolve`` gives them."""
    from overlapkit import __version__

    return {
        "schema_version": SCHEMA_VERSION,
        "overlapkit_version": __version__,
        "files": [_checked(checked) for checked in report.files],
        "passed_over": [{"path": passed.path, "why": passed.why} for passed in report.passed_over],
        "totals": totals(report),
    }


def _checked(checked: Checked) -> dict[str, Any]:
    return {
        "path": checked.path,
        "ok": checked.ok,
        "error": None if checked.error is None else _error(checked.error, checked.error_when),
        "findings": [_finding(finding) for finding in findings(checked)],
        "outcomes": [_outcome(outcome) for outcome in checked.outcomes],
    }


def _error(error: RecipeError, when: tuple[str, ...]) -> dict[str, Any]:
    return {
        "source": error.source,
        "line": error.line,
        "field": error.path,
        "problem": error.problem,
        "hint": error.hint,
        "when": list(when),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    values = {name: getattr(finding, name) for name in Finding.__slots__ if name != "path"}
    return {**values, "when": list(finding.when)}


def _outcome(outcome: ResolvedOutcome) -> dict[str, Any]:
    return {
        "when": list(outcome.when),
        "taken": outcome.taken,
        "notes": list(outcome.notes),
        "plan": outcome.plan.to_dict(),
    }
