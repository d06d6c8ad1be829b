"""A profiler's trace as a stream of events, in blocks: memory does not grow with the file, and a cut one is read.

The format is Chrome's JSON trace as PyTorch's kineto writes it: an object whose ``traceEvents`` is a list of objects
that begin with ``"ph"``, before and behind it ``distributedInfo``, ``host_name`` and others. A trace is untrusted: a
block that does not decode as a whole is read event by event, and what cannot be read is counted and named.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from overlapkit.measure.events import Problem
from overlapkit.measure.readers.gz import up_to_damage

try:
    from overlapkit.measure.readers.torch_trace import msgspec_decoder as fast
except ImportError:  # without the extra: the same by the standard library, some five times slower
    fast = None  # type: ignore[assignment]

BLOCK = 1 << 20
# Far above what a trace has: pg_config lists each group's ranks, an event its arguments.
HEADER_LIMIT = EVENT_LIMIT = 16 << 20
SIZE_LIMIT = 4_000_000_000  # bytes, uncompressed
FAILURES_LIMIT = 100  # with more, the rest of a block is only counted, lest each costs a look at all that follows

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_NEXT_EVENT = re.compile(rb'\}\s*,\s*(?=\{\s*"ph")')
_NEXT_OBJECT = re.compile(rb"\}\s*,\s*(?=\{)")
_START = re.compile(r'\{\s*"ph"')
_LAST = re.compile(r'\}\s*(\])\s*(?:\}\s*$|,\s*")')  # the end of the list, before the file's or another member
_SPACE = re.compile(r"[\s,]*")
_raw_decode = json.JSONDecoder().raw_decode


class NotATrace(Exception):
    """The file is no trace, or too big a one; its text says which."""


class Event(NamedTuple):
    """An event of a trace; times are microseconds."""

    name: str
    cat: str
    ts: float
    dur: float
    tid: int | str
    args: dict[str, Any]


def arguments(event: Any) -> dict[str, Any]:
    """The arguments of an event, however it was decoded."""
    return event.args if isinstance(event, Event) else fast.arguments(event)


def correlation(event: Any) -> int | None:
    """The id that joins a launch to its kernel; None where the event has none."""
    if not isinstance(event, Event):
        return fast.correlation(event)
    return integer(event.args.get("correlation"))


def integer(value: object) -> int | None:
    """The value where it is a whole number, as ids are."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class TraceFile:
    """One file. :meth:`blocks` yields its events; ``header`` and ``problems`` are complete when it ends.

    ``progress`` is told how many bytes of the file were read since it was told last.
    """

    def __init__(self, path: Path, progress: Callable[[int], None] | None = None) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self._progress = progress
        self._position = 0  # of what is decoded next, uncompressed
        self._broken = 0
        self._first_broken = 0

    def blocks(self) -> Iterator[list[Any]]:
        """The events, a list per block.

        Raises:
            NotATrace: it has no events, or is above the limit.
            OSError: it cannot be opened or read.
        """
        with self.path.open("rb") as file:
            yield from self._blocks(self._read(file))
        if self._broken:
            what = f"an event cannot be read, the first near byte {self._first_broken}"
            self.problems.append(Problem(source=str(self.path), what=what, count=self._broken))

    def _read(self, file: IO[bytes]) -> Iterator[bytes]:
        """The text in blocks, uncompressed; a damaged end of a compressed file is a problem, not an error."""
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        source = self._told(file)
        total = 0
        for block in self._unzipped(source) if zipped else source:
            total += len(block)
            if total > SIZE_LIMIT:
                raise NotATrace(f"more than {SIZE_LIMIT // 10**9} GB uncompressed: profile fewer steps")
            yield block

    def _told(self, file: IO[bytes]) -> Iterator[bytes]:
        while block := file.read(BLOCK):
            if self._progress is not None:
                self._progress(len(block))
            yield block

    def _unzipped(self, source: Iterator[bytes]) -> Iterator[bytes]:
        """In blocks of at most ``BLOCK``, so that a bomb does not fill the memory; all that comes before a damage."""
        member = zlib.decompressobj(wbits=31)
        total = 0
        try:
            for packed in source:
                while packed:
                    if member.eof:
                        member = zlib.decompressobj(wbits=31)  # gzip files may be joined
                    before = member.copy()
                    try:
                        block = member.decompress(packed, BLOCK)
                    except zlib.error:
                        for block in up_to_damage(before, packed):
                            total += len(block)
                            yield block
                        raise
                    packed = member.unused_data if member.eof else member.unconsumed_tail
                    total += len(block)
                    if block:
                        yield block
        except zlib.error as error:
            self._problem(f"the compressed data is damaged after {total} bytes of text ({error})")
        else:
            if not member.eof:
                self._problem(f"the compressed data is cut after {total} bytes of text")

    def _blocks(self, source: Iterator[bytes]) -> Iterator[list[Any]]:
        buffer = self._head(source)
        for block in source:
            buffer += block
            boundary = _last_boundary(buffer)
            if boundary is not None:
                yield self._decode(memoryview(buffer)[: boundary.start() + 1])
                self._position += boundary.end()
                buffer = buffer[boundary.end() :]
            elif len(buffer) > EVENT_LIMIT:
                self._problem(f"no event ends within {EVENT_LIMIT >> 20} MiB after byte {self._position}; cut there")
                return
        yield self._tail(buffer)

    def _head(self, source: Iterator[bytes]) -> bytes:
        """Reads up to the list of events; what was read behind its beginning."""
        buffer = b""
        for block in source:
            buffer += block
            found = _EVENTS.search(buffer)
            if found:
                self._members(buffer[: found.start()] + b'"":0}')
                self._position = found.end()
                return buffer[found.end() :]
            if len(buffer) > HEADER_LIMIT:
                break
        raise NotATrace("no traceEvents: not a trace of PyTorch's profiler, or cut before its first event")

    def _members(self, text: bytes) -> None:
        """Keeps what stands beside the events, where it can be read."""
        try:
            found = json.loads(text.decode("utf-8-sig", "replace"))
        except (ValueError, RecursionError):
            self._problem("what stands beside the events (distributedInfo, host_name) cannot be read")
            return
        if isinstance(found, dict):
            if "traceEvents" in found:
                self._problem("a second list of traceEvents, which is not read")
            self.header.update(found)

    def _decode(self, block: memoryview) -> list[Any]:
        """The events of a block that ends with an event."""
        if fast is not None:
            try:
                return fast.events(b"".join((b"[", block, b"]")))
            except fast.ERRORS:
                pass  # event by event
        return self._one_by_one(str(block, "utf-8", "replace"))[0]

    def _tail(self, block: bytes) -> list[Any]:
        """The last events, and what stands behind their list."""
        text = block.decode("utf-8", "replace")
        events, rest = self._one_by_one(text, last=True)
        if rest is None:
            self._problem(f"cut after {self._position + len(block)} bytes; the events before are read")
        elif rest.strip():
            self._members(('{"":0' + rest).encode())
        return events

    def _one_by_one(self, text: str, *, last: bool = False) -> tuple[list[Any], str | None]:
        """The events of a text, and what follows the end of their list; None where the list does not end here."""
        events: list[Any] = []
        at, failures = 0, 0
        while True:
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text):
                return events, None
            if text[at] == "]":
                return events, text[at + 1 :]
            try:
                value, end = _raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                following = _START.search(text, at + 1)
                if following is None and last:
                    closing = _LAST.search(text, at)
                    if closing is None and isinstance(error, json.JSONDecodeError):
                        return events, None  # the event in which the file is cut
                    self._event_broken(at)
                    return events, text[closing.end(1) :] if closing else ""
                self._event_broken(at)
                failures += 1
                if following is None or failures == FAILURES_LIMIT:
                    self._broken += len(_START.findall(text, at + 1))
                    return events, "" if last else None
                at = following.start()
                continue
            try:
                events.append(_event(value))
            except (TypeError, OverflowError):
                self._event_broken(at)
            at = end

    def _event_broken(self, at: int) -> None:
        if not self._broken:
            self._first_broken = self._position + at
        self._broken += 1

    def _problem(self, what: str) -> None:
        self.problems.append(Problem(source=str(self.path), what=what))


