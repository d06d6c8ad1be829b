"""Exports of Nsight Systems: device times, NVTX steps, NCCL's own ranges, and files that are something else."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from overlapkit.measure.events import CommEvent, Interval, Reading, Span
from overlapkit.measure.readers import nsys
from overlapkit.measure.readers.nsys import tables

GEMM, ALL_REDUCE, ALL_GATHER = (
    "sm90_gemm",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
    "ncclDevKernel_AllGather_RING_LL",
)
PID = 4242
THREAD = PID << 24 | 7
COLUMNS = {
    "StringIds": "id INTEGER, value TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,"
    " correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER, end INTEGER, globalPid INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, text TEXT, textId INTEGER, globalTid INTEGER, jsonText TEXT",
    "TARGET_INFO_SYSTEM_ENV": "name TEXT, value TEXT",
    "DIAGNOSTIC_EVENT": "severity INTEGER, text TEXT",
}


def export(path: Path, *, without: tuple[str, ...] = (), **tables: list[dict[str, Any]]) -> Path:
    """A file with the tables of an export, but for ``without``, and these rows; times in nanoseconds."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for table, columns in COLUMNS.items():
            if table not in without:
                connection.execute(f"CREATE TABLE {table} ({columns})")
        for table, rows in tables.items():
            for row in rows:
                marks = ", ".join("?" * len(row))
                connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))
    return path


STRINGS = [{"id": number, "value": name} for number, name in enumerate((GEMM, ALL_REDUCE, ALL_GATHER, "iteration 5"))]


def kernel(name: str, start_us: int, end_us: int, correlation: int = 0, pid: int = PID) -> dict[str, Any]:
    number = next(row["id"] for row in STRINGS if row["value"] == name)
    times = {"start": start_us * 1000, "end": end_us * 1000}
    return {**times, "correlationId": correlation, "globalPid": pid << 24, "demangledName": number}


def ranged(text: str, start_us: float, end_us: float, pid: int = PID, **payload: Any) -> dict[str, Any]:
    times = {"start": int(start_us * 1000), "end": int(end_us * 1000)}
    return {**times, "text": text, "globalTid": pid << 24 | 7, "jsonText": json.dumps(payload) if payload else None}


def launch(start_us: float, correlation: int) -> dict[str, Any]:
    return {
        "start": int(start_us * 1000),
        "end": int(start_us * 1000),
        "globalTid": THREAD,
        "correlationId": correlation,
    }


def read(path: Path) -> Reading:
    return nsys.read([path])


def test_kernels_and_copies_are_times_in_microseconds(tmp_path: Path) -> None:
    found = read(
        export(
            tmp_path / "a.sqlite",
            StringIds=STRINGS,
            CUPTI_ACTIVITY_KIND_KERNEL=[kernel(GEMM, 0, 10), kernel(ALL_REDUCE, 5, 20)],
            CUPTI_ACTIVITY_KIND_MEMCPY=[{"start": 21_500, "end": 22_000, "globalPid": PID << 24}],
            TARGET_INFO_SYSTEM_ENV=[{"name": "Hostname", "value": "node3"}],
        )
    )
    (recording,) = found.recordings
    assert found.problems == ()
    assert recording.spans == [Span(5, 20, None, "all_reduce", "unknown")]
    assert recording.busy == [(0, 10), (21.5, 22)]
    assert (recording.kind, recording.host, recording.rank) == ("nsys", "node3", None)


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["iteration 5", "iteration 6", "iteration 7"], [(5, 0, 10), (6, 10, 20), (7, 20, 28)]),
        (["train_step"] * 3, [(0, 0, 10), (1, 10, 20), (2, 20, 28)]),
        (["ProfilerStep#8", "ProfilerStep#9"], [(8, 0, 10), (9, 10, 18)]),
        (["Step 1"], []),
        (["forward", "forward"], []),
        (["iteration 5", "iteration 5"], [(0, 0, 10), (1, 10, 18)]),
    ],
)
def test_steps_are_a_repeated_range_with_a_name_of_steps(
    tmp_path: Path, names: list[str], steps: list[tuple[int, float, float]]
) -> None:
    ranges = [ranged(name, 10 * place, 10 * place + 8) for place, name in enumerate(names)]
    path = export(
        tmp_path / "a.sqlite", StringIds=STRINGS, NVTX_EVENTS=ranges, CUPTI_ACTIVITY_KIND_KERNEL=[kernel(GEMM, 0, 1)]
    )
    (recording,) = read(path).recordings
    assert [(each.number, each.start_us, each.end_us) for each in recording.windows] == steps
    assert (recording.steps, recording.steps_by is None) == (len(steps), not steps)


