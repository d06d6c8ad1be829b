"""``{a,b}``, ``{1..8..2}`` and ``{a..c}``: one word that becomes several before anything in it is expanded."""

from __future__ import annotations

import re
from itertools import pairwise

from overlapkit.megatron_lm.shell.text import Piece
from overlapkit.megatron_lm.shell.tree import Literal, Parameter, Segment, ShellWord, Unknown

MAX_WORDS = 1_000
_MAX_CHARACTERS = 100_000  # in all words that one becomes
_MAX_DEPTH = 20
_NUMBERS = re.compile(r"(-?\d{1,6})\.\.(-?\d{1,6})(?:\.\.(-?\d{1,6}))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d{1,6}))?")

_PARTS = re.compile(r"[{},]|[^{},]+")

_Token = Segment | tuple[str, int]  # what stays as it is, or characters that are not quoted and their line


class _TooMany(Exception):
    """More words than anyone writes, or braces too deep in each other."""


def braces(word: ShellWord) -> list[ShellWord]:
    """The words that a word becomes; an unknown one where there are too many."""
    if "{" not in word.raw or not any(isinstance(s, Literal) and not s.quoted and "{" in s.text for s in word.segments):
        return [word]
    tokens: list[_Token] = []
    for segment in word.segments:
        if isinstance(segment, Literal) and not segment.quoted:
            tokens.extend((part, segment.line) for part in _PARTS.findall(segment.text))
        else:
            tokens.append(segment)
    try:
        found = _Braces(tokens).words(0, len(tokens), 0)
    except _TooMany:
        piece = Piece(None, word.raw, word.line, f"{word.raw} stands for too many words", many=True)
        return [ShellWord((Unknown(piece, False),), word.raw, word.line)]
    return [word] if len(found) == 1 and len(found[0]) == len(tokens) else [_joined(part, word) for part in found]


class _Braces:
    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens = tokens
        self.closing: dict[int, int] = {}
        self.commas: dict[int, list[int]] = {}
        opened: list[int] = []
        for place, token in enumerate(tokens):
            character = token[0] if isinstance(token, tuple) else ""
            if character == "{":
                opened.append(place)
            elif character == "," and opened:
                self.commas.setdefault(opened[-1], []).append(place)
            elif character == "}" and opened:
                self.closing[opened.pop()] = place

    def words(self, start: int, stop: int, depth: int) -> list[list[_Token]]:
        """What the tokens from ``start`` to ``stop`` become."""
        if depth > _MAX_DEPTH:
            raise _TooMany
        results: list[list[_Token]] = [[]]
        size = 0
        place = plain = start
        while place < stop:
            choices = self._choices(place, depth) if place in self.closing else None
            if choices is None:
                place += 1
                continue
            before = self.tokens[plain:place]
            size = size * len(choices) + len(results) * (len(choices) * _size(before) + sum(map(_size, choices)))
            if len(results) * len(choices) > MAX_WORDS or size > _MAX_CHARACTERS:
                raise _TooMany
            if len(choices) == 1:
                for result in results:
                    result += [*before, *choices[0]]
            else:
                results = [[*result, *before, *choice] for result in results for choice in choices]
            place = plain = self.closing[place] + 1
        rest = self.tokens[plain:stop]
        if len(results) > 1 and size + len(results) * _size(rest) > _MAX_CHARACTERS:
            raise _TooMany
        return [[*result, *rest] for result in results]

    def _choices(self, place: int, depth: int) -> list[list[_Token]] | None:
        """What may stand for the braces that open here; None where they mean nothing."""
        close = self.closing[place]
        commas = self.commas.get(place)
        if commas is None:
            return self._sequence(place + 1, close)
        edges = pairwise((place, *commas, close))
        return [choice for start, stop in edges for choice in self.words(start + 1, stop, depth + 1)]

    def _sequence(self, start: int, stop: int) -> list[list[_Token]] | None:
        inside = self.tokens[start]
        if stop != start + 1 or not isinstance(inside, tuple):
            return None
        text, line = inside
        numbers, letters = _NUMBERS.fullmatch(text), _LETTERS.fullmatch(text)
        if found := numbers or letters:
            one, other = found.group(1), found.group(2)
            first, last = (int(one), int(other)) if numbers else (ord(one), ord(other))
            step = max(abs(int(found.group(3) or 1)), 1) * (1 if last >= first else -1)
            values = range(first, last + (1 if step > 0 else -1), step)
            if len(values) > MAX_WORDS:
                raise _TooMany
            padded = any(re.match(r"-?0\d", part) for part in (one, other))
            width = max(len(one), len(other)) if padded else 0
            shown = [f"{value:0{width}d}" if numbers else chr(value) for value in values]
            return [[(value, line)] for value in shown]
        return None


def _size(tokens: list[_Token]) -> int:
    return sum(len(token[0]) if isinstance(token, tuple) else 10 for token in tokens)


def _goes_on(parameter: Parameter, token: _Token) -> bool:
    following = token[0] if isinstance(token, tuple) else ""
    return parameter.name.isidentifier() and re.match(r"\w", following, re.ASCII) is not None


def _joined(tokens: list[_Token], word: ShellWord) -> ShellWord:
    segments: list[Segment] = []
    for token in tokens:
        last = segments[-1] if segments else None
        if isinstance(last, Parameter) and not last.written.startswith("${") and _goes_on(last, token):
            piece = Piece(None, word.raw, word.line, f"{word.raw}: what follows the braces becomes part of a name")
            return ShellWord((Unknown(piece, True),), word.raw, word.line)
        if not isinstance(token, tuple):
            segments.append(token)
        elif isinstance(last, Literal) and not last.quoted and last.line == token[1]:
            segments[-1] = Literal(last.text + token[0], last.line, False)
        else:
            segments.append(Literal(token[0], token[1], False))
    plain = "".join(segment.text for segment in segments if isinstance(segment, Literal))
    return ShellWord(tuple(segments), plain if all(isinstance(s, Literal) for s in segments) else word.raw, word.line)
