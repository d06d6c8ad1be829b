"""Traces that are cut, damaged or hostile: what can be read is read, the rest is named, and nothing raises."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from kineto import collective, kernel, record, trace, written

from overlapkit.measure.events import Reading
from overlapkit.measure.readers import torch_trace
from overlapkit.measure.readers.torch_trace import json_stream


@pytest.fixture(params=["msgspec", "json"], autouse=True)
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "json":
        monkeypatch.setattr(json_stream, "fast", None)
    else:
        pytest.importorskip("msgspec")


CALLS = [record(float(at), collective("allreduce", "1", 100, 100)) for at in range(50)]


def reading(folder: Path, data: bytes, name: str = "trace.json") -> Reading:
    path = folder / name
    path.write_bytes(data)
    return torch_trace.read([path])


def calls(found: Reading) -> int:
    return sum(each.calls for recording in found.recordings for each in recording.events)


def test_a_cut_trace_is_read_up_to_its_cut(tmp_path: Path) -> None:
    whole = json.dumps(trace(CALLS)).encode()
    start = whole.index(b'"record_param_comms"')
    for cut in range(start, whole.index(b'"traceName"'), 997):
        found = reading(tmp_path, whole[:cut])
        complete = whole[:cut].count(b'"record_param_comms"')
        assert calls(found) in (complete - 1, complete)
        (problem,) = found.problems
        assert problem.what == f"cut after {cut} bytes; the events before are read"


def test_a_cut_in_many_blocks_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "BLOCK", 512)
    whole = json.dumps(trace(CALLS)).encode()
    cut = len(whole) * 2 // 3
    found = reading(tmp_path, whole[:cut])
    assert calls(found) == whole[:cut].count(b'"record_param_comms"') - 1
    assert [problem.what for problem in found.problems] == [f"cut after {cut} bytes; the events before are read"]


def test_a_cut_gzip_is_read_up_to_its_cut(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps(trace(CALLS * 50)).encode(), compresslevel=1)
    found = reading(tmp_path, packed[: len(packed) // 2], "trace.json.gz")
    assert 1000 < calls(found) < 2500
    assert any("compressed data is cut" in problem.what for problem in found.problems)


@pytest.mark.parametrize("end", [bytes(8), b"\xff" * 8 + b"and more"])
def test_a_gzip_whose_checksum_is_wrong_is_read_to_its_end(tmp_path: Path, end: bytes) -> None:
    packed = gzip.compress(json.dumps(trace(CALLS)).encode())[:-8] + end
    found = reading(tmp_path, packed, "trace.json.gz")
    assert calls(found) == 50
    assert ["compressed data is damaged" in problem.what for problem in found.problems] == [True]


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(json.dumps(trace(CALLS)).encode()))
    packed[12:40] = bytes(28)
    found = reading(tmp_path, bytes(packed), "trace.json.gz")
    assert found.recordings == ()
    assert any("compressed data is damaged" in problem.what for problem in found.problems)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\x00" * 5000, b'{"traceEvents"', b"[1, 2]", b"\x1f\x8b", b"\xff\xfe" * 40]
)
def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path, data: bytes) -> None:
    found = reading(tmp_path, data)
    assert found.recordings == ()
    assert found.problems
    assert all("\n" not in str(problem) for problem in found.problems)


@pytest.mark.parametrize(
    "broken",
    [
        '{"ph": "X", "name": }',
        '{"ph": "X", "ts": "soon", "dur": [], "name": {}, "cat": 5, "args": 3}',
        "null",
        '{"ph": "X", "name": "\udcff\udcfe", "cat": "kernel"}',
        '{"ph": "X", "cat": "kernel", "name": "k", "ts": NaN, "dur": 1}',
        '{"ph": "X", "cat": "kernel", "name": "k", "ts": 1e999, "dur": 1}',
        '{"ph": "X", "cat": "kernel", "name": "k", "ts": ' + "9" * 5000 + "}",
        '{"ph": "X", "args": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "args": []}',
    ],
)
def test_a_broken_event_costs_no_other(tmp_path: Path, broken: str) -> None:
    events = [json.dumps(each) for each in CALLS]
    text = '{"schemaVersion": 1, "traceEvents": [\n' + ",\n".join([*events[:20], broken, *events[20:]]) + "\n]}\n"
    found = reading(tmp_path, text.encode("utf-8", "surrogateescape"))
    assert calls(found) == 50
    assert all("\n" not in str(problem) for problem in found.problems)


@pytest.mark.parametrize(
    "args",
    [
        {"Group size": 10**18, "Global rank start": 0, "Global rank stride": 1, "Process Group Ranks": "[0, ..., 9]"},
        {"Group size": -4, "Process Group Ranks": [[]], "Rank": "x", "Process Group Name": {"a": 1}},
        {"In msg nelems": -5},
        {"In msg nelems": 10**400},
        {"In msg nelems": None, "dtype": 7},
        {"External id": [1], "Process Group Description": ["x"]},
        {"Collective name": "\x1b[31m" * 100},
        {"Collective name": ["allreduce"], "correlation": [1]},
        {"Process Group Ranks": "[0, 0]", "Group size": 2},
        {"Process Group Name": "\x1b[2J\n" * 50},
    ],
)
def test_absurd_arguments_are_counted_or_named(tmp_path: Path, args: dict[str, Any]) -> None:
    odd = {**collective("allreduce", "1", 100, 100), **args}
    found = torch_trace.read(
        [written(tmp_path, trace([record(1, odd), kernel("ncclDevKernel_AllReduce", 1, 1, **odd)], distributedInfo=[]))]
    )
    (recording,) = found.recordings
    assert calls(found) == 1
    assert len(recording.spans or ()) == 1
    shown = [
        *(each.label for each in recording.communicators),
        *(e.op for e in recording.events),
        *map(str, found.problems),
    ]
    assert all(text.isprintable() and len(text) < 400 for text in shown)


def test_what_is_absurd_in_the_job_is_passed(tmp_path: Path) -> None:
    for distributed in ({"rank": "x", "pg_config": [3, {"ranks": 7}]}, {"pg_config": {"a": 1}}, 5, None):
        assert calls(torch_trace.read([written(tmp_path, trace(CALLS, distributedInfo=distributed))])) == 50


@pytest.mark.parametrize(
    "last",
    [
        "null",
        '{"ph": "X", "ts": ' + "9" * 400 + "}",
        '{"ph": "X", "ts": "soon"}',
        '{"ph": "X", "ts": ' + "9" * 5000 + "}",
        '{"ph": "X", "args": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"ph": "X", !}',
    ],
)
def test_a_broken_last_event_is_not_taken_for_a_cut(tmp_path: Path, last: str) -> None:
    events = ",\n".join([*(json.dumps(each) for each in CALLS), last])
    found = reading(tmp_path, f'{{"traceEvents": [{events}], "host_name": "node-7"}}'.encode())
    assert calls(found) == 50 and found.recordings[0].host == "node-7"
    assert [problem.what.split(",")[0] for problem in found.problems] == ["an event cannot be read"]


@pytest.mark.parametrize("events", [b'[null, 1, "x", []]', b"[[[]]]", b"[" * 100_000, b'[{"a":' * 100_000])
def test_a_trace_of_which_nothing_can_be_read_is_none(tmp_path: Path, events: bytes) -> None:
    found = reading(tmp_path, b'{"traceEvents": ' + events + b"}")
    assert found.recordings == () and found.problems


def test_a_second_list_of_events_is_not_left_out_in_silence(tmp_path: Path) -> None:
    events = json.dumps(CALLS)
    found = reading(tmp_path, f'{{"traceEvents": {events}, "traceEvents": {events}}}'.encode())
    assert calls(found) == 50
    assert [problem.what for problem in found.problems] == ["a second list of traceEvents, which is not read"]


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + json.dumps(trace(CALLS)).encode()
    assert torch_trace.recognises(data, tmp_path)
    found = reading(tmp_path, data)
    assert (calls(found), found.problems) == (50, ())
    assert found.recordings[0].world_size == 4


def test_an_event_without_end_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "EVENT_LIMIT", 1 << 16)
    monkeypatch.setattr(json_stream, "BLOCK", 1 << 14)
    found = reading(tmp_path, b'{"traceEvents": [' + b'{"ph": "X", "name": "' + b"x" * (1 << 20))
    assert any("no event ends within" in problem.what for problem in found.problems)


def test_a_bomb_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "SIZE_LIMIT", 4_000_000)
    text = json.dumps(trace(CALLS)).encode()[:-100] + b"," + b" " * 5_000_000
    found = reading(tmp_path, gzip.compress(text), "bomb.json.gz")
    assert found.recordings == ()
    assert any("uncompressed: profile fewer steps" in problem.what for problem in found.problems)


def test_a_bomb_without_events_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "HEADER_LIMIT", 1 << 20)
    found = reading(tmp_path, gzip.compress(b'{"schemaVersion": 1' + b" " * 50_000_000), "bomb.json.gz")
    assert [problem.what.partition(":")[0] for problem in found.problems] == ["no traceEvents"]


def test_many_broken_events_take_no_quadratic_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a hundred the rest of a block is given up, and only counted."""
    found = reading(tmp_path, b'{"traceEvents": [' + b'{"ph": "X", "args": [' * 20_000 + b"]}")
    (problem, *_) = found.problems
    assert found.recordings == ()
    assert (problem.count, "an event cannot be read" in problem.what) == (20_000, True)


def test_another_order_of_keys_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "BLOCK", 512)
    found = reading(tmp_path, json.dumps(trace(CALLS), sort_keys=True).encode())
    assert (calls(found), found.problems) == (50, ())
    assert found.recordings[0].world_size == 4


def test_a_missing_file_is_a_problem(tmp_path: Path) -> None:
    (problem,) = torch_trace.read([tmp_path / "none.json"]).problems
    assert "No such file" in problem.what
