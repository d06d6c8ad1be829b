"""Errors that a person reads: one line each, with the place and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class OverlapkitError(Exception):
    """Base of every error that overlapkit raises on purpose; its text is one printable line."""

    exit_code = 2


class RecipeError(OverlapkitError):
    """A recipe, override or command that cannot be used.

    ``source`` is the file (or ``command line``, ``mapping``), ``line`` its 1-based line and ``path``
    the dotted path of the field, each None where it does not apply.
    """

    def __init__(
        self,
        problem: str,
        *,
        path: str | None = None,
        source: str | None = None,
        line: int | None = None,
        hint: str | None = None,
    ) -> None:
        self.problem = problem
        self.path = path
        self.source = source
        self.line = line
        self.hint = hint
        super().__init__(problem)

    def __str__(self) -> str:
        place = self.source or ""
        if place and self.line is not None:
            place = f"{place}:{self.line}"
        parts = [printable(part, limit=300) for part in (place, self.path) if part]
        text = self.problem if self.hint is None else f"{self.problem}; {self.hint}"
        return ": ".join([*parts, printable(text, limit=600)])


class PlanError(OverlapkitError):
    """A plan that has errors, where only one without will do."""

    exit_code = 1


class SetupError(OverlapkitError, AssertionError):
    """What Bridge's own set-up of communication overlap refuses, and mostly by an AssertionError."""

    exit_code = 1


class MissingPackageError(OverlapkitError, ImportError):
    """A package that this part of overlapkit works with, and that cannot be imported here."""


def printable(text: str, *, limit: int = 120) -> str:
    """``text`` on one line, control characters escaped, cut at ``limit`` characters.

    Recipes are untrusted: what they contain must not move the cursor or forge lines.
    """
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shown(value: object) -> str:
    """A value of unknown size and type, short enough for an error message."""
    if isinstance(value, str):
        return f"'{printable(value, limit=60)}'"
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    if isinstance(value, dict):
        return f"a mapping of {len(value)} keys"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)} items"
    if isinstance(value, (int, float)):
        return str(value)
    return f"a {type(value).__name__}"  # of a caller's mapping: its text may be anything


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The word of ``words`` that ``word`` was probably meant to be: misspelt, or cut short."""
    if len(word) > 200:
        return None
    candidates = list(words)
    found = get_close_matches(word, candidates, n=1, cutoff=0.75)
    if found:
        return found[0]
    return next((other for other in candidates if len(word) > 3 and other.startswith(f"{word}_")), None)
