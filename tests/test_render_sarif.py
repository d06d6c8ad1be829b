"""SARIF: every log validates against the official schema, whatever the files hold."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given, settings
from jsonschema import Draft4Validator, FormatChecker
from test_check import ERROR, GOOD, LAUNCH, ROOT, UNUSABLE, WARNING, Outcome, folder, of_recipe, report, write  # noqa: F401
from test_findings import decision
from test_render_check import FILES, hostile_reports

from overlapkit import resolve
from overlapkit.check import Checked, Report, ResolvedOutcome, check
from overlapkit.check_paths import select
from overlapkit.findings import findings
from overlapkit.plan import Severity
from overlapkit.render.data import to_json
from overlapkit.render.page import page_parts
from overlapkit.render.sarif import to_sarif
from overlapkit.rules import registered

SCHEMA = json.loads((ROOT / "tests" / "data" / "sarif-schema-2.1.0.json").read_text(encoding="utf-8"))
VALIDATOR = Draft4Validator(SCHEMA, format_checker=FormatChecker())


def valid(result: Report, *, least: Severity = "warning") -> dict[str, Any]:
    """The one run of the log, which is of the schema and the same after its JSON."""
    log = json.loads(to_json(to_sarif(result, least=least)))
    VALIDATOR.validate(log)
    assert (log["$schema"], log["version"]) == (SCHEMA["id"], "2.1.0")
    (run,) = log["runs"]
    return run  # type: ignore[no-any-return]


def test_the_schema_refuses_what_is_not_sarif() -> None:
    log = to_sarif(Report(files=(), passed_over=()))
    VALIDATOR.validate(log)
    for wrong in ({**log, "version": "2.2"}, {**log, "more": 1}, {"version": "2.1.0"}):
        assert not VALIDATOR.is_valid(wrong)
    log["runs"][0]["results"] = [{"ruleId": "TP002", "level": "info", "message": {"text": "x"}}]
    assert not VALIDATOR.is_valid(log)


def test_a_result_per_error_and_warning() -> None:
    write(FILES)
    run = valid(report(*FILES))
    assert [
        (result["ruleId"], result["level"], location(result), result["message"]["text"].split("\n")[0])
        for result in run["results"]
    ] == [
        ("TP002", "warning", ("warning.yaml", 7), "model.tp_comm_overlap: sequence_parallel is false"),
        (
            "TP002",
            "error",
            ("error.yaml", 7),
            "model.tp_comm_overlap: sequence_parallel is false (megatron-lm raises at validation)",
        ),
        ("RECIPE", "error", ("unusable.yaml", 3), "model.tensor_model_parallel_sizes: unknown key"),
    ]
    assert run["results"][2]["message"]["text"].endswith("\nFix: did you mean model.tensor_model_parallel_size?")
    assert run["columnKind"] == "unicodeCodePoints"


def location(result: dict[str, Any]) -> tuple[str, int | None]:
    (place,) = result["locations"]
    artifact = place["physicalLocation"]["artifactLocation"]
    assert artifact["uriBaseId"] == "%SRCROOT%"
    return artifact["uri"], place["physicalLocation"].get("region", {}).get("startLine")


def test_only_rules_that_occur_are_there_with_their_pages() -> None:
    write(FILES)
    run = valid(report(*FILES))
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["TP002", "RECIPE"]
    assert [rules[result["ruleIndex"]]["id"] for result in run["results"]] == ["TP002", "TP002", "RECIPE"]
    assert rules[0]["name"] == "TpWithoutSequenceParallel"
    assert rules[0]["shortDescription"]["text"] == "TP overlap needs sequence parallelism."
    assert rules[0]["fullDescription"]["text"] == page_parts(registered()["TP002"])["what"]
    assert all(label in rules[0]["help"]["text"] for label in ("Why: ", "Fix: ", "Holds for: ", "Source: "))
    assert "**Fix:** set `model.sequence_parallel=true`." in rules[0]["help"]["markdown"]
    assert rules[0]["defaultConfiguration"] == {"level": "error"}  # the gravest of its two results
    assert rules[0]["properties"] == {"tags": ["communication-overlap", "TP"], "problem.severity": "error"}
    assert "helpUri" not in rules[0]


def test_infos_are_notes_on_request() -> None:
    write({"good.yaml": GOOD})
    assert valid(report("good.yaml"))["results"] == []
    run = valid(report("good.yaml"), least="info")
    assert {result["level"] for result in run["results"]} == {"note"}
    assert {rule["properties"]["problem.severity"] for rule in run["tool"]["driver"]["rules"]} == {"recommendation"}


def test_unusable_files_are_told_of_the_run_too() -> None:
    write({"a.yaml": UNUSABLE, "b.yaml": GOOD, "c.yaml": ""})
    (invocation,) = valid(report("a.yaml", "b.yaml", "c.yaml"))["invocations"]
    assert invocation["executionSuccessful"] is False
    told = [
        (note["level"], location(note), note["message"]["text"]) for note in invocation["toolExecutionNotifications"]
    ]
    assert told == [
        (
            "error",
            ("a.yaml", 3),
            "model.tensor_model_parallel_sizes: unknown key\nFix: did you mean model.tensor_model_parallel_size?",
        ),
        ("error", ("c.yaml", None), "the file is empty"),
    ]
    assert valid(report("b.yaml"))["invocations"] == [{"executionSuccessful": True, "toolExecutionNotifications": []}]


def test_what_the_command_line_set_has_no_region() -> None:
    write({"a.yaml": ERROR})
    (result,) = valid(report("a.yaml", "comm_overlap.tp_comm_overlap=true"))["results"]
    assert location(result) == ("a.yaml", None)


@pytest.mark.parametrize("name", ["a b.yaml", "50%.yaml", "a#b?.yaml", "größe.yaml", "a:b.yaml", "\udcff.yaml"])
def test_names_of_files_are_uris(name: str, folder: Path) -> None:  # noqa: F811
    write({f"x/{name}": ERROR})
    (result,) = valid(report(f"x/{name}"))["results"]
    uri, _ = location(result)
    assert uri.isascii() and unquote(uri, errors="surrogateescape") == f"x/{name}"
    split = urlsplit(uri)
    assert (split.scheme, split.query, split.fragment) == ("", "", "")


def test_a_file_outside_has_an_absolute_uri(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    write({"a.yaml": ERROR, "b/c.yaml": GOOD})
    monkeypatch.chdir("b")
    (result,) = valid(report("../a.yaml"))["results"]
    (place,) = result["locations"]
    assert place["physicalLocation"]["artifactLocation"] == {"uri": (folder / "a.yaml").as_uri()}


def test_fingerprints_stay_while_lines_move_and_tell_findings_apart() -> None:
    write({"a.yaml": WARNING, "b.yaml": WARNING})

    def prints(*arguments: str) -> list[str]:
        return [
            result["partialFingerprints"]["overlapkit/v1"]
            for result in valid(report(*arguments), least="info")["results"]
        ]

    before = prints("a.yaml", "b.yaml")
    assert len(set(before)) == len(before)
    assert prints("./b.yaml", "a.yaml") != before and set(prints("./b.yaml", "a.yaml")) == set(before)
    write({"a.yaml": f"# one\n# two\n{WARNING}"})
    assert prints("a.yaml", "b.yaml") == before


def test_conditions_of_a_script() -> None:
    write({"train.sh": LAUNCH})

    def load(path: str, overrides: Sequence[str]) -> tuple[Outcome, ...]:
        return (
            Outcome(recipe=of_recipe(ERROR, path), when=("TP > 1",)),
            Outcome(recipe=of_recipe(GOOD, path), when=("not TP > 1",)),
        )

    (result,) = valid(check(select(["train.sh"]), load))["results"]
    assert result["properties"] == {"subject": "model.tp_comm_overlap", "when": ["TP > 1"]}
    assert result["message"]["text"].startswith("model.tp_comm_overlap: when TP > 1: sequence_parallel is false")


def test_the_page_of_every_rule_is_valid() -> None:
    recipe = of_recipe(GOOD)
    plan = replace(resolve(recipe), decisions=tuple(decision("recipe", code=code) for code in registered()))
    run = valid(
        Report(files=(Checked(path="a.yaml", outcomes=(ResolvedOutcome(recipe=recipe, plan=plan),)),), passed_over=())
    )
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(registered())
    assert [rule["id"] for rule in rules if "``" in json.dumps(rule) or not rule["fullDescription"]["text"]] == []


@settings(max_examples=150, deadline=None)
@given(hostile_reports())
def test_hostile_text_is_valid_and_becomes_no_link(result: Report) -> None:
    expected = [finding for checked in result.files for finding in findings(checked, "info")]
    run = valid(result, least="info")
    assert [found["ruleId"] for found in run["results"]] == [finding.code for finding in expected]
    for found in run["results"]:
        text = found["message"]["text"]
        assert all(line.isprintable() for line in text.split("\n")) and text.count("\n") <= 1


def test_what_looks_like_a_link_is_escaped() -> None:
    write({"a.yaml": GOOD.replace("h100", "'[x](http://example.org)'")})
    (result,) = valid(report("a.yaml"))["results"]
    assert result["message"]["text"].startswith("cluster.gpu: '\\[x](http://example.org)' is not a known GPU")


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from overlapkit.check import check; from overlapkit.check_paths import select;"
        "from overlapkit.render.sarif import to_sarif;"
        f"to_sarif(check(select([{str(ROOT / 'recipes')!r}])), least='info'); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, timeout=60)
    assert not {"rich", "typer", "omegaconf", "jsonschema"} & {name.partition(".")[0] for name in done.stdout.split()}
