"""What the reader of recipes accepts, it reads as OmegaConf does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from overlapkit import RecipeError
from overlapkit.recipe.overrides import apply_overrides
from overlapkit.recipe.yaml_source import parse

ci = settings(max_examples=300, derandomize=True, database=None, deadline=None)


def exactly(value: Any) -> Any:
    """A form that tells 1 from true and 1.0, and NaN from nothing; the order of keys does not count."""
    if isinstance(value, dict):
        return {repr(key): exactly(item) for key, item in value.items()}
    return [exactly(item) for item in value] if isinstance(value, list) else repr(value)


def assert_omegaconf_reads(mine: Any, read: Callable[[], Any]) -> None:
    try:
        theirs = OmegaConf.to_container(read())
    except yaml.scanner.ScannerError:
        return  # OmegaConf 2.3 reads with PyYAML's scanner, which refuses tabs that libyaml takes
    assert exactly(mine) == exactly(theirs)


def assert_same(text: str) -> None:
    try:
        mine = parse(text, "file").value
    except RecipeError:
        return
    assert_omegaconf_reads(mine, lambda: OmegaConf.create(text))


# Each means one thing in YAML 1.2 and another in 1.1, or one thing to PyYAML and another to OmegaConf.
SCALARS = [
    "1", "-1", "+1", "0", "00", "01", "010", "0o10", "0x1F", "0xg", "0b101", "0b2", "1_000", "1__0", "_1", "1_",
    "190:20:30", "1:2", "-1:2", "08", "0.1", ".1", "-.1", "+.1", "1.", "1.e3", "1e3", "1E3", "1e+3", "-1e-3",
    "1.5e3", ".5e3", ".5e+3", "-.5e3", "1_0e3", "1__0e3", "1_e3", "1:2.5", ".inf", "-.inf", "+.inf", ".Inf",
    ".NAN", ".nan", "-.nan", "inf", "nan", "true", "True", "TRUE", "tRUE", "yes", "Yes", "no", "off", "on", "y",
    "n", "null", "Null", "NULL", "~", "nul", "2026-01-01", "2026-01-01T00:00:00Z", "12:30:45", "=", "<", "<<",
    "--", "-", "?", ":", ":a", "a:b", "a#b", "#a", "@a", "`a", "%a", "!a", "!!str", "!!int", "!!float",
    "!!bool", "&a", "*a", "|", ">", "'", '"', "''", '""', "'a''b'", '"a\\tb"', '"\\x41"', '"\\u00e9"', '"\\e"',
    "{}", "[]", "{a}", "[a]", "{a:1}", "0.1.2", "2.10", "2.10.0", "nemo:26.04", "1,2", "1,000", "é", '\xa0',
    '\u2028', "😀", "???", "a", "b", "{a: 1}", "a b",
]  # fmt: skip


@pytest.mark.parametrize("form", ["a: {}", "a: [{}]", "{{a: {}}}", "? {}\n: 1", "a:\n- {}\n", "a: !!str {}", "a: ! {}"])
def test_scalars(form: str) -> None:
    for scalar in SCALARS:
        assert_same(form.format(scalar))


plain = st.sampled_from(SCALARS[:80])
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="$"), max_size=8)
keys = st.sampled_from(["a", "b", "model", "1", "x y", "ü"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys | texts, inner, max_size=3),
    max_leaves=8,
)


@ci
@given(
    value=st.dictionaries(keys, values, max_size=4),
    style=st.sampled_from([None, "'", '"', "|", ">"]),
    flow=st.sampled_from([True, False, None]),
    width=st.sampled_from([10, 80]),
)
def test_dumped_values(value: dict[str, Any], style: str | None, flow: bool | None, width: int) -> None:
    text = yaml.safe_dump(value, default_style=style, default_flow_style=flow, width=width, allow_unicode=True)
    assert_same(text)


@st.composite
def flow(draw: st.DrawFn, depth: int = 0) -> str:
    """A flow collection of plain scalars, anchors, aliases and merges."""
    kind = draw(st.sampled_from(["plain"] if depth > 2 else ["plain", "plain", "map", "map", "list", "alias"]))
    anchor = draw(st.sampled_from(["", "", "&x ", "&y "]))
    if kind == "plain":
        return anchor + draw(plain)
    if kind == "alias":
        return draw(st.sampled_from(["*x", "*y"]))
    parts = draw(st.lists(flow(depth + 1), max_size=3))
    if kind == "list":
        return f"{anchor}[{', '.join(parts)}]"
    names = draw(st.lists(st.sampled_from(["a", "b", "c", "<<", "1", "true"]), min_size=3, max_size=3))
    return f"{anchor}{{{', '.join(f'{name}: {part}' for name, part in zip(names, parts, strict=False))}}}"


@settings(ci, max_examples=600)
@given(st.lists(flow(), min_size=1, max_size=4))
def test_anchors_and_merges(parts: list[str]) -> None:
    text = "".join(f"k{index}: {part}\n" for index, part in enumerate(parts))
    if text.count("<<:") < 2:  # PyYAML 6.0.4 itself forgets keys of a merge in a merge
        assert_same(text)


def test_merges_of_merges() -> None:
    text = "a: &a {x: 1, y: 1, z: 1}\nb: &b {<<: *a, y: 2, z: 2}\nc: {<<: *b, z: 3}\nd: {<<: [*b, *a], x: 4}\n"
    value = parse(text, "file").value
    assert value["c"] == {"x": 1, "y": 2, "z": 3}
    assert value["d"] == {"x": 4, "y": 2, "z": 2}


# --- overrides -----------------------------------------------------------------------------------


def assert_same_override(text: str) -> None:
    """The value of ``env_vars.A=text``, alone and merged over something."""
    override = f"env_vars.A={text}"
    for tree in ({}, {"env_vars": {"A": {"a": 1, "b": {"c": 2}}}}):

        def merged(tree: dict[str, Any] = tree) -> Any:
            theirs = OmegaConf.create(tree)
            theirs.merge_with_dotlist([override])
            return theirs

        try:
            mine, _ = apply_overrides(tree, [override])
        except RecipeError:
            return
        if tree and isinstance(mine["env_vars"]["A"], list):
            return  # OmegaConf refuses a list in a mapping's place; here the field does
        assert_omegaconf_reads(mine, merged)


def test_overrides() -> None:
    for text in [*SCALARS, "", " ", "a b", "[1, x]", "{b: {d: 1}}", "{b: 1, c: [a]}", "'2.10'", "a=b"]:
        assert_same_override(text)


@ci
@given(texts | flow() | st.text(st.sampled_from("ab1.:-_[]{}'\"#&*!,=~ \n"), max_size=10))
def test_override_of_any_text(text: str) -> None:
    assert_same_override(text)


def test_versions_are_the_one_exception() -> None:
    assert apply_overrides({}, ["software.torch=2.10"])[0] == {"software": {"torch": "2.10"}}
    assert OmegaConf.to_container(OmegaConf.from_dotlist(["software.torch=2.10"])) == {"software": {"torch": 2.1}}
