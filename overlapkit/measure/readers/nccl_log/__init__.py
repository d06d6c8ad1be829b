"""NCCL logs: one call per line, with its communicator, element count and type.

All ranks may write into one file, or each into its own; a process is known by host and pid. NCCL logs no times. What a
line says: :mod:`overlapkit.measure.readers.nccl_log.format`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from overlapkit.errors import printable
from overlapkit.measure.events import Reading
from overlapkit.measure.readers.nccl_log.counting import MOST_COMMUNICATORS, Counter, Entry, Process, Room
from overlapkit.measure.readers.nccl_log.format import (
    CALL,
    OPERATIONS,
    Made,
    Origin,
    looks_made,
    made,
    operation,
    origin,
    tail,
    telltale_lines,
    without_clock,
    without_prefix,
)
from overlapkit.measure.readers.nccl_log.lines import NO_LINE, Problems, blocks
from overlapkit.measure.readers.nccl_log.recordings import recordings_of

_TEXT_FILES = (".log", ".out", ".err", ".txt")
_MOST_HEADS = 20_000  # what may stand before a call: more only where every line has a time of its own
_MOST_FUNCTIONS = 64  # of one process, those that are unknown included
_MOST_ENDS = 4096  # of the lines of one function
_LONGEST_KEPT = 1000  # bytes of such a text
_MOST_KNOWN = 100_000  # texts from one call to the next
_MOST_PROCESSES = 16_384
_MANY_PROCESSES = f"a line of a process beyond the first {_MOST_PROCESSES:,}, which is not kept"
_DAMAGED_CALL = "a line that looks like a call is cut or damaged"
_DAMAGED_INIT = "a line that looks like an Init is cut or damaged"
_CROWDED = f"there are more communicators, of one process more than {MOST_COMMUNICATORS}, than are kept apart"
_NO_CALL = "no call of NCCL in it: NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,COLL log them"
_WITHOUT_INIT = "no INIT lines, so that communicators are guesses: NCCL_DEBUG_SUBSYS=INIT,COLL gives them"
_NOTES = ("NCCL's log has no times", "what userbuffers move does not go through NCCL: no line shows it")


def recognises(head: bytes, path: Path) -> bool:
    """Whether a file that begins with ``head`` may be an NCCL log: it says so, or it is text and named like a log."""
    text = head.replace(b"\0", b"")
    if _speaks(text):
        return True
    name = path.name.removesuffix(".gz")
    return name.endswith(_TEXT_FILES) and not text.lstrip().startswith((b"{", b"[", b"SQLite format 3"))


def _speaks(text: bytes) -> bool:
    return b"NCCL INFO" in text or b"NCCL version" in text


def read(paths: Sequence[Path], progress: Callable[[int], None] | None = None) -> Reading:
    """The calls of every process in the logs, in one recording each; the ranks of communicators joined over all files.

    ``progress`` is told how many more bytes of the files were read. Message bytes are those of NCCL's counts: an
    AllGather's count is what each rank sends, a ReduceScatter's what it keeps, and both are taken times the ranks.
    """
    problems = Problems()
    scan = _Scan(problems)
    for path in paths:
        calls, speaks = scan.calls, False
        scan.begin(path)
        for line, block in blocks(path, problems, progress, lambda: scan.calls):
            speaks = speaks or _speaks(block)
            scan.block(line, block)
        if scan.calls == calls and not problems.of(scan.source):
            problems.add(scan.source, _NO_CALL if speaks else NO_LINE)
    recordings = recordings_of([process for process in scan.processes if process.counters])
    notes = _NOTES if recordings else ()
    if recordings and not any(known.made for process in scan.processes for known in process.communicators):
        notes = (*notes, _WITHOUT_INIT)
    return Reading(recordings=recordings, problems=problems.listed(), notes=notes)


class _Function(dict[bytes, "_Known"]):
    """A function of one process, with what is known of its calls by the text between their count and the next one's.

    ``ends`` holds them by the rest of their own line only. ``process`` is None where it is unknown.
    """

    __slots__ = ("ends", "name", "process")

    def __init__(self, process: Process | None = None, name: str = "") -> None:
        super().__init__()
        self.process, self.name = process, name
        self.ends: dict[bytes, Entry] = {}

    def forget(self) -> None:
        """A pointer has come to mean another communicator."""
        self.clear()
        self.ends.clear()


_Known = tuple[Counter, Callable[[bytes], None] | None, _Function]  # how a call is counted, and whose the next one is


class _Scan:
    """The logs as they are read, block by block."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.processes: list[Process] = []
        self.source = ""
        self.calls = 0
        self._by_name: dict[tuple[str, int], Process] = {}
        self._of_this_file: set[tuple[str, int]] = set()
        self._nowhere, self._beyond = _Function(), _Function()
        self._heads: dict[bytes, _Function] = {}
        self._space, self._room = Room(), _MOST_KNOWN
        self._line = 1
        self._parts: list[bytes] = []

    def begin(self, path: Path) -> None:
        self.source = printable(str(path), limit=300)
        self._heads, self._of_this_file = {}, set()

    def block(self, line: int, block: bytes) -> None:
        """Counts every call of a block of whole lines that begins at ``line``."""
        self._line, self._parts = line, CALL.split(without_clock(block))
        self.calls += len(self._parts) // 2
        parts = iter(self._parts)
        function = self._before_call(0, next(parts))
        for at, (count, between) in enumerate(zip(parts, parts, strict=True)):
            counter, told, function = function.get(between) or self._look_up(function, at, between)
            if told is not None:
                told(count)
            else:
                try:
                    counter.sizes[count] += 1
                except KeyError:
                    counter.add(count)

    def _look_up(self, function: _Function, at: int, between: bytes) -> _Known:
        """How call number ``at`` of the block is counted, by what comes after its count, and whose the next call is."""
        end, newline, head = between.partition(b"\n")
        entry = function.ends.get(end)
        if entry is None:
            entry, rest = self._entry(function, at, end, newline)
            head = head if newline else rest
        following = self._heads.get(head)
        if following is None:
            following = self._before_call(at + 1, head, glued=not newline)
        known = (*entry, following)
        if self._room and end in function.ends and head in self._heads:
            self._room -= 1
            function[between] = known
        return known

    def _entry(self, function: _Function, at: int, end: bytes, newline: bytes) -> tuple[Entry, bytes]:
        """How a call is counted whose line ends with ``end``, and what comes after it on the same line."""
        found = tail(end)
        rest = end if found is None else end[found.length :]
        entry: Entry | None = None
        if found is None or function is self._nowhere:
            self._problem(_DAMAGED_CALL, at)
        elif function.process is None:
            self._problem(_MANY_PROCESSES, at)
        elif function.name not in OPERATIONS:
            self._problem(f"a call of {function.name}, which is unknown", at)
        elif not found.width:
            self._problem(f"a call with {found.dtype}, which is unknown", at)
        else:
            entry = function.process.entry(function.name, found)
            if entry is None:
                self._problem(_CROWDED, at)
        if newline and rest.strip():
            self._lines(at + 1, rest)
        elif newline and entry is not None and len(end) <= _LONGEST_KEPT:
            if len(function.ends) >= _MOST_ENDS:
                function.ends.clear()
            function.ends[end] = entry
        return entry or (Counter(0, "", "", 0, self._space), None), rest

    def _before_call(self, at: int, text: bytes, *, glued: bool = False) -> _Function:
        """Reads the whole lines of ``text`` and then what begins the line of call number ``at`` of the block."""
        lines, newline, head = text.rpartition(b"\n")
        if newline:
            self._lines(at, lines)
        key = without_prefix(head)
        if not glued and key in self._heads:
            return self._keep(head, self._heads[key])
        named = origin(head)
        name = None if named is None else operation(named.text)
        if named is None or name is None:
            return self._nowhere
        trusted = not glued or bool(newline)
        process = self._process(named, trusted=trusted)
        if process is None:
            return self._beyond if trusted else self._nowhere
        function = process.functions.get(name)
        if not isinstance(function, _Function):
            if len(process.functions) >= _MOST_FUNCTIONS:
                return self._nowhere
            function = process.functions[name] = _Function(process, name)
        return self._keep(head, self._keep(key, function))

    def _keep(self, head: bytes, function: _Function) -> _Function:
        if len(self._heads) >= _MOST_HEADS:
            self._heads.clear()
        if len(head) <= _LONGEST_KEPT:
            self._heads[head] = function
        return function

    def _lines(self, at: int, text: bytes) -> None:
        """The lines between two calls: those about communicators are read, damaged calls counted."""
        for line in telltale_lines(text):
            if not looks_made(line):
                self._problem(_DAMAGED_CALL, at, line)
                continue
            found, named = made(line), origin(line)
            if found is None or named is None:
                self._problem(_DAMAGED_INIT, at, line)
                continue
            process = self._process(named, begins=isinstance(found, Made))
            if process is None:
                self._problem(_MANY_PROCESSES, at, line)
            elif isinstance(found, str):
                process.destroy(found)
            elif not process.make(found):
                self._problem(_CROWDED, at, line)

    def _process(self, named: Origin, *, trusted: bool = True, begins: bool = False) -> Process | None:
        """The process of a line. Where a line is cut, the end of the text before it sticks to the host's name."""
        name = named.host, named.pid
        process = self._by_name.get(name)
        if process is None and not (trusted and (named.at_start or (begins and named.alone))):
            ends = ((named.host[at:], named.pid) for at in range(1, len(named.host)))
            name = next((end for end in ends if end in self._by_name), name)
            process = self._by_name.get(name)
        # A process that begins a further file with an Init is another one: a second run on the same host.
        if process is not None and not (begins and name not in self._of_this_file):
            if name not in self._of_this_file:
                self._of_this_file.add(name)
                process.sources.append(self.source)
            return process
        if not trusted:
            return None
        if len(self.processes) >= _MOST_PROCESSES:
            return None
        process = self._by_name[name] = Process(*name, self.source, self._space)
        self.processes.append(process)
        self._of_this_file.add(name)
        return process

    def _problem(self, what: str, at: int, line: bytes | None = None) -> None:
        """Counts a problem of the line of call number ``at``, or of ``line``, which stands before that call."""
        number = None
        if self.problems.is_new(self.source, what):
            before = self._parts[: 2 * at + 1]
            if line is not None:
                before[-1] = before[-1][: max(before[-1].find(line), 0)]
            number = self._line + sum(part.count(b"\n") for part in before)
        self.problems.add(self.source, what, number)
