"""A caller's mapping as plain dicts, lists and values, within the bounds of a recipe file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from overlapkit.errors import RecipeError, shown
from overlapkit.recipe.yaml_source import MAX_BYTES, MAX_DEPTH, MAX_INTEGER, MAX_NODES

_NEEDS = "which no recipe needs"


def plain_tree(value: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A copy of ``value``: numbers and texts of derived classes as what they derive from, paths as text.

    Raises:
        RecipeError: not a mapping, deeper than 50 levels (a circle is), more than 10,000 values or
            262,144 characters, an integer beyond 64 bits, or a key that is no text.
    """
    if not isinstance(value, Mapping):
        raise RecipeError(f"a recipe is a mapping of sections, this is {shown(value)}", source=source)
    if type(value).__module__.startswith("omegaconf."):  # reading its items would run its resolvers
        from omegaconf import OmegaConf

        value = OmegaConf.to_container(value)  # type: ignore[assignment]
    return _Copy(source).mapping(value)


class _Copy:
    def __init__(self, source: str) -> None:
        self.source = source
        self.path: list[Any] = []
        self.nodes = 0
        self.characters = 0

    def error(self, problem: str) -> RecipeError:
        return RecipeError(problem, source=self.source, path=".".join(map(str, self.path)) or None)

    def grow(self, nodes: int, characters: int) -> None:
        self.nodes += nodes
        self.characters += characters
        if self.nodes > MAX_NODES:
            raise self.error(f"more than {MAX_NODES:,} values, {_NEEDS}")
        if self.characters > MAX_BYTES:
            raise self.error(f"more than {MAX_BYTES:,} characters, {_NEEDS}")

    def mapping(self, value: Mapping[Any, Any]) -> dict[Any, Any]:
        self.grow(len(value), 0)
        copy = {}
        for key, child in value.items():
            if key.__class__ is str:  # what nearly all are, as nearly all values of a dump are null or flags:
                self.characters += len(key)  # a call for each would take as long as all the rules do
                plain_key = key
            else:
                plain_key = self.key(key)
            if child is None or child.__class__ is bool:
                copy[plain_key] = child
                continue
            self.path.append(plain_key)
            copy[plain_key] = self.child(child)
            self.path.pop()
        self.grow(0, 0)
        return copy

    def key(self, key: Any) -> Any:
        plain = self.leaf(key)
        if isinstance(plain, (str, int, float)):
            return plain
        raise self.error(f"a key must be text, not {shown(key)}")

    def sequence(self, value: Sequence[Any]) -> list[Any]:
        self.grow(len(value), 0)
        copy = []
        for index, child in enumerate(value):
            self.path.append(index)
            copy.append(self.child(child))
            self.path.pop()
        return copy

    def child(self, value: Any) -> Any:
        if isinstance(value, (str, int, float)) or not isinstance(value, (Mapping, list, tuple)):
            return self.leaf(value)
        if len(self.path) >= MAX_DEPTH:
            raise self.error(f"nested deeper than {MAX_DEPTH} levels, {_NEEDS}")
        return self.mapping(value) if isinstance(value, Mapping) else self.sequence(value)

    def leaf(self, value: Any) -> Any:
        """A single value; of a class that a recipe file cannot hold, as it is: its field refuses it."""
        if value.__class__ is not str and isinstance(value, PathLike):
            value = fspath(value)
        if isinstance(value, str):
            self.grow(0, len(value))
            return value if value.__class__ is str else str.__str__(value)
        if isinstance(value, int) and not isinstance(value, bool):
            if abs(value) > MAX_INTEGER:
                raise self.error(f"{shown(value)} is beyond 64 bits")
            return int(value)
        return float(value) if isinstance(value, float) else value
