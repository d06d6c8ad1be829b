"""What is read of the recorder's files: steps, windows, and files that are cut or are none."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlapkit.measure.events import SOME_STEP, CommEvent, Communicator, Reading, Recording, Step
from overlapkit.measure.readers import recorder
from overlapkit.measure.readers.nccl_log import lines
from overlapkit.measure.readers.recorder import read, recognises

HEADER = {"overlapkit_recorder": 1, "host": "node1", "pid": 7, "torch": "2.13.0", "steps": None}
RANK = {"rank": 3, "world_size": 4}
TP = {"group": 0, "name": "5", "desc": "TENSOR_MODEL_PARALLEL_GROUP", "size": 2, "ranks": [2, 3], "rank": 1, "order": 4}
MODEL = {
    "group": 1,
    "name": "4",
    "desc": "MODEL_PARALLEL_GROUP",
    "size": 4,
    "ranks": [0, 1, 2, 3],
    "rank": 3,
    "order": 3,
}
OPEN, CLOSED, END = {"window": "open"}, {"window": "closed"}, {"end": True}
Write = Callable[..., Path]


def calls(count: int, op: str = "all_reduce", group: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
    return {"calls": [[group, op, dtype, count, 100 * count]]}


def mark(us: int, kind: str = "int32", group: int | None = 1) -> dict[str, Any]:
    return {"mark": kind, "group": group, "us": us}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(*lines: dict[str, Any] | bytes, name: str = "recorder.node1.7.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(
            b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        )
        return path

    return written


def recording(*lines: dict[str, Any], write: Write) -> Recording:
    reading = read([write(*lines)])
    assert reading.problems == ()
    (found,) = reading.recordings
    return found


def by_step(found: Recording) -> list[tuple[int | None, int]]:
    return [(event.step, event.calls) for event in found.events]


# --- steps ---------------------------------------------------------------------------------------


def test_a_step_lies_between_two_marks(write: Write) -> None:
    between = [calls(9), mark(10), calls(1), mark(20), calls(2), mark(35), calls(5)]
    found = recording(HEADER, RANK, TP, MODEL, *between, END, write=write)
    assert by_step(found) == [(None, 14), (2, 1), (3, 2)]
    assert found.steps == 2
    assert found.steps_by == "the all_reduce of one int32 on group 4 (MODEL_PARALLEL_GROUP)"
    assert found.windows == (
        Step(number=2, start_us=10.0, end_us=20.0),
        Step(number=3, start_us=20.0, end_us=35.0),
    )


def test_a_recording_names_its_process_its_groups_and_what_it_lacks(write: Write) -> None:
    path = write(HEADER, RANK, TP, calls(2), calls(1), END)
    assert read([path]) == Reading(
        recordings=(
            Recording(
                source=str(path),
                kind="recorder",
                rank=3,
                world_size=4,
                host="node1",
                communicators=(
                    Communicator(
                        label="group 5 (TENSOR_MODEL_PARALLEL_GROUP)",
                        size=2,
                        ranks=(2, 3),
                        rank=1,
                        description="TENSOR_MODEL_PARALLEL_GROUP",
                        order=4,
                    ),
                ),
                events=(CommEvent(0, "all_reduce", "bfloat16", 3, 300, None),),
                notes=recording(HEADER, RANK, TP, calls(1), END, write=write).notes,
            ),
        )
    )


def test_one_mark_makes_no_step_and_is_named(write: Write) -> None:
    found = recording(HEADER, MODEL, TP, calls(1), mark(10), calls(2), END, write=write)
    assert (found.steps, by_step(found), found.windows) == (0, [(None, 3)], ())
    assert found.steps_by is not None


@pytest.mark.parametrize(
    ("marks", "by"),
    [
        ([mark(1, "step", None), mark(2), mark(3), mark(4, "step", None)], "Recorder.step()"),
        # A flag that Megatron-Core asks for in the first step alone marks nothing.
        ([mark(1, group=0), mark(2), mark(3)], "the all_reduce of one int32 on group 4 (MODEL_PARALLEL_GROUP)"),
        ([mark(1, group=0), mark(2), mark(3, group=0)], "the all_reduce of one int32 on group 5 (TENSOR"),
        (
            [mark(1, "float32", 0), mark(2, "float32"), mark(3, "float32", 0), mark(4, "float32")],
            "the all_reduce of one float32 on group 4 (MODEL_PARALLEL_GROUP)",
        ),
        ([mark(1, "float32"), mark(2, group=0), mark(3, "float32"), mark(4, group=0)], "the all_reduce of one int32"),
    ],
    ids=["the user's", "a flag of the first step", "the first group", "the largest group", "int32 before float32"],
)  # fmt: skip
def test_what_marks_the_steps(marks: list[dict[str, Any]], by: str, write: Write) -> None:
    found = recording(HEADER, RANK, TP, MODEL, calls(1), *marks, calls(1), END, write=write)
    assert found.steps == 1
    assert found.steps_by is not None
    assert found.steps_by.startswith(by)


def test_only_steps_that_the_window_holds_whole_are_complete(write: Write) -> None:
    header = {**HEADER, "steps": [3, 4]}
    between = [mark(10), OPEN, mark(20), calls(3), mark(30), calls(4), mark(40), CLOSED]
    found = recording(header, RANK, MODEL, TP, *between, END, write=write)
    assert (found.steps, by_step(found)) == (2, [(3, 3), (4, 4)])


def test_a_step_in_which_the_window_opens_is_not_complete(write: Write) -> None:
    header = {**HEADER, "steps": [1, 1]}
    found = recording(header, RANK, MODEL, TP, mark(1), OPEN, calls(1), mark(2), CLOSED, END, write=write)
    assert (found.steps, by_step(found)) == (0, [(None, 1)])


def test_many_steps_are_kept_together(write: Write) -> None:
    steps = [line for number in range(1202) for line in (mark(number), calls(1))]
    found = recording(HEADER, RANK, TP, MODEL, *steps, END, write=write)
    assert found.steps == 1201
    assert by_step(found) == [(SOME_STEP, 1201), (None, 1)]
    assert found.windows == ()


def test_a_job_that_died_is_told(write: Write) -> None:
    assert any("no end" in note for note in recording(HEADER, RANK, TP, calls(1), write=write).notes)
    assert not any("no end" in note for note in recording(HEADER, RANK, TP, calls(1), END, write=write).notes)


# --- what is no such file, or not all of it -------------------------------------------------------


def test_it_is_recognised_by_its_first_line(write: Write) -> None:
    assert recognises(b'{"overlapkit_recorder":1,"host":"x"}', Path("any.txt"))
    assert not recognises(b'{"traceEvents":[]}', Path("recorder.node.1.jsonl"))
    assert not recognises(b"", Path("recorder.node.1.jsonl"))


def test_a_cut_last_line_loses_itself_alone(write: Write) -> None:
    reading = read([write(HEADER, RANK, TP, calls(2), b'{"calls":[[0,"all_red')])
    assert [event.calls for event in reading.recordings[0].events] == [2]
    assert [str(problem).rpartition("jsonl:")[2] for problem in reading.problems] == ["5: the last line is cut"]


BAD_CALLS: list[Any] = [
    [0, "all_reduce", "bfloat16", 1],
    [7, "all_reduce", "bfloat16", 1, 1],
    [0, "rm -rf", "bfloat16", 1, 1],
    [0, "all_reduce", "\x1b[2J", 1, 1],
    [0, "all_reduce", "bfloat16", -1, 1],
    [0, "all_reduce", "bfloat16", True, 1],
    [0, "all_reduce", "bfloat16", 1, 1e300],
    [0, "all_reduce", "bfloat16", 1, 1 << 70],
    [[0], "all_reduce", "bfloat16", 1, 1],
    [0, ["all_reduce"], "bfloat16", 1, 1],
    {"a": 1},
    None,
]


@pytest.mark.parametrize("entry", BAD_CALLS, ids=str)
def test_a_call_that_is_none_is_counted_as_a_problem(entry: Any, write: Write) -> None:
    reading = read([write(HEADER, RANK, TP, calls(1), {"calls": [entry]}, END)])
    assert [event.calls for event in reading.recordings[0].events] == [1]
    assert [(problem.line, problem.count) for problem in reading.problems] == [(5, 1)]


@pytest.mark.parametrize(
    "line",
    [
        {"unknown": 1},
        {"mark": "int32", "group": 99, "us": 1},
        {"mark": ["int32"], "group": 0, "us": 1},
        {"mark": "int32", "group": [0], "us": 1},
        {"group": 0, "size": 2},
        {"group": 5, "size": 0},
        {"group": 5, "size": 2, "ranks": [1]},
        {"group": 5, "size": 1, "ranks": ["1"]},
        {"world_size": "4", "rank": 1},
        {"window": "ajar"},
        {"missed": [["all_reduce", "why"]]},
        HEADER,
        b"[1]\n",
        b"\xff\xfe\n",
        b"{" * 100_000 + b"\n",
        b'{"a":' + b"[" * 100_000 + b"\n",
    ],
    ids=lambda line: str(line)[:30],
)
def test_a_line_that_no_recorder_writes_is_skipped_and_counted(line: Any, write: Write) -> None:
    reading = read([write(HEADER, RANK, TP, calls(1), line, line, calls(2), END)])
    assert [event.calls for event in reading.recordings[0].events] == [3]
    assert [(problem.line, problem.count) for problem in reading.problems] == [(5, 2)]


def test_a_line_without_end_is_passed_in_pieces(write: Write) -> None:
    long = b'{"calls":[' + b" " * (9 << 20) + b"]}\n"
    reading = read([write(HEADER, RANK, TP, calls(1), long, calls(2), END)])
    assert [event.calls for event in reading.recordings[0].events] == [3]
    assert [str(problem).rpartition("jsonl:")[2] for problem in reading.problems] == [
        "5: a line of more than 1 MB is passed over"
    ]


def test_calls_that_the_recorder_missed_are_a_problem(write: Write) -> None:
    reading = read([write(HEADER, RANK, TP, calls(1), {"missed": [["all_gather", "KeyError", 3]]}, END)])
    assert [(problem.what, problem.count) for problem in reading.problems] == [
        ("calls of all_gather that the recorder could not count: KeyError", 3)
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no file of the recorder: its first line is missing"),
        (b"\x00\x01\x02", "no file of the recorder: its first line is missing"),
        (b'{"overlapkit_recorder":9}\n', "no file of the recorder: its first line is missing"),
        (
            json.dumps(HEADER).encode() + b"\n",
            "no call of torch.distributed was recorded in it; processes that it starts are not recorded",
        ),
        (
            json.dumps({**HEADER, "steps": [9, 10]}).encode()
            + b"\n"
            + json.dumps(mark(1, "step", None)).encode()
            + b"\n",
            "no call was recorded in it: it was to record steps 9 to 10, and 1 was marked",
        ),
    ],
)
def test_a_file_without_a_recording_says_why(content: bytes, says: str, write: Write) -> None:
    reading = read([write(content)])
    assert reading.recordings == ()
    assert says in [problem.what for problem in reading.problems]


def test_a_file_that_is_gone_is_a_problem_and_the_others_are_read(tmp_path: Path, write: Write) -> None:
    reading = read([tmp_path / "gone.jsonl", write(HEADER, RANK, TP, calls(1), END)])
    assert len(reading.recordings) == 1
    assert reading.problems[0].what == "cannot be read: No such file or directory"


def test_a_packed_file_is_read_as_far_as_it_goes(write: Write) -> None:
    lines = [HEADER, RANK, TP, *([calls(1)] * 3000), END]
    packed = gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())
    whole = read([write(packed, name="a.jsonl.gz")])
    assert (whole.recordings[0].events[0].calls, whole.problems) == (3000, ())
    cut = read([write(packed[:-20], name="b.jsonl.gz")])
    assert 0 < cut.recordings[0].events[0].calls <= 3000
    assert [problem.what for problem in cut.problems] == [
        "the gz file is cut: what comes after is missing",
        "the last line is cut",
    ]


@pytest.mark.parametrize("junk", [b"\n", b"{}\n", b"[]\n"])
def test_a_file_of_nothing_but_damage_is_given_up(junk: bytes, write: Write) -> None:
    reading = read([write(HEADER, RANK, TP, calls(1), junk * 200_000, calls(2))])
    assert [event.calls for event in reading.recordings[0].events] == [1]
    assert [problem.count for problem in reading.problems if "the rest is not read" not in problem.what] == [100_001]
    assert reading.problems[-1].what == "there are more than 100,000 damaged lines: the rest is not read"


def test_a_gz_file_of_nothing_but_marks_is_given_up(monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    monkeypatch.setattr(lines, "MOST_USELESS", 1 << 20)
    head = "".join(json.dumps(line) + "\n" for line in (HEADER, RANK, TP, calls(1))).encode()
    packed = gzip.compress(head + b'{"window":"open"}\n' * (4 << 16))
    reading = read([write(packed, name="a.jsonl.gz")])
    assert [event.calls for event in reading.recordings[0].events] == [1]
    assert "its rest is not read" in reading.problems[0].what


def test_a_file_that_is_larger_than_any_is_read_to_a_limit(monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    monkeypatch.setattr(recorder, "SIZE_LIMIT", 1 << 20)
    reading = read([write(HEADER, RANK, TP, calls(1), *[calls(1)] * 60_000, END)])
    assert 10_000 < reading.recordings[0].events[0].calls < 60_000
    assert ["the rest is not read" in problem.what for problem in reading.problems] == [True]


def test_progress_is_told_every_byte_once(write: Write) -> None:
    told: list[int] = []
    path = write(HEADER, RANK, TP, calls(1), END)
    read([path], told.append)
    assert sum(told) == path.stat().st_size
