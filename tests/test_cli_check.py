"""The verb ``check`` as CI and pre-commit call it: streams, forms and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from overlapkit.cli import app

ROOT = Path(__file__).parent.parent
GOOD = "cluster: {gpu: h100, num_gpus: 8}\nmodel: {tensor_model_parallel_size: 2, sequence_parallel: true}\n"
FAILS = GOOD + "train: {micro_batch_size: 1, global_batch_size: 3}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", *arguments])


@pytest.mark.parametrize(
    ("text", "arguments", "code"),
    [
        (GOOD, (), 0),
        (FAILS, (), 1),
        (FAILS, ("--fail-on", "never"), 0),
        (FAILS, ("train.global_batch_size=8",), 0),
        ("model: {tensor_model_parallel_size: 3}\ncluster: {num_gpus: 8}\n", (), 2),
    ],
)
def test_exit_code(folder: Path, text: str, arguments: tuple[str, ...], code: int) -> None:
    (folder / "recipe.yaml").write_text(text)
    assert check("recipe.yaml", *arguments).exit_code == code


def test_an_unusable_file_stops_no_other(folder: Path) -> None:
    (folder / "a.yaml").write_text("model: [\n")
    (folder / "b.yaml").write_text(FAILS)
    result = check("a.yaml", "b.yaml")
    assert result.exit_code == 2
    assert "CFG005" in result.stdout


def test_github_annotations_name_file_and_line(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(FAILS)
    result = check(".", "--format", "github")
    assert result.stdout.startswith("::error file=recipe.yaml,line=3,title=CFG005 train.global_batch_size::")


@pytest.mark.parametrize(("form", "key"), [("json", "files"), ("sarif", "runs")])
def test_machine_forms_stand_alone_on_stdout(folder: Path, form: str, key: str) -> None:
    (folder / "recipe.yaml").write_text(FAILS)
    assert key in json.loads(check("recipe.yaml", "--format", form).stdout)


def test_files_passed_over_are_counted_and_named_on_request(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(GOOD)
    (folder / "workflow.yaml").write_text("jobs: {}\n")
    assert "workflow.yaml" not in check(".").stdout
    assert "workflow.yaml" in check(".", "--verbose").stdout


def test_schema_and_rule_pages_are_the_committed_ones() -> None:
    schema = CliRunner().invoke(app, ["schema"]).stdout
    assert schema == (ROOT / "recipe.schema.json").read_text(encoding="utf-8")
    pages = CliRunner().invoke(app, ["explain", "--all", "--format", "markdown"]).stdout
    assert pages == (ROOT / "overlapkit" / "rules" / "README.md").read_text(encoding="utf-8")
