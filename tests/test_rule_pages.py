"""The rules' documentation in one file, for those who open the folder: written from the docstrings, and complete.

``overlapkit explain --all --format markdown > overlapkit/rules/README.md`` writes it again.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from overlapkit.render import page
from overlapkit.rules import Rule, documented

if TYPE_CHECKING:
    from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "overlapkit" / "rules"
RULES = documented()
MARKDOWN = page.to_markdown(RULES.values())
PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
TOKENS = PARSER.parse(MARKDOWN)


def inline(tokens: list[Token]) -> list[Token]:
    return [child for token in tokens for child in token.children or ()]


def shown(tokens: list[Token]) -> str:
    """What a reader sees of some blocks, line breaks as spaces; code without its quotes."""
    texts = ("".join(child.content or " " * (child.type == "softbreak") for child in t.children or ()) for t in tokens)
    return "\n".join(texts).strip()


def sections() -> dict[str, list[Token]]:
    """Code -> the paragraphs under its heading, those of the list among them."""
    found: dict[str, list[Token]] = {}
    code = ""
    for before, token in pairwise(TOKENS):
        if before.type == "heading_open":
            code = token.content if before.tag == "h3" else ""
        elif token.type == "inline" and code:
            found.setdefault(code, []).append(token)
    return found


SECTIONS = sections()


def test_the_committed_file_is_the_generated_one() -> None:
    committed = (FOLDER / "README.md").read_text(encoding="utf-8")
    command = "overlapkit explain --all --format markdown > overlapkit/rules/README.md"
    assert committed == MARKDOWN, f"write it again: {command}"


def test_the_order_does_not_depend_on_the_order_given() -> None:
    assert page.to_markdown(reversed(RULES.values())) == MARKDOWN


def test_every_rule_has_its_section_by_family_and_number() -> None:
    assert set(SECTIONS) == set(RULES)
    families = list(dict.fromkeys(re.sub(r"\d", "", code) for code in SECTIONS))
    assert families == ["TP", "UB", "PP", "DP", "EP", "CP", "FSDP", "ENV", "CFG"]
    assert list(SECTIONS) == sorted(
        RULES, key=lambda code: (families.index(code.rstrip("0123456789")), int(re.sub(r"\D", "", code)))
    )


def plain(text: str) -> str:
    return text.replace("``", "")


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_page_says_what_why_and_fix_for_which_versions_and_from_where(rule: Rule) -> None:
    """In the docstring's own words, with nothing that Markdown swallowed."""
    parts = page.page_parts(rule)
    what = [rule.summary, *parts["what"].split("\n\n")] if parts["what"] else [rule.summary]
    body = shown(SECTIONS[rule.code])
    head, why, fix, holds, source, code = re.split(r"\n(?=Why: |Fix: |Holds for: |Source: |Code: )", body)
    assert head == plain("\n".join(what))
    assert why.replace("\n", "\n\n") == plain(f"Why: {parts['why']}")
    assert fix.replace("\n", "\n\n") == plain(f"Fix: {parts['fix']}")
    assert parts["why"] and parts["fix"]
    assert re.match(r"Holds for: Megatron-(Bridge|LM)( \(any version\)| from | before | with Megatron-Core )", holds)
    assert source == plain(f"Source: {rule.source}")
    assert (FOLDER / code.removeprefix("Code: ")).is_file()


def test_links_lead_to_a_heading_or_a_file() -> None:
    headings = {f"#{token.content.lower()}" for before, token in pairwise(TOKENS) if before.type == "heading_open"}
    targets = {str(token.attrs["href"]) for token in inline(TOKENS) if token.type == "link_open"}
    assert {f"#{code.lower()}" for code in RULES} < targets
    assert [target for target in targets - headings if not (FOLDER / target).is_file()] == []


def test_it_has_no_html_but_the_comment_at_its_head() -> None:
    html = [token.content for token in [*TOKENS, *inline(TOKENS)] if token.type.startswith("html")]
    assert len(html) == 1 and html[0].startswith("<!-- Written by `overlapkit explain --all --format markdown`")


# --- versions in words -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("TP002", "Megatron-Bridge (any version); Megatron-LM (any version)"),
        ("EP001", "Megatron-Bridge (any version); Megatron-LM with Megatron-Core from 0.14.0"),
        ("EP030", "Megatron-LM with Megatron-Core before 0.14.0"),
        (
            "UB033",
            "Megatron-Bridge from 0.2.0 to before 0.6.0; Megatron-LM with Megatron-Core from 0.15.0;"
            " each with Transformer Engine from 2.7 to before 2.8",
        ),
    ],
)
def test_targets_and_versions_in_words(code: str, words: str) -> None:
    assert f"Holds for: {words}" in [shown([token]) for token in SECTIONS[code]]


# --- text that looks like markup -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        ("set ``a_b`` for TP < 2 | CP", r"set `a_b` for TP \< 2 \| CP"),
        ("tp_size and __post_init__ and _x", r"tp_size and \_\_post_init_\_ and \_x"),
        ("[tokens, hidden] * 2 &lt; x", r"\[tokens, hidden] \* 2 \&lt; x"),
        ("2.7 and 2. 8", "2.7 and 2. 8"),
        ("2. is no list", r"2\. is no list"),
        ("- nor is this", r"\- nor is this"),
    ],
)
def test_only_what_would_be_markup_is_escaped(docstring: str, markdown: str) -> None:
    assert page._markdown(docstring) == markdown


TRAPS = [
    "<a>",
    "<!--",
    "-->",
    "~~a~~",
    "&lt;",
    "&#35;",
    "__a__",
    "_a_",
    "*a*",
    "[a](b)",
    "![a](b)",
    r"\*",
    "1.",
    "-",
    "#",
]
WORDS = st.sampled_from(TRAPS) | st.text(r"ab1_*<>|[]()#&;~+-=.!\:", min_size=1, max_size=8)
TEXTS = st.lists(WORDS | WORDS.map(lambda word: f"``{word}``"), min_size=1, max_size=6).map(" ".join)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(TEXTS)
def test_any_text_is_shown_as_it_is_written(text: str) -> None:
    tokens = PARSER.parse(page._markdown(text))
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    assert {child.type for child in inline(tokens)} <= {"text", "code_inline"}
    assert shown([token for token in tokens if token.type == "inline"]) == plain(text)
