"""The command: help that runs, exit codes, formats, streams."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from overlapkit import __version__, resolve
from overlapkit.cli import app
from overlapkit.presets import load_preset, preset_names
from overlapkit.rules import documented

ROOT = Path(__file__).resolve().parent.parent
COMMAND = str(Path(sys.executable).with_name("overlapkit"))
RECIPE = "recipes/llama2_7b_32xh20.yaml"
PLAIN = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}


def run(
    *arguments: str, env: Mapping[str, str] | None = None, stdout: Any = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """The installed command in a process of its own, at the checkout."""
    return subprocess.run(
        [COMMAND, *arguments],
        cwd=ROOT,
        env={**PLAIN, "PYTHONIOENCODING": "utf-8", **(env or {})},
        stdout=stdout,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


def bash(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env={**PLAIN, "OVERLAPKIT": COMMAND, **env},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def recipes(tmp_path: Path) -> dict[str, str]:
    """Recipes by the gravest thing that is said of them."""
    head = "cluster: {gpu: h100, num_gpus: 8}\ncomm_overlap: {tp_comm_overlap: true}\n"
    model = "model: {tensor_model_parallel_size: 2, sequence_parallel: %s}\nmixed_precision: bf16_mixed\n"
    texts = {
        "error": head + model % "false" + "software: {framework: megatron-lm}\n",
        "warning": head + model % "false",
        "info": head + model % "true",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return {name: str(tmp_path / f"{name}.yaml") for name in texts}


# --- help ----------------------------------------------------------------------------------------


def verbs(command: Any = None, names: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command that does something."""
    command = command or get_command(app)
    below = getattr(command, "commands", None)
    if below is None:
        yield names
    for name, child in (below or {}).items():
        yield from verbs(child, (*names, name))


def example_of(verb: tuple[str, ...]) -> list[str]:
    """What follows ``Example:`` in a verb's help."""
    help_text = CliRunner().invoke(app, [*verb, "--help"]).stdout
    lines = help_text.splitlines()
    start = next(index for index, line in enumerate(lines) if "Example:" in line)
    example = []
    for line in lines[start:]:
        if not line.strip():
            break
        example.append(line.strip())
    return shlex.split(" ".join(example).removeprefix("Example:"))


@pytest.mark.parametrize("verb", list(verbs()), ids=" ".join)
def test_help_shows_an_example_that_runs(verb: tuple[str, ...]) -> None:
    example = example_of(verb)
    assert example[: len(verb) + 1] == ["overlapkit", *verb]
    result = CliRunner().invoke(app, example[1:])
    assert result.exit_code in (0, 1), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.stdout


def test_verbs() -> None:
    presets = {f"presets {verb}" for verb in ("list", "show", "check", "diff", "derive")}
    expected = {"resolve", "check", "schema", "explain", "volume"} | presets
    assert {" ".join(verb) for verb in verbs()} >= expected
    for arguments in ([], ["--help"], ["-h"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code in (0, 2)  # without arguments typer says 2 from 0.13 on
        assert all(verb[0] in result.output for verb in verbs())


def test_version() -> None:
    assert run("--version").stdout == f"overlapkit {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["no_such_verb"],
        ["resolve", RECIPE, "--no-such-option"],
        ["resolve", RECIPE, "--format", "xml"],
        ["resolve", RECIPE, "--fail-on", "always"],
        ["resolve", RECIPE, "--tp=4"],
        ["presets", "no_such_verb"],
        ["presets", "show"],
        ["explain", "TP001", "TP002"],
    ],
)
def test_a_command_that_is_none_exits_with_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage:" in done.stderr and "Traceback" not in done.stderr


# --- exit codes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gravest", "fails"),
    [
        ("error", {"error", "warning", "info"}),
        ("warning", {"warning", "info"}),
        ("info", {"info"}),
    ],
)
@pytest.mark.parametrize("form", ["text", "json", "yaml", "env"])
def test_findings_exit_with_1(gravest: str, fails: set[str], form: str, recipes: dict[str, str]) -> None:
    for level in ("error", "warning", "info", "never"):
        result = CliRunner().invoke(app, ["resolve", recipes[gravest], "--fail-on", level, "--format", form])
        assert result.exit_code == (1 if level in fails else 0), (level, result.output)