def _last_boundary(buffer: bytes) -> re.Match[bytes] | None:
    """From the end of the last event that is complete for certain to the beginning of the next; None without one."""
    # The kineto order, "ph" first; by another writer's order any two objects.
    at = len(buffer)
    for _ in range(16):
        at = buffer.rfind(b'"ph"', 0, at)
        if at < 0:
            break
        found = list(_NEXT_EVENT.finditer(buffer, max(at - 64, 0), at + 4))
        if found:
            return found[-1]
    objects = list(_NEXT_OBJECT.finditer(buffer, max(len(buffer) - (64 << 10), 0)))
    return objects[-1] if objects else None


def _event(value: Any) -> Event:
    """The event of a decoded object.

    Raises:
        TypeError: it is none, or its times are no numbers.
        OverflowError: a time is larger than any.
    """
    if not isinstance(value, dict):
        raise TypeError("not an object")
    name, cat, tid, args = (value.get(key) for key in ("name", "cat", "tid", "args"))
    return Event(
        name if isinstance(name, str) else "",
        cat if isinstance(cat, str) else "",
        _number(value.get("ts", 0.0)),
        _number(value.get("dur", 0.0)),
        tid if isinstance(tid, (int, str)) else 0,
        args if isinstance(args, dict) else {},
    )


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError("not a number")
    return float(value)
