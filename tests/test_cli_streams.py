"""Colour for terminals only, and no traceback from a reader that leaves, a full disk or an odd encoding."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from test_cli import COMMAND, PLAIN, RECIPE, ROOT, bash, run

from overlapkit.presets import preset_names


def on_a_terminal(*arguments: str, **env: str) -> str:
    """What a terminal would show."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [COMMAND, *arguments],
        cwd=ROOT,
        env={**PLAIN, "TERM": "xterm-256color", **env},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        process.wait(timeout=60)
    os.close(ours)
    return shown.decode()


ARGUMENTS = [("resolve", RECIPE), ("presets", "list"), ("presets", "show", preset_names()[0])]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=" ".join)
def test_colour_is_for_terminals(arguments: tuple[str, ...]) -> None:
    assert "\x1b[" in on_a_terminal(*arguments)
    assert "\x1b[" in on_a_terminal(*arguments, NO_COLOR="")  # set, but to nothing
    assert "\x1b" not in on_a_terminal(*arguments, NO_COLOR="1")
    assert "\x1b" not in on_a_terminal(*arguments, TERM="dumb")
    assert "\x1b" not in run(*arguments).stdout
    assert "\x1b" not in run(*arguments, env={"FORCE_COLOR": "1"}).stdout


COLOUR = re.compile(r"\x1b\[[0-9;]*m")
FAILING = (
    "resolve",
    RECIPE,
    "model.num_moe_experts=64",
    "model.expert_model_parallel_size=2",
    "comm_overlap.overlap_moe_expert_parallel_comm=true",
    "cluster.gpu=a800",
    "env_vars.CUDA_DEVICE_MAX_CONNECTIONS=8",
)


def test_no_line_ends_in_spaces() -> None:
    for arguments in ARGUMENTS:
        assert all(line == line.rstrip() for line in run(*arguments).stdout.splitlines())
        shown = COLOUR.sub("", on_a_terminal(*arguments)).replace("\r\n", "\n")
        assert all(line == line.rstrip() for line in shown.split("\n"))


@pytest.mark.parametrize("columns", ["30", "60", "80", "100", "200"])
def test_a_narrow_terminal_loses_nothing(columns: str) -> None:
    decisions = json.loads(run(*FAILING, "--format", "json").stdout)["decisions"]
    shown = COLOUR.sub("", on_a_terminal(*FAILING, COLUMNS=columns))
    assert "…" not in shown
    shown = "".join(shown.split())  # lines break anywhere
    told = [decision for decision in decisions if decision["severity"] != "info"]
    assert len(told) >= 3
    for decision in told:
        for part in ("code", "subject", "because", "fix"):
            assert "".join((decision[part] or "").split()) in shown, decision
    listed = on_a_terminal("presets", "list", COLUMNS=columns)
    assert all(name in listed for name in preset_names())


@pytest.mark.parametrize("arguments", [f"resolve {RECIPE}", "explain --all", "explain --all -f json", "presets list"])
def test_a_reader_that_leaves_is_no_failure(arguments: str) -> None:
    for reader in ("head -1", "true"):
        done = bash(f'"$OVERLAPKIT" {arguments} | {reader}')
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [("resolve", RECIPE), ("--version",)])
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = run(*arguments, stdout=full)
    assert (done.returncode, done.stderr) == (2, "overlapkit: [Errno 28] No space left on device\n")


def test_a_closed_stdout_is_no_traceback() -> None:
    assert bash(f'"$OVERLAPKIT" resolve {RECIPE} >&-').stderr == ""


def test_a_terminal_without_our_signs() -> None:
    done = run("resolve", RECIPE, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "32 \\xd7 h20" in done.stdout
