"""Nsight Systems, exported by ``nsys export --type sqlite``: device times, NVTX steps, and NCCL's own ranges.

Times are nanoseconds there. Tables and columns vary by version and by what was captured: each is looked up first, and
what is absent is said. A file may hold several processes; each is a recording, and its rank is never guessed from a
name. The file is opened read-only and is untrusted.
"""

from __future__ import annotations

import re
import sqlite3
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlapkit.errors import printable
from overlapkit.measure.events import CommEvent, Interval, Problem, Reading, Recording, Span, Step
from overlapkit.measure.intervals import step_at, windows
from overlapkit.measure.readers.kernels import communication, may_run
from overlapkit.measure.readers.nsys.nccl_payloads import Call, Range, calls, is_function
from overlapkit.measure.readers.nsys.tables import Tables, open_read_only
from overlapkit.measure.readers.torch_trace.collectives import UNKNOWN

_KERNELS, _RUNTIME, _NVTX = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
_COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
SIZE_LIMIT = 4_000_000_000  # bytes of the file
# What a range of an optimizer step is called: a word for it, with its number or always the same.
_STEP = re.compile(r"(?:train(?:ing)?[ _]?)?(?:step|iteration|iter)[ _:#=-]*(\d{1,12})?|ProfilerStep#(\d{1,12})", re.I)


def recognises(head: bytes, path: Path) -> bool:
    """Whether a file that begins so is an sqlite database; whether it is an export of nsys, :func:`read` says."""
    return head.startswith(b"SQLite format 3\0")


def read(paths: Sequence[Path], progress: Callable[[int], None] | None = None) -> Reading:
    """A recording per process of each file; a file that gives none is a problem that says why.

    ``progress`` is told the bytes of each file when it is read.
    """
    recordings: list[Recording] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            size = path.stat().st_size
            if size > SIZE_LIMIT:
                what = f"more than {SIZE_LIMIT // 10**9} GB: capture fewer steps"
                problems.append(Problem(source=str(path), what=what))
                continue
            with open_read_only(path) as tables:
                found, said = _file(str(path), tables)
            recordings += found
            problems += said
            if progress is not None:
                progress(size)
        except (sqlite3.Error, OSError) as error:
            what = f"it cannot be read as an sqlite database ({printable(str(error))})"
            problems.append(Problem(source=str(path), what=what))
    return Reading(recordings=tuple(recordings), problems=tuple(problems))


@dataclass(slots=True)
class _Process:
    """What of one process matters, in microseconds; a kernel is its start, end, operation and correlation id."""

    kernels: list[tuple[float, float, str, int | None]] = field(default_factory=list)
    busy: list[Interval] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    steps: dict[str, list[tuple[int | None, Interval]]] = field(default_factory=dict)
    launches: dict[int, tuple[float, int]] = field(default_factory=dict)

    @property
    def communicates_or_computes(self) -> bool:
        return bool(self.kernels or self.busy or self.ranges)


