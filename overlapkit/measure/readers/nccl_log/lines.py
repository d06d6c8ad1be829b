"""The bytes of a log, block by block of whole lines, whatever its length: plain or gz, cut, binary or endless.

A block holds about ``BLOCK`` bytes and ends with a newline. No more than a few blocks are ever in memory: a line longer
than ``LONGEST`` is passed over in linear time and counted. A gz file is decompressed piece by piece, and given up where
it is a bomb: it grows without end and nothing in it is of use.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from overlapkit.errors import printable
from overlapkit.measure.events import Problem
from overlapkit.measure.readers.gz import up_to_damage

BLOCK = 1 << 16  # what a core's cache holds, cut into lines, is read a quarter faster than a megabyte
LONGEST = 1 << 20
MOST_PROBLEMS = 1000
NO_LINE = "no line of NCCL in it: NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,COLL log its calls"
_GZIP = b"\x1f\x8b"
_GZIP_FORMAT = 31  # zlib's number of it
_ZIPPED = 1 << 13
# A gz file is given up that holds nothing of use for so many bytes in a row, of so many times as many as were packed.
# Deflate reaches 1,032 times, with what is always the same.
MOST_USELESS = 64 << 20
MOST_PACKED = 100
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class Problems:
    """What could not be read: equal problems of a file are one, with the first one's line.

    Beyond ``MOST_PROBLEMS`` different ones, they are counted as one more.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[int | None, int]] = {}

    def of(self, source: str) -> bool:
        """Whether a file has any."""
        return any(known == source for known, _ in self._found)

    def is_new(self, source: str, what: str) -> bool:
        """Whether ``add`` would be the first of its kind: only then is its line worth looking for."""
        return (source, what) not in self._found

    def add(self, source: str, what: str, line: int | None = None, count: int = 1) -> None:
        key = source, what
        if key not in self._found and len(self._found) >= MOST_PROBLEMS:
            key = source, "further problems"
        first, before = self._found.get(key, (line, 0))
        self._found[key] = first, before + count

    def listed(self) -> tuple[Problem, ...]:
        return tuple(
            Problem(source=source, what=what, line=line, count=count)
            for (source, what), (line, count) in self._found.items()
        )


def blocks(
    path: Path,
    problems: Problems,
    progress: Callable[[int], None] | None = None,
    used: Callable[[], int] = lambda: 0,
) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, whole lines) of a file; what cannot be read is added to ``problems``.

    ``progress`` is told the bytes of the file as they are read, compressed ones where it is a gz. ``used`` says how
    much of use was found until now, in any unit: a gz file in which it stays the same for long is given up.
    """
    source = printable(str(path), limit=300)
    line, rest, skipping, wide = 1, b"", False, None
    for piece in _pieces(path, source, problems, progress, used):
        if wide is None:
            wide = piece.startswith(_UTF16) or 3 * piece.count(b"\0") > len(piece)
        # What matters in a log is ASCII: without its NULs, UTF-16 is as good.
        new = piece.replace(b"\0", b"") if wide else piece
        if skipping:
            _, newline, new = new.partition(b"\n")
            if not newline:
                continue
            line, skipping = line + 1, False
        end = new.rfind(b"\n") + 1
        if not end:
            rest += new
        else:
            text = rest + new[:end]
            rest = new[end:]
            yield line, _without_long_lines(text, line, source, problems)
            line += text.count(b"\n")
        if len(rest) > LONGEST:
            problems.add(source, _too_long(), line)
            rest, skipping = b"", True
    if rest:
        yield line, rest + b"\n"


def _too_long() -> str:
    return f"a line of more than {LONGEST >> 20} MB is passed over"


def _bomb() -> str:
    return f"the gz file grows without end: its rest is not read, {MOST_USELESS >> 20} MB hold nothing of use"


def _without_long_lines(text: bytes, line: int, source: str, problems: Problems) -> bytes:
    """``text`` with every line of more than ``LONGEST`` bytes emptied, so that the lines keep their numbers."""
    if len(text) <= LONGEST:
        return text
    kept: list[bytes] = []
    start = 0
    while len(text) - start > LONGEST:
        end = text.rfind(b"\n", start, start + LONGEST) + 1
        if not end:
            end = text.index(b"\n", start + LONGEST)
            problems.add(source, _too_long(), line + sum(part.count(b"\n") for part in kept))
        else:
            kept.append(text[start:end])
        start = end
    return b"".join([*kept, text[start:]])


def _pieces(
    path: Path, source: str, problems: Problems, progress: Callable[[int], None] | None, used: Callable[[], int]
) -> Iterator[bytes]:
    """The decompressed bytes of a file, some at a time."""
    try:
        with path.open("rb") as file:
            zipped = file.read(len(_GZIP)) == _GZIP
            file.seek(0)
            size = _ZIPPED if zipped else BLOCK
            read = _told(iter(lambda: file.read(size), b""), progress)
            yield from _unzipped(read, source, problems, used) if zipped else read
    except OSError as error:
        problems.add(source, f"cannot be read: {error.strerror or type(error).__name__}")


def _told(pieces: Iterator[bytes], progress: Callable[[int], None] | None) -> Iterator[bytes]:
    for piece in pieces:
        if progress is not None:
            progress(len(piece))
        yield piece


def _unzipped(pieces: Iterator[bytes], source: str, problems: Problems, used: Callable[[], int]) -> Iterator[bytes]:
    """What gz pieces hold, at most ``BLOCK`` at a time; several gz files may follow each other in one."""
    unzip, begun = zlib.decompressobj(_GZIP_FORMAT), False
    before_use, packed, unpacked = used(), 0, 0
    for piece in pieces:
        raw = piece
        packed += len(piece)
        while raw:
            begun = True
            before = unzip.copy()
            try:
                block = unzip.decompress(raw, BLOCK)
            except zlib.error:
                yield from up_to_damage(before, raw)
                problems.add(source, "the gz file is damaged: what comes after is missing")
                return
            yield block
            if used() != before_use:
                before_use, packed, unpacked = used(), len(unzip.unconsumed_tail), 0
            unpacked += len(block)
            if unpacked > max(MOST_USELESS, MOST_PACKED * packed):
                problems.add(source, _bomb())
                return
            raw = unzip.unconsumed_tail
            if unzip.eof:
                raw = unzip.unused_data
                unzip, begun = zlib.decompressobj(_GZIP_FORMAT), False
    if begun:
        problems.add(source, "the gz file is cut: what comes after is missing")
