"""Findings as workflow commands of GitHub Actions, which annotates the lines of a pull request with them.

Source: GitHub Docs, "Workflow commands for GitHub Actions"; the escapes are those of actions/toolkit, packages/core
src/command.ts.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from overlapkit.check import Report
from overlapkit.check_paths import relative_path
from overlapkit.errors import printable
from overlapkit.findings import Finding, findings, told
from overlapkit.plan import Severity

_COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}


def to_github(report: Report, *, least: Severity = "warning") -> str:
    """One command per finding of severity ``least`` and graver; without more, infos are left out.

    A finding about the command line names the file only. Paths count from the current folder; GitHub takes those in
    the checkout.
    """
    return "".join(
        f"{_command(finding, _file(checked.path))}\n"
        for checked in report.files
        for finding in findings(checked, least)
    )


def _command(finding: Finding, file: str) -> str:
    properties = {"file": file}
    if finding.line is not None:
        properties["line"] = str(finding.line)
    properties["title"] = printable(f"{finding.code} {finding.subject}".strip())
    text = printable(told(finding), limit=1000)
    if finding.fix:
        text += f"\nFix: {printable(finding.fix, limit=1000)}"
    listed = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{_COMMANDS[finding.severity]} {listed}::{_data(text)}"


def _file(path: str) -> str:
    found = relative_path(path)
    name = Path(os.path.abspath(path)).as_posix() if found is None else found  # noqa: PTH100
    parts = re.split(r"([\r\n])", name)  # which the command can spell; nothing else that cannot be printed
    return "".join(part if part in ("\r", "\n") else printable(part, limit=4096) for part in parts)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
