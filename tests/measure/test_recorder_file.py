"""How the recorder's files are written: at once, beside those that are there, and without harm to the job."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from overlapkit.errors import RecipeError
from overlapkit.integrations import recorder_file
from overlapkit.integrations.recorder_file import RecorderFile

LINES = [{"group": 0, "size": 2}, {"calls": [[0, "all_reduce", "float32", 1, 4]]}]


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"file/in: nothing can be recorded in it: Not a directory$"):
        RecorderFile(tmp_path / "file" / "in", torch_version="2.13.0", steps=None)


def test_what_is_written_is_in_the_file_at_once(tmp_path: Path) -> None:
    file = RecorderFile(tmp_path / "new" / "folder", torch_version="2.13.0", steps=(2, 3))
    file.write(LINES)
    lines = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert (lines[0]["overlapkit_recorder"], lines[0]["steps"], lines[1:]) == (1, [2, 3], LINES)
    file.close()


def test_a_file_of_the_same_host_and_process_is_left_as_it_is(tmp_path: Path) -> None:
    files = [RecorderFile(tmp_path, torch_version="2.13.0", steps=None) for _ in range(3)]
    for number, file in enumerate(files, 1):
        file.write([{"calls": [[0, "all_reduce", "float32", number, 4]]}])
        file.close()
    assert len({file.path for file in files}) == 3
    for number, file in enumerate(files, 1):
        assert [json.loads(line) for line in file.path.read_text().splitlines()][1:] == [
            {"calls": [[0, "all_reduce", "float32", number, 4]]}
        ]


def test_a_full_disk_is_told_once_and_nothing_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = RecorderFile(tmp_path, torch_version="2.13.0", steps=None)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recorder_file.os, "write", full)
    file.write(LINES)
    file.write(LINES)
    assert not file.writable
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"overlapkit: recording ends: {file.path}: No space left on device\n"
