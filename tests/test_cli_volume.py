"""``overlapkit volume``: forms, options, two configurations side by side, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from test_cli import RECIPE, ROOT, run
from test_cli_imports import imported
from test_cli_streams import COLOUR, on_a_terminal
from typer.testing import CliRunner

import overlapkit
from overlapkit.cli import app

LLAMA2 = (RECIPE, "train.global_batch_size=32", "comm_overlap=null")  # the sizes that were asked about
LARGE = "recipes/llama31_405b_h100.yaml"
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"<!-- volume: (.+?) -->\n```text\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def printed(*arguments: str) -> str:
    """What the command writes to a pipe."""
    result = CliRunner().invoke(app, ["volume", *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def refused(*arguments: str) -> str:
    """The one line of a command that cannot be used."""
    done = run("volume", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    return done.stderr


# --- the README --------------------------------------------------------------------------------------


def test_readme_answers_the_question_in_four_variants() -> None:
    assert [" ".join(shlex.split(arguments)[len(LLAMA2) + 1 :]) for arguments, _ in SHOWN] == [
        "",
        "--diff model.sequence_parallel=false",
        "--diff ddp.use_distributed_optimizer=false",
        "--diff model.recompute_granularity=full --diff model.recompute_method=uniform"
        " --diff model.recompute_num_layers=1",
    ]
    assert all(shlex.split(arguments)[:4] == [*LLAMA2, "--exact"] for arguments, _ in SHOWN)


@pytest.mark.parametrize(("arguments", "shown"), SHOWN)
def test_readme_shows_what_the_command_prints(arguments: str, shown: str, request: pytest.FixtureRequest) -> None:
    text = printed(*shlex.split(arguments))
    if request.config.getoption("--update-golden"):
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        head = f"<!-- volume: {arguments} -->\n```text\n"
        (ROOT / "README.md").write_text(readme.replace(head + shown, head + text), encoding="utf-8", newline="\n")
        return
    assert shown == text


# --- machine forms -------------------------------------------------------------------------------------


def test_json_is_the_volume_and_nothing_else() -> None:
    found = overlapkit.volume(LLAMA2[0], LLAMA2[1:])
    for options, expected in (
        ((), found.to_dict()),
        (("--phases",), found.to_dict(phases=True)),
        (("--nodes",), found.to_dict(nodes=True)),
    ):
        done = run("volume", *LLAMA2, "-f", "json", *options)
        assert (json.loads(done.stdout), done.stderr) == (expected, "")


def test_csv_has_a_line_per_row_with_whole_bytes() -> None:
    lines = list(csv.DictReader(io.StringIO(printed(*LLAMA2, "--format", "csv"))))
    rows = [
        {"pipeline_rank": stage["pipeline_rank"], "global_ranks": f"ranks {stage['global_ranks']}", **row}
        for stage in overlapkit.volume(LLAMA2[0], LLAMA2[1:]).to_dict()["stages"]
        for row in stage["rows"]
    ]
    assert [list(line) for line in lines] == [list(row) for row in rows]
    for line, row in zip(lines, rows, strict=True):
        assert line == {
            name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in row.items()
        }


def test_csv_of_phases_adds_up_to_the_rows() -> None:
    sums: dict[tuple[str, ...], int] = {}
    for line in csv.DictReader(io.StringIO(printed(*LLAMA2, "-f", "csv", "--phases"))):
        assert line["phase"] in ("forward", "backward", "p2p", "finalize", "optimizer", "train_loop")
        key = (line["pipeline_rank"], line["group"], line["op"], line["dtype"])
        sums[key] = sums.get(key, 0) + int(line["message_bytes"])
    assert sums == {
        (str(stage.pipeline_rank), row.group, row.op, row.dtype): row.message_bytes
        for stage in overlapkit.volume(LLAMA2[0], LLAMA2[1:]).stages
        for row in stage.rows
    }


def test_a_job_of_one_gpu_moves_nothing() -> None:
    one = ("cluster.num_gpus=1", "model.tensor_model_parallel_size=1", "model.pipeline_model_parallel_size=1")
    alone = (*LLAMA2, *one, "model.sequence_parallel=false")
    assert "Stage 0, ranks 0: each sends 0 B" in printed(*alone)
    assert printed(*alone, "-f", "csv").count("\n") == 1  # the titles


# --- text ------------------------------------------------------------------------------------------------


def test_exact_gives_every_byte() -> None:
    text = printed(*LLAMA2, "--exact")
    for stage in overlapkit.volume(LLAMA2[0], LLAMA2[1:]).stages:
        for row in stage.rows:
            line = rf"{row.op} +{row.dtype} +{row.count:,} +{row.message_bytes:,} +{row.wire_bytes:,}\n"
            assert re.search(line, text), row
    assert "52,076,478,464" not in printed(*LLAMA2) and "52.1 GB" in printed(*LLAMA2)


def test_phases_stand_below_their_row() -> None:
    text = printed(*LLAMA2, "--phases")
    assert re.search(r"    all_gather +bfloat16 +1,552 .*\n      forward +512 .*\n      backward +1,040 ", text)


def test_the_batch_on_request() -> None:
    assert "broadcast" not in printed(*LLAMA2)
    assert re.search(r"broadcast +int64 +from source +32 ", printed(*LLAMA2, "--data-broadcast"))
    assert "only Megatron-LM broadcasts the batch" in refused(LARGE, "--data-broadcast")


def test_every_pair_of_nodes_on_request() -> None:
    found = overlapkit.volume(LARGE).between_nodes()
    assert "more, which --nodes lists" in printed(LARGE)
    lines = re.findall(r"^  [\d.]+ \w?B +(\d+) → (\d+)$", printed(LARGE, "--nodes"), flags=re.MULTILINE)
    assert [(int(a), int(b)) for a, b in lines] == list(found)


def test_a_plan_with_errors_is_said_to_have_them() -> None:
    broken = (*LLAMA2, "ddp.overlap_param_gather=true", "ddp.use_distributed_optimizer=false")
    assert "would fail (2 errors): overlapkit resolve says why" in printed(*broken)
    assert "would fail" not in printed(*LLAMA2)
    assert "which would fail" in printed(*LLAMA2, "--diff", broken[-2], "--diff", broken[-1])


# --- two configurations ------------------------------------------------------------------------------------


def test_diff_as_json_is_both_volumes() -> None:
    change = "model.sequence_parallel=false"
    found = json.loads(printed(*LLAMA2, "--diff", change, "-f", "json"))
    assert found == {
        "schema_version": 1,
        "configurations": [
            {"overrides": [], "volume": overlapkit.volume(LLAMA2[0], LLAMA2[1:]).to_dict()},
            {"overrides": [change], "volume": overlapkit.volume(LLAMA2[0], [*LLAMA2[1:], change]).to_dict()},
        ],
    }


def test_diff_as_csv_names_the_configuration() -> None:
    lines = list(csv.DictReader(io.StringIO(printed(*LLAMA2, "--diff", "model.sequence_parallel=false", "-f", "csv"))))
    assert next(iter(lines[0])) == "configuration"
    assert list(dict.fromkeys(line["configuration"] for line in lines)) == ["recipe", "model.sequence_parallel=false"]


# --- terminals -----------------------------------------------------------------------------------------------


def test_colour_is_for_terminals() -> None:
    assert "\x1b[" in on_a_terminal("volume", RECIPE)
    assert "\x1b" not in on_a_terminal("volume", RECIPE, NO_COLOR="1")
    assert "\x1b" not in run("volume", RECIPE, env={"FORCE_COLOR": "1"}).stdout


@pytest.mark.parametrize("options", [(), ("--exact",), ("--exact", "--diff", "model.sequence_parallel=false")])
@pytest.mark.parametrize("columns", ["30", "60", "80", "200"])
def test_a_narrow_terminal_loses_nothing(columns: str, options: tuple[str, ...]) -> None:
    wide = set(re.findall(r"\d[\d,.]+|[A-Z_]{6,}|[a-z_]{3,}", printed(LARGE, *options)))
    shown = COLOUR.sub("", on_a_terminal("volume", LARGE, *options, COLUMNS=columns))
    assert "…" not in shown
    shown = "".join(shown.split())  # lines break anywhere
    assert {word for word in wide if word not in shown} == set()


@pytest.mark.parametrize("columns", ["30", "80"])
def test_a_figure_is_never_cut_in_two(columns: str) -> None:
    shown = COLOUR.sub("", on_a_terminal("volume", LARGE, "--exact", COLUMNS=columns))
    for row in overlapkit.volume(LARGE).stages[0].rows:
        assert re.search(rf"\b{row.message_bytes:,}\b", shown), row


# --- pictures --------------------------------------------------------------------------------------------------


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["volume", RECIPE, "--plot", "volume.svg"])
    assert str(result.exception) == "--plot needs matplotlib: pip install 'overlapkit[plot]'"
    assert getattr(result.exception, "exit_code", None) == 2
    assert result.stdout == ""


def test_a_picture_is_svg_or_png() -> None:
    assert refused(RECIPE, "--plot", "volume.pdf").startswith(
        "overlapkit: --plot: 'volume.pdf' is neither .svg nor .png"
    )


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    nowhere, folder = tmp_path / "none" / "volume.svg", tmp_path / "folder.svg"
    folder.mkdir()
    assert refused(RECIPE, "--plot", str(nowhere)).endswith(
        "none/volume.svg: cannot be written: No such file or directory\n"
    )
    assert refused(RECIPE, "--plot", str(folder)).endswith("folder.svg: cannot be written: Is a directory\n")


def test_only_a_picture_needs_matplotlib() -> None:
    assert imported(f"import overlapkit; overlapkit.volume({RECIPE!r})") == {"yaml"}
    command = "from typer.testing import CliRunner; from overlapkit.cli import app; CliRunner().invoke(app, {})"
    assert "matplotlib" not in imported(command.format(["volume", RECIPE]))


# --- what is refused -------------------------------------------------------------------------------------------


def test_what_is_missing_is_one_line(tmp_path: Path) -> None:
    recipe = tmp_path / "bare.yaml"
    recipe.write_text("cluster: {gpu: h100, num_gpus: 8}\nmodel: {num_layers: 4, hidden_size: 64}\n")
    names = "model.num_attention_heads, model.vocab_size, model.seq_length, train.micro_batch_size and"
    assert f"volume needs {names} train.global_batch_size" in refused(str(recipe))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.yaml"], "cannot be read"),
        (["recipes/deepseek_v3_h100.yaml"], "the traffic of multi-latent attention is not modelled"),
        (
            ["pretrain.sh"],
            "a recipe is a YAML file; overlapkit resolve --megatron-lm-args pretrain.sh --save recipe.yaml",
        ),
        ([RECIPE, "--nodes", "-f", "csv"], "--nodes goes with --format text and json"),
        ([RECIPE, "--phases", "--diff", "model.num_layers=16"], "--phases goes with --diff in --format json"),
        ([RECIPE, "--diff", "no_override"], "'no_override' is not an override"),
    ],
)
def test_what_cannot_be_used_is_one_line(arguments: list[str], said: str) -> None:
    assert said in refused(*arguments)
