"""Plain values as Python source: literals only, so that no text of a recipe becomes code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

WIDTH = 120
INDENT = "    "


class Name(str):
    """Source that stands as it is: a name of ours, never text of a recipe."""

    __slots__ = ()


class Call:
    """A call of a class of ours with keyword arguments."""

    __slots__ = ("arguments", "function")

    def __init__(self, function: str, arguments: Mapping[str, Any]) -> None:
        self.function = function
        self.arguments = arguments


def source(value: Any, *, column: int = 0, depth: int = 0) -> str:
    """A value as ``ruff format`` would lay it out; it starts at ``column`` of a line indented ``depth`` times."""
    opening, parts, closing = _parts(value)
    if not opening:
        return _leaf(value)
    inline = opening + ", ".join(f"{label}{source(item)}" for label, item in parts) + closing
    if "\n" not in inline and column + len(inline) <= WIDTH:
        return inline
    indent = INDENT * (depth + 1)
    lines = []
    for label, item in parts:
        # One column is for the comma.
        lines.append(f"{indent}{label}{source(item, column=len(indent + label) + 1, depth=depth + 1)},\n")
    return f"{opening}\n{''.join(lines)}{INDENT * depth}{closing}"


def _parts(value: Any) -> tuple[str, list[tuple[str, Any]], str]:
    """Brackets and what is in them, each part with what stands before it; no brackets around a single value."""
    if isinstance(value, Call):
        return f"{value.function}(", [(f"{name}=", item) for name, item in value.arguments.items()], ")"
    if isinstance(value, Mapping):
        return "{", [(f"{_leaf(key)}: ", item) for key, item in value.items()], "}"
    if isinstance(value, (list, tuple)):
        return "[", [("", item) for item in value], "]"
    return "", [], ""


def _leaf(value: Any) -> str:
    """Plain text in ASCII, within double quotes where it has none itself."""
    if isinstance(value, Name):
        return str(value)
    text = ascii(value)
    return f'"{text[1:-1]}"' if isinstance(value, str) and '"' not in text else text


def assignment(target: str, value: Any, *, depth: int = 0) -> str:
    """``target = value`` with its line end."""
    head = f"{INDENT * depth}{target} = "
    return f"{head}{source(value, column=len(head), depth=depth)}\n"


def import_from(module: str, names: Iterable[str]) -> str:
    """``from module import names`` on one line, or one name per line."""
    ordered = sorted(names, key=lambda name: (not name[0].isupper(), name))
    line = f"from {module} import {', '.join(ordered)}\n"
    if len(line) <= WIDTH + 1:
        return line
    return f"from {module} import (\n" + "".join(f"{INDENT}{name},\n" for name in ordered) + ")\n"
