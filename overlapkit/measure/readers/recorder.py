"""Reads the files of the recorder: one per process, lines of JSON that the job appended while it ran.

The first line says ``{"overlapkit_recorder": 1, "host": …, "pid": …, "torch": …, "steps": [first, last] | null}``.
Then, in the order in which things happened:

- ``{"rank": …, "world_size": …}`` of the process, before its first group;
- ``{"group": n, "name": …, "desc": …, "size": …, "ranks": […], "rank": …, "order": …}``, a group when it is first used;
- ``{"calls": [[group, op, dtype, calls, message bytes], …]}``, what was called since the line before;
- ``{"mark": "step" | "int32" | "float32", "group": …, "us": …}``, what may mark an optimizer step, which is told apart
  here; the call itself is counted after it;
- ``{"window": "open" | "closed"}`` around the steps that were asked for;
- ``{"missed": [[function, why, calls], …]}``, calls that could not be counted;
- ``{"end": true}``, unless the process was ended.

A process that is ended leaves at most one line that is cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from overlapkit.errors import printable
from overlapkit.measure.events import SOME_STEP, CommEvent, Communicator, Reading, Recording, Step
from overlapkit.measure.readers.nccl_log.lines import Problems, blocks
from overlapkit.measure.readers.step_marks import StepMarks

FORMAT = "overlapkit_recorder"
SCHEMA_VERSION = 1
OPERATIONS = (
    *("all_reduce", "all_gather", "all_gather_list", "reduce_scatter", "reduce_scatter_list", "all_to_all"),
    *("broadcast", "send", "recv", "reduce", "gather", "scatter", "barrier"),
)
_MOST_GROUPS = 10_000
_MOST_STEPS = 1_000  # kept apart; the calls of more steps are kept together
_LARGEST = 1 << 63
SIZE_LIMIT = 1 << 30  # bytes, unpacked: of hundreds of thousands of steps
_MOST_DAMAGED = 100_000  # lines of a file: of a job that is killed, the last one is
_GIVEN_UP = f"there are more than {_MOST_DAMAGED:,} damaged lines: the rest is not read"
_NOTES = (
    "the recorder keeps no device times",
    "the recorder sees calls of torch.distributed's functions: not the reductions of torch's own DDP and FSDP, which "
    "C++ issues (Megatron's are seen), userbuffers, functional collectives (DTensor, torch.compile), calls of a "
    "process group's own methods, nor what a CUDA graph replays",
)


def recognises(head: bytes, path: Path) -> bool:
    """Whether a file that begins with ``head`` is the recorder's."""
    return head.lstrip()[: len(FORMAT) + 2] == f'{{"{FORMAT}'.encode()


def read(paths: Sequence[Path], progress: Callable[[int], None] | None = None) -> Reading:
    """The recordings of these files, one each; ``progress`` is told the bytes that were read since it was told last.

    What cannot be read is counted in the problems; nothing is raised for what a file holds or lacks.
    """
    problems = Problems()
    found = [_recording(path, problems, progress) for path in paths]
    recordings = tuple(recording for recording in found if recording is not None)
    return Reading(recordings=recordings, problems=problems.listed())


# --- one file ------------------------------------------------------------------------------------


def _recording(path: Path, problems: Problems, progress: Callable[[int], None] | None) -> Recording | None:
    source = printable(str(path), limit=300)
    # The first time through for the groups and the marks, the second for the calls between them.
    content, last, damaged = _Content(), 0, 0
    for last, line in _lines(path, problems, progress):
        if not content.add(line):
            problems.add(source, "a line that the recorder does not write, skipped", last)
            damaged += 1
        if damaged > _MOST_DAMAGED:
            problems.add(source, _GIVEN_UP, last)
            break
    if content.header is None:
        problems.add(source, "no file of the recorder: its first line is missing")
        return None
    periods = _Periods(content)
    for number, line in _lines(path, Problems()):  # what is wrong was noted
        periods.add(line)
        if number == last:
            break
    for function, why, count in content.missed:
        problems.add(source, f"calls of {function} that the recorder could not count: {why}", count=count)
    if not periods.any:
        problems.add(source, _without_calls(content))
        return None
    return _made(source, content, periods)


