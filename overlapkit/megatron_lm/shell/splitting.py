"""Fields: where a word is split, and what it may turn out to be."""

from __future__ import annotations

import re
from dataclasses import replace

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

_BRACES = re.compile(r"([^{}]*)\{([^{}\s]*,[^{}\s]*|-?\d{1,6}\.\.-?\d{1,6})\}([^{}]*)")
_MAX_BRACES = 1_000

# A word on its way: pieces, and None where one element of a list ends and the next begins.
Items = list[Piece | None]


def split(items: Items) -> list[Text]:
    fields: list[Text] = []
    current: list[Piece] = []
    for item in items:
        if item is None:
            fields.append(tuple(current))
            current = []
        elif not item.expanded or item.text is None:
            if item.text != "" or item.quoted:
                current.append(item)
        else:
            parts = re.split(r"([ \t\n]+)", item.text)
            for part in parts:
                if part.strip(" \t\n"):
                    whole = part == item.text
                    current.append(item if whole else replace(item, text=part, written=part))
                elif part and current:
                    fields.append(tuple(current))
                    current = []
    fields.append(tuple(current))
    return [field for field in fields if field]


def braces(word: ShellWord) -> list[ShellWord]:
    """``{a,b}`` and ``{1..4}`` in a word that is otherwise plain."""
    if len(word.segments) != 1 or "{" not in word.raw:
        return [word]
    segment = word.segments[0]
    found = _BRACES.fullmatch(segment.text) if isinstance(segment, Literal) and not segment.quoted else None
    if not found:
        return [word]
    before, inside, after = found.groups()
    if "," in inside:
        parts = inside.split(",")
    else:
        first, last = map(int, inside.split(".."))
        parts = [
            str(number) for number in range(first, last + (1 if last >= first else -1), 1 if last >= first else -1)
        ]
    if len(parts) > _MAX_BRACES:
        return [word]
    return [
        ShellWord((Literal(before + part + after, word.line, False),), before + part + after, word.line)
        for part in parts
    ]


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
