"""Findings as SARIF 2.1.0, which code scanning and editors read.

Source: OASIS, Static Analysis Results Interchange Format 2.1.0 plus Errata 01.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from overlapkit.check import Report
from overlapkit.check_paths import relative_path
from overlapkit.errors import printable
from overlapkit.findings import UNUSABLE, Finding, findings, told
from overlapkit.plan import SEVERITIES, Severity

SCHEMA_URI = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ROOT = "%SRCROOT%"  # the name that code scanning knows
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_GITHUB_LEVELS = {"error": "error", "warning": "warning", "info": "recommendation"}
_LINK = re.compile(r"\[(?=[^\]]*\]\()")


def to_sarif(report: Report, *, least: Severity = "warning") -> dict[str, Any]:
    """A log with one run: the findings of severity ``least`` and graver, and the rules that they are of.

    A file that cannot be used is a result of the rule ``RECIPE`` and, beside it, a notification of the run.
    """
    from overlapkit import __version__

    found = [finding for checked in report.files for finding in findings(checked, least)]
    codes = list(dict.fromkeys(finding.code for finding in found))
    unusable = [finding for finding in found if finding.code == UNUSABLE]
    driver = {
        "name": "overlapkit",
        "semanticVersion": __version__,
        "rules": [_rule(code, [finding for finding in found if finding.code == code]) for code in codes],
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [
            {
                "executionSuccessful": not unusable,
                "toolExecutionNotifications": [_notification(finding) for finding in unusable],
            }
        ],
        "originalUriBaseIds": {_ROOT: {"description": {"text": "The folder that overlapkit was called in."}}},
        "columnKind": "unicodeCodePoints",
        "results": _results(found, {code: index for index, code in enumerate(codes)}),
    }
    return {"$schema": SCHEMA_URI, "version": "2.1.0", "runs": [run]}


# --- rules ---------------------------------------------------------------------------------------


def _rule(code: str, found: Sequence[Finding]) -> dict[str, Any]:
    """A rule that occurs; its level is that of its gravest finding here."""
    gravest = min((finding.severity for finding in found), key=SEVERITIES.index)
    page = _UNUSABLE_PAGE if code == UNUSABLE else _page(code)
    family = code.rstrip("0123456789")
    return {
        "id": code,
        **page,
        "defaultConfiguration": {"level": _LEVELS[gravest]},
        "properties": {"tags": ["communication-overlap", family], "problem.severity": _GITHUB_LEVELS[gravest]},
    }


def _page(code: str) -> dict[str, Any]:
    """The rule's documentation, which is its docstring."""
    from overlapkit.render.page import applies_to, page_parts
    from overlapkit.rules import documented

    rule = documented()[code]
    what, why, fix = (text.replace("``", "`") for text in page_parts(rule).values())
    parts = {"Why": why, "Fix": fix, "Holds for": "; ".join(applies_to(rule)), "Source": rule.source}
    return {
        "name": "".join(word.capitalize() for word in rule.check.__name__.split("_")),
        "shortDescription": {"text": f"{rule.summary}.".replace("``", "`")},
        "fullDescription": {"text": what or f"{rule.summary}.".replace("``", "`")},
        "help": {
            "text": "\n\n".join(f"{label}: {text}" for label, text in parts.items()),
            "markdown": "\n\n".join(f"**{label}:** {text}" for label, text in parts.items()),
        },
    }


_UNUSABLE_PAGE = {
    "name": "UnusableFile",
    "shortDescription": {"text": "The file cannot be used."},
    "fullDescription": {"text": "It is no recipe and no launch script that can be resolved, so nothing else is known."},
    "help": {
        "text": "Fix: the message names the line, the field and what is right there.",
        "markdown": "**Fix:** the message names the line, the field and what is right there.",
    },
}


# --- results -------------------------------------------------------------------------------------


def _results(found: Sequence[Finding], indices: Mapping[str, int]) -> list[dict[str, Any]]:
    counts: Counter[str] = Counter()
    results = []
    for finding in found:
        fingerprint = _fingerprint(finding)
        counts[fingerprint] += 1
        results.append(_result(finding, indices[finding.code], f"{fingerprint}:{counts[fingerprint]}"))
    return results


def _result(finding: Finding, index: int, fingerprint: str) -> dict[str, Any]:
    properties = {"subject": printable(finding.subject), "when": [printable(condition) for condition in finding.when]}
    return {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": _LEVELS[finding.severity],
        "message": _message(finding),
        "locations": [_location(finding)],
        "partialFingerprints": {"overlapkit/v1": fingerprint},
        "properties": properties,
    }


def _notification(finding: Finding) -> dict[str, Any]:
    return {"level": "error", "message": _message(finding), "locations": [_location(finding)]}


def _message(finding: Finding) -> dict[str, str]:
    text = printable(told(finding), limit=1000)
    if finding.subject:
        text = f"{printable(finding.subject)}: {text}"
    if finding.fix:
        text += f"\nFix: {printable(finding.fix, limit=1000)}"
    return {"text": _LINK.sub(r"\\[", text)}  # what a recipe holds becomes no link


def _location(finding: Finding) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": _artifact(finding.path)}
    if finding.line is not None:
        physical["region"] = {"startLine": finding.line}
    return {"physicalLocation": physical}


def _artifact(path: str) -> dict[str, str]:
    relative = relative_path(path)
    if relative is None:
        return {"uri": Path(os.path.abspath(path)).as_uri()}  # noqa: PTH100
    return {"uri": quote(os.fsencode(relative)), "uriBaseId": _ROOT}


def _fingerprint(finding: Finding) -> str:
    """The same while only lines move and figures in messages change."""
    parts = (_artifact(finding.path)["uri"], finding.code, finding.subject, *finding.when)
    return sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]
