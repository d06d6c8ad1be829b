"""``overlapkit search``: its forms, what it refuses, what it leaves behind when it is stopped."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_cli import COMMAND, PLAIN, ROOT, run
from test_cli_imports import imported
from typer.testing import CliRunner

import overlapkit
from overlapkit.cli import app
from overlapkit.errors import OverlapkitError
from overlapkit.search.judge import Judge
from overlapkit.search.ranking import Ranking

LLAMA = "recipes/llama3_70b_64xh100.yaml"
FEW = ("--tp", "4,8", "--pp", "2,4", "--vp", "1,5", "--cp", "2", "--mbs", "1")
ONE = ("--tp", "4", "--pp", "4", "--vp", "5", "--cp", "2", "--mbs", "1", "--recompute", "none")


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def printed(*arguments: str, code: int = 0) -> str:
    """What the command writes to a pipe."""
    result = CliRunner().invoke(app, ["search", *arguments, "--workers", "1"])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def refused(*arguments: str, code: int = 2) -> str:
    """The one line of a command that finds nothing or cannot be used."""
    result = CliRunner().invoke(app, ["search", *arguments, "--workers", "1"])
    assert isinstance(result.exception, OverlapkitError), (result.output, result.exception)
    said = str(result.exception)
    assert (result.exception.exit_code, result.stdout, "\n" in said) == (code, "", False)
    return said


# --- forms ---------------------------------------------------------------------------------------


def test_text_shows_the_fastest_the_front_and_what_became_of_the_others() -> None:
    text = printed(LLAMA, *FEW, "--top", "3")
    lines = text.splitlines()
    assert lines[0] == f"{LLAMA}: 432 layouts on h100, 80 GiB each"
    start = lines.index("Fastest, each with the overlaps that are best for it")
    assert [line.split()[1] for line in lines[start + 2 : start + 5]] == ["s"] * 3
    assert "Less memory: the fastest layout for each" in lines
    assert any(line.endswith("  legal and fit the memory") for line in lines)
    assert "Memory may be 10 % above what is predicted" in text


def test_json_has_times_memory_layouts_and_overrides() -> None:
    found = json.loads(printed(LLAMA, *FEW, "--format", "json", "--top", "2"))
    assert found["schema_version"] == 1 and not found["interrupted"]
    assert len(found["best"]) == 2 and len(found["front"]) > 2
    counts = found["layouts"]
    assert counts["judged"] == counts["ranked"] + sum(counts["too_large"].values()) + sum(counts["refused"].values())
    best = found["best"][0]
    assert best["interval_s"][0] < best["step_time_s"] < best["interval_s"][1]
    assert best["memory"]["total"] * 1.1 <= found["memory_bytes"]
    estimated = overlapkit.estimate(LLAMA, best["overrides"])
    assert estimated.step_time_s == best["step_time_s"]
    assert overlapkit.resolve(LLAMA, best["overrides"]).parallelism.tp == best["layout"]["tp"]


def test_csv_has_a_line_per_layout_the_best_first() -> None:
    lines = list(csv.DictReader(io.StringIO(printed(LLAMA, *FEW, "--format", "csv", "--top", "2"))))
    assert [line["rank"] for line in lines[:3]] == ["1", "2", ""]
    assert all(line["on_front"] == "true" for line in lines[2:])
    assert lines[0]["tp"] == "4" and float(lines[0]["low_s"]) < float(lines[0]["step_time_s"])


def test_one_layout_is_the_estimate_of_the_recipe_itself() -> None:
    found = json.loads(printed(LLAMA, *ONE, "--format", "json"))
    assert found["best"][0]["step_time_s"] == overlapkit.estimate(LLAMA).step_time_s


def test_overrides_come_before_the_search() -> None:
    found = json.loads(printed(LLAMA, "train.global_batch_size=512", *ONE, "--format", "json"))
    shorter = json.loads(printed(LLAMA, *ONE, "--format", "json"))
    assert found["best"][0]["step_time_s"] > shorter["best"][0]["step_time_s"]


def test_several_numbers_of_gpus_are_searched_together() -> None:
    found = json.loads(printed(LLAMA, *ONE, "--gpus", "64,128", "--format", "json"))
    assert {each["layout"]["gpus"] for each in found["best"]} == {64, 128}


def test_recipes_are_written_and_resolve(tmp_path: Path) -> None:
    folder = tmp_path / "found"
    printed(LLAMA, *FEW, "--top", "2", "--save-recipes", str(folder))
    files = sorted(folder.iterdir())
    assert len(files) == 2 and files[0].name.startswith("llama3_70b_64xh100_01_64gpus_tp4")
    done = run("check", *map(str, files))
    assert done.returncode == 0, done.stdout


def test_an_experiment_measures_the_layouts_that_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    module = types.ModuleType("overlapkit.integrations.nemo_run.submission")
    module.submit = lambda files, own, *, name: launched.append((files, own, name))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "overlapkit.integrations.nemo_run", types.ModuleType("nemo_run"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    own = tmp_path / "executor.py"
    own.write_text("")
    printed(LLAMA, *ONE, "--save-recipes", str(tmp_path), "--submit", str(own))
    ((files, executor, name),) = launched
    assert (executor, name) == (own, "search_llama3_70b_64xh100") and all(path.is_file() for path in files)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            (LLAMA, "--tp", "some"),
            "--tp: 'some' is no range of sizes; write sizes of at least 1, for example 1,2,4 or 1-8",
        ),
        ((LLAMA, "--pp", "0"), "--pp: '0' is no range of sizes; write sizes of at least 1, for example 1,2,4 or 1-8"),
        ((LLAMA, "--mbs=-1"), "--mbs: '-1' is no range of sizes; write sizes of at least 1, for example 1,2,4 or 1-8"),
        ((LLAMA, "--cp", "1-99999"), "--cp: '1-99999' has more than 10,000 sizes"),
        ((LLAMA, "--vp", "8-4"), "--vp: '8-4' runs backwards"),
        ((LLAMA, "--ep", "2"), "--ep: the model has no experts to spread over EP; leave --ep out"),
        (
            (LLAMA, "--recompute", "all"),
            "--recompute: 'all' is no kind of recomputation; write some of none, selective, full",
        ),
        ((LLAMA, "--top", "0"), "--top: 0 is not between 1 and 1,000"),
        ((LLAMA, "--submit", "no.py"), "no.py: there is no such file; name a Python file that has executor()"),
        (("no.yaml",), "no.yaml: cannot be read: No such file or directory"),
        ((LLAMA, "model.vocab_size=null"), f"{LLAMA}: search needs model.vocab_size; add model.vocab_size: …"),
        (
            (LLAMA, "cluster.gpu=vr200"),
            "command line: cluster.gpu: the time on vr200 is not modelled: its",
        ),
        (
            ("recipes/llama3_70b_lora_8xh100.yaml",),
            "recipes/llama3_70b_lora_8xh100.yaml:38: peft: the time of frozen parameters is not modelled",
        ),
        (
            (LLAMA, "model.is_hybrid_model=true"),
            "command line: model.is_hybrid_model: the time of hybrid models is not modelled",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_searched_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    assert refused(*arguments).startswith(said)


def test_a_search_that_nothing_survives_says_what_stopped_most() -> None:
    said = refused(LLAMA, "--tp", "1", "--pp", "1", "--cp", "1", "--vp", "1", code=1)
    assert said.startswith(f"{LLAMA}: none of 36 layouts is legal and fits the memory, most of them because: does not")


def test_sizes_that_do_not_go_together_hide_no_other_reason() -> None:
    said = refused("recipes/llama31_405b_h100.yaml", "--gpus", "8", "--vp", "1", "--mbs", "1", code=1)
    assert said.endswith("most that split the GPUs because: does not fit the GPU's memory")
    said = refused(LLAMA, *ONE, "--gpus", "63", code=1)
    assert said.endswith("most of them because: TP · PP · CP does not divide the GPUs")


def test_a_folder_that_cannot_be_written_is_one_line_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("search", LLAMA, *ONE, "--format", "json", "--save-recipes", str(tmp_path / "file"))
    assert (done.returncode, done.stderr) == (2, f"overlapkit: {tmp_path / 'file'}: cannot be written: File exists\n")


def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    result = CliRunner().invoke(app, ["search", LLAMA, *ONE, "--save-recipes", str(tmp_path)])
    assert isinstance(result.exception, overlapkit.RecipeError)
    assert str(result.exception).endswith("cannot be written: No space left on device")
    assert list(tmp_path.iterdir()) == []


# --- Ctrl-C --------------------------------------------------------------------------------------


def test_ctrl_c_shows_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge.judge

    def stopped(self: Judge, start: int, stop: int) -> Ranking:
        if start >= 5:
            raise KeyboardInterrupt
        return judge(self, start, stop)

    monkeypatch.setattr(Judge, "judge", stopped)
    result = CliRunner().invoke(app, ["search", LLAMA, *FEW, "--workers", "1", "--format", "json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 130 and found["interrupted"]
    judged = found["layouts"]["judged"]
    assert result.stderr == f"overlapkit: interrupted: {judged} layouts judged, 5 of 8 points of the space\n"


def _takes_ctrl_c() -> None:
    """A job in the background of a shell, as tests may be, ignores it, and so do its children unless told otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _read(terminal: int) -> bytes:
    """What is there; nothing once no process has the other end."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def test_ctrl_c_on_a_terminal_ends_every_process_with_one_line() -> None:
    """A million layouts, stopped as soon as the bar says that some are judged."""
    ours, theirs = pty.openpty()
    many = ("--tp", "1-8", "--pp", "1-80", "--cp", "1-8", "--mbs", "1-100", "--vp", "1-80", "--workers", "2")
    with subprocess.Popen(
        [COMMAND, "search", LLAMA, *many, "--format", "json"],
        cwd=ROOT,
        env={**PLAIN, "TERM": "xterm-256color", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_takes_ctrl_c,
    ) as process:
        os.close(theirs)
        shown = b""
        while re.search(rb"[1-9][\d,]* layouts", shown) is None:
            shown += os.read(ours, 65536)
        os.killpg(process.pid, signal.SIGINT)
        # Both are read at once: a terminal that nobody reads stops the bar, and with it the process.
        rest: list[bytes] = []
        reader = threading.Thread(target=lambda: rest.extend(iter(partial(_read, ours), b"")))
        reader.start()
        out, _ = process.communicate(timeout=120)
        reader.join()
        shown = b"".join(rest)
        assert process.returncode == 130
    os.close(ours)
    assert json.loads(out)["interrupted"] is True
    assert "overlapkit: interrupted: " in shown.decode() and "Traceback" not in shown.decode()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_twice_is_one_line_and_leaves_no_process(workers: str) -> None:
    """Early, while processes start, and again while they end; Python's own start-up is no part of it."""
    many = ("--tp", "1-8", "--pp", "1-80", "--cp", "1-8", "--mbs", "1-100", "--workers", workers, "--format", "json")
    start = "import overlapkit.cli as cli, overlapkit.search.find; print(flush=True); cli.main()"
    with subprocess.Popen(
        [sys.executable, "-c", start, "search", LLAMA, *many],
        cwd=ROOT,
        env=PLAIN,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_takes_ctrl_c,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        time.sleep(1)
        for _ in range(2):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.02)
        _, said = process.communicate(timeout=60)  # stderr ends with the last process that has it
    assert said.startswith("overlapkit: interrupted") and said.count("\n") == 1, said


def test_processes_end_with_the_first_one() -> None:
    many = ("--tp", "1-8", "--pp", "1-80", "--cp", "1-8", "--mbs", "1-100", "--vp", "1-80", "--workers", "2")
    with subprocess.Popen(
        [COMMAND, "search", LLAMA, *many], cwd=ROOT, env=PLAIN, stderr=subprocess.PIPE, text=True
    ) as process:
        time.sleep(1.5)
        process.kill()
        process.communicate(timeout=60)  # stderr ends with the last process that has it


# --- imports -------------------------------------------------------------------------------------


def test_a_process_that_judges_layouts_starts_without_the_command_line() -> None:
    assert imported("import overlapkit.search.find") == {"yaml"}


def test_help_shows_an_example_that_runs() -> None:
    text = CliRunner().invoke(app, ["search", "--help"], env={"COLUMNS": "200"}).stdout
    example = next(line for line in text.splitlines() if "Example: overlapkit search" in line)
    arguments = example.strip(" │").split()[3:]
    assert printed(*arguments, "--top", "1", "--mbs", "1", "--vp", "1").startswith(LLAMA)
