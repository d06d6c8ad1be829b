"""``python -m overlapkit.record``: a script runs as it runs without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


ALIKE = """
import __main__, json, multiprocessing, os, pickle, sys

class Mine:
    pass

def found():
    return [sys.argv, sys.path[0], __name__, __file__, __spec__ is None, __main__.__dict__ is globals(),
            type(pickle.loads(pickle.dumps(Mine()))) is Mine, os.getcwd()]

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps([found(), pool.apply(abs, (-3,)), pool.apply(len, ([Mine()],))]))
    sys.exit(7)
"""


def test_a_script_sees_what_it_sees_without(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "job.py").write_text(ALIKE)
    arguments = ["scripts/job.py", "--steps", "1", "-o", "x", "--"]
    plain = python(*arguments, cwd=tmp_path)
    ours = python("-m", "overlapkit.record", "-o", str(tmp_path / "out"), "--", *arguments, cwd=tmp_path)
    assert plain.returncode == 7, plain.stderr
    assert (ours.returncode, json.loads(ours.stdout)) == (7, json.loads(plain.stdout)), ours.stderr


def test_a_module_sees_what_it_sees_without(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys; print(sys.argv, __name__, __package__); sys.exit(3)")
    plain = python("-m", "package", "a", "-b", cwd=tmp_path)
    ours = python("-m", "overlapkit.record", "-o", "out", "--", "-m", "package", "a", "-b", cwd=tmp_path)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout) == (3, ours.stdout), ours.stderr


@pytest.mark.parametrize(
    ("script", "status", "says"),
    [
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("import sys; sys.exit('bye')", 1, "bye"),
        ("def broken(:", 1, "SyntaxError"),
    ],
)
def test_a_script_ends_as_it_ends_without(script: str, status: int, says: str, tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(script)
    done = python("-m", "overlapkit.record", "-o", str(tmp_path / "out"), str(path))
    assert (done.returncode, done.stdout) == (status, "")
    assert says in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-o", "out"], "name the script to run after --"),
        (["-o", "out", "--", "-m"], "name the script to run after --"),
        (["--", "job.py"], "the following arguments are required: -o/--output"),
        (["-o", "out", "--steps", "x", "--", "job.py"], "argument --steps: no steps 'x': write 3-5 or 3"),
        (["-o", "out", "--steps", "5-3", "--", "job.py"], "no steps 5-3"),
        (["-o", "out", "--", "gone.py"], "can't open file 'gone.py': No such file or directory"),
        (["-o", "job.py/out", "--", "job.py"], "nothing can be recorded in it: Not a directory"),
    ],
)
def test_a_command_that_cannot_be_is_refused_before_the_script_runs(
    arguments: list[str], says: str, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text("print('it runs')")
    done = python("-m", "overlapkit.record", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr
