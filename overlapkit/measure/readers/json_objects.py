"""JSON objects that follow each other, on one line each or not, read as a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from overlapkit.measure.readers.nccl_log.lines import Problems

_LONGEST = 1 << 20  # characters of one object
_LONGEST_WORD = 12  # what is decoded in one piece, such as -Infinity or an escaped surrogate pair
_DEEPEST = 1000  # of one inside the other, about what Python's decoder takes
_MOST_DAMAGED = 100_000  # objects of one file
_DAMAGED = "a JSON object is cut or damaged"
_GIVEN_UP = f"there are more than {_MOST_DAMAGED:,} damaged JSON objects: the rest is not read"
_BETWEEN = re.compile(r"[\s,\[\]\ufeff\ufffd]*")  # a byte order mark too
_BEGINNING = re.compile(r'(?<=\n)\{|\{"header"')


def objects(blocks: Iterable[tuple[int, bytes]], source: str, problems: Problems) -> Iterator[tuple[int, Any]]:
    """(line, value) of every JSON value in ``blocks``, pairs of the first line's number and the text.

    After what is no JSON, reading goes on where an object begins a line or is a record. An array around the objects, or
    commas between them, do no harm.
    """
    decode = json.JSONDecoder().raw_decode
    text, line, damaged = "", 1, 0
    for _, block in chain(blocks, ((0, b""),)):
        text += block.decode("utf-8", "replace")
        at = 0
        while True:
            start = _end_of(text, at)
            line += text.count("\n", at, start)
            at = start
            if at == len(text):
                break
            try:
                value, end = decode(text, at)
            except (ValueError, RecursionError) as error:
                if block and len(text) - at < _LONGEST and _may_go_on(error, text):
                    break
                damaged += 1
                if damaged > _MOST_DAMAGED:
                    problems.add(source, _GIVEN_UP, line)
                    return
                problems.add(source, _DAMAGED, line)
                reached = error.pos if isinstance(error, json.JSONDecodeError) else at
                found = _BEGINNING.search(
                    text, max(reached, at + (_DEEPEST if isinstance(error, RecursionError) else 1))
                )
                end = len(text) if found is None else found.start()
            else:
                yield line, value
            line += text.count("\n", at, end)
            at = end
        text = text[at:]


def _may_go_on(error: Exception, text: str) -> bool:
    """Whether the text may only lack its end: a string has none, or the error is there."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos > len(text) - _LONGEST_WORD


def _end_of(text: str, at: int) -> int:
    """Where the next value begins, or the end."""
    found = _BETWEEN.match(text, at)
    return at if found is None else found.end()
