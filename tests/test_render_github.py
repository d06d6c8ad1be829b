"""Annotations of GitHub Actions: one workflow command per finding, which nothing in a file can break out of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import given, settings
from test_check import ERROR, GOOD, LAUNCH, Outcome, folder, of_recipe, report, write  # noqa: F401
from test_render_check import FILES, hostile_reports

from overlapkit.check import Report, check
from overlapkit.check_paths import select
from overlapkit.errors import printable
from overlapkit.findings import findings, told
from overlapkit.render.github import to_github

if TYPE_CHECKING:
    import pytest


def read(line: str) -> tuple[str, dict[str, str], str]:
    """A command as the runner reads it: up to the first ``::`` properties, after it data, escapes undone."""
    assert line.startswith("::")
    head, _, data = line[2:].partition("::")
    name, _, listed = head.partition(" ")
    properties = dict(pair.split("=", 1) for pair in listed.split(","))
    return name, {key: unescaped(value) for key, value in properties.items()}, unescaped(data)


def unescaped(text: str) -> str:
    for code, character in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, character)
    return text


def test_every_error_and_warning_is_a_command() -> None:
    write(FILES)
    fix = "Fix: set model.sequence_parallel=true, or comm_overlap.tp_comm_overlap=false"
    assert to_github(report(*FILES)).splitlines() == [
        f"::warning file=warning.yaml,line=7,title=TP002 model.tp_comm_overlap::sequence_parallel is false%0A{fix}",
        "::error file=error.yaml,line=7,title=TP002 model.tp_comm_overlap"
        f"::sequence_parallel is false (megatron-lm raises at validation)%0A{fix}",
        "::error file=unusable.yaml,line=3,title=RECIPE model.tensor_model_parallel_sizes"
        "::unknown key%0AFix: did you mean model.tensor_model_parallel_size?",
    ]


def test_infos_are_notices_on_request() -> None:
    write({"good.yaml": GOOD})
    assert to_github(report("good.yaml")) == ""
    commands = [read(line)[0] for line in to_github(report("good.yaml"), least="info").splitlines()]
    assert commands and set(commands) == {"notice"}


def test_what_the_command_line_set_names_the_file_only() -> None:
    write({"a.yaml": ERROR})
    (line,) = to_github(report("a.yaml", "comm_overlap.tp_comm_overlap=true")).splitlines()
    name, properties, data = read(line)
    assert (name, properties) == ("error", {"file": "a.yaml", "title": "TP002 model.tp_comm_overlap"})
    assert "; from the command line: comm_overlap.tp_comm_overlap\n" in data


def test_paths_count_from_the_current_folder(folder: Path) -> None:  # noqa: F811
    write({"a/50%, b:c.yaml": ERROR})
    expected = "::error file=a/50%25%2C b%3Ac.yaml,line=7,"
    for path in ("a/50%, b:c.yaml", "./a/../a/50%, b:c.yaml", str(folder / "a" / "50%, b:c.yaml"), "a"):
        assert to_github(report(path)).startswith(expected)


def test_a_path_outside_is_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    write({"a.yaml": ERROR, "b/c.yaml": GOOD})
    monkeypatch.chdir("b")
    assert read(to_github(report("../a.yaml")).rstrip("\n"))[1]["file"] == (folder / "a.yaml").as_posix()


def test_conditions_of_a_script_come_first() -> None:
    write({"train.sh": LAUNCH})

    def load(path: str, overrides: Sequence[str]) -> tuple[Outcome, ...]:
        return (
            Outcome(recipe=of_recipe(ERROR, path), when=("$TP > 1",)),
            Outcome(recipe=of_recipe(GOOD, path), when=("not $TP > 1",)),
        )

    (line,) = to_github(check(select(["train.sh"]), load)).splitlines()
    assert read(line)[2].startswith("when $TP > 1: sequence_parallel is false (")


@settings(max_examples=300, deadline=None)
@given(hostile_reports())
def test_nothing_breaks_out_of_its_command(result: Report) -> None:
    expected = [finding for checked in result.files for finding in findings(checked, "info")]
    text = to_github(result, least="info")
    lines = text.split("\n")[:-1]
    assert len(lines) == len(expected) and text.count("\n") == len(lines)
    for line, finding in zip(lines, expected, strict=True):
        assert line.isprintable()
        name, properties, data = read(line)
        assert name == {"error": "error", "warning": "warning", "info": "notice"}[finding.severity]
        assert list(properties) == ["file", *(["line"] if finding.line is not None else []), "title"]
        assert properties["title"] == printable(f"{finding.code} {finding.subject}".strip())
        assert data.split("\n")[0] == printable(told(finding), limit=1000)
        assert data.count("\n") == bool(finding.fix)
