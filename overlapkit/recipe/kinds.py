"""The kinds of a recipe's fields: ``build`` checks values by them, ``json_schema`` says them to editors."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def _of(kind: str, doc: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=None, metadata={"kind": kind, "doc": doc, "choices": choices})


def size(doc: str) -> Any:
    """A whole number of at least 1."""
    return _of("size", doc)


def count(doc: str) -> Any:
    """A whole number of at least 0."""
    return _of("count", doc)


def integer(doc: str) -> Any:
    """Any whole number."""
    return _of("integer", doc)


def number(doc: str) -> Any:
    """A finite number above 0."""
    return _of("number", doc)


def flag(doc: str) -> Any:
    """true or false."""
    return _of("flag", doc)


def text(doc: str) -> Any:
    """Text."""
    return _of("text", doc)


def version(doc: str) -> Any:
    """A version as text: a YAML number would read 2.10 as 2.1."""
    return _of("version", doc)


def choice(doc: str, *choices: str) -> Any:
    """One of several texts."""
    return _of("choice", doc, choices)


def names(doc: str) -> Any:
    """A list of names, or one name, or a comma-separated text."""
    return _of("names", doc)


def sizes(doc: str) -> Any:
    """A list of whole numbers of at least 1."""
    return _of("sizes", doc)


def anything(doc: str) -> Any:
    """A value whose presence counts, not its form."""
    return _of("anything", doc)


def own_form(doc: str, default: Any) -> Any:
    """A value of a form that no other field has; ``build`` reads it by the field's name."""
    return field(default=default, metadata={"doc": doc})
