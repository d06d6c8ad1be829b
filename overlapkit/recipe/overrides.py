"""``section.key=value`` from the command line, merged over a recipe.

The form is OmegaConf's dotlist and the values mean what they mean in a recipe file, except where
the text itself counts: a version such as ``2.10`` would become the number 2.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from overlapkit.errors import RecipeError, shown
from overlapkit.recipe.place import COMMAND_LINE
from overlapkit.recipe.yaml_source import parse_value

VERSION_PATHS = frozenset(
    {
        "software.megatron_bridge",
        "software.megatron_core",
        "software.transformer_engine",
        "software.torch",
        "software.container",
        "cluster.driver_version",
    }
)
_KEY = re.compile(r"[A-Za-z_][\w\-]*(?:\.[A-Za-z_][\w\-]*)*")
_MAX_LENGTH = 16 * 1024


def apply_overrides(value: dict[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], frozenset[str]]:
    """The recipe's tree with the overrides in, and the dotted paths they set.

    Raises:
        RecipeError: an override that is not ``section.key=value``.
    """
    paths = set()
    for override in overrides:
        path, new = _parse(override)
        value = _set(value, path.split("."), new)
        paths.add(path)
    return value, frozenset(paths)


def _parse(override: str) -> tuple[str, Any]:
    path, equals, text = override.partition("=")
    if not equals or not _KEY.fullmatch(path):
        hint = "write section.key=value, for example model.tensor_model_parallel_size=4"
        if override.startswith(("+", "~")):
            hint = f"leave out the {override[0]}: write section.key=value, and null to unset"
        raise RecipeError(f"{shown(override)} is not an override", source=COMMAND_LINE, hint=hint)
    if len(override) > _MAX_LENGTH:
        raise RecipeError("longer than 16 KB", source=COMMAND_LINE, path=path)
    if path in VERSION_PATHS and text not in ("", "null", "~"):
        return path, text.strip("'\"")
    try:
        return path, parse_value(text, COMMAND_LINE)
    except RecipeError as error:
        raise RecipeError(error.problem, source=COMMAND_LINE, path=path, hint=error.hint) from None


def _set(tree: dict[str, Any], keys: list[str], value: Any) -> dict[str, Any]:
    """A copy of ``tree`` with one value replaced; mappings merge, as OmegaConf merges them."""
    key, rest = keys[0], keys[1:]
    below = tree.get(key)
    if rest:
        return {**tree, key: _set(below if isinstance(below, dict) else {}, rest, value)}
    if isinstance(value, dict) and isinstance(below, dict):
        merged = below
        for inner, inner_value in value.items():
            merged = _set(merged, [str(inner)], inner_value)
        value = merged
    return {**tree, key: value}