def _lines(
    path: Path, problems: Problems, progress: Callable[[int], None] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, object) of each line that is one; the others are problems."""
    source, read, damaged, wrong = printable(str(path), limit=300), 0, 0, None
    size = 0

    def used() -> int:
        return read

    for first, block in blocks(path, problems, progress, used):
        size += len(block)
        if size > SIZE_LIMIT:
            problems.add(source, f"more than {SIZE_LIMIT >> 30} GB of text: the rest is not read", first)
            return
        for number, data in enumerate(block.removesuffix(b"\n").split(b"\n"), first):
            if wrong is not None:
                problems.add(source, "no JSON object, skipped", wrong)
                damaged, wrong = damaged + 1, None
            if damaged > _MOST_DAMAGED:
                problems.add(source, _GIVEN_UP, number)
                return
            found = _object(data)
            if found is None:
                wrong = number
            else:
                read += "calls" in found
                yield number, found
    if wrong is not None:
        problems.add(source, "the last line is cut", wrong)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _without_calls(content: _Content) -> str:
    steps = (content.header or {}).get("steps")
    if isinstance(steps, list) and len(steps) == 2 and all(_number(step) is not None for step in steps):
        marked = content.marks.count()
        were = "was" if marked == 1 else "were"
        return (
            f"no call was recorded in it: it was to record steps {steps[0]} to {steps[1]}, and {marked} {were} marked"
        )
    return "no call of torch.distributed was recorded in it; processes that it starts are not recorded"


def _made(source: str, content: _Content, periods: _Periods) -> Recording:
    header = content.header or {}
    ended = () if content.ended else ("the recording has no end: the job was ended, or is still running",)
    return Recording(
        source=source,
        kind="recorder",
        rank=content.rank,
        world_size=content.world_size,
        host=_text(header.get("host")),
        communicators=tuple(content.groups.values()),
        events=periods.events(),
        steps=periods.steps,
        steps_by=content.steps_by(),
        windows=tuple(periods.windows),
        notes=(*_NOTES, *ended),
    )


class _Content:
    """What of a file does not depend on the marks. ``groups`` are in the order of their numbers in the file."""

    def __init__(self) -> None:
        self.header: dict[str, Any] | None = None
        self.rank: int | None = None
        self.world_size: int | None = None
        self.groups: dict[int, Communicator] = {}
        self.places: dict[int, int] = {}
        self.marks = StepMarks()
        self.missed: list[tuple[str, str, int]] = []
        self.ended = False

    def add(self, line: dict[str, Any]) -> bool:
        """Whether it is a line that the recorder writes."""
        if FORMAT in line:
            return self._add_header(line)
        if self.header is None:
            return False
        if "mark" in line:
            return self._add_mark(line)
        if "group" in line:
            return self._add_group(line)
        if "calls" in line:
            return isinstance(line["calls"], list) and all(_call(each, self.places) for each in line["calls"])
        if "missed" in line:
            return self._add_missed(line["missed"])
        if "world_size" in line:
            self.rank, self.world_size = _number(line.get("rank")), _number(line["world_size"])
            return self.rank is not None and self.world_size is not None
        self.ended |= line.get("end") is True
        return line.get("end") is True or line.get("window") in ("open", "closed")

    def _add_header(self, line: dict[str, Any]) -> bool:
        first = self.header is None and line[FORMAT] == SCHEMA_VERSION
        if first:
            self.header = line
        return first

    def _add_group(self, line: dict[str, Any]) -> bool:
        number, size, ranks = _number(line["group"]), _number(line.get("size")), line.get("ranks")
        if number is None or not size or number in self.groups or len(self.groups) >= _MOST_GROUPS:
            return False
        if ranks is not None and not (
            isinstance(ranks, list) and len(ranks) == size and all(_number(rank) is not None for rank in ranks)
        ):
            return False
        description = _text(line.get("desc"))
        self.places[number] = len(self.groups)
        self.groups[number] = Communicator(
            label=f"group {_text(line.get('name')) or number}" + (f" ({description})" if description else ""),
            size=size,
            ranks=None if ranks is None else tuple(ranks),
            rank=_number(line.get("rank")),
            description=description,
            order=_number(line.get("order")),
        )
        return True

    def _add_mark(self, line: dict[str, Any]) -> bool:
        kind, group = line["mark"], _number(line.get("group"))
        if kind == "step":
            self.marks.add(kind, None, 0)
            return True
        if kind not in ("int32", "float32") or group is None or group not in self.groups:
            return False
        self.marks.add(kind, group, self.groups[group].size or 0)
        return True

    def _add_missed(self, entries: Any) -> bool:
        if not isinstance(entries, list) or len(self.missed) > 100:
            return False
        for entry in entries:
            if not (isinstance(entry, list) and len(entry) == 3):
                return False
            function, why, count = _text(entry[0]), _text(entry[1]), _number(entry[2])
            if function is None or why is None or count is None:
                return False
            self.missed.append((function, why, count))
        return True

    def steps_by(self) -> str | None:
        chosen = self.marks.chosen()
        if chosen is None:
            return None
        kind, group = chosen
        if kind == "step" or group is None:
            return "Recorder.step()"
        return f"the all_reduce of one {kind} on {self.groups[group].label}"


class _Periods:
    """The calls, put into the steps: what lies between two marks, where the recorder listened all the time."""

    def __init__(self, content: _Content) -> None:
        self.places = content.places
        self.chosen = content.marks.chosen()
        self.open = content.header is not None and content.header.get("steps") is None
        self.together = content.marks.count() > _MOST_STEPS + 1
        self.any = False
        self.steps = 0
        self.windows: list[Step] = []
        self._marks = 0
        self._whole = False  # since the last mark
        self._since: float | None = None
        self._current: dict[tuple[int, str, str], list[int]] = {}
        self._kept: dict[tuple[int | None, int, str, str], list[int]] = {}

    def add(self, line: dict[str, Any]) -> None:
        if "mark" in line:
            if (line["mark"], line.get("group")) == self.chosen:
                self._mark(line.get("us"))
        elif "window" in line:
            self.open = line["window"] == "open"
            self._whole &= self.open
        elif isinstance(line.get("calls"), list):
            for entry in line["calls"]:
                if _call(entry, self.places):
                    group, op, dtype, calls, moved = entry
                    _add(self._current, (self.places[group], op, dtype), calls, moved)
                    self.any = True

    def _mark(self, moment: Any) -> None:
        now = float(moment) if _number(moment) is not None else None
        self._marks += 1
        if self._whole:
            self.steps += 1
            if self._since is not None and now is not None and now >= self._since and not self.together:
                self.windows.append(Step(number=self._marks, start_us=self._since, end_us=now))
        self._keep((SOME_STEP if self.together else self._marks) if self._whole else None)
        self._whole, self._since = self.open, now

    def _keep(self, step: int | None) -> None:
        for (place, op, dtype), (calls, moved) in self._current.items():
            _add(self._kept, (step, place, op, dtype), calls, moved)
        self._current = {}

    def events(self) -> tuple[CommEvent, ...]:
        self._keep(None)
        return tuple(
            CommEvent(place, op, dtype, calls, moved, step)
            for (step, place, op, dtype), (calls, moved) in self._kept.items()
        )


def _add(sums: dict[Any, list[int]], key: Any, calls: int, moved: int) -> None:
    found = sums.setdefault(key, [0, 0])
    found[0] += calls
    found[1] += moved


def _call(entry: Any, places: dict[int, int]) -> bool:
    """Whether it is [group, op, dtype, calls, bytes] of a group that the file has named."""
    if not (isinstance(entry, list) and len(entry) == 5):
        return False
    group, op, dtype, calls, moved = entry
    return (
        _number(group) is not None
        and group in places
        and op in OPERATIONS
        and isinstance(dtype, str)
        and dtype.isidentifier()
        and len(dtype) <= 40
        and _number(calls) is not None
        and _number(moved) is not None
    )


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST else None


def _text(value: Any) -> str | None:
    return printable(value, limit=200) if isinstance(value, str) and value else None
