"""``overlapkit estimate``: forms, files beside them, and what is refused.

``pytest tests/test_cli_estimate.py --update-golden`` writes the texts in ``golden_estimate/`` again.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli import RECIPE, ROOT, run
from test_cli_imports import imported
from test_cli_streams import COLOUR, on_a_terminal
from typer.testing import CliRunner

import overlapkit
from overlapkit.cli import app

GOLDEN = ROOT / "tests" / "golden_estimate"
LARGE = "recipes/llama31_405b_h100.yaml"
RECIPES = (
    "deepseek_v3_gb200",
    "llama31_405b_h100",
    "llama3_8b_fsdp_8xh100",
    "mixtral_8x7b_h100",
    "qwen3_32b_8xh20",
)


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def printed(*arguments: str) -> str:
    """What the command writes to a pipe."""
    result = CliRunner().invoke(app, ["estimate", *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def refused(*arguments: str) -> str:
    """The one line of a command that cannot be used."""
    done = run("estimate", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    return done.stderr


# --- forms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_text_is_golden(recipe: str, request: pytest.FixtureRequest) -> None:
    golden = GOLDEN / f"{recipe}.txt"
    text = printed(f"recipes/{recipe}.yaml")
    if request.config.getoption("--update-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8", newline="\n")
    assert text == golden.read_text(encoding="utf-8"), f"see {__doc__}"


def test_text_is_a_screen() -> None:
    assert printed(LARGE).count("\n") < 40


def test_json_is_the_estimate_and_nothing_else() -> None:
    done = run("estimate", RECIPE, "train.global_batch_size=32", "-f", "json")
    expected = overlapkit.estimate(RECIPE, ["train.global_batch_size=32"]).to_dict()
    assert (json.loads(done.stdout), done.stderr) == (json.loads(json.dumps(expected)), "")


def test_json_adds_up_to_the_step() -> None:
    found = json.loads(printed(LARGE, "-f", "json"))
    exposed = sum(group["exposed_s"] for group in found["groups"].values())
    assert sum(found["parts"].values()) + exposed == pytest.approx(found["step_time_s"])
    for group in found["groups"].values():
        assert group["hidden_s"] + group["exposed_s"] == pytest.approx(group["total_s"])


def test_csv_has_the_figures_of_json() -> None:
    found = json.loads(printed(LARGE, "-f", "json"))
    lines = {(line["kind"], line["name"]): line for line in csv.DictReader(io.StringIO(printed(LARGE, "-f", "csv")))}
    assert float(lines["step", "step_time"]["value"]) == found["step_time_s"]
    assert float(lines["rate", "mfu"]["value"]) == found["mfu"]
    for axis, group in found["groups"].items():
        line = lines["exposed", axis]
        assert (float(line["value"]), int(line["message_bytes"])) == (group["exposed_s"], group["message_bytes"])
    for name, saving in found["saves"].items():
        assert float(lines["saves", name]["value"]) == saving["seconds"]


def test_a_plan_with_errors_is_said_to_have_them() -> None:
    text = printed(RECIPE, "comm_overlap=null", "ddp.overlap_param_gather=true", "ddp.use_distributed_optimizer=false")
    assert "would fail (2 errors): overlapkit resolve says why" in text
    assert "note     this launch would fail" in text


# --- terminals -------------------------------------------------------------------------------------


def test_colour_is_for_terminals() -> None:
    assert "\x1b[" in on_a_terminal("estimate", RECIPE)
    assert "\x1b" not in on_a_terminal("estimate", RECIPE, NO_COLOR="1")
    assert "\x1b" not in run("estimate", RECIPE, env={"FORCE_COLOR": "1"}).stdout


@pytest.mark.parametrize("columns", ["30", "60", "80", "200"])
def test_a_narrow_terminal_loses_nothing(columns: str) -> None:
    wide = set(re.findall(r"\d[\d,.]+|[A-Z]{2,}|[a-z_]{3,}", printed(LARGE)))
    shown = COLOUR.sub("", on_a_terminal("estimate", LARGE, COLUMNS=columns))
    assert "…" not in shown
    shown = "".join(shown.split())  # lines break anywhere
    assert {word for word in wide if word not in shown} == set()


# --- files -----------------------------------------------------------------------------------------


def test_trace_and_answer_at_once(tmp_path: Path) -> None:
    path = tmp_path / "step.json.gz"
    text = printed(LARGE, "--trace", str(path))
    assert text == printed(LARGE)
    events: Any = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    step_us = 1e6 * overlapkit.estimate(LARGE).step_time_s
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == pytest.approx(step_us, abs=0.01)
    assert {event["pid"] for event in events} == set(range(8))
    passes = {"forward", "backward"}
    assert sum(event.get("cat") in passes for event in events) == 2 * 192 * 8 * 8  # microbatches, stages, chunks


def test_a_picture_beside_the_answer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "step.png"
    assert printed(RECIPE, "--plot", str(path)) == printed(RECIPE)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["estimate", RECIPE, "--plot", "step.svg"])
    assert str(result.exception) == "--plot needs matplotlib: pip install 'overlapkit[plot]'"
    assert getattr(result.exception, "exit_code", None) == 2
    assert result.stdout == ""


def test_only_a_picture_needs_matplotlib() -> None:
    assert imported(f"import overlapkit; overlapkit.estimate({RECIPE!r})") == {"yaml"}
    command = "from typer.testing import CliRunner; from overlapkit.cli import app; CliRunner().invoke(app, {})"
    assert "matplotlib" not in imported(command.format(["estimate", RECIPE]))


@pytest.mark.parametrize(("option", "name"), [("--trace", "step.json"), ("--plot", "step.svg")])
def test_a_file_that_cannot_be_written(option: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    nowhere, folder, full = tmp_path / "none" / name, tmp_path / f"folder_{name}", tmp_path / f"full_{name}"
    folder.mkdir()
    full.symlink_to("/dev/full")
    for path, said in (
        (nowhere, "No such file or directory"),
        (folder, "Is a directory"),
        (full, "No space left on device"),
    ):
        assert refused(RECIPE, option, str(path)) == f"overlapkit: {path}: cannot be written: {said}\n"
    assert sorted(tmp_path.iterdir()) == sorted([folder, full])


# --- what is refused -------------------------------------------------------------------------------


def test_what_is_missing_is_one_line(tmp_path: Path) -> None:
    recipe = tmp_path / "bare.yaml"
    recipe.write_text("cluster: {gpu: h100, num_gpus: 8}\nmodel: {num_layers: 4, hidden_size: 64}\n")
    assert "model.num_attention_heads, model.vocab_size, model.seq_length" in refused(str(recipe))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.yaml"], "missing.yaml: cannot be read"),
        ([RECIPE, "cluster.gpu=null"], "cluster.gpu: estimate needs the GPU; for example cluster.gpu=h100"),
        ([RECIPE, "cluster.gpu=abacus"], "'abacus' is not a known GPU"),
        ([RECIPE, "no_override"], "'no_override' is not an override"),
        (["pretrain.sh"], "a recipe is a YAML file; overlapkit resolve --megatron-lm-args pretrain.sh --save"),
        (["recipes/llama3_70b_lora_8xh100.yaml"], "peft: the time of frozen parameters is not modelled"),
        ([RECIPE, "--plot", "step.pdf"], "--plot: 'step.pdf' is neither .svg nor .png; end its name with .svg"),
        ([RECIPE, "--trace", "step.txt"], "--trace: 'step.txt' is neither .json nor .json.gz"),
    ],
)
def test_what_cannot_be_used_is_one_line(arguments: list[str], said: str) -> None:
    assert said in refused(*arguments)


def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = run("estimate", RECIPE, stdout=full)
    assert (done.returncode, done.stderr) == (2, "overlapkit: [Errno 28] No space left on device\n")
