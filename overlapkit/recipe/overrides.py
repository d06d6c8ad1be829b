"""``section.key=value`` from the command line, merged over a recipe.

The form is OmegaConf's dotlist and the values mean what they mean in a recipe file, except where
the text itself counts: a version such as ``2.10`` would become the number 2.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from overlapkit.data import load_yaml
from overlapkit.errors import RecipeError, shown
from overlapkit.recipe.place import COMMAND_LINE
from overlapkit.recipe.sections import MixedPrecision
from overlapkit.recipe.yaml_source import MAX_DEPTH, parse_value

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
_NAME = r"[A-Za-z_][\w\-]*"
_KEY = re.compile(rf"{_NAME}(?:\.{_NAME}){{0,{MAX_DEPTH - 1}}}")
_MAX_LENGTH = 16 * 1024


def apply_overrides(value: dict[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], frozenset[str]]:
    """The recipe's tree with the overrides in, and the dotted paths they set.

    Raises:
        RecipeError: an override that is not ``section.key=value``, or one of a part of a single value.
    """
    paths: set[str] = set()
    for override in overrides:
        path, new = _parse(override)
        value = _set(value, path.split("."), new, path, "")
        paths.update(_paths(path, new))
    return value, frozenset(paths)


def _paths(path: str, value: Any) -> Iterator[str]:
    """The dotted paths that a value sets: a mapping those of its parts."""
    if not isinstance(value, dict) or not value:
        yield path
        return
    for key, item in value.items():
        yield from _paths(f"{path}.{key}", item)


def _parse(override: str) -> tuple[str, Any]:
    path, equals, text = override.partition("=")
    if len(override) > _MAX_LENGTH:
        raise RecipeError("longer than 16 KB", source=COMMAND_LINE, path=path)
    if not equals or not _KEY.fullmatch(path):
        hint = "write section.key=value, for example model.tensor_model_parallel_size=4"
        if override.startswith(("+", "~")):
            hint = f"leave out the {override[0]}: write section.key=value, and null to unset"
        raise RecipeError(f"{shown(override)} is not an override", source=COMMAND_LINE, hint=hint)
    try:
        value = parse_value(text, COMMAND_LINE)
    except RecipeError as error:
        raise RecipeError(error.problem, source=COMMAND_LINE, path=path, hint=error.hint) from None
    if path in VERSION_PATHS and isinstance(value, (int, float)) and not isinstance(value, bool):
        return path, text.strip()
    return path, value


def _set(tree: dict[str, Any], keys: list[str], value: Any, path: str, above: str) -> dict[str, Any]:
    """A copy of ``tree`` with one value replaced; mappings merge, as OmegaConf merges them."""
    key, rest = keys[0], keys[1:]
    here = f"{above}.{key}" if above else key
    below = tree.get(key)
    if rest:
        if below is not None and not isinstance(below, dict):
            below = _parts(here, below, path)
        return {**tree, key: _set(below or {}, rest, value, path, here)}
    if isinstance(value, dict) and isinstance(below, dict):
        value = _merged(below, value)
    return {**tree, key: value}


def _merged(old: dict[Any, Any], new: dict[Any, Any]) -> dict[Any, Any]:
    merged = dict(old)
    for key, value in new.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return merged


def _parts(here: str, value: Any, path: str) -> dict[str, Any]:
    """What a name stands for, so that an override changes one part of it and leaves the others."""
    found = None
    if isinstance(value, str) and here == "mixed_precision":
        entry = load_yaml("mixed_precision.yaml").get(value.replace("-", "_"), {})
        names = [field.name for field in fields(MixedPrecision)]
        found = {name: entry[name] for name in names if entry.get(name) is not None}
    elif isinstance(value, str) and here.endswith(".tp_comm_overlap_cfg"):
        from overlapkit.presets import load_preset, preset_names

        found = dict(load_preset(value).userbuffers) if value in preset_names() else None
    if not found:
        hint = f"write the whole of {here}"
        raise RecipeError(f"{here} is {shown(value)}, which has no parts", source=COMMAND_LINE, path=path, hint=hint)
    return found
