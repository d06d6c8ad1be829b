"""NCCL Inspector: one JSON object per operation, written by a profiler plugin of NCCL that runs beside the job.

``header`` (id of the communicator, rank, n_ranks), ``metadata`` (hostname, pid) and ``coll_perf`` or ``p2p_perf``: the
operation, its message size, its time and its bandwidths. A newer form writes the first two once, with ``dump_stats``,
before the operations that they hold for. The element type is in none. Source: ext-profiler/inspector/README.md of NCCL.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlapkit.errors import printable, shown
from overlapkit.measure.events import CommEvent, Communicator, Reading, Recording, Span
from overlapkit.measure.readers.json_objects import objects
from overlapkit.measure.readers.nccl_log.lines import Problems, blocks
from overlapkit.measure.readers.nccl_log.ranks import Member, rank_sets

# The name in a record -> (operation, whether its size may be that of one rank's part).
_OPERATIONS = {
    "AllReduce": ("all_reduce", False),
    "Broadcast": ("broadcast", False),
    "Reduce": ("reduce", False),
    "AllGather": ("all_gather", True),
    "ReduceScatter": ("reduce_scatter", True),
    "AllToAll": ("all_to_all", True),
    "AlltoAll": ("all_to_all", True),
    "Gather": ("gather", True),
    "Scatter": ("scatter", True),
    "Send": ("send", False),
    "Recv": ("recv", False),
}
_DTYPE = "unknown"
_BEFORE = b"\xef\xbb\xbf\xff\xfe \t\r\n"  # byte order marks and white space
_MOST_USELESS = 100_000  # records in a row
_GIVEN_UP = f"more than {_MOST_USELESS:,} records in a row are of no operation: the rest is not read"
_MOST_PROCESSES, _MOST_COMMUNICATORS, _MOST_SIZES, _MOST_SPANS = 16_384, 4096, 4096, 2_000_000
_NOTES = (
    "NCCL Inspector does not say element types",
    "NCCL Inspector marks no steps: sums are of the whole input",
)


@dataclass(slots=True)
class _Group:
    """A communicator as one process sees it, its how-manieth; ``sums`` are [calls, bytes, µs] by operation and size."""

    place: int
    id: str
    size: int
    rank: int
    name: str | None
    sums: dict[tuple[str, int], list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class _Process:
    host: str
    source: str
    groups: dict[tuple[str, int, int], _Group] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    untimed: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


def recognises(head: bytes, path: Path) -> bool:
    """Whether a file that begins with ``head`` is NCCL Inspector's."""
    start = head.replace(b"\0", b"").lstrip(_BEFORE)
    return start.startswith(b"{") and b'"header"' in start and any(word in start for word in (b"_perf", b"dump_stats"))


def read(paths: Sequence[Path], progress: Callable[[int], None] | None = None) -> Reading:
    """The operations of every process, in one recording each, the ranks of communicators joined over all files.

    ``progress`` is told how many more bytes of the files were read.
    """
    problems = Problems()
    scan = _Scan(problems)
    for path in paths:
        source = printable(str(path), limit=300)
        before = scan.operations
        scan.begin(source)
        text = blocks(path, problems, progress, lambda: scan.operations)
        for line, value in objects(text, source, problems):
            scan.record(value, line)
            if scan.useless > _MOST_USELESS:
                problems.add(source, _GIVEN_UP, line)
                break
        if scan.operations == before and not problems.of(source):
            problems.add(source, "no operation in it")
    recordings = _recordings(list(scan.processes.values()), scan.parts_written())
    return Reading(recordings=recordings, problems=problems.listed(), notes=_NOTES if recordings else ())


