"""``--format env``: lines that are safe to eval whatever the values hold."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapkit.render.env import to_env

NASTY = [
    "", " ", "a b", "'", "''", "'\\''", '"', "$HOME", "$(touch hacked)", "`touch hacked`", ";touch hacked", "&& x",
    "|", ">hacked", "a\nb", "\n", "a\n", "\r", "\t", "\\", "\\n", "*", "~", "!x", "#", "%s", "-n", "${IFS}", "\x1b[31m",
    "\x07", "é", "😀", "=", "a=b",
]  # fmt: skip


def exported(env: dict[str, str], shell: str, folder: Path) -> dict[str, str]:
    """What a shell's children see after it evaluated the lines."""
    done = subprocess.run(
        [shell, "-c", 'eval "$1" && exec env -0', shell, to_env(env)],
        cwd=folder,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        check=True,
        timeout=60,
    )
    pairs = (pair.split("=", 1) for pair in done.stdout.decode().split("\0") if pair)
    return {name: value for name, value in pairs if name in env}


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_evaluating_them_sets_exactly_the_values(shell: str, tmp_path: Path) -> None:
    env = {f"N{index}": value for index, value in enumerate(NASTY)}
    assert exported(env, shell, tmp_path) == env
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=50, derandomize=True, database=None, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"N[A-Za-z0-9_]{0,5}", fullmatch=True),
        st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    )
)
def test_whatever_they_hold(env: dict[str, str]) -> None:
    assert exported(env, "bash", Path.cwd()) == env


@pytest.mark.parametrize("name", ["", "1A", "A B", "A-B", "A=B", "A;touch hacked", "A\n", "$A", "É"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a variable's name"):
        to_env({name: "x"})


def test_no_environment_holds_a_nul() -> None:
    with pytest.raises(ValueError, match="NUL"):
        to_env({"A": "x\0y"})
