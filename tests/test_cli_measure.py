"""``overlapkit measure``: what the README shows, the forms, and what is refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import shlex
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from test_cli import RECIPE, ROOT, run
from test_cli_imports import imported
from test_cli_streams import COLOUR, on_a_terminal
from typer.testing import CliRunner

import overlapkit
from overlapkit.cli import app
from overlapkit.measure.how import FRAMEWORKS, SOURCES

sys.path.insert(0, str(ROOT / "tests" / "measure"))
from write_trace import HIDDEN, write_trace

LLAMA2 = (RECIPE, "train.global_batch_size=32", "comm_overlap=null")  # of the README
FULL = ("model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1")
SMALL = (*LLAMA2, "model.num_layers=2", "train.global_batch_size=4")
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"<!-- traces: (.+?) -->\n```text\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in that has the recipes, and ``traces`` of ranks 0, 1 and 16 of a small job."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "traces").mkdir()
    volume = overlapkit.volume(ROOT / SMALL[0], SMALL[1:])
    for rank in (0, 1, 16):
        write_trace(volume, tmp_path / "traces" / f"rank{rank:02}.json.gz", rank=rank)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "traces"


def printed(*arguments: str) -> str:
    """What the command writes to a pipe."""
    result = CliRunner().invoke(app, ["measure", *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def refused(*arguments: str) -> tuple[int, str]:
    """The exit code and the one line of a command that cannot be used."""
    done = run("measure", *arguments)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1), done
    return done.returncode, done.stderr


# --- the README --------------------------------------------------------------------------------------


def test_readme_shows_both_verbs() -> None:
    assert [arguments.split()[0] for arguments, _ in SHOWN] == ["measure", "measure", "compare"]


@pytest.fixture(scope="module")
def recomputed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with traces of ranks 0 and 16 of the job that the README describes: it recomputes all its layers."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    (folder / "tests").symlink_to(ROOT / "tests")
    (folder / "traces").mkdir()
    ran = overlapkit.volume(ROOT / LLAMA2[0], [*LLAMA2[1:], *FULL])
    for rank in (0, 16):
        write_trace(ran, folder / "traces" / f"rank{rank:02}.json.gz", rank=rank)
    return folder


@pytest.mark.parametrize(("arguments", "shown"), SHOWN)
def test_readme_shows_what_the_command_prints(
    arguments: str, shown: str, request: pytest.FixtureRequest, recomputed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recomputed)
    result = CliRunner().invoke(app, shlex.split(arguments))
    assert result.exit_code == (1 if arguments.startswith("compare") else 0), result.output
    if request.config.getoption("--update-golden"):
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        head = f"<!-- traces: {arguments} -->\n```text\n"
        new = readme.replace(head + shown, head + result.stdout)
        (ROOT / "README.md").write_text(new, encoding="utf-8", newline="\n")
        return
    assert shown == result.stdout


# --- machine forms -------------------------------------------------------------------------------------


def test_json_is_the_measurement_and_nothing_else(traces: Path) -> None:
    done = run("measure", str(traces), "-f", "json")
    assert (json.loads(done.stdout), done.stderr) == (overlapkit.measure(traces).to_dict(), "")


def test_csv_has_a_line_per_rank_and_row(traces: Path) -> None:
    lines = list(csv.DictReader(io.StringIO(printed("traces", "--format", "csv"))))
    rows = [(rank, row) for rank in overlapkit.measure("traces").ranks for row in rank.rows]
    assert len(lines) == len(rows)
    for line, (rank, row) in zip(lines, rows, strict=True):
        assert row.per_step is not None
        assert line["source"] == rank.source and line["rank"] == str(rank.rank) and line["steps"] == "2"
        assert (line["group"], line["op"], line["dtype"]) == (row.group, row.op, row.dtype)
        assert line["message_bytes"] == str(row.message_bytes)
        assert line["message_bytes_per_step"] == str(row.per_step.message_bytes)


def test_a_picture_has_a_bar_for_ranks_that_moved_the_same(traces: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    printed("traces", "--plot", "measured.svg")
    text = (tmp_path / "measured.svg").read_text(encoding="utf-8")
    assert "Stage 0, ranks 0-1" in text and "Stage 1, rank 16" in text
    assert "per optimizer step" in text


# --- text ------------------------------------------------------------------------------------------------


def test_text_has_every_row_per_step(traces: Path) -> None:
    text = printed("traces", "--exact")
    for stage in overlapkit.volume(SMALL[0], SMALL[1:]).stages:
        for row in stage.rows:
            line = rf"{row.op} +{row.dtype} +{row.count:,} +{row.message_bytes:,} +{row.wire_bytes:,} "
            assert re.search(line, text), row


def test_ranks_that_moved_the_same_share_a_table(traces: Path) -> None:
    text = printed("traces")
    assert re.findall(r"^Stage \d+, ranks? [\d, -]+", text, flags=re.MULTILINE) == [
        "Stage 0, ranks 0-1",
        "Stage 1, rank 16",
    ]
    assert text.count("2 complete steps, by ProfilerStep ranges") == 2


def test_times_are_of_a_step_and_say_what_was_hidden(traces: Path) -> None:
    text = printed("traces/rank00.json.gz")
    [rank] = overlapkit.measure("traces/rank00.json.gz").ranks
    assert rank.overlap is not None
    tp = rank.overlap.groups["TENSOR_MODEL_PARALLEL_GROUP"]
    found = re.search(r"TENSOR_MODEL_PARALLEL_GROUP, 8 ranks .* ([\d.]+) (ms|µs) +[\d.]+ (?:ms|µs) +([\d.]+) %", text)
    assert found is not None
    shown = float(found[1]) * (1000 if found[2] == "ms" else 1)
    assert shown == pytest.approx(tp.time_us / rank.steps, rel=0.01)
    assert float(found[3]) == pytest.approx(100 * HIDDEN["tp"], abs=0.1)


def test_a_source_without_device_times_has_no_columns_for_them(traces: Path) -> None:
    volume = overlapkit.volume(SMALL[0], SMALL[1:])
    write_trace(volume, traces / "host.json.gz", kernels=False)
    text = printed("traces/host.json.gz")
    assert "exposed" not in text.partition("Notes")[0]
    assert "no GPU kernels captured" in text


def test_a_group_that_is_not_sure_says_so() -> None:
    text = printed(str(ROOT / "tests/measure/nccl/tied_pp2.r0.log.gz"))
    assert "TENSOR_MODEL_PARALLEL_GROUP, 2 ranks, likely" in text
    assert "TP 2 · PP 2 · DP 2, inferred from the input" in text


def test_groups_that_fit_as_well_stand_below_the_table(tmp_path: Path) -> None:
    log = gzip.decompress((ROOT / "tests/measure/nccl/tied_pp2.r0.log.gz").read_bytes()).splitlines(keepends=True)
    (tmp_path / "rank0.log").write_bytes(b"".join(line for line in log if b"opCount" in line))
    text = printed(str(tmp_path / "rank0.log"))
    assert re.search(r"^  [A-Z_]+, 2 ranks, guess +\d", text, flags=re.MULTILINE)
    assert re.search(r"^  ties +[A-Z_]+ may as well be [A-Z_]+", text, flags=re.MULTILINE)


def test_several_ranks_have_a_slowest(traces: Path) -> None:
    assert "rank 16 is slowest in 2 of 2 steps" in printed("traces")
    assert "Skew" not in printed("traces/rank00.json.gz")


def test_each_job_in_a_folder_has_its_layout_in_the_head() -> None:
    """Samples of three jobs, of 8, 4 and 2 ranks."""
    text = printed(str(ROOT / "tests/measure/nccl"))
    for line in ("8 ranks: TP 2 · PP 2 · DP 2", "4 ranks: TP 1 · PP 2 · DP 2", "2 ranks: TP 1 · PP 1 · EP 2 · DP 2"):
        assert f"{line}, inferred from the input" in text


def test_without_marks_figures_are_of_the_whole_input(traces: Path) -> None:
    volume = overlapkit.volume(SMALL[0], SMALL[1:])
    write_trace(volume, traces / "unmarked.json.gz", ranges=False, scalars=False)
    assert "per input" in printed("traces/unmarked.json.gz")
    assert "per step" in printed("traces/unmarked.json.gz", "--steps", "2")


def test_what_cannot_be_read_stands_below_what_can(traces: Path) -> None:
    (traces / "broken.json").write_text("{")
    text = printed("traces/rank00.json.gz", "traces/broken.json")
    assert "Stage 0, rank 0" in text and "broken.json" in text.partition("Not read")[2]


def test_a_group_is_never_printed_raw(traces: Path) -> None:
    path = traces / "odd.json"
    arguments = {
        "Collective name": "allreduce",
        "dtype": "Float",
        "In msg nelems": 4,
        "Out msg nelems": 4,
        "Group size": 2,
        "Process Group Name": "1",
        "Process Group Description": "\x1b[31mRED",
    }
    event = {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1, "tid": 1, "ts": 1, "dur": 1}
    path.write_text(json.dumps({"traceEvents": [{**event, "args": arguments}]}))
    for form in ("text", "csv", "json"):
        shown = printed(str(path), "-f", form)
        assert "RED" in shown and "\x1b" not in shown


def test_times_of_calls_without_their_moments_stand_in_the_rows(tmp_path: Path) -> None:
    """NCCL Inspector without verbose records: two gathers of 100 µs."""
    perf = {"coll": "AllReduce", "coll_msg_size_bytes": 10**6, "coll_exec_time_us": 100}
    record = {"header": {"id": "0xe6", "rank": 0, "n_ranks": 4}, "metadata": {"hostname": "a", "pid": 1}}
    text = json.dumps({**record, "coll_perf": perf})
    (tmp_path / "inspector.log").write_text(f"{text}\n{text}\n")
    shown = printed(str(tmp_path / "inspector.log"))
    assert re.search(r"all_reduce  unknown +2 +2.0 MB +3.0 MB +200.0 µs +15.0\n", shown)
    assert "all groups" not in shown


def test_what_no_step_has_stands_below_the_table(tmp_path: Path) -> None:
    group = {"group": 0, "name": "1", "desc": "TENSOR_MODEL_PARALLEL_GROUP", "size": 2, "ranks": [0, 1], "rank": 0}
    mark, gather = {"mark": "step", "us": 1.0}, {"calls": [[0, "all_gather", "bfloat16", 1, 8]]}
    lines = [
        {"overlapkit_recorder": 1, "host": "a", "pid": 1, "torch": "2.13.0", "steps": None},
        {"rank": 0, "world_size": 2},
        {**group, "order": 0},
        {"calls": [[0, "broadcast", "int64", 3, 24]]},
        *(mark, gather, mark, gather, mark, {"end": True}),
    ]
    (tmp_path / "rank0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    text = printed(str(tmp_path / "rank0.jsonl"))
    assert re.search(r"all_gather  bfloat16 +1 +8 B", text)
    assert "outside  TENSOR_MODEL_PARALLEL_GROUP broadcast int64: 3 calls, 24 B" in text


def test_calls_of_no_known_group_are_listed() -> None:
    text = printed(str(ROOT / "tests/measure/traces/gloo.r0.trace.json.gz"))
    assert "nothing attributed" in text and "2 all_to_all calls, 288 B" in text
    assert "c10d's operators, of unknown groups" in text


def test_kernels_of_no_group_are_told_by_their_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nsight Systems without NCCL's ranges: a gather of which half hides, and one that nothing hides."""
    strings = enumerate(("sm90_gemm", "ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_SendRecv"))
    kernels = [(0, 50_000, 0), (0, 100_000, 1), (200_000, 230_000, 1), (300_000, 310_000, 2)]
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as file, file:
        file.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        file.executemany("INSERT INTO StringIds VALUES (?, ?)", strings)
        file.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, demangledName INTEGER)")
        file.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?)", kernels)
    monkeypatch.chdir(tmp_path)
    text = printed("a.sqlite")
    assert re.search(r"all groups +unknown +140.0 µs +90.0 µs +35.7 %", text)
    assert "Not attributed to a group: kernels of unknown bytes\n" in text
    assert "a.sqlite, 2 all_gather kernels, 130.0 µs, 80.0 µs of it exposed" in text
    assert "a.sqlite, 1 send_recv kernel, 10.0 µs, 10.0 µs of it exposed" in text
    assert "0 B" not in text