def test_errors_are_the_default(recipes: dict[str, str]) -> None:
    assert run("resolve", recipes["error"]).returncode == 1
    assert run("resolve", recipes["warning"]).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["resolve", "missing.yaml"], "overlapkit: missing.yaml: cannot be read: No such file or directory\n"),
        (["resolve", RECIPE, "model.x=1"], "overlapkit: command line: model.x: unknown key\n"),
        (
            ["explain", "TP0002"],
            "overlapkit: explain: 'TP0002' is not a rule's code; did you mean TP002?"
            " overlapkit explain --all lists them\n",
        ),
        (["explain", "?"], "overlapkit: explain: '?' is not a rule's code; overlapkit explain --all lists them\n"),
        (["resolve"], "overlapkit: resolve: no recipe is named; for example: overlapkit resolve recipe.yaml\n"),
        (["explain"], "overlapkit: explain: give a code or --all; for example: overlapkit explain TP002\n"),
        (
            ["explain", "TP002", "--all"],
            "overlapkit: explain: give a code or --all; for example: overlapkit explain TP002\n",
        ),
        (["presets", "show", "x"], "overlapkit: 'x' is not a preset; overlapkit presets list names them\n"),
    ],
)
def test_what_is_unusable_exits_with_2_and_one_line(arguments: list[str], line: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


# --- formats -------------------------------------------------------------------------------------


def test_json_and_yaml_are_the_plan_and_nothing_else(recipes: dict[str, str]) -> None:
    for recipe in (RECIPE, *recipes.values()):
        expected = resolve(recipe).to_dict()
        for form, load in (("json", json.loads), ("yaml", yaml.safe_load)):
            done = run("resolve", recipe, "-f", form, "--fail-on", "never")
            assert (load(done.stdout), done.stderr) == (expected, "")


def test_env_is_for_a_shell_and_errors_go_to_stderr(recipes: dict[str, str]) -> None:
    plan = resolve(recipes["error"])
    done = run("resolve", recipes["error"], "--format", "env")
    assert done.stdout == "".join(f"export {name}={shlex.quote(value)}\n" for name, value in plan.env.items())
    errors = [decision for decision in plan.decisions if decision.severity == "error"]
    assert [line.split()[0] for line in done.stderr.splitlines()] == [decision.code for decision in errors]
    assert run("resolve", recipes["info"], "--format", "env").stderr == ""


def test_a_plan_in_env_is_what_a_shell_exports() -> None:
    done = bash(f'eval "$("$OVERLAPKIT" resolve {RECIPE} --format env)" && env -0')
    exported = dict(pair.split("=", 1) for pair in done.stdout.split("\0") if pair)
    assert {**exported, **resolve(RECIPE).env} == exported


def test_overrides_and_options_in_any_order() -> None:
    one = run("resolve", RECIPE, "train.micro_batch_size=2", "--format", "json", "cluster.gpu=h100")
    other = run("resolve", "-f", "json", RECIPE, "cluster.gpu=h100", "train.micro_batch_size=2")
    assert one.stdout == other.stdout
    assert json.loads(one.stdout)["target"]["gpu"] == "h100"


# --- the other verbs -----------------------------------------------------------------------------


def test_explain_one() -> None:
    result = CliRunner().invoke(app, ["explain", "tp002"])
    assert result.stdout.startswith("TP002  TP overlap needs sequence parallelism\n")
    assert all(label in result.stdout for label in ("Why: ", "Fix: ", "Holds for: ", "Source: "))
    page = json.loads(CliRunner().invoke(app, ["explain", "TP002", "--format", "json"]).stdout)
    assert set(page) == {"code", "summary", "what", "why", "fix", "applies_to", "source"}
    assert page["code"] == "TP002"


def test_explain_all() -> None:
    pages = json.loads(CliRunner().invoke(app, ["explain", "--all", "--format", "json"]).stdout)
    assert [page["code"] for page in pages] == sorted(documented())
    text = CliRunner().invoke(app, ["explain", "--all"]).stdout
    assert all(f"{code}  " in text for code in documented())


def test_presets_list() -> None:
    text = CliRunner().invoke(app, ["presets", "list"]).stdout
    assert len(text.splitlines()) == len(preset_names()) + 1
    for form, load in (("json", json.loads), ("yaml", yaml.safe_load)):
        found = load(CliRunner().invoke(app, ["presets", "list", "--format", form]).stdout)
        assert [preset["name"] for preset in found] == list(preset_names())
        assert "userbuffers" not in found[0]


@pytest.mark.parametrize("name", preset_names()[:2])
def test_presets_show(name: str) -> None:
    preset = load_preset(name)
    text = CliRunner().invoke(app, ["presets", "show", name]).stdout
    assert all(layer in text for layer in preset.userbuffers)
    assert preset.source in text
    shown = yaml.safe_load(CliRunner().invoke(app, ["presets", "show", name, "--format", "yaml"]).stdout)
    assert shown == preset.userbuffers  # the file that --tp-comm-overlap-cfg reads
    both = json.loads(CliRunner().invoke(app, ["presets", "show", name, "--format", "json"]).stdout)
    assert (both["name"], both["userbuffers"]) == (name, preset.userbuffers)


# --- completion ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    done = run(env={"_OVERLAPKIT_COMPLETE": f"source_{shell}"})
    assert done.returncode == 0
    assert "_OVERLAPKIT_COMPLETE" in done.stdout


def test_show_completion() -> None:
    done = bash('"$OVERLAPKIT" --show-completion; true')
    assert "_overlapkit_completion" in done.stdout


def test_completion() -> None:
    done = run(env={"_OVERLAPKIT_COMPLETE": "complete_bash", "COMP_WORDS": "overlapkit presets ", "COMP_CWORD": "2"})
    assert done.stdout.split() == ["list", "show", "check", "diff", "derive"]