def test_a_range_may_keep_its_text_by_id(tmp_path: Path) -> None:
    ranges = [{**ranged("", at, at + 8), "text": None, "textId": 3} for at in (0, 10)]
    path = export(
        tmp_path / "a.sqlite", StringIds=STRINGS, NVTX_EVENTS=ranges, CUPTI_ACTIVITY_KIND_KERNEL=[kernel(GEMM, 0, 1)]
    )
    assert read(path).recordings[0].steps == 2


COMMUNICATOR = {"NCCL communicator ID": 0xABC}


def test_payloads_of_nccl_are_calls_with_bytes(tmp_path: Path) -> None:
    found = read(
        export(
            tmp_path / "a.sqlite",
            StringIds=STRINGS,
            NVTX_EVENTS=[
                ranged("ncclCommInitRank", 0, 1, **COMMUNICATOR, **{"No. of ranks": 8, "Rank": 3}),
                ranged("iteration 5", 2, 20),
                ranged("iteration 6", 20, 40),
                ranged("ncclAllGather", 3, 4, **COMMUNICATOR, **{"Message size [bytes]": 1000}),
                ranged("ncclAllReduce", 5, 6, **COMMUNICATOR, **{"Message size [bytes]": 500}),
                ranged("ncclAllReduce", 25, 26, **COMMUNICATOR, **{"Message size [bytes]": 500}),
                ranged("ncclGroupEnd", 27, 28),
            ],
            CUPTI_ACTIVITY_KIND_RUNTIME=[launch(3.5, 1), launch(5.5, 2), launch(5.6, 3)],
            CUPTI_ACTIVITY_KIND_KERNEL=[
                kernel(ALL_GATHER, 7, 9, 1),
                kernel(ALL_REDUCE, 9, 12, 2),
                kernel(GEMM, 0, 8, 3),
            ],
        )
    )
    (recording,) = found.recordings
    (communicator,) = recording.communicators
    assert (communicator.size, communicator.rank, communicator.label) == (8, 3, "NCCL communicator 0xabc")
    assert recording.events == [
        CommEvent(0, "all_gather", "unknown", 1, 8000, 5),
        CommEvent(0, "all_reduce", "unknown", 1, 500, 5),
        CommEvent(0, "all_reduce", "unknown", 1, 500, 6),
    ]
    assert recording.spans == [Span(7, 9, 0, "all_gather", "unknown"), Span(9, 12, 0, "all_reduce", "unknown")]


def test_a_gather_needs_the_size_of_its_communicator(tmp_path: Path) -> None:
    ranges = [ranged("ncclAllGather", 3, 4, **COMMUNICATOR, **{"Message size [bytes]": 1000})]
    found = read(export(tmp_path / "a.sqlite", NVTX_EVENTS=ranges))
    assert found.recordings[0].events == [CommEvent(0, "all_gather", "unknown", 1, 0, None)]
    assert [problem.what for problem in found.problems] == ["all_gather: the size of its communicator was not captured"]


def test_ranges_of_nccl_without_payloads_are_said(tmp_path: Path) -> None:
    (recording,) = read(export(tmp_path / "a.sqlite", NVTX_EVENTS=[ranged("ncclSend", 1, 2)] * 3)).recordings
    assert recording.events == []
    assert any("without a payload: 3" in note for note in recording.notes)


def test_processes_are_kept_apart(tmp_path: Path) -> None:
    kernels = [kernel(GEMM, 0, 10, pid=11), kernel(ALL_REDUCE, 0, 20, pid=12)]
    path = export(tmp_path / "a.sqlite", StringIds=STRINGS, CUPTI_ACTIVITY_KIND_KERNEL=kernels)
    found = read(path).recordings
    assert [(each.source, len(each.spans or ()), len(each.busy or ())) for each in found] == [
        (f"{path} (process 11)", 0, 1),
        (f"{path} (process 12)", 1, 0),
    ]


def test_what_the_file_lacks_is_said(tmp_path: Path) -> None:
    path = export(
        tmp_path / "a.sqlite", without=("CUPTI_ACTIVITY_KIND_KERNEL",), NVTX_EVENTS=[ranged("ncclSend", 1, 2)]
    )
    (recording,) = read(path).recordings
    assert (recording.spans, recording.busy) == (None, None)
    assert any("no GPU kernels captured" in note for note in recording.notes)
    assert "no table CUPTI_ACTIVITY_KIND_MEMSET" in recording.notes


