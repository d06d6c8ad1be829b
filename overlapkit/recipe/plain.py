"""A caller's mapping as plain dicts, lists and values, within the bounds of a recipe file."""

from __future__ import annotations

from collections.abc import Mapping
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

    def mapping(self, value: Mapping[Any, Any]) -> dict[Any, Any]:
        copy = {}
        for key, child in value.items():
            plain_key = self.leaf(key)
            if not isinstance(plain_key, (str, int, float)):
                raise self.error(f"a key must be text, not {shown(key)}")
            copy[plain_key] = self.child(plain_key, child)
        return copy

    def child(self, key: Any, value: Any) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise self.error(f"more than {MAX_NODES:,} values, {_NEEDS}")
        self.path.append(key)
        if value is None or isinstance(value, (str, int, float)):
            copy = self.leaf(value)
        elif isinstance(value, (Mapping, list, tuple)):
            if len(self.path) >= MAX_DEPTH:
                raise self.error(f"nested deeper than {MAX_DEPTH} levels, {_NEEDS}")
            if isinstance(value, Mapping):
                copy = self.mapping(value)
            else:
                copy = [self.child(index, item) for index, item in enumerate(value)]
        else:
            copy = self.leaf(value)
        self.path.pop()
        return copy

    def leaf(self, value: Any) -> Any:
        """A single value; of a class that a recipe file cannot hold, as it is: its field refuses it."""
        if isinstance(value, PathLike):
            value = fspath(value)
        if isinstance(value, str):
            self.characters += len(value)
            if self.characters > MAX_BYTES:
                raise self.error(f"more than {MAX_BYTES:,} characters, {_NEEDS}")
            return value if type(value) is str else str.__str__(value)
        if isinstance(value, int) and not isinstance(value, bool):
            if abs(value) > MAX_INTEGER:
                raise self.error(f"{shown(value)} is beyond 64 bits")
            return int(value)
        return float(value) if isinstance(value, float) else value
