"""NCCL Inspector: records to bytes, times and ranks, and what is said of a record that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overlapkit.measure.events import CommEvent, Reading, Recording, Span
from overlapkit.measure.readers import nccl_inspector

FACTORS = {"AllReduce": 2.0}  # times (n − 1)/n: what nccl-tests calls the bus bandwidth


def record(coll: str, size: int, *, rank: int = 0, ranks: int = 4, whole: int = 1, **more: Any) -> dict[str, Any]:
    """A record as the plugin writes it, ``whole`` times ``size`` bytes in 100 µs; ``id`` and ``perf`` may be said."""
    bandwidth = size * whole / 100 / 1000
    return {
        "header": {"id": more.get("id", "0xe62d"), "rank": rank, "n_ranks": ranks, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "git_rev": "",
            "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": 1_752_867_229_276_385,
            "hostname": "node-0",
            "pid": 100 + more.get("process", rank),
        },
        "coll_perf": {
            "coll": coll,
            "coll_sn": 7,
            "coll_msg_size_bytes": size,
            "coll_exec_time_us": 100,
            "coll_timing_source": "kernel_gpu",
            "coll_algobw_gbs": round(bandwidth, 6),
            "coll_busbw_gbs": round(bandwidth * FACTORS.get(coll, 1.0) * (ranks - 1) / ranks, 6),
            **more.get("perf", {}),
        },
    }


def read(folder: Path, *records: Any, between: str = "\n") -> Reading:
    path = folder / "inspector.log"
    path.write_text(between.join(one if isinstance(one, str) else json.dumps(one) for one in records))
    return nccl_inspector.read([path])


def one(reading: Reading) -> Recording:
    assert reading.problems == ()
    (recording,) = reading.recordings
    return recording


@pytest.mark.parametrize("between", ["\n", "", ",\n", "\n\n  "])
def test_equal_operations_are_summed_with_their_time(tmp_path: Path, between: str) -> None:
    records = [record("AllReduce", 1 << 20), record("AllReduce", 1 << 20), record("AllReduce", 64)]
    recording = one(read(tmp_path, *records, between=between))
    assert recording.events == [
        CommEvent(0, "all_reduce", "unknown", 1, 64, None, 100.0),
        CommEvent(0, "all_reduce", "unknown", 2, 2 << 20, None, 200.0),
    ]
    assert (recording.rank, recording.world_size, recording.host, recording.steps) == (0, 4, "node-0", 0)
    assert (recording.spans, recording.busy) == (None, None)


@pytest.mark.parametrize("coll", ["AllGather", "ReduceScatter"])
@pytest.mark.parametrize(("whole", "moved"), [(1, 1 << 20), (4, 4 << 20)])
def test_what_a_size_means_is_judged_by_the_bandwidth(tmp_path: Path, coll: str, whole: int, moved: int) -> None:
    recording = one(read(tmp_path, record(coll, 1 << 20, whole=whole)))
    assert [event.message_bytes for event in recording.events] == [moved]


def test_small_messages_follow_the_others(tmp_path: Path) -> None:
    rounded = record("AllGather", 8, perf={"coll_algobw_gbs": 0.0, "coll_busbw_gbs": 0.0})
    recording = one(read(tmp_path, rounded, record("AllGather", 1 << 20, whole=1)))
    assert [event.message_bytes for event in recording.events] == [8, 1 << 20]
    recording = one(read(tmp_path, rounded))
    assert [event.message_bytes for event in recording.events] == [8 * 4]


def test_verbose_records_have_the_span_of_their_channels(tmp_path: Path) -> None:
    channels = [(1000, 1100), (990, 1080), (0, 2000)]
    events = [
        {"channel_id": at, "kernel_start_ts": start, "kernel_stop_ts": stop}
        for at, (start, stop) in enumerate(channels)
    ]
    trace = {"event_trace_ts": {"coll_start_ts": 900, "coll_stop_ts": 1200, "kernel_events": events}}
    recording = one(read(tmp_path, record("AllReduce", 64, perf=trace)))
    assert recording.spans == [Span(990, 1100, 0, "all_reduce", "unknown")]
    assert any("on the host" in note for note in recording.notes)


def test_ranks_are_joined_over_files(tmp_path: Path) -> None:
    paths = []
    for rank in range(4):
        path = tmp_path / f"{rank}.log"
        pair = record("AllReduce", 64, rank=rank // 2, ranks=2, id=f"0x{rank % 2}", process=rank)
        path.write_text(json.dumps(record("AllReduce", 64, rank=rank)) + json.dumps(pair))
        paths.append(path)
    reading = nccl_inspector.read(paths)
    assert [one.communicators[1].ranks for one in reading.recordings] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [one.rank for one in reading.recordings] == [0, 1, 2, 3]


def test_records_after_a_marker_have_its_header(tmp_path: Path) -> None:
    marker = record("AllReduce", 64)
    perf = {"coll_perf": marker.pop("coll_perf")}
    marker["dump_stats"] = {"coll_records": 2, "coll_dropped_total": 3, "coll_dropped_since_last_dump": 1}
    send = {"p2p_perf": {"p2p": "Send", "p2p_msg_size_bytes": 32, "p2p_exec_time_us": 5, "peer": 1}}
    recording = one(read(tmp_path, marker, perf, send))
    assert [(event.op, event.message_bytes) for event in recording.events] == [("all_reduce", 64), ("send", 32)]
    assert any("dropped 3 operations" in note for note in recording.notes)


def test_what_cannot_be_used_is_counted_with_its_line(tmp_path: Path) -> None:
    good = record("AllReduce", 64)
    no_rank = {"header": {"id": "0x1"}, "coll_perf": {}}
    unknown, no_size = record("Frob\x1b[2J", 64), record("AllReduce", 64, perf={"coll_msg_size_bytes": -1})
    cut = json.dumps(good)[:-40]
    reading = read(tmp_path, good, cut, good, "12", no_rank, unknown, no_size, good, cut)
    assert [(problem.line, problem.count) for problem in reading.problems] == [(2, 2), (4, 1), (5, 1), (6, 1), (7, 1)]
    assert all(problem.what.isprintable() for problem in reading.problems)
    assert [event.calls for event in reading.recordings[0].events] == [3]


@pytest.mark.parametrize("content", ["", "[" * 99_999, '{"header":' * 9999, "{" * 2_200_000, "1" * 5000, "\0\xff"])
def test_hostile_files_say_that_nothing_is_in_them(tmp_path: Path, content: str) -> None:
    reading = read(tmp_path, content)
    assert reading.recordings == ()
    assert reading.problems


@pytest.mark.parametrize(
    "damage", ['{\n{"', "{\n" * 3, '{"a":' * 2000 + "}" * 3, '{"header": [1, 2\n', "{" + '"a": {' * 9 + "\n"]
)
def test_records_between_damage_are_read(tmp_path: Path, damage: str) -> None:
    good = record("AllReduce", 64)
    reading = read(tmp_path, good, damage, good, damage, good)
    assert [event.calls for event in reading.recordings[0].events] == [3]
    assert [problem.line for problem in reading.problems] == [2]


def test_a_file_of_nothing_but_damage_is_given_up(tmp_path: Path) -> None:
    good = record("AllReduce", 64)
    reading = read(tmp_path, good, "{\n" * 200_000, good)
    assert [event.calls for event in reading.recordings[0].events] == [1]
    assert any("the rest is not read" in problem.what for problem in reading.problems)


def test_a_file_of_records_of_no_operation_is_given_up(tmp_path: Path) -> None:
    good = record("AllReduce", 64)
    reading = read(tmp_path, good, "{}\n" * 200_000, good)
    assert [event.calls for event in reading.recordings[0].events] == [1]
    assert any("the rest is not read" in problem.what for problem in reading.problems)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_other_encodings(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "inspector.log"
    path.write_bytes("\n".join(json.dumps(record("AllReduce", 64)) for _ in range(3)).encode(encoding))
    assert nccl_inspector.recognises(path.read_bytes(), path)
    assert [event.calls for event in one(nccl_inspector.read([path])).events] == [3]


def test_it_is_recognised_by_its_keys() -> None:
    head = json.dumps(record("AllReduce", 64), indent=2).encode()
    assert nccl_inspector.recognises(head, Path("x"))
    assert not nccl_inspector.recognises(b'{"schemaVersion": 1, "traceEvents": []}', Path("x.json"))
