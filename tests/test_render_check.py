"""The summary of `check` for people, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_check import ERROR, GOOD, LAUNCH, UNUSABLE, WARNING, Outcome, folder, of_recipe, report, write  # noqa: F401

from overlapkit import RecipeError, __version__, resolve
from overlapkit.check import Checked, PassedOver, Report, ResolvedOutcome, check
from overlapkit.check_paths import select
from overlapkit.findings import findings
from overlapkit.plan import SEVERITIES, Decision, Severity
from overlapkit.render.check import print_report, to_dict
from overlapkit.render.data import to_json
from overlapkit.rules import registered

HOSTILE = st.text(
    st.sampled_from("a\n\r\x00\x1b\x07:,%;[](){}$`'\"\\\u2028\u202e\u00e9\udc80<>|&*")
    | st.characters(exclude_categories=["Cs"])
)


@st.composite
def hostile_reports(draw: st.DrawFn) -> Report:
    """Reports whose every text is hostile."""
    recipe = of_recipe(WARNING)
    plan = resolve(recipe)
    words, lines = st.lists(HOSTILE, max_size=2).map(tuple), st.none() | st.integers(0, 2**40)
    fixes, paths = st.none() | HOSTILE, HOSTILE.filter(bool)
    codes, severities = st.sampled_from(sorted(registered())), st.sampled_from(SEVERITIES)
    decisions = st.builds(
        Decision, codes, severities, HOSTILE, st.none(), st.none(), HOSTILE, fixes, fixes, fixes, st.just("a source")
    )
    files = []
    for path in draw(st.lists(paths, max_size=2)):
        found = draw(st.lists(st.lists(decisions, max_size=3).map(tuple), max_size=2))
        outcomes = tuple(
            ResolvedOutcome(when=draw(words), notes=draw(words), recipe=recipe, plan=replace(plan, decisions=each))
            for each in found
        )
        errors = st.builds(RecipeError, HOSTILE, path=fixes, source=fixes | st.just(path), line=lines, hint=fixes)
        files.append(Checked(path=path, outcomes=outcomes, error=draw(st.none() | errors), error_when=draw(words)))
    return Report(files=tuple(files), passed_over=tuple(draw(st.lists(st.builds(PassedOver, path=paths, why=HOSTILE)))))


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def text(result: Report, *, least: Severity = "warning", name_passed_over: bool = False) -> str:
    stream = StringIO()
    print_report(result, stream, least=least, name_passed_over=name_passed_over)
    return stream.getvalue()


SUMMARY = """\
ok        good.yaml
ok        warning.yaml  1 warning
  TP002  line 7  model.tp_comm_overlap  sequence_parallel is false
                                        → set model.sequence_parallel=true, or comm_overlap.tp_comm_overlap=false
fails     error.yaml  1 error
  TP002  line 7  model.tp_comm_overlap  sequence_parallel is false (megatron-lm raises at validation)
                                        → set model.sequence_parallel=true, or comm_overlap.tp_comm_overlap=false
unusable  unusable.yaml
  RECIPE  line 3  model.tensor_model_parallel_sizes  unknown key
                                                     → did you mean model.tensor_model_parallel_size?