class _Scan:
    """The records as they are read."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.processes: dict[tuple[str, int], _Process] = {}
        self.operations = 0
        self.useless = 0  # records since the last operation
        self._source = ""
        self._last: tuple[Any, Any] = ({}, {})
        self._votes: dict[str, Counter[bool]] = {}

    def begin(self, source: str) -> None:
        self._source, self._last, self.useless = source, ({}, {}), 0

    def record(self, value: Any, line: int) -> None:
        self.useless += 1
        if not isinstance(value, dict):
            self.problems.add(self._source, "a value that is no record", line)
            return
        if isinstance(value.get("header"), dict):
            self._last = value["header"], value.get("metadata")
        kind = next((kind for kind in ("coll", "p2p") if isinstance(value.get(f"{kind}_perf"), dict)), None)
        found = self._group(*self._last)
        if found is None:
            self.problems.add(self._source, "a record whose header lacks id, rank or n_ranks", line)
        elif kind is not None:
            self._operation(*found, kind, value[f"{kind}_perf"], line)
        elif isinstance(value.get("dump_stats"), dict):
            _note_dropped(*found, value["dump_stats"])
        else:
            self.problems.add(self._source, "a record of no operation", line)

    def _group(self, header: Mapping[str, Any], metadata: Any) -> tuple[_Process, _Group] | None:
        """The process and the communicator of a record; None where it does not name them or they are too many."""
        name, size, rank = header.get("id"), _whole(header.get("n_ranks")), _whole(header.get("rank"))
        if not isinstance(name, str) or not size or rank is None or rank >= size:
            return None
        metadata = metadata if isinstance(metadata, dict) else {}
        host, pid = metadata.get("hostname"), _whole(metadata.get("pid"))
        host = printable(host, limit=255) if isinstance(host, str) else ""
        process = self.processes.get((host, pid or 0))
        if process is None:
            if len(self.processes) >= _MOST_PROCESSES:
                return None
            process = self.processes[host, pid or 0] = _Process(host, self._source)
        key = name[:64], size, rank
        group = process.groups.get(key)
        if group is None:
            if len(process.groups) >= _MOST_COMMUNICATORS:
                return None
            said = header.get("comm_name")
            group = process.groups[key] = _Group(
                len(process.groups), *key, printable(said) if isinstance(said, str) and said else None
            )
        return process, group

    def _operation(self, process: _Process, group: _Group, kind: str, perf: dict[str, Any], line: int) -> None:
        name = perf.get(kind)
        op, parts = _OPERATIONS.get(name, (None, False)) if isinstance(name, str) else (None, False)
        size, time = _whole(perf.get(f"{kind}_msg_size_bytes")), _number(perf.get(f"{kind}_exec_time_us"))
        if op is None or size is None:
            what = "a record without a message size" if op else f"a record of the operation {shown(name)}"
            self.problems.add(self._source, f"{what}, which is left out", line)
            return
        self.operations += 1
        self.useless = 0
        # Where sizes are many, those of one operation are summed: key -1.
        key = op, size if (op, size) in group.sums or len(group.sums) < _MOST_SIZES else -1
        sums = group.sums.setdefault(key, [0, 0, 0.0])
        sums[0] += 1
        sums[1] += size
        sums[2] += time if time is not None else math.nan
        if parts and time:
            self._vote(op, size, group.size, time, _number(perf.get(f"{kind}_algobw_gbs")))
        self._span(process, group, op, perf)

    def _vote(self, op: str, size: int, ranks: int, time: float, bandwidth: float | None) -> None:
        """Whether the size is one rank's part: algobw times the time is the whole. Small ones are rounded away."""
        if ranks > 1 and size and bandwidth:
            ratio = bandwidth * 1000 * time / size
            if 0.7 < ratio < 1.3 or 0.7 < ratio / ranks < 1.3:
                self._votes.setdefault(op, Counter())[abs(ratio / ranks - 1) < abs(ratio - 1)] += 1

    def parts_written(self) -> dict[str, bool]:
        """Operation -> whether its sizes are those of one rank's part, as they are where bandwidths do not say."""
        said = {op: votes[True] >= votes[False] for op, votes in self._votes.items()}
        for op, votes in self._votes.items():
            if len(votes) > 1:
                other = min(votes.values())
                self.problems.add(self._source, f"{op}: {other} records mean another size than the rest", count=other)
        return {op: said.get(op, True) for op, parts in _OPERATIONS.values() if parts}

    def _span(self, process: _Process, group: _Group, op: str, perf: dict[str, Any]) -> None:
        """From the first channel's start to the last one's stop, where the record has them."""
        if len(process.spans) >= _MOST_SPANS:
            process.untimed += 1
            return
        times = [_times(trace) for trace in _traces(perf)]
        known = [pair for pair in times if pair is not None]
        if known:
            start, end = min(pair[0] for pair in known), max(pair[1] for pair in known)
            process.spans.append(Span(start, end, group.place, op, _DTYPE))
        else:
            process.untimed += 1


