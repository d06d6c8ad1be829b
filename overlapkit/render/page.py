"""A rule's documentation page, from its docstring and registration; all of them as one Markdown file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
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
    targets, conditions = _targets(rule, _range)
    return [f"{target}, {' and '.join(conditions)}" if conditions else target for target in targets]


def _targets(rule: Rule, said: Callable[[str, VersionRange], str]) -> tuple[list[str], list[str]]:
    """The targets, and what each of them must have besides."""
    targets = []
    if rule.bridge is not None:
        targets.append(said("megatron-bridge", rule.bridge))
    if rule.megatron_lm is not None:
        core = "" if rule.megatron_lm is ANY else " with megatron-core"
        targets.append(said(f"megatron-lm{core}", rule.megatron_lm))
    conditions = [
        said(name, versions)
        for name, versions in (("megatron-core", rule.core), ("transformer-engine", rule.te))
        if versions is not ANY
    ]
    return targets, conditions


def _range(name: str, versions: VersionRange) -> str:
    return name if versions is ANY else f"{name} {versions.text.replace(',', ', ')}"


def to_dict(rule: Rule) -> dict[str, Any]:
    parts = page_parts(rule)
    return {
        "code": rule.code,
        "summary": rule.summary,
        **parts,
        "what": parts["what"] or rule.summary,  # of a short rule the title says it all
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


# --- Markdown ------------------------------------------------------------------------------------

_FAMILIES = {
    "TP": "Tensor parallelism, and whether userbuffers are on",
    "UB": "Userbuffers: what Transformer Engine can do, and presets",
    "PP": "Pipeline parallelism",
    "DP": "Data parallelism: gradients and parameters",
    "EP": "Expert parallelism",
    "CP": "Context parallelism",
    "FSDP": "Fully sharded data parallelism",
    "ENV": "Environment variables",
    "CFG": "The recipe itself",
}
_NAMES = {
    "megatron-bridge": "Megatron-Bridge",
    "megatron-lm": "Megatron-LM",
    "megatron-lm with megatron-core": "Megatron-LM with Megatron-Core",
    "megatron-core": "Megatron-Core",
    "transformer-engine": "Transformer Engine",
}
_HEAD = """\
<!-- Written by `overlapkit explain --all --format markdown` from the docstrings in this folder: change those. -->

# Rules

Each decision of a plan has the code of the rule that made it. `overlapkit explain CODE` prints a rule's page; this file
has all of them. A rule holds for the targets and versions that its page names, and is silent for others.
"""
# What Markdown would read as markup, the last character being the one to escape: a mark anywhere, an underscore that
# no letter precedes, the start of an entity, and what makes a line a list, a quote or a heading.
_MARKUP = re.compile(r"[\\`*\[<|~]|(?<![^\W_])_|&(?=[\w#])|^[-+>#=]|^\d{1,9}[.)](?=\s|$)")


def to_markdown(rules: Iterable[Rule]) -> str:
    """One file: the rules of each family under a table of contents, in the order of their codes."""
    families: dict[str, list[Rule]] = {name: [] for name in _FAMILIES}
    for rule in sorted(rules, key=_code):
        families[_code(rule)[0]].append(rule)
    blocks = [_HEAD.strip()]
    contents = []
    for name, members in families.items():
        if members:
            contents.append(f"- **[{name}](#{name.lower()})** {_FAMILIES[name]}")
            contents += [f"  - [{rule.code}](#{rule.code.lower()}) {_markdown(rule.summary)}" for rule in members]
            blocks += [f"## {name}", f"{_FAMILIES[name]}.", *map(_section, members)]
    blocks.insert(1, "\n".join(contents))
    return "\n\n".join(blocks) + "\n"


def _code(rule: Rule) -> tuple[str, int]:
    family = rule.code.rstrip("0123456789")
    return family, int(rule.code[len(family) :])


def _section(rule: Rule) -> str:
    """The heading is the code alone, so that links to it outlive a changed summary."""
    parts = page_parts(rule)
    file = rule.check.__module__.rpartition(".")[2] + ".py"
    points = "\n".join(
        f"- **{label}:** {_markdown(text, indent=2)}"
        for label, text in (
            ("Why", parts["why"]),
            ("Fix", parts["fix"]),
            ("Holds for", _applies_in_words(rule)),
            ("Source", rule.source),
        )
    )
    what = [_markdown(parts["what"])] if parts["what"] else []
    title = f"**{_markdown(rule.summary)}**"
    return "\n\n".join([f"### {rule.code}", title, *what, f"{points}\n- **Code:** [{file}]({file})"])


def _applies_in_words(rule: Rule) -> str:
    targets, conditions = _targets(rule, _range_in_words)
    each = "; each with" if len(targets) > 1 else ", with"
    return "; ".join(targets) + (f"{each} {' and '.join(conditions)}" if conditions else "")


def _range_in_words(name: str, versions: VersionRange) -> str:
    if versions is ANY:
        return f"{_NAMES[name]} (any version)"
    since = f"from {versions.since}" if versions.since else ""
    before = f"before {versions.before}" if versions.before else ""
    return f"{_NAMES[name]} {since}{' to ' if since and before else ''}{before}"


def _markdown(text: str, *, indent: int = 0) -> str:
    """A docstring's text as Markdown that shows it: ``code`` as it is, the rest without markup of its own.

    Paragraphs after the first are indented, as those of a list's entry must be.
    """
    paragraphs = []
    for paragraph in text.split("\n\n"):
        parts = re.split(r"``(.+?)``", paragraph)
        parts[::2] = [_MARKUP.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", part) for part in parts[::2]]
        paragraphs.append("`".join(parts))
    return f"\n\n{' ' * indent}".join(paragraphs)
