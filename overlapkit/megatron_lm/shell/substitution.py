"""What a substitution comes to whose output only its own text makes: ``$(cat <<EOF …)`` and ``$(seq 1 4)``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from overlapkit.megatron_lm.shell.text import Piece, Text, known
from overlapkit.megatron_lm.shell.tree import ShellWord, Simple

if TYPE_CHECKING:
    from overlapkit.megatron_lm.shell.expansion import Expansion

MAY_BE_TEXT = re.compile(r"(?:\$\(|`)\s*(?:cat\s*<<|seq\s)")
_MAX_NUMBERS = 1_000
_WHOLE = re.compile(r"-?(?:0|[1-9]\d{0,8})")


def output(command: Simple, written: str, line: int, expansion: Expansion) -> Text | None:
    """The output without its last newlines; None where only a run could tell."""
    words = [word for word in command.words if isinstance(word, ShellWord)]
    name = words[0].plain if words else None
    if name == "seq" and not command.redirects:
        numbers = _numbers([known(field) for field in expansion.fields(words[1:])])
        if numbers is None:
            return None
        expansion.charge(1 + len(numbers) // 4)
        return (Piece("\n".join(map(str, numbers)), written, line),)
    if name == "cat" and len(words) == len(command.redirects) == 1 and command.redirects[0].body is not None:
        return _without_last_newlines(expansion.text(command.redirects[0].body))
    return None


def _numbers(arguments: list[str | None]) -> range | None:
    whole = [int(text) for text in arguments if text is not None and _WHOLE.fullmatch(text)]
    if len(whole) != len(arguments) or not 1 <= len(whole) <= 3:
        return None
    first, step, last = (1, 1, whole[0]) if len(whole) == 1 else (whole[0], (1, *whole[1:-1])[-1], whole[-1])
    if step == 0:
        return None
    numbers = range(first, last + (1 if step > 0 else -1), step)
    return numbers if len(numbers) <= _MAX_NUMBERS else None


def _without_last_newlines(text: Text) -> Text:
    pieces = list(text)
    while pieces and (last := pieces[-1].text) is not None:
        rest = last.rstrip("\n")
        if rest:
            piece = pieces[-1]
            pieces[-1] = Piece(rest, rest if piece.written == last else piece.written, piece.line, quoted=piece.quoted)
            break
        pieces.pop()
    return tuple(pieces)
