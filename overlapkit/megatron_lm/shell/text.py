"""Text of a script and what becomes of it: pieces that remember where they stand."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from overlapkit.errors import printable
from overlapkit.megatron_lm.words import Word

MAX_CHARACTERS = 256 * 1024  # of a file, and of any value in it
MAX_PIECES = 20_000  # of a value
MAX_DEPTH = 40  # constructs inside each other
MAX_WRITTEN = 200  # characters of a word that are kept to show it
# Stand for unknown pieces in text that is parsed again, as `eval` does. Scripts may not contain them.
FIRST_STAND_IN, LAST_STAND_IN = 0xF0000, 0xFFFFD


class ShellError(Exception):
    """What cannot be read, and its line. ``fatal``: no part of the script can be trusted."""

    def __init__(self, problem: str, line: int, *, fatal: bool = False) -> None:
        super().__init__(problem)
        self.problem = problem
        self.line = line
        self.fatal = fatal


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a value, on one line of the script; ``text`` is None where only a run could tell.

    ``absent``: nothing in the script sets it, so that a default would count. ``quoted``: neither split nor a
    pattern. ``expanded``: out of an unquoted expansion, to be split. ``many``: stands for any number of words.
    """

    text: str | None
    written: str
    line: int
    unknown: str | None = None
    absent: bool = False
    quoted: bool = False
    expanded: bool = False
    many: bool = False


Text = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Array:
    """An indexed or associative array, in the order of its keys' first assignment."""

    items: tuple[tuple[str, Text], ...] = ()

    def get(self, key: str) -> Text | None:
        return next((value for name, value in self.items if name == key), None)

    def with_item(self, key: str, value: Text) -> Array:
        return self.extended([(key, value)])

    def extended(self, values: Iterable[tuple[str | None, Text]]) -> Array:
        """With further elements; those without a key follow the one before them."""
        items = dict(self.items)
        following = max((int(key) for key in items if key.isdecimal()), default=-1) + 1
        for key, value in values:
            key = str(following) if key is None else key
            following = int(key) + 1 if key.isdecimal() else following
            items[key] = value
        if len(items) > len(self.items) and all(map(str.isdecimal, items)):  # elements stand by their index
            return Array(tuple(sorted(items.items(), key=lambda item: int(item[0]))))
        return Array(tuple(items.items()))

    def without(self, key: str) -> Array:
        return Array(tuple(item for item in self.items if item[0] != key))


Value = Text | Array


def literal(text: str, line: int, *, quoted: bool = False) -> Text:
    """Pieces for text that stands in the script, one per line of it."""
    return tuple(Piece(part, part, line + number, quoted=quoted) for number, part in enumerate(lines_of(text)))


def lines_of(text: str) -> list[str]:
    """Lines with their ends; unlike ``splitlines``, only a newline ends one."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def known(text: Text) -> str | None:
    """The characters, None where a piece is unknown."""
    parts = []
    for piece in text:
        if piece.text is None:
            return None
        parts.append(piece.text)
    return "".join(parts)


def written(text: Text) -> str:
    return "".join(piece.written for piece in text)


def why_unknown(text: Text) -> str | None:
    """What could not be known, each reason once."""
    reasons = list(dict.fromkeys(piece.unknown for piece in text if piece.unknown))
    return "; ".join(printable(reason, limit=MAX_WRITTEN) for reason in reasons[:3]) or None


def is_absent(text: Text) -> bool:
    """Whether nothing in the script sets it: an unset variable, or a copy of one."""
    return bool(text) and all(piece.absent or piece.text == "" for piece in text)


def to_word(text: Text, line: int) -> Word:
    shown = printable(written(text), limit=MAX_WRITTEN)
    return Word(known(text), shown, text[0].line if text else line, why_unknown(text))


def as_value(text: Text) -> Text:
    """As a variable keeps it: how it was quoted is forgotten, nothing empty remains."""
    return tuple(
        replace(piece, quoted=False, expanded=False) if piece.quoted or piece.expanded else piece
        for piece in text
        if piece.text != ""
    )


class Source:
    """Shell text and the line of every offset: a file, or a value that is run (`eval`, `bash -c`, a here-document)."""

    def __init__(self, text: str, marks: list[int], lines: list[int], unknowns: tuple[Piece, ...] = ()) -> None:
        self.text = text
        self.unknowns = unknowns
        self._marks = marks
        self._lines = lines
        self._last_use: dict[str, int] | None = None
        self._names_any = "${!" in text  # a name that is made at run time

    @classmethod
    def of_file(cls, text: str) -> Source:
        marks = [0, *(match.end() for match in re.finditer("\n", text))]
        return cls(text, marks, list(range(1, len(marks) + 1)))

    @classmethod
    def of_value(cls, value: Text) -> Source:
        parts: list[str] = []
        marks, lines, offset = [0], [value[0].line if value else 1], 0
        unknowns: list[Piece] = []
        for piece in value:
            part = piece.text
            if part is None:
                if FIRST_STAND_IN + len(unknowns) > LAST_STAND_IN:
                    raise ShellError("too many unknown values", piece.line, fatal=True)
                part = chr(FIRST_STAND_IN + len(unknowns))
                unknowns.append(piece)
            parts.append(part)
            marks.append(offset)
            lines.append(piece.line)
            offset += len(part)
        return cls("".join(parts), marks, lines, tuple(unknowns))

    def line_at(self, offset: int) -> int:
        return self._lines[bisect_right(self._marks, offset) - 1]

    def raw(self, start: int, stop: int) -> str:
        """The text as it stands in the script, where unknown pieces of it are written out."""
        part = self.text[start:stop]
        if not self.unknowns:
            return part
        pieces = [self.unknown_at(start + offset) for offset in range(len(part))]
        return "".join(piece.written if piece else character for piece, character in zip(pieces, part, strict=True))

    def unknown_at(self, offset: int) -> Piece | None:
        number = ord(self.text[offset]) - FIRST_STAND_IN
        return self.unknowns[number] if 0 <= number < len(self.unknowns) else None

    def used_after(self, name: str, offset: int) -> bool:
        """Whether the name occurs again; text that is only run later counts from where it stands to the end."""
        if self._last_use is None:
            self._last_use = {match.group(): match.start() for match in re.finditer(r"[A-Za-z_]\w*|\d+", self.text)}
            end = len(self.text)
            for match in re.finditer(r"\\\$\{?(\w+)|'[^']*'", self.text):
                deferred = [match.group(1)] if match.group(1) else re.findall(r"\$\{?(\w+)", match.group())
                self._last_use.update(dict.fromkeys(deferred, end))
        return self._last_use.get(name, -1) >= offset or self._names_any
