"""A caller's mapping as plain dicts and lists, with the same bounds as a recipe file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlapkit.errors import RecipeError, shown
from overlapkit.recipe.yaml_source import MAX_DEPTH, MAX_NODES


def plain_tree(value: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A copy of ``value``.

    Raises:
        RecipeError: not a mapping, deeper than 50 levels (a circle is), or more than 10,000 values.
    """
    if not isinstance(value, Mapping):
        raise RecipeError(f"a recipe is a mapping of sections, this is {shown(value)}", source=source)
    budget = [MAX_NODES]
    result: dict[str, Any] = _copy(value, source, budget, 0)
    return result


def _copy(value: Any, source: str, budget: list[int], depth: int) -> Any:
    budget[0] -= 1
    if budget[0] < 0:
        raise RecipeError(f"more than {MAX_NODES:,} values, which no recipe needs", source=source)
    if isinstance(value, (dict, Mapping)):
        if depth >= MAX_DEPTH:
            raise RecipeError(f"nested deeper than {MAX_DEPTH} levels, which no recipe needs", source=source)
        return {
            key: child if child is None or type(child) in _LEAVES else _copy(child, source, budget, depth + 1)
            for key, child in value.items()
        }
    if isinstance(value, (list, tuple)):
        if depth >= MAX_DEPTH:
            raise RecipeError(f"nested deeper than {MAX_DEPTH} levels, which no recipe needs", source=source)
        return [_copy(child, source, budget, depth + 1) for child in value]
    return value


_LEAVES = frozenset({bool, int, float, str})
