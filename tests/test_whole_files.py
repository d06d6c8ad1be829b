"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from overlapkit.errors import RecipeError
from overlapkit.whole_files import check_writable, whole_file, write_whole


def write(path: Path, content: bytes) -> None:
    with whole_file(str(path)) as stream:
        stream.write(content)


def test_a_file_is_there_when_all_of_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with whole_file(str(path)) as stream:
        stream.write(b"all")
        assert not path.exists()
    assert path.read_bytes() == b"all"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, ValueError])
def test_what_stops_half_way_leaves_nothing_new(stopped: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(stopped), whole_file(str(path)) as stream:
        stream.write(b"half")
        raise stopped
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_keeps_its_mode_and_a_new_one_has_the_usual(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"")
    old.chmod(0o640)
    mask = os.umask(0o022)
    try:
        write(old, b"1")
        write(new, b"2")
    finally:
        os.umask(mask)
    assert [oct(path.stat().st_mode & 0o777) for path in (old, new)] == ["0o640", "0o644"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"before")
    link.symlink_to(file)
    write(link, b"after")
    assert link.is_symlink() and file.read_bytes() == b"after"


def test_a_folder_or_none_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be written: Is a directory"):
        write(tmp_path, b"")
    with pytest.raises(RecipeError, match="cannot be written: No such file or directory"):
        write(tmp_path / "none" / "file", b"")
    with pytest.raises(RecipeError, match="cannot be written: No such file or directory"):
        check_writable(str(tmp_path / "none" / "file"))
    check_writable(str(tmp_path / "file"))


def test_of_several_files_none_is_written_when_one_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")
    with pytest.raises(RecipeError, match="cannot be written"):
        write_whole(tmp_path, {"a": "after", "none/b": "new"})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "before")]
    assert write_whole(tmp_path, {"a": "after"}) == (tmp_path / "a",)
    assert (tmp_path / "a").read_text() == "after"