def _traces(perf: Mapping[str, Any]) -> list[Any]:
    """The times of the kernel's channels, in the two forms in which they are written."""
    trace = perf.get("event_trace_ts")
    if isinstance(trace, dict) and isinstance(trace.get("kernel_events"), list):
        return list(trace["kernel_events"])
    events = perf.get("events")
    return [one.get("event_trace_ts") for one in events if isinstance(one, dict)] if isinstance(events, list) else []


def _times(trace: Any) -> tuple[float, float] | None:
    if not isinstance(trace, dict):
        return None
    start, stop = _number(trace.get("kernel_start_ts")), _number(trace.get("kernel_stop_ts"))
    return (start, stop) if start and stop and stop >= start else None


def _note_dropped(process: _Process, group: _Group, stats: Mapping[str, Any]) -> None:
    """How many operations the plugin overwrote before it could write them: a running total per communicator."""
    names = [name for name in stats if isinstance(name, str) and name.endswith("dropped_total")]
    process.dropped[group.id] = sum(_whole(stats[name]) or 0 for name in names)


def _whole(value: Any) -> int | None:
    """A size, rank or number of ranks; None where it is no whole number of at most 62 bits."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value < 1e18 else None


def _recordings(processes: Sequence[_Process], parts: Mapping[str, bool]) -> tuple[Recording, ...]:
    """One recording per process, by global rank."""
    worlds = [max(process.groups.values(), key=lambda group: group.size) for process in processes]
    largest = max((world.size for world in worlds), default=0)
    # The largest communicator is the world where all processes are in it: so certain, and no more, is a global rank.
    certain = len({world.id for world in worlds}) == 1
    members = [
        Member(
            size=group.size,
            rank=group.rank,
            identity=(group.id, group.size),
            world_rank=world.rank if certain else None,
            world_size=largest if certain else None,
        )
        for process, world in zip(processes, worlds, strict=True)
        for group in process.groups.values()
    ]
    sets = iter(rank_sets(members))
    found = []
    for process, world in zip(processes, worlds, strict=True):
        communicators = tuple(
            Communicator(
                label=f"communicator {printable(group.id)}",
                size=group.size,
                ranks=next(sets),
                rank=group.rank,
                description=group.name,
                order=order,
            )
            for order, group in enumerate(process.groups.values())
        )
        found.append(
            Recording(
                source=process.source,
                kind="nccl_inspector",
                rank=world.rank if certain else None,
                world_size=largest if certain else None,
                host=process.host or None,
                communicators=communicators,
                events=[
                    event for at, group in enumerate(process.groups.values()) for event in _events(at, group, parts)
                ],
                spans=process.spans or None,
                notes=tuple(_lacks(process)),
            )
        )
    return tuple(sorted(found, key=lambda one: (one.rank is None, one.rank or 0, one.host or "", one.source)))


def _events(at: int, group: _Group, parts: Mapping[str, bool]) -> list[CommEvent]:
    return [
        CommEvent(
            at,
            op,
            _DTYPE,
            int(calls),
            int(moved) * (group.size if parts.get(op) else 1),
            None,
            None if math.isnan(time) else time,
        )
        for (op, _), (calls, moved, time) in sorted(group.sums.items())
    ]


def _lacks(process: _Process) -> list[str]:
    notes = []
    if process.spans and process.untimed:
        notes.append(f"{process.untimed} operations have no times of their channels")
    if process.spans:
        notes.append("start and stop of channels are taken by the plugin on the host, not by the GPU")
    dropped = sum(process.dropped.values())
    if dropped:
        notes.append(f"the plugin dropped {dropped} operations before it could write them: sums are too small")
    return notes
