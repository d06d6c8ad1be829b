"""A rule's documentation page, from its docstring and registration."""

from __future__ import annotations

import re
from typing import Any

from overlapkit.rules import Rule
from overlapkit.versions import ANY, VersionRange


def page_parts(rule: Rule) -> dict[str, str]:
    """What, why and fix of a rule, each on one line per paragraph."""
    body, _, rest = rule.page.partition("\nWhy:")
    why, _, fix = rest.partition("\nFix:")
    _, _, what = body.partition("\n")
    return {"what": _joined(what), "why": _joined(why), "fix": _joined(fix)}


def _joined(text: str) -> str:
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def applies_to(rule: Rule) -> list[str]:
    """The targets and version ranges that a rule holds for."""
    targets = []
    if rule.bridge is not None:
        targets.append(_range("megatron-bridge", rule.bridge))
    if rule.megatron_lm is not None:
        core = "" if rule.megatron_lm is ANY else " with megatron-core"
        targets.append(_range(f"megatron-lm{core}", rule.megatron_lm))
    conditions = [
        _range(name, versions)
        for name, versions in (("megatron-core", rule.core), ("transformer-engine", rule.te))
        if versions is not ANY
    ]
    return [f"{target}, {' and '.join(conditions)}" if conditions else target for target in targets]


def _range(name: str, versions: VersionRange) -> str:
    return name if versions is ANY else f"{name} {versions.text.replace(',', ', ')}"


def to_dict(rule: Rule) -> dict[str, Any]:
    return {
        "code": rule.code,
        "summary": rule.summary,
        **page_parts(rule),
        "applies_to": applies_to(rule),
        "source": rule.source,
    }


def to_text(rule: Rule, width: int = 100) -> str:
    """The page for a terminal."""
    from textwrap import fill

    parts = page_parts(rule)
    file = rule.check.__module__.replace(".", "/") + ".py"
    blocks = [f"{rule.code}  {rule.summary}"]
    if parts["what"]:
        blocks += [fill(paragraph, width) for paragraph in parts["what"].split("\n\n")]
    labelled = (
        ("Why", parts["why"]),
        ("Fix", parts["fix"]),
        ("Holds for", "; ".join(applies_to(rule))),
        ("Source", rule.source),
        ("In", file),
    )
    blocks += [fill(f"{label}: {text}", width, subsequent_indent="  ") for label, text in labelled]
    return "\n\n".join(blocks).replace("``", "`") + "\n"
