"""Recordings -> Measured: every call into a row of its group, every kernel to the time of it, and nothing dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from overlapkit.errors import printable
from overlapkit.measure.attribution import (
    CONFIDENCES,
    Attribution,
    attribute,
    global_rank,
    pipeline_rank,
    world_size,
)
from overlapkit.measure.events import CommEvent, Interval, Reading, Recording, Span
from overlapkit.measure.intervals import Overlap, Times, exposed, union
from overlapkit.measure.job_meshes import job_meshes
from overlapkit.measure.measured import Measured, MeasuredRow, PerStep, RankMeasured, Unattributed
from overlapkit.measure.mesh import Mesh, axis_of
from overlapkit.measure.skew import GroupTime, RankTime, Skew, skew
from overlapkit.volume import placement
from overlapkit.volume.placement import placements
from overlapkit.volume.rows import Row, wire_numerator

Group = tuple[str, int]  # name, ranks (0: unknown)
Key = tuple[Group, str, str]  # group, operation, type
Owner = tuple[Group | None, str, str]  # of a kernel, None for nobody's
# A profiler's word for a kernel, and the operations whose kernel it can be.
_ALSO = {
    "send_recv": ("send", "recv", "all_to_all"),
    "all_gather": ("all_gather_list",),
    "reduce_scatter": ("reduce_scatter_list",),
}
# No source but NCCL's log tells what a rank keeps of it, and a prediction does not know it.
_EVEN = "all_to_all: of n ranks' message (n-1)/n counts as sent, as if all got as much; routing may send more or less"
# Kernels outside NCCL, and the only group that Megatron uses them for.
_OUTSIDE_NCCL = {"userbuffers": placement.TP, "dispatch": placement.EP, "combine": placement.EP}


def measured(reading: Reading, mesh: Mesh | None = None, *, steps: int | None = None) -> Measured:
    """What the recordings show, by the groups of ``mesh`` or, in jobs of other sizes, of the mesh that they fit best.

    ``steps``: the optimizer steps that each input covers, for those in which nothing marks them.
    """
    notes = list(reading.notes)
    meshes, more = job_meshes(reading.recordings, mesh)
    notes += more
    processes = [_Process.of(recording, meshes[recording.world_size]) for recording in reading.recordings]
    ranks = tuple(process.measured(steps) for process in processes)
    notes += _repeated(ranks)
    notes += _own_notes(reading.recordings)
    if any(row.op == "all_to_all" for rank in ranks for row in rank.rows):
        notes.append(_EVEN)
    return Measured(
        ranks=ranks,
        skew=_skew(processes, ranks),
        problems=reading.problems,
        notes=tuple(dict.fromkeys(printable(note, limit=500) for note in notes)),
    )


def _repeated(ranks: Sequence[RankMeasured]) -> list[str]:
    """Says where several inputs of one kind are of the same rank: an older run's files in the folder, or its parts."""
    notes = []
    inputs = Counter((rank.kind, rank.rank) for rank in ranks if rank.rank is not None)
    for kind in dict.fromkeys(rank.kind for rank in ranks):
        many = {rank: number for (of, rank), number in inputs.items() if of == kind and number > 1}
        if many:
            rank, number = next(iter(many.items()))
            others = f" (and so have {len(many) - 1} others)" if len(many) > 1 else ""
            notes.append(f"rank {rank} has {number} inputs of one kind{others}: of several runs? Each counts by itself")
    return notes


def _own_notes(recordings: Sequence[Recording]) -> list[str]:
    """Each note of the sources once; with its source where only some of several have it."""
    sources: dict[str, list[str]] = {}
    for recording in recordings:
        for note in recording.notes:
            sources.setdefault(note, []).append(recording.source)
    return [
        note if len(having) == len(recordings) else f"{having[0]}{' and others' if len(having) > 1 else ''}: {note}"
        for note, having in sources.items()
    ]


