"""A userbuffers configuration as written: the form that Transformer Engine reads is what is left."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

from overlapkit.errors import RecipeError, shown

Fail = Callable[[str, str, "str | None"], RecipeError]


def clean_userbuffers(value: Any, path: str, fail: Fail) -> Any:
    """A name or path as it is; a mapping without ``_target_``, empty layers and tuples.

    Bridge's ``fp8_buf: bool = (False,)`` dumps as ``[false]``: not empty, so Transformer Engine reads
    it as true.

    Raises:
        RecipeError: neither text nor a mapping of layers to mappings.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise fail(path, f"expected auto, null, a preset's name, a path or a mapping, got {shown(value)}", None)
    layers = {}
    for layer, entry in value.items():
        if layer == "_target_" or entry is None:
            continue
        if not isinstance(layer, str) or not isinstance(entry, dict):
            hint = "for example qkv_fprop: {method: ring_exchange}"
            raise fail(f"{path}.{layer}", f"expected a mapping of options, got {shown(entry)}", hint)
        layers[layer] = _clean_layer(entry, f"{path}.{layer}", fail)
    return layers


def _clean_layer(entry: dict[Any, Any], path: str, fail: Fail) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key, option in entry.items():
        if key == "_target_":
            continue
        if isinstance(option, (list, tuple)):
            option = len(option) > 0
        if not isinstance(key, str) or not _is_plain(option):
            raise fail(f"{path}.{key}", f"expected a plain value, got {shown(option)}", None)
        options[key] = option
    return options


def _is_plain(option: Any) -> bool:
    """A value that every output format can hold; infinity and NaN are not JSON."""
    if isinstance(option, float):
        return isfinite(option)
    return option is None or isinstance(option, (str, int))
