"""What a launch script says, before anyone asks what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Word:
    """One argument, as the shell would pass it.

    ``text`` is None where only a run could tell; ``written`` is what stands in the script, ``line`` its 1-based
    line, and ``unknown`` says what could not be known, for example ``$TP is not set in this script``.
    """

    text: str | None
    written: str
    line: int
    unknown: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One way in which a script starts training.

    ``when`` names the branches that lead here, in the order of the script, for example
    ``line 12: [ $TP -gt 1 ] holds``. ``taken`` is whether the script takes them all as it is written.
    ``contrary``: a branch goes against what the script's own values say, so that only another script would go there.
    ``arguments`` are the words after the training program, ``launcher`` those before it (torchrun and its options).
    ``exports`` is the environment of the process, None where the file is a list of arguments and says nothing of it.
    ``notes`` are the places where flags may hide that nobody could see, one line each.
    """

    line: int
    arguments: tuple[Word, ...]
    launcher: tuple[Word, ...] = ()
    exports: Mapping[str, Word] | None = None
    when: tuple[str, ...] = ()
    taken: bool = True
    contrary: bool = False
    notes: tuple[str, ...] = field(default=())
