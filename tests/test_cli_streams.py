"""Colour for terminals only, and no traceback from a reader that leaves, a full disk or an odd encoding."""

from __future__ import annotations

import os
import pty
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


def test_no_line_ends_in_spaces() -> None:
    for arguments in ARGUMENTS:
        assert all(line == line.rstrip() for line in run(*arguments).stdout.splitlines())


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