@dataclass(slots=True)
class _Sum:
    """Calls, message bytes and times of the whole input, the first two of the complete steps in it too."""

    calls: int = 0
    message_bytes: int = 0
    step_calls: int = 0
    step_bytes: int = 0
    time_us: float | None = 0.0  # None as soon as one is unknown

    def add(self, event: CommEvent) -> None:
        self.calls += event.calls
        self.message_bytes += event.message_bytes
        self.time_us = None if self.time_us is None or event.time_us is None else self.time_us + event.time_us
        if event.step is not None:
            self.step_calls += event.calls
            self.step_bytes += event.message_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """A recording and what its communicators are."""

    recording: Recording
    mesh: Mesh | None
    rank: int | None
    groups: tuple[Attribution, ...]

    @classmethod
    def of(cls, recording: Recording, mesh: Mesh | None) -> _Process:
        rank = global_rank(recording)
        return cls(recording=recording, mesh=mesh, rank=rank, groups=attribute(recording, mesh))

    def measured(self, steps: int | None) -> RankMeasured:
        recording = self.recording
        sums, lost = self._sums()
        times = _KernelTimes.of(self, sums) if recording.spans is not None else None
        rows = [self._row(key, found, steps, times) for key, found in sorted(sums.items())]
        return RankMeasured(
            rank=self.rank,
            world_size=world_size(recording),
            pipeline_rank=pipeline_rank(recording, self.mesh, self.groups),
            source=recording.source,
            kind=recording.kind,
            host=recording.host,
            steps=recording.steps,
            steps_by=recording.steps_by,
            per_step_of=_covered(recording, steps),
            mesh=self.mesh,
            rows=tuple(row for row in rows if row.size != 1),
            single_rank=tuple(row for row in rows if row.size == 1),
            unattributed=(*lost, *(times.lost if times is not None else ())),
            overlap=None if times is None else times.overlap,
        )

    def _sums(self) -> tuple[dict[Key, _Sum], list[Unattributed]]:
        by_group: dict[Key, _Sum] = {}
        by_communicator: dict[tuple[int, str, str], _Sum] = {}
        for event in self.recording.events:
            group = _group(self.groups[event.communicator])
            found = (
                by_group.setdefault((group, event.op, event.dtype), _Sum())
                if group is not None
                else by_communicator.setdefault((event.communicator, event.op, event.dtype), _Sum())
            )
            found.add(event)
        lost = []
        for (index, op, dtype), found in by_communicator.items():
            communicator = self.recording.communicators[index]
            lost.append(
                Unattributed(
                    communicator=printable(communicator.label),
                    size=communicator.size,
                    op=op,
                    dtype=dtype,
                    count=found.calls,
                    message_bytes=found.message_bytes,
                    step_bytes=found.step_bytes if self.recording.steps else found.message_bytes,
                    time_us=found.time_us,
                    why=self.groups[index].why,
                )
            )
        return by_group, lost

    def of_group(self, group: Group) -> list[Attribution]:
        return [one for one in self.groups if _group(one) == group]

    def ranks_of(self, group: str) -> tuple[int, ...] | None:
        """The group's global ranks, as far as a communicator of it knows them."""
        known = zip(self.recording.communicators, self.groups, strict=True)
        return next((each.ranks for each, one in known if one.group == group and each.ranks is not None), None)

    def _row(self, key: Key, found: _Sum, steps: int | None, times: _KernelTimes | None) -> MeasuredRow:
        (name, size), op, dtype = key
        parts = self.of_group((name, size))
        mesh = self.mesh
        row = Row(
            group=name,
            axis=axis_of(name, op),
            size=size,
            op=op,
            dtype=dtype,
            count=found.calls,
            message_bytes=found.message_bytes,
            placement=None if mesh is None else placements(mesh.layout).get(name),
            observable=True,
            exact=True,
            evidence="measured",
            phases=(),
        )
        return MeasuredRow(
            totals=row,
            per_step=_per_step(self.recording, row, found, steps),
            times=None if times is None else times.rows.get(key),
            attributed_by=", ".join(dict.fromkeys(one.by for one in parts)),
            confidence=max((one.confidence for one in parts), key=CONFIDENCES.index),
            ties=tuple(dict.fromkeys(tie for one in parts for tie in one.ties if tie != name)),
            summed_us=found.time_us,
        )


def _group(found: Attribution) -> Group | None:
    return None if found.group is None else (found.group, found.size or 0)


def _covered(recording: Recording, steps: int | None) -> int | None:
    """The complete steps; where there are none, the whole input is about one step or about ``steps`` of them."""
    return recording.steps or (steps if recording.steps_by is None else 1)


