"""Fields: where a word is split, and what it may turn out to be."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from overlapkit.megatron_lm.shell.text import Piece, Text, as_value
from overlapkit.megatron_lm.shell.tree import (
    Arithmetic,
    ArithmeticCommand,
    Body,
    Conditional,
    Literal,
    Parameter,
    Segments,
    ShellWord,
    Simple,
    Unknown,
)

BLANKS = " \t\n"

# A word on its way: pieces, and None where one element of a list ends and the next begins.
Items = list[Piece | None]


def split(items: Items, ifs: str = BLANKS) -> list[Text]:
    """The fields of one word; ``ifs`` holds the characters that divide them."""
    delimiter = _delimiter(ifs)
    fields: list[Text] = []
    current: list[Piece] = []
    blank = False  # whether blanks have just ended a field: another divider behind them is the same one
    for item in items:
        if item is None:
            fields.append(tuple(current))
            current, blank = [], True
        elif not item.expanded or item.text is None:
            if item.text != "" or item.quoted:
                current.append(item)
                blank = False
        elif delimiter is None:
            current += [item] if item.text else []
        else:
            for number, part in enumerate(delimiter.split(item.text)):
                if number % 2 == 0:
                    if part:
                        current.append(item if part == item.text else replace(item, text=part, written=part))
                        blank = False
                elif current or (part.strip(BLANKS) and not blank):
                    fields.append(tuple(current) or (Piece("", "", item.line, quoted=True),))
                    current, blank = [], not part.strip(BLANKS)
                else:
                    blank = blank and not part.strip(BLANKS)
    fields.append(tuple(current))
    return [field for field in fields if field]


def cut(text: str, ifs: str, most: int | None = None) -> list[str]:
    """Text as `read` divides it: into fields, the last of ``most`` of which takes what is left."""
    delimiter = _delimiter(ifs)
    blanks = "".join(character for character in ifs if character in BLANKS)
    text = text.strip(blanks)
    if not text or delimiter is None:
        return [text] if text else []
    found: list[str] = []
    start = 0
    while start < len(text):
        if most is not None and len(found) == most - 1:
            rest = cut(text[start:], ifs)
            return [*found, rest[0] if len(rest) == 1 else text[start:]]
        match = delimiter.search(text, start)
        found.append(text[start : match.start() if match else len(text)])
        start = match.end() if match else len(text)
    return found


@lru_cache(maxsize=16)
def _delimiter(ifs: str) -> re.Pattern[str] | None:
    """One divider: blanks of ``ifs``, or one other character of it with the blanks around it."""
    blanks = "".join(re.escape(character) for character in ifs if character in BLANKS)
    others = "".join(re.escape(character) for character in ifs if character not in BLANKS)
    around = f"[{blanks}]*" if blanks else ""
    choices = ([f"{around}[{others}]{around}"] if others else []) + ([f"[{blanks}]+"] if blanks else [])
    return re.compile(f"({'|'.join(choices)})") if choices else None


def as_element(field: Text) -> Text:
    """An element of an array: what may be several words stays so."""
    several = may_be_several(field)
    return tuple(replace(piece, many=several) for piece in as_value(field))


def may_be_several(field: Text) -> bool:
    """Whether an argument is nothing but an unknown that could be any number of words."""
    return len(field) == 1 and field[0].text is None and (field[0].expanded or field[0].many)


def names_in(segments: Segments) -> set[str]:
    """Every parameter that the segments expand."""
    names: set[str] = set()
    for segment in segments:
        if isinstance(segment, Parameter):
            names.add(segment.name)
            for argument in segment.arguments:
                names |= names_in(argument)
        elif isinstance(segment, Arithmetic):
            names |= names_in(segment.expression)
            for part in segment.expression:
                if isinstance(part, Literal):
                    names.update(re.findall(r"[A-Za-z_]\w*", part.text))
        elif isinstance(segment, Unknown):
            names.add(segment.piece.written)
    return names


def names_asked(body: Body) -> set[str]:
    """Every parameter that a condition rests on, and `getopts` where it asks for options."""
    names: set[str] = set()
    for statement in body:
        for pipeline in (statement.first, *(pipeline for _, pipeline in statement.rest)):
            for command in pipeline.commands:
                if isinstance(command, Simple):
                    words = [word for word in command.words if isinstance(word, ShellWord)]
                elif isinstance(command, Conditional):
                    words = [token for token in command.tokens if isinstance(token, ShellWord)]
                elif isinstance(command, ArithmeticCommand):
                    names |= names_in(command.expression) | set(re.findall(r"[A-Za-z_]\w*", command.raw))
                    continue
                else:
                    continue
                names.update(word.plain or "" for word in words[:1] if word.plain == "getopts")
                for word in words:
                    names |= names_in(word.segments)
    return names
