"""``overlapkit compare``: exit codes, forms, text, and which arguments are overrides."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path

import pytest
from test_cli import RECIPE, ROOT, run
from test_cli_streams import COLOUR, on_a_terminal
from typer.testing import CliRunner

import overlapkit
from overlapkit.cli import app

sys.path.insert(0, str(ROOT / "tests" / "measure"))
from write_nccl_log import write_logs
from write_trace import write_trace

SMALL = ("comm_overlap=null", "model.num_layers=2", "train.global_batch_size=4")
SP_OFF = "model.sequence_parallel=false"


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def traces(tmp_path: Path) -> str:
    """Traces of ranks 0, 1 and 16 of a job as the recipe has it."""
    for rank in (0, 1, 16):
        write_trace(overlapkit.volume(RECIPE, SMALL), tmp_path / f"rank{rank:02}.json.gz", rank=rank)
    return str(tmp_path)


def printed(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["compare", RECIPE, *arguments])
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result.stdout


# --- exit codes ---------------------------------------------------------------------------------------


def test_0_when_equal_and_1_when_not(traces: str) -> None:
    assert "is what was measured" in printed(traces, *SMALL)
    assert "differs from what was measured" in printed(traces, *SMALL, SP_OFF, exit_code=1)


TIED = ["tests/measure/tied_pp2.yaml", "tests/measure/traces/tied_pp2.r0.trace.json.gz"]
OTHER = "tests/measure/traces/dp2_pp2_buckets_overlap.r0.trace.json.gz"


def test_a_log_and_a_trace_of_one_job_are_compared_over_the_same_steps() -> None:
    for path in (TIED[1], "tests/measure/nccl/tied_pp2.r0.log.gz"):
        done = run("compare", TIED[0], path)
        assert done.returncode == 0 and "the whole input as 1 step" in done.stdout
        (rank,) = json.loads(run("compare", TIED[0], path, "-f", "json").stdout)["ranks"]
        assert (rank["steps"], rank["whole_input"]) == (1, True)


@pytest.mark.parametrize("form", ["text", "json", "csv"])
def test_3_and_one_line_where_nothing_could_be_compared(form: str) -> None:
    done = run("compare", TIED[0], OTHER, "-f", form)
    said = f"overlapkit: nothing could be compared: {OTHER}: its job has 4 ranks, the recipe 8\n"
    assert (done.returncode, done.stderr) == (3, said)
    if form == "json":
        assert [one["why"] for one in json.loads(done.stdout)["unpaired"]] == ["its job has 4 ranks, the recipe 8"]
    else:
        assert done.stdout.count("\n") == (form == "csv")  # the names of the columns


def test_without_times_there_is_no_table_of_overlap() -> None:
    text = run("compare", *TIED).stdout
    assert "is what was measured in all 11 rows" in text
    assert [line for line in text.splitlines() if "verlap" in line and "no GPU" not in line] == [
        "Overlap: no input has times of it"
    ]


def test_a_note_names_its_group_and_the_rows_that_it_is_of(traces: str) -> None:
    text = " ".join(printed(traces, *SMALL, "model.pipeline_model_parallel_size=1", exit_code=1).split())
    assert "note MODEL_PARALLEL_GROUP all_reduce float32, all_reduce int32: on 16 ranks, not 8: the job ran" in text


def test_the_first_lines_say_what_is_not_compared() -> None:
    done = run("compare", *TIED, OTHER)
    assert done.returncode == 1
    assert done.stdout.splitlines()[3] == "1 input is not compared: its job has 4 ranks, the recipe 8"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["missing.yaml", "."], 2, "cannot be read"),
        ([RECIPE, "model.num_layers=2"], 2, "no log or trace is named"),
        ([RECIPE, ".", "model.no_such=2"], 2, "no_such"),
        ([RECIPE, "missing.log"], 3, "no file or folder"),
        ([RECIPE, ".", "--plot", "compared.pdf"], 2, "is neither .svg nor .png"),
        ([RECIPE, ".", "--plot", "none/compared.svg"], 2, "none/compared.svg: cannot be written"),
    ],
)
def test_2_for_a_recipe_and_3_for_inputs_that_cannot_be_used(arguments: list[str], code: int, said: str) -> None:
    done = run("compare", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done
    assert said in done.stderr


def test_a_file_that_looks_like_an_override_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(overlapkit.volume(ROOT / RECIPE, SMALL), Path("model.rank=0"))
    result = CliRunner().invoke(app, ["compare", str(ROOT / RECIPE), *SMALL, "model.rank=0"])
    assert result.exit_code == 0, result.output


# --- forms --------------------------------------------------------------------------------------------


def test_json_is_the_comparison_and_nothing_else(traces: str) -> None:
    done = run("compare", RECIPE, traces, *SMALL, SP_OFF, "-f", "json")
    assert done.returncode == 1 and done.stderr == ""
    assert json.loads(done.stdout) == overlapkit.compare(RECIPE, traces, [*SMALL, SP_OFF]).to_dict()


def test_csv_has_a_line_per_rank_and_row_equal_or_not(traces: str) -> None:
    found = overlapkit.compare(RECIPE, traces, [*SMALL, SP_OFF])
    lines = list(csv.DictReader(io.StringIO(printed(traces, *SMALL, SP_OFF, "-f", "csv", exit_code=1))))
    rows = [(rank, row) for rank in found.ranks for row in rank.rows]
    assert len(lines) == len(rows)
    for line, (rank, row) in zip(lines, rows, strict=True):
        assert (line["rank"], line["op"], line["status"]) == (str(rank.rank), row.op, row.status)
        for side, figures in (("predicted", row.predicted), ("measured", row.measured)):
            assert line[f"{side}_message_bytes"] == ("" if figures is None else str(figures.message_bytes))


def test_a_picture_has_both_sides(traces: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    printed(traces, *SMALL, "--plot", str(tmp_path / "compared.svg"))
    text = (tmp_path / "compared.svg").read_text(encoding="utf-8")
    assert "Stage 0, predicted" in text and "Stage 0, ranks 0-1, measured" in text


# --- text ---------------------------------------------------------------------------------------------


def test_rows_that_differ_stand_as_predicted_and_measured(traces: str) -> None:
    text = printed(traces, *SMALL, SP_OFF, "--exact", exit_code=1)
    predicted = overlapkit.volume(RECIPE, [*SMALL, SP_OFF]).stages[0].rows
    measured = overlapkit.volume(RECIPE, SMALL).stages[0].rows
    sends = [next(row for row in rows if row.op == "send") for rows in (predicted, measured)]
    arrow = f"{sends[0].message_bytes:,} → {sends[1].message_bytes:,}"
    assert re.search(rf"send  bfloat16 +{sends[0].count} +{arrow} +−87.5 % +differs", text)
    assert re.search(r"all_gather  bfloat16 +– → \d+ +– → [\d,]+ +not predicted", text)
    assert re.search(r"all_reduce  bfloat16 +\d+ → – +[\d,]+ → – +not seen", text)


def test_equal_groups_are_named_in_one_line(traces: str) -> None:
    text = printed(traces, *SMALL, SP_OFF, exit_code=1)
    assert re.search(r"equal +DATA_PARALLEL_GROUP_WITH_CP, ", text)


def test_what_lies_outside_the_steps_is_said(tmp_path: Path) -> None:
    write_logs(overlapkit.volume(RECIPE, SMALL), tmp_path, steps=2)
    text = printed(str(tmp_path / "nccl.node-0.1000.log"), *SMALL)
    assert re.search(r"outside +\d+ calls, [\d.]+ GB, of set-up and of steps that are cut: not compared", text)
    assert "only there: WORLD" in " ".join(text.split())


def test_the_likely_reason_comes_with_its_overrides(traces: str) -> None:
    text = printed(traces, *SMALL, SP_OFF, exit_code=1)
    assert re.search(r"sequence parallelism on +\d+ → 0 rows differ +model.sequence_parallel=true", text)


def test_overlap_stands_in_one_table(traces: str) -> None:
    text = printed(traces, *SMALL)
    assert re.search(
        r"DP  gradient reduction .* planned off +[\d.]+ \w+, of it [\d.]+ \w+ exposed, 75.0 % hidden", text
    )


def test_a_narrow_terminal_loses_no_word(traces: str) -> None:
    wide = set(re.findall(r"[A-Z_]{6,}|[a-z_]{4,}", printed(traces, *SMALL, SP_OFF, exit_code=1)))
    shown = COLOUR.sub("", on_a_terminal("compare", RECIPE, traces, *SMALL, SP_OFF, COLUMNS="50"))
    shown = "".join(shown.split())  # lines break anywhere
    assert {word for word in wide if word not in shown} == set()
