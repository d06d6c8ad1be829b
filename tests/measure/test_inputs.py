"""Paths -> files -> kinds -> readers: recognised by content, named when passed over, exit 3 when nothing is left."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from overlapkit.measure import inputs
from overlapkit.measure.events import Problem, Reading, Recording
from overlapkit.measure.inputs import InputError, read_inputs, select_inputs


def reader(kind: str, *, gives: bool = True) -> SimpleNamespace:
    """A reader of files that begin with their kind."""

    def read(paths: Sequence[Path], progress: Callable[[int], None] | None = None) -> Reading:
        if progress is not None:
            progress(sum(path.stat().st_size for path in paths))
        recordings = tuple(Recording(source=str(path), kind=kind) for path in paths if gives)
        problems = () if gives else tuple(Problem(source=str(path), what="cut", line=3) for path in paths)
        return Reading(recordings=recordings, problems=problems, notes=("a note",))

    return SimpleNamespace(recognises=lambda head, path: head.startswith(kind.encode()), read=read)


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> dict[str, SimpleNamespace]:
    found = {kind: reader(kind) for kind in inputs.KINDS}
    monkeypatch.setattr(inputs, "_reader", found.__getitem__)
    return found


def written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def kinds(paths: Sequence[str | Path]) -> dict[str, list[str]]:
    return {kind: [path.name for path in files] for kind, files in select_inputs(paths).files}


def message(paths: Sequence[str | Path]) -> str:
    with pytest.raises(InputError) as raised:
        read_inputs(select_inputs(paths))
    assert raised.value.exit_code == 3
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.usefixtures("readers")
def test_the_kind_is_what_a_file_holds_not_what_it_is_called(tmp_path: Path) -> None:
    log = written(tmp_path / "trace.json", b"nccl_log line")
    packed = written(tmp_path / "log.txt", gzip.compress(b"torch_trace {}"))
    assert kinds([log, packed]) == {"nccl_log": ["trace.json"], "torch_trace": ["log.txt"]}


@pytest.mark.usefixtures("readers")
def test_a_folder_gives_what_can_be_read_in_it_and_counts_the_rest(tmp_path: Path) -> None:
    written(tmp_path / "a" / "rank1.log", b"nccl_log 1")
    written(tmp_path / "a" / "b" / "rank0.log", b"nccl_log 0")
    written(tmp_path / "a" / "train.py", b"import torch")
    written(tmp_path / "a" / ".git" / "hidden.log", b"nccl_log 2")
    found = select_inputs([tmp_path / "a"])
    assert [path.name for _, files in found.files for path in files] == ["rank1.log", "rank0.log"]
    assert found.passed == (f"{tmp_path}/a/train.py",) and found.problems == ()
    assert read_inputs(found).notes == ("1 file holds no measurement of a kind that is read: train.py", "a note")
    assert found.total_bytes == 20


@pytest.mark.usefixtures("readers")
def test_globs_and_files_that_several_paths_lead_to(tmp_path: Path) -> None:
    for rank in range(3):
        written(tmp_path / f"nccl.{rank}.log", b"nccl_log")
    (tmp_path / "latest.log").symlink_to(tmp_path / "nccl.2.log")
    assert kinds([f"{tmp_path}/nccl.[01].log", tmp_path / "nccl.0.log", tmp_path / "nccl.2.log", tmp_path]) == {
        "nccl_log": ["nccl.0.log", "nccl.1.log", "nccl.2.log"]
    }


@pytest.mark.usefixtures("readers")
def test_a_packed_file_whose_checksum_is_wrong_has_a_kind(tmp_path: Path) -> None:
    packed = written(tmp_path / "trace.gz", gzip.compress(b"torch_trace {}")[:-8] + bytes(8))
    assert kinds([packed]) == {"torch_trace": ["trace.gz"]}


def test_the_readings_are_joined_and_progress_is_told(tmp_path: Path, readers: dict[str, SimpleNamespace]) -> None:
    readers["torch_trace"] = reader("torch_trace", gives=False)
    log, trace = written(tmp_path / "log", b"nccl_log"), written(tmp_path / "trace", b"torch_trace")
    told: list[int] = []
    found = read_inputs(select_inputs([log, trace, tmp_path / "none"]), told.append)
    assert [recording.kind for recording in found.recordings] == ["nccl_log"]
    assert [str(problem) for problem in found.problems] == [f"{tmp_path}/none: no file or folder", f"{trace}:3: cut"]
    assert found.notes == ("a note",) and sum(told) == 19


def test_nothing_to_read_is_one_line(tmp_path: Path, readers: dict[str, SimpleNamespace]) -> None:
    report = written(tmp_path / "profile.nsys-rep", b"\x00\x01")
    empty = written(tmp_path / "empty.log", b"")
    assert message([]) == "no log or trace is named; name files, folders or globs"
    assert message([tmp_path / "none"]) == f"{tmp_path}/none: no file or folder"
    assert message([f"{tmp_path}/*.log.gz"]) == f"{tmp_path}/*.log.gz: no file or folder"
    assert message([empty]) == f"{empty}: empty"
    assert message([report]) == f"{report}: export it first: nsys export --type sqlite profile.nsys-rep"
    assert message([tmp_path]) == (
        "none of the 2 files is an NCCL log, a trace or a recording: empty.log, profile.nsys-rep"
    )
    readers["nccl_log"] = reader("nccl_log", gives=False)
    cut = [written(tmp_path / name, b"nccl_log") for name in ("one", "two", "three", "four", "five")]
    assert message(cut[:2]) == f"{cut[0]}:3: cut; {cut[1]}:3: cut"
    assert message(cut) == f"{cut[0]}:3: cut; {cut[1]}:3: cut; {cut[2]}:3: cut and 2 more"


def test_a_text_without_a_line_of_nccl_is_passed_over_in_a_folder_and_a_problem_by_itself(tmp_path: Path) -> None:
    """Such as the plan in the folder of a job, which names variables of NCCL."""
    log = Path(__file__).parent / "nccl" / "tied_pp2.r0.log.gz"
    (tmp_path / "rank0.log.gz").symlink_to(log)
    texts = [written(tmp_path / f"{name}.txt", b"NCCL_DEBUG=INFO\n") for name in "abcd"]
    found = read_inputs(select_inputs([tmp_path]))
    assert (len(found.recordings), found.problems) == (1, ())
    assert found.notes[0] == "4 files hold no measurement of a kind that is read: a.txt, b.txt, c.txt and 1 more"
    (problem,) = read_inputs(select_inputs([texts[0], tmp_path])).problems
    assert problem.what.startswith("no line of NCCL in it")


@pytest.mark.usefixtures("readers")
def test_hostile_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    bomb = written(tmp_path / "bomb.gz", gzip.compress(b"x" * (1 << 26)))
    cut = written(tmp_path / "cut.gz", b"\x1f\x8b\x08\x00garbage that is no deflate stream")
    good = written(tmp_path / "good", b"nccl_log")
    found = select_inputs([tmp_path / "loop", tmp_path / "pipe", bomb, cut, "\x1b[2J", good])
    told = [str(problem).removeprefix(f"{tmp_path}/").split(":", 1) for problem in found.problems]
    assert [name for name, _ in told] == ["loop", "pipe", "bomb.gz", "cut.gz", "\\x1b[2J"]
    assert told[1][1] == " cannot be read: no ordinary file" and "cannot be decompressed" in told[3][1]
    with pytest.raises(InputError):
        select_inputs(["a\0b"])


def test_every_kind_has_a_reader() -> None:
    for kind in inputs.KINDS:
        module = inputs._reader(kind)
        assert callable(module.read) and module.recognises(b"", Path("x")) is False