def _per_step(recording: Recording, row: Row, found: _Sum, steps: int | None) -> PerStep | None:
    calls, message_bytes = found.step_calls, found.step_bytes
    if not recording.steps:
        calls, message_bytes = found.calls, found.message_bytes
    divisor = _covered(recording, steps)
    if divisor is None:
        return None
    moved = Fraction(message_bytes, divisor)
    wire = None if not row.size else 0
    if row.size > 1:
        wire = wire_numerator(row.op, row.size, message_bytes) // (row.size * divisor)
    return PerStep(count=Fraction(calls, divisor), message_bytes=moved, wire_bytes=wire)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KernelTimes:
    """Times of a process's rows and groups, and the kernels that are nobody's."""

    rows: Mapping[Key, Times]
    overlap: Overlap[str | None]
    lost: tuple[Unattributed, ...]

    @classmethod
    def of(cls, process: _Process, sums: Mapping[Key, _Sum]) -> _KernelTimes:
        recording = process.recording
        by_key: dict[Owner, list[Interval]] = {}
        owners: dict[tuple[int | None, str, str], Owner] = {}
        owner = _owner_of_kernels(process, sums)
        for start, end, communicator, op, dtype in recording.spans or ():
            named = communicator, op, dtype
            if named not in owners:
                owners[named] = owner(Span(start, end, communicator, op, dtype))
            by_key.setdefault(owners[named], []).append((start, end))
        busy = union(recording.busy or ())
        by_group: dict[str | None, list[Interval]] = {}
        for (group, _, _), intervals in by_key.items():
            by_group.setdefault(None if group is None else group[0], []).extend(intervals)
        of_rows = exposed(by_key, busy).groups
        return cls(
            rows={(group, op, dtype): times for (group, op, dtype), times in of_rows.items() if group is not None},
            overlap=exposed(by_group, busy, recording.windows),
            lost=tuple(_lost_kernels(by_key, of_rows)),
        )


def _owner_of_kernels(process: _Process, sums: Mapping[Key, _Sum]) -> Callable[[Span], Owner]:
    """What says of a kernel whose row it belongs to: (None, operation, type) for those that are nobody's.

    One whose communicator is unknown belongs to the only group that issues its operation, if there is only one.
    """

    def owner(span: Span) -> Owner:
        group = None if span.communicator is None else _group(process.groups[span.communicator])
        if span.communicator is None:
            ops = (span.op, *_ALSO.get(span.op, ()))
            users = {name for name, op, _ in sums if op in ops}
            group = users.pop() if len(users) == 1 else _outside_nccl(process, span.op)
        if group is None:
            return None, span.op, span.dtype
        op, dtype = _row_of_kernel(sums, group, span)
        return group, op, dtype

    return owner


def _outside_nccl(process: _Process, op: str) -> Group | None:
    name = _OUTSIDE_NCCL.get(op)
    if name is None:
        return None
    return next((group for one in process.groups if (group := _group(one)) and group[0] == name), (name, 0))


def _row_of_kernel(sums: Mapping[Key, _Sum], group: Group, span: Span) -> tuple[str, str]:
    """The row of the group that a kernel's time stands in.

    A kernel that both sends and receives stands in the row of what is sent.
    """
    if (group, span.op, span.dtype) in sums:
        return span.op, span.dtype
    for op in (span.op, *_ALSO.get(span.op, ())):
        rows = [(other, dtype) for name, other, dtype in sums if name == group and other == op]
        same = [row for row in rows if row[1] == span.dtype]
        if same or len(rows) == 1:
            return (same or rows)[0]
    return span.op, span.dtype


def _lost_kernels(
    by_key: Mapping[Owner, Sequence[Interval]],
    times: Mapping[Owner, Times],
) -> Iterator[Unattributed]:
    for key, intervals in by_key.items():
        group, op, dtype = key
        if group is None:
            yield Unattributed(
                communicator="kernels",
                size=None,
                op=op,
                dtype=dtype,
                count=len(intervals),
                message_bytes=None,
                step_bytes=None,
                time_us=times[key].time_us,
                exposed_us=times[key].exposed_us,
                why="the source does not say whose kernels they are",
            )


def _skew(processes: Sequence[_Process], ranks: Sequence[RankMeasured]) -> Skew | None:
    """Of the ranks with device times; groups are told apart by their ranks where a source says them."""
    groups: list[GroupTime] = []
    steps: list[tuple[int, RankTime]] = []
    for process, found in zip(processes, ranks, strict=True):
        rank, overlap = process.rank, found.overlap
        if rank is None or overlap is None:
            continue
        steps += [(step.number, RankTime(rank, step.end_us - step.start_us)) for step in process.recording.windows]
        for step, times in ((None, overlap.groups), *((each.number, each.groups) for each in overlap.steps)):
            for group, taken in times.items():
                if group is not None:
                    groups.append(GroupTime(group, process.ranks_of(group), step, rank, taken.time_us))
    return skew(groups, steps)