# --- terminals -----------------------------------------------------------------------------------------


def test_progress_and_colour_are_for_terminals(traces: Path) -> None:
    assert "\x1b[" in on_a_terminal("measure", str(traces))
    done = run("measure", str(traces))
    assert done.stderr == "" and "\x1b" not in done.stdout


def test_progress_knows_the_whole(traces: Path) -> None:
    told: list[tuple[int, int]] = []
    overlapkit.measure(traces, progress=lambda more, total: told.append((more, total)))
    size = sum(path.stat().st_size for path in traces.iterdir())
    assert {total for _, total in told} == {size} and sum(more for more, _ in told) == size


def test_a_narrow_terminal_loses_no_figure(traces: Path) -> None:
    wide = set(re.findall(r"\d[\d,.]+ [kMG]?B", printed(str(traces))))
    shown = COLOUR.sub("", on_a_terminal("measure", str(traces), COLUMNS="60"))
    assert {figure for figure in wide if figure not in shown} == set()


# --- how to get inputs ------------------------------------------------------------------------------------


def test_how_is_a_table_of_what_there_is() -> None:
    text = printed("--how")
    assert text.count("\n") < 15
    assert "overlapkit measure --how bridge nsys" in text
    described = run("measure", "-h", env={"COLUMNS": "200"}).stdout
    for word in (*FRAMEWORKS, *SOURCES):
        assert word in text and word in described, word


