"""What `read`, `mapfile` and `readarray` put into variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from overlapkit.megatron_lm.shell.splitting import BLANKS, cut
from overlapkit.megatron_lm.shell.text import Array, Piece, Text, Value, as_value, known

_WITH_VALUE = {"read": "adinNptu", "mapfile": "dnOsuCc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One such command. ``whole``: all lines; ``partly``: only a part of the input, which is not followed."""

    names: tuple[str, ...]
    lines: bool = False  # an element per line
    array: bool = False  # an element per word
    whole: bool = False
    raw: bool = False
    verbatim: bool = False
    trims: bool = False
    partly: bool = False


def request(fields: Sequence[Text]) -> Request:
    """The command as its options say."""
    command = "read" if known(fields[0]) == "read" else "mapfile"
    values: dict[str, str | None] = {}
    names: list[str] = []
    position = 1
    while position < len(fields):
        text = known(fields[position])
        position += 1
        if text is None or not text.startswith("-") or len(text) == 1:
            names.append(text or "")
            continue
        for number, letter in enumerate(text[1:], 1):
            values[letter] = ""
            if letter in _WITH_VALUE[command]:
                values[letter] = text[number + 1 :]
                if not values[letter] and position < len(fields):
                    values[letter] = known(fields[position])
                    position += 1
                break
    if command == "mapfile":
        return Request(
            names=tuple(names[:1]) or ("MAPFILE",),
            lines=True,
            trims="t" in values,
            partly=bool(values.keys() & set("dnOsuCc")),
        )
    delimiter = values.get("d", "\n")
    array = values.get("a")
    return Request(
        names=(array,) if array else tuple(names) or ("REPLY",),
        array=bool(array),
        whole=delimiter == "",
        raw="r" in values,
        verbatim=not array and not names,
        partly=bool(values.keys() & set("nNu")) or delimiter not in ("", "\n"),
    )


def values(asked: Request, body: Text | None, ifs: str, line: int) -> dict[str, Value]:
    """The variables' values; ``body`` is None where the input is not in the script."""
    many = asked.lines or asked.array
    unknown: dict[str, Value] = {
        name: (Piece(None, f"${name}", line, f"${name} is only known at run time", many=many),)
        for name in asked.names
        if name.isidentifier()
    }
    if (
        body is None
        or asked.partly
        or (not asked.raw and not asked.lines and any("\\" in (p.text or "") for p in body))
    ):
        return unknown
    if not asked.whole and not asked.lines:
        body = _first_line(body)
    if len(asked.names) == 1 and not many:
        stripped = body if asked.verbatim else _stripped(body, ifs)
        return {name: as_value(stripped) for name in unknown}
    text = known(body)
    if text is None:
        return unknown
    start = body[0].line if body else line
    if asked.lines:
        parts = text.removesuffix("\n").split("\n") if text else []
        parts = parts if asked.trims else [f"{part}\n" for part in parts]
        return dict.fromkeys(unknown, _array(parts, start, 1))
    if asked.array:
        return dict.fromkeys(unknown, _array(cut(text, ifs), start, 0))
    parts = cut(text, ifs, len(asked.names))
    parts += [""] * (len(asked.names) - len(parts))
    return {name: (Piece(part, part, start),) if part else () for name, part in zip(asked.names, parts, strict=True)}


def _array(parts: list[str], line: int, step: int) -> Array:
    elements: list[tuple[str | None, Text]] = [
        (None, (Piece(part, part, line + number * step),) if part else ()) for number, part in enumerate(parts)
    ]
    return Array().extended(elements)


def _first_line(body: Text) -> Text:
    pieces: list[Piece] = []
    for piece in body:
        part, newline, _ = (piece.text or "").partition("\n")
        if newline:
            return (*pieces, replace(piece, text=part, written=part))
        pieces.append(piece)
    return tuple(pieces)


def _stripped(body: Text, ifs: str) -> Text:
    """Without the blanks that a single name's value loses at both ends."""
    blanks = "".join(character for character in ifs if character in BLANKS)
    pieces = list(body)
    for place, strip in ((0, str.lstrip), (-1, str.rstrip)):
        while pieces and (text := pieces[place].text) is not None:
            left = strip(text, blanks)
            if left:
                pieces[place] = pieces[place] if left == text else replace(pieces[place], text=left, written=left)
                break
            del pieces[place]
    return tuple(pieces)
