"""What rounds of a loop change, and what is left of it where nobody knows how many there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from overlapkit.megatron_lm.shell.state import State, value_key
from overlapkit.megatron_lm.shell.text import Array, Piece, Text, Value


def changed(before: State, ways: Iterable[State]) -> set[str]:
    """The variables that differ behind the ways from what they were."""
    names: set[str] = set()
    for way in ways:
        for name in before.variables.keys() | way.variables.keys():
            old, new = before.variables.get(name), way.variables.get(name)
            if old is not new and (old is None or new is None or value_key(old) != value_key(new)):
                names.add(name)
    return names


def any_value(name: str, before: State, ways: Sequence[State], line: int) -> Value:
    """What a variable may be behind any number of rounds: of flags that only grow, those before them stay known."""
    old = before.variables.get(name)
    reason = f"${name} changes in the loop of line {line}, whose rounds are not known"
    piece = Piece(None, f"${name}", line, reason)
    new = [way.variables.get(name) for way in ways]
    if isinstance(old, Array) or any(isinstance(value, Array) for value in new):
        piece = replace(piece, many=True)
        if isinstance(old, Array) and all(_extends(value, old) for value in new):
            return old.extended([(None, (piece,))])
        return (piece,)
    if old and any(" " in (part.text or "") for part in old) and all(_begins_with(value, old) for value in new):
        return (*old, Piece(" ", " ", line), piece)
    return (piece,)


def _extends(value: Value | None, old: Array) -> bool:
    return isinstance(value, Array) and value.items[: len(old.items)] == old.items


def _begins_with(value: Value | None, old: Text) -> bool:
    return not isinstance(value, Array) and _flat(value or ()).startswith(_flat(old))


def _flat(text: Text) -> str:
    return "".join("\0" if piece.text is None else piece.text for piece in text)