4 files checked: 2 ok, 1 fails, 1 unusable · 1 error · 1 warning
"""
FILES = {"good.yaml": GOOD, "warning.yaml": WARNING, "error.yaml": ERROR, "unusable.yaml": UNUSABLE}


@pytest.fixture
def all_kinds(folder: object) -> Report:  # noqa: F811
    write(FILES)
    return report(*FILES)


def test_a_line_per_file_what_was_found_and_totals(all_kinds: Report) -> None:
    assert text(all_kinds) == SUMMARY


def test_infos_on_request(all_kinds: Report) -> None:
    assert text(all_kinds, least="warning") == SUMMARY
    shown = text(all_kinds, least="info")
    for checked in all_kinds.files:
        assert [finding.code for finding in findings(checked) if f"  {finding.code} " not in shown] == []
    assert "TP002" not in text(report("warning.yaml"), least="error")


def test_what_was_passed_over_is_counted_and_named_on_request() -> None:
    write({"a/good.yaml": GOOD, "a/other.yaml": "x: 1\n", "a/make.sh": "make\n"})
    result = report("a")
    assert text(result) == "ok        a/good.yaml\n\n1 file checked: 1 ok · 2 files passed over\n"
    named = text(result, name_passed_over=True).splitlines()
    assert named[1:3] == [
        "passed over  a/make.sh  no training launch",
        "passed over  a/other.yaml  no section of a recipe",
    ]


def test_only_files_that_are_passed_over() -> None:
    write({"a/other.yaml": "x: 1\n"})
    assert text(report("a")) == "\n0 files checked · 1 file passed over\n"


def test_a_script_has_its_outcomes_conditions_and_notes() -> None:
    write({"train.sh": LAUNCH})

    def load(path: str, overrides: Sequence[str]) -> tuple[Outcome, ...]:
        notes = ("--foo is not a flag",)
        return (
            Outcome(recipe=of_recipe(ERROR, path), when=("TP > 1",), notes=notes),
            Outcome(recipe=of_recipe(GOOD, path), when=("not TP > 1",), taken=False, notes=notes),
        )

    lines = text(check(select(["train.sh"]), load)).splitlines()
    assert lines[0] == "fails     train.sh  1 error, 2 outcomes"
    assert "  TP002  line 7  model.tp_comm_overlap  when TP > 1: sequence_parallel is false" in lines[1]
    assert [line.split() for line in lines if "note" in line] == [["note", "--foo", "is", "not", "a", "flag"]]


# --- terminals -------------------------------------------------------------------------------------


def on_terminal(result: Report) -> str:
    stream = Terminal()
    print_report(result, stream)
    return stream.getvalue()


def test_colour_on_a_terminal_only(all_kinds: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in on_terminal(all_kinds)
    monkeypatch.setenv("NO_COLOR", "1")
    assert on_terminal(all_kinds) == SUMMARY


def test_a_narrow_terminal_loses_nothing(all_kinds: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "50")
    narrow = on_terminal(all_kinds)
    assert narrow.split() == SUMMARY.split()
    assert max(len(line) for line in narrow.splitlines() if not line.startswith("4 files")) <= 50


@settings(max_examples=200, deadline=None)
@given(hostile_reports())
def test_hostile_text_moves_no_cursor_and_forges_no_line(result: Report) -> None:
    shown = text(result, least="info", name_passed_over=True)
    assert all(line.isprintable() for line in shown.split("\n"))


# --- JSON ------------------------------------------------------------------------------------------


def test_json_has_plans_findings_and_totals(all_kinds: Report) -> None:
    data = to_dict(all_kinds)
    assert (data["schema_version"], data["overlapkit_version"]) == (1, __version__)
    assert [(file["path"], file["ok"]) for file in data["files"]] == [
        ("good.yaml", True),
        ("warning.yaml", True),
        ("error.yaml", False),
        ("unusable.yaml", False),
    ]
    assert data["files"][1]["outcomes"] == [
        {"when": [], "taken": True, "notes": [], "plan": resolve("warning.yaml").to_dict()}
    ]
    assert data["files"][2]["findings"][0] == {
        "line": 7,
        "code": "TP002",
        "severity": "error",
        "subject": "model.tp_comm_overlap",
        "message": "sequence_parallel is false (megatron-lm raises at validation)",
        "fix": "set model.sequence_parallel=true, or comm_overlap.tp_comm_overlap=false",
        "when": [],
    }
    assert data["files"][3]["error"] == {
        "source": "unusable.yaml",
        "line": 3,
        "field": "model.tensor_model_parallel_sizes",
        "problem": "unknown key",
        "hint": "did you mean model.tensor_model_parallel_size?",
        "when": [],
    }
    assert data["files"][3]["outcomes"] == []
    assert data["totals"] == {
        "files": 4, "ok": 2, "fails": 1, "unusable": 1, "errors": 1, "warnings": 1, "passed_over": 0
    }  # fmt: skip
    assert json.loads(to_json(data)) == data


@settings(max_examples=50, deadline=None)
@given(hostile_reports())
def test_hostile_text_is_json(result: Report) -> None:
    data = to_dict(result)
    assert json.loads(to_json(data)) == data