def test_warnings_of_the_capture_are_passed_on(tmp_path: Path) -> None:
    path = export(
        tmp_path / "a.sqlite",
        StringIds=STRINGS,
        CUPTI_ACTIVITY_KIND_KERNEL=[kernel(GEMM, 0, 10)],
        DIAGNOSTIC_EVENT=[{"severity": 2, "text": "buffers\x1b[2J ran full"}, {"severity": 1, "text": "started"}],
    )
    notes = read(path).recordings[0].notes
    assert "the capture has 1 warnings, the first: buffers\\x1b[2J ran full" in notes


def test_kernels_without_a_process_are_one_process(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        connection.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, shortName INTEGER)")
        connection.execute("CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT, globalTid INTEGER)")
        connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1000, 2000, 1)")
        connection.executemany(
            "INSERT INTO NVTX_EVENTS VALUES (?, ?, 'step', ?)", [(0, 500, THREAD), (500, 900, THREAD)]
        )
    (recording,) = read(path).recordings
    assert (recording.busy, recording.steps) == ([(1, 2)], 2)


@pytest.mark.parametrize(
    "statement", ["CREATE TABLE users (name TEXT)", "CREATE VIEW NVTX_EVENTS AS SELECT 1 AS start, 2 AS end"]
)
def test_a_database_of_something_else_is_named(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
    found = read(path)
    assert found.recordings == ()
    (problem,) = found.problems
    assert "no export of Nsight Systems" in problem.what


@pytest.mark.parametrize(
    "data", [b"", b"SQLite format 3\0", b"SQLite format 3\0" + b"\xff" * 5000, b"not a database at all"]
)
def test_what_is_no_database_is_a_problem_in_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "broken.sqlite"
    path.write_bytes(data)
    found = read(path)
    assert found.recordings == ()
    assert len(found.problems) == 1
    assert "\n" not in str(found.problems[0])


def test_a_damaged_table_is_read_up_to_the_damage(tmp_path: Path) -> None:
    kernels = [kernel(GEMM, at, at + 1) for at in range(5000)]
    path = export(tmp_path / "a.sqlite", StringIds=STRINGS, CUPTI_ACTIVITY_KIND_KERNEL=kernels)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 4096] = b"\xff" * 4096
    path.write_bytes(data)
    found = read(path)
    assert 0 < sum(len(each.busy or ()) for each in found.recordings) < 5000
    assert any("is not read to its end" in problem.what for problem in found.problems)


def test_odd_values_are_counted(tmp_path: Path) -> None:
    rows = [kernel(GEMM, 0, 1), {**kernel(GEMM, 5, 1)}, {**kernel(GEMM, 1, 2), "end": None}]
    rows.append({**kernel(GEMM, 2, 3), "demangledName": b"\xff", "correlationId": "x", "globalPid": "y"})
    found = read(export(tmp_path / "a.sqlite", StringIds=STRINGS, CUPTI_ACTIVITY_KIND_KERNEL=rows))
    busy: list[Interval] = [interval for each in found.recordings for interval in each.busy or ()]
    assert sorted(busy) == [(0, 1), (2, 3)]
    assert [problem.count for problem in found.problems] == [2]


def test_a_huge_table_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROWS_LIMIT", 10)
    kernels = [kernel(GEMM, at, at + 1) for at in range(50)]
    found = read(export(tmp_path / "a.sqlite", StringIds=STRINGS, CUPTI_ACTIVITY_KIND_KERNEL=kernels))
    assert len(found.recordings[0].busy or ()) == 10
    assert any("more than 10 rows" in problem.what for problem in found.problems)


def test_a_huge_file_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys, "SIZE_LIMIT", 1000)
    (problem,) = read(export(tmp_path / "a.sqlite")).problems
    assert "capture fewer steps" in problem.what


def test_the_file_is_left_as_it_was(tmp_path: Path) -> None:
    path = export(tmp_path / "a file?.sqlite", StringIds=STRINGS, CUPTI_ACTIVITY_KIND_KERNEL=[kernel(GEMM, 0, 10)])
    before = path.read_bytes()
    path.chmod(0o444)
    assert len(read(path).recordings) == 1
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_it_is_recognised_by_its_beginning(tmp_path: Path) -> None:
    path = export(tmp_path / "a.sqlite")
    assert nsys.recognises(path.read_bytes()[:65536], path)
    assert not nsys.recognises(b'{"traceEvents": []}', path)
