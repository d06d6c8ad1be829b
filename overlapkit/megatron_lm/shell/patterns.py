"""Glob patterns, matched in time that grows with pattern times text."""

from __future__ import annotations

import re

from overlapkit.megatron_lm.shell.text import Text, known

_MAX_WORK = 1_000_000
_EXTENDED = re.compile(r"[@?+!*]\(")
_SET = re.compile(r"\[[!^]?\]?[^\]]*\]")

_STAR, _ANY = "*", "?"


def matches(pattern: Text, text: str) -> bool | None:
    """Whether the pattern matches all of the text; None where it is unknown, or of a kind that is not tried."""
    tokens = _tokens(pattern)
    if tokens is None or len(tokens) * len(text) > _MAX_WORK:
        return None
    place = token = 0
    star, resume = -1, 0
    while place < len(text):
        if token < len(tokens) and tokens[token] != (_STAR, False) and _one(tokens[token], text[place]):
            place, token = place + 1, token + 1
        elif token < len(tokens) and tokens[token] == (_STAR, False):
            star, resume, token = token, place, token + 1
        elif star >= 0:
            resume += 1
            place, token = resume, star + 1
        else:
            return False
    return all(rest == (_STAR, False) for rest in tokens[token:])


def _tokens(pattern: Text) -> list[tuple[str, bool]] | None:
    """Characters, sets and wildcards, each with whether it stands for itself."""
    if known(pattern) is None:
        return None
    tokens: list[tuple[str, bool]] = []
    for piece in pattern:
        text = piece.text or ""
        if piece.quoted:
            tokens.extend((character, True) for character in text)
            continue
        if _EXTENDED.search(text):
            return None
        position = 0
        while position < len(text):
            found = _SET.match(text, position) if text[position] == "[" else None
            token = found.group() if found else text[position]
            tokens.append((token, not found and token not in (_STAR, _ANY)))
            position += len(token)
    return tokens


def _one(token: tuple[str, bool], character: str) -> bool:
    text, itself = token
    if itself:
        return text == character
    if text == _ANY:
        return True
    body = text[1:-1]
    negated = body[:1] in ("!", "^")
    body = body[1:] if negated else body
    found = position = 0
    while position < len(body):
        if body[position + 1 : position + 2] == "-" and position + 2 < len(body):
            found |= body[position] <= character <= body[position + 2]
            position += 3
        else:
            found |= body[position] == character
            position += 1
    return bool(found) != negated


def strip(text: str, pattern: Text, operator: str) -> str | None:
    """``#``, ``##``, ``%`` and ``%%``; None where the pattern cannot be tried."""
    if len(text) ** 2 * sum(len(piece.written) + 1 for piece in pattern) > _MAX_WORK:
        return None
    lengths = list(range(len(text) + 1))
    if len(operator) == 2:
        lengths.reverse()
    for length in lengths:
        part = text[:length] if operator[0] == "#" else text[len(text) - length :]
        found = matches(pattern, part)
        if found is None:
            return None
        if found:
            return text[length:] if operator[0] == "#" else text[: len(text) - length]
    return text
