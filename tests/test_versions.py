"""Versions are ordered as PEP 440 orders them; `packaging` is the judge."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import InvalidVersion
from packaging.version import Version as Judge

from overlapkit.versions import ANY, Version, parse_range, parse_version

ci = settings(max_examples=300, derandomize=True, database=None, deadline=None)

digits = st.sampled_from(["0", "1", "2", "9", "10", "04", "26", "123456789"])
separator = st.sampled_from(["", ".", "-", "_"])


def optional(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.just("") | part


@st.composite
def version_texts(draw: st.DrawFn) -> str:
    """Every spelling that container tags, wheels and NGC builds use, and the odder ones of PEP 440."""
    release = ".".join(draw(st.lists(digits, min_size=1, max_size=4)))
    pre = draw(optional(st.builds(lambda s, p, t, n: s + p + t + n, separator, pre_names, separator, optional(digits))))
    post = draw(
        optional(st.builds(lambda s, p, t, n: s + p + t + n, separator, post_names, separator, optional(digits)))
    )
    dev = draw(optional(st.builds(lambda s, t, n: f"{s}dev{t}{n}", separator, separator, optional(digits))))
    local = draw(optional(st.lists(local_parts, min_size=1, max_size=3).map(lambda parts: "+" + ".".join(parts))))
    text = draw(st.sampled_from(["", "v"])) + release + pre + post + dev + local
    return draw(st.sampled_from([text, text.upper(), f" {text}\n"]))


pre_names = st.sampled_from(["a", "b", "c", "rc", "alpha", "beta", "pre", "preview"])
post_names = st.sampled_from(["post", "rev", "r"])
local_parts = st.sampled_from(["0", "7", "10", "010", "cu12", "70f53666", "eb65b36914", "nv26", "abc", "ABC"])


def judge(text: str) -> Judge | None:
    try:
        return Judge(text)
    except InvalidVersion:
        return None


def accepted(text: str) -> Version | None:
    try:
        return parse_version(text)
    except ValueError:
        return None


@ci
@given(version_texts(), version_texts())
def test_order(one: str, other: str) -> None:
    first, second = judge(one), judge(other)
    if first is None or second is None:
        return
    mine = parse_version(one), parse_version(other)
    assert (mine[0] < mine[1], mine[0] == mine[1]) == (first < second, first == second)
    assert first != second or hash(mine[0]) == hash(mine[1])


@ci
@given(
    version_texts()
    | st.text(st.sampled_from("0129.-_+vabcrdepostev \n!\u0661\u017f"), max_size=8)
    | st.text(max_size=6)
)
def test_what_is_a_version(text: str) -> None:
    """All that is one, but for epochs, which no training software has."""
    judged, mine = judge(text), accepted(text)
    if judged is None or "!" in text:
        assert mine is None
    else:
        assert mine is not None and Judge(str(mine)) == judged


@pytest.mark.parametrize(
    "ordered",
    [
        ["2.9", "2.10", "2.10.1", "2.11"],
        ["0.4.0.dev1", "0.4.0a1", "0.4.0b2", "0.4.0rc0", "0.4.0rc1", "0.4.0", "0.4.0+local", "0.4.0.post1"],
        ["2.11.0a0", "2.11.0a0+eb65b36914.nv26.2", "2.11.0"],
        ["2.9.0", "2.9.0+70f53666", "2.9.1"],
    ],
)
def test_examples(ordered: list[str]) -> None:
    assert sorted(sorted(ordered), key=parse_version) == ordered


def test_the_text_is_kept() -> None:
    assert str(parse_version("2.9.0+70F53666")) == "2.9.0+70F53666"
    assert parse_version("2.10") == parse_version("v2.10.0")


@ci
@given(version_texts(), version_texts(), version_texts())
def test_ranges(text: str, since: str, before: str) -> None:
    judged, low, high = judge(text), judge(since), judge(before)
    if judged is None or low is None or high is None:
        return
    version, since, before = parse_version(text), since.strip(), before.strip()
    assert (version in parse_range(f">={since},<{before}")) == (low <= judged < high)
    assert (version in parse_range(f">={since}")) == (low <= judged)
    assert (version in parse_range(f"<{before}")) == (judged < high)


def test_any_holds_every_version() -> None:
    assert parse_range("any") is ANY
    assert parse_version("0.0.1.dev0") in ANY


@pytest.mark.parametrize("text", ["", "0.4", ">0.4", "<=0.4", ">=0.4, <0.5", ">=x", "=="])
def test_other_ranges_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a "):
        parse_range(text)