class _Export:
    """One file as it is read: its processes by their ids, and what could not be used of it."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.processes: dict[int, _Process] = {}
        self.problems: Counter[str] = Counter()
        self._apart = not tables.has(_KERNELS) or tables.has(_KERNELS, "globalPid")

    def process_id(self, of: object) -> int:
        """Of a globalPid or globalTid, in bits 24 to 47; 0 where the file does not keep processes apart."""
        return (of >> 24) & 0xFFFFFF if self._apart and isinstance(of, int) and of >= 0 else 0

    def process(self, of: object) -> _Process:
        return self.processes.setdefault(self.process_id(of), _Process())

    def timed(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """The rows with start and end in microseconds, then the columns; rows without times are counted."""
        for start, end, *rest in self.tables.rows(table, ("start", "end", *columns)):
            if isinstance(start, int) and isinstance(end, int) and start <= end:
                yield (start / 1000, end / 1000, *rest)
            else:
                self.problems[f"{table}: a row has no time, or ends before it starts"] += 1


def _file(source: str, tables: Tables) -> tuple[list[Recording], list[Problem]]:
    if not any(tables.has(name, "start", "end") for name in (_KERNELS, *_COPIES, _NVTX)):
        what = "an sqlite database, but no export of Nsight Systems: it has no table of kernels, copies or NVTX ranges"
        return [], [Problem(source=source, what=what)]
    export = _Export(tables)
    texts, operations = _strings(tables)
    _device_work(export, operations)
    _nvtx(export, texts)
    _launches(export)
    notes = (*_absent(tables), *_said_by_capture(tables))
    rows = tables.rows("TARGET_INFO_SYSTEM_ENV", ("name", "value"))
    host = next((value for name, value in rows if name == "Hostname" and isinstance(value, str)), None)
    used = {pid: process for pid, process in export.processes.items() if process.communicates_or_computes}
    recordings = [
        _recording(source if len(used) == 1 else f"{source} (process {pid})", export, used[pid], host, notes)
        for pid in sorted(used)
    ]
    if not recordings:
        export.problems["its tables have no kernel, copy or range of NCCL"] += 1
    found = [Problem(source=source, what=what, count=count) for what, count in export.problems.items()]
    for table, why in tables.ended.items():
        found.append(Problem(source=source, what=f"table {table} is not read to its end: {printable(why)}"))
    return recordings, found


def _strings(tables: Tables) -> tuple[dict[int, str], dict[int, str]]:
    """Ids -> texts that name steps or functions of NCCL, and payloads; ids -> operations of communication kernels."""
    texts: dict[int, str] = {}
    operations: dict[int, str] = {}
    for number, value in tables.rows("StringIds", ("id", "value")):
        if isinstance(value, str):
            op = communication(value)
            if op is not None:
                operations[number] = op
            if is_function(value) or _STEP.fullmatch(value) or value.startswith("{"):
                texts[number] = value
    return texts, operations


def _device_work(export: _Export, operations: Mapping[int, str]) -> None:
    columns = ("globalPid", "demangledName", "shortName", "correlationId")
    for start, end, process, long_name, short_name, correlation in export.timed(_KERNELS, *columns):
        op = operations.get(long_name) or operations.get(short_name)
        if op is None:
            export.process(process).busy.append((start, end))
        else:
            number = correlation if isinstance(correlation, int) else None
            export.process(process).kernels.append((start, end, op, number))
    for table in _COPIES:
        for start, end, process in export.timed(table, "globalPid"):
            export.process(process).busy.append((start, end))


def _nvtx(export: _Export, texts: Mapping[int, str]) -> None:
    """Ranges of steps and of NCCL. Marks have no end, nor have ranges that were open when the capture ended."""
    columns = ("start", "end", "text", "textId", "globalTid", "jsonText", "jsonTextId")
    for start, end, text, text_id, thread, payload, payload_id in export.tables.rows(_NVTX, columns):
        name = text if isinstance(text, str) else texts.get(text_id)
        if name is None or not (isinstance(start, int) and isinstance(end, int) and start <= end):
            continue
        step = _STEP.fullmatch(name)
        if is_function(name):
            payload = payload if isinstance(payload, str) else texts.get(payload_id)
            number = thread if isinstance(thread, int) else 0
            export.process(thread).ranges.append(Range(start / 1000, number, name, payload))
        elif step:
            digits = step[1] or step[2]
            family = name.removesuffix(digits or "").lower()
            times = (int(digits) if digits else None, (start / 1000, end / 1000))
            export.process(thread).steps.setdefault(family, []).append(times)


def _launches(export: _Export) -> None:
    """When and on which thread the host launched the communication kernels."""
    wanted = {pid: {kernel[3] for kernel in process.kernels} for pid, process in export.processes.items()}
    if not any(process.ranges for process in export.processes.values()):
        return
    for start, thread, correlation in export.tables.rows(_RUNTIME, ("start", "globalTid", "correlationId")):
        pid = export.process_id(thread)
        if isinstance(start, int) and isinstance(correlation, int) and correlation in wanted.get(pid, ()):
            export.processes[pid].launches[correlation] = (start / 1000, thread if isinstance(thread, int) else 0)


def _recording(source: str, export: _Export, process: _Process, host: str | None, notes: tuple[str, ...]) -> Recording:
    made, communicators, nameless = calls(process.ranges)
    steps, steps_by = _steps(process)
    own = []
    if nameless:
        own.append(f"NCCL's ranges without a payload: {nameless}; nothing says their bytes or communicator")
    if made:
        own.append("NCCL's ranges do not say the type of the elements")
    if not steps:
        own.append('no repeated NVTX range of optimizer steps, such as "iteration 5" or "train_step"')
    on_device = export.tables.has(_KERNELS, "start", "end")
    return Recording(
        source=source,
        kind="nsys",
        host=None if host is None else printable(host),
        communicators=tuple(communicators),
        events=_events(made, steps, export.problems),
        steps=len(steps),
        steps_by=steps_by,
        windows=steps,
        spans=_spans(process, made) if on_device else None,
        busy=sorted(process.busy) if on_device else None,
        notes=(*notes, *own),
    )


def _events(made: Sequence[Call], steps: Sequence[Step], problems: Counter[str]) -> list[CommEvent]:
    sums: dict[tuple[int, str, int | None], list[int]] = {}
    for call in made:
        known = sums.setdefault((call.communicator, call.op, step_at(steps, call.at)), [0, 0])
        known[0] += 1
        known[1] += call.message_bytes
        if call.unclear is not None:
            problems[call.unclear] += 1
    return [
        CommEvent(communicator, op, UNKNOWN, count, moved, step)
        for (communicator, op, step), (count, moved) in sums.items()
    ]


def _spans(process: _Process, made: Sequence[Call]) -> list[Span]:
    """The communication kernels, each with the last call before its launch, on its thread, that it may run."""
    threads: dict[int, list[Call]] = {}
    for call in made:
        threads.setdefault(call.thread, []).append(call)
    found = []
    for start, end, op, correlation in sorted(process.kernels, key=lambda kernel: kernel[0]):
        at, thread = process.launches.get(-1 if correlation is None else correlation, (0.0, 0))
        before = threads.get(thread, [])
        last = bisect_right(before, at, key=lambda call: call.at)
        may = (call for call in reversed(before[max(last - 32, 0) : last]) if may_run(op, call.op))
        communicator, op = next(((call.communicator, call.op) for call in may), (None, op))
        found.append(Span(start, end, communicator, op, UNKNOWN))
    return found


def _steps(process: _Process) -> tuple[tuple[Step, ...], str | None]:
    """The repeated range of steps; of several kinds the one that takes the most time."""
    repeated = {family: ranges for family, ranges in process.steps.items() if len(ranges) > 1}
    if not repeated:
        return (), None
    family = max(repeated, key=lambda name: sum(end - start for _, (start, end) in repeated[name]))
    ranges = sorted(repeated[family], key=lambda found: found[1])
    numbered = {number: times for number, times in ranges if number is not None}
    if len(numbered) < len(ranges):
        numbered = {place: times for place, (_, times) in enumerate(ranges)}
    return windows(numbered), f'NVTX ranges "{printable(family.strip(), limit=40)}"'


def _absent(tables: Tables) -> list[str]:
    """What the file lacks, for the reader of the report."""
    notes = []
    if not tables.has(_KERNELS, "start", "end"):
        notes.append(f"no table {_KERNELS}: no GPU kernels captured, so that no overlap can be measured")
    elif not tables.has(_KERNELS, "globalPid"):
        notes.append("its kernels do not say their process: all of the file are taken as one's")
    notes += [f"no table {table}" for table in (*_COPIES, _NVTX, _RUNTIME) if not tables.has(table)]
    if tables.has(_GRAPHS):
        notes.append("CUDA graphs were captured as a whole: the kernels inside them are not seen")
    return notes


def _said_by_capture(tables: Tables) -> list[str]:
    """The warnings of an incomplete capture."""
    said = [text for severity, text in tables.rows("DIAGNOSTIC_EVENT", ("severity", "text")) if severity in (2, 3, 4)]
    first = next((text for text in said if isinstance(text, str)), "")
    return [f"the capture has {len(said)} warnings, the first: {printable(first)}"] if said else []