def test_how_takes_words() -> None:
    text = printed("--how", "megatron-lm", "nccl-log")
    assert text.count("## ") == 1 and "NCCL_DEBUG_SUBSYS=INIT,COLL" in text
    assert printed("--how", "mega", "nccl-l") == text
    assert printed("--how", "recorder").count("## ") == len(FRAMEWORKS)
    assert printed("--how", "bridge").count("## ") == len(SOURCES)


def test_how_of_an_unknown_word() -> None:
    code, line = refused("--how", "recoder")
    assert code == 2 and "did you mean recorder?" in line
    code, line = refused("--how", "n")
    assert code == 2 and "may be nemo-run or nccl-log or nsys or nccl-inspector" in line


# --- what is refused -----------------------------------------------------------------------------------


def test_nothing_readable_is_exit_3(tmp_path: Path) -> None:
    (tmp_path / "empty.log").write_text("")
    (tmp_path / "other.log").write_bytes(bytes(range(256)) * 20)
    for name in ("empty.log", "other.log", "missing.log"):
        assert refused(str(tmp_path / name))[0] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no log or trace is named"),
        (["model.num_layers=2"], "no log or trace is named"),
        ([".", "model.num_layers=2"], "overrides need --recipe"),
        ([".", "--plot", "measured.pdf"], "is neither .svg nor .png"),
        ([".", "--plot", "none/measured.svg"], "none/measured.svg: cannot be written"),
        ([".", "--recipe", "missing.yaml"], "cannot be read"),
    ],
)
def test_a_command_that_cannot_be_used_is_exit_2(arguments: list[str], said: str) -> None:
    code, line = refused(*arguments)
    assert code == 2 and said in line


def test_help_stays_cheap() -> None:
    command = "from typer.testing import CliRunner; from overlapkit.cli import app; CliRunner().invoke(app, {})"
    assert not imported(command.format(["measure", "--help"])) & {"msgspec", "matplotlib", "torch"}
