"""A userbuffers configuration as written: the form that Transformer Engine reads is what is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from overlapkit.errors import RecipeError, shown

Fail = Callable[[str, str, "str | None"], RecipeError]
_WHOLE_NUMBERS = ("num_sm", "cga_size", "num_splits", "comm_priority", "gemm_priority")
_FLAGS = (
    *("is_reduce_scatter", "set_sm_margin", "aggregate", "atomic_gemm", "use_ce", "fp8_buf"),
    "pipeline_rs_overlap_first_gemm",
)


def clean_userbuffers(value: Any, path: str, fail: Fail) -> Any:
    """A name or path as it is; a mapping without ``_target_`` and tuples. A layer may be None: it has no entry.

    Bridge's ``fp8_buf: bool = (False,)`` dumps as ``[false]``: not empty, so Transformer Engine reads
    it as true.

    Raises:
        RecipeError: neither text nor a mapping of layers to mappings, or an option of the wrong kind.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise fail(path, f"expected auto, null, a preset's name, a path or a mapping, got {shown(value)}", None)
    layers = {}
    for layer, entry in value.items():
        if layer == "_target_":
            continue
        if not isinstance(layer, str):
            raise fail(path, f"a layer's name is text, got {shown(layer)}", None)
        if not (entry is None or isinstance(entry, dict)):
            hint = "for example qkv_fprop: {method: ring_exchange}"
            raise fail(_below(path, layer), f"expected a mapping of options, got {shown(entry)}", hint)
        layers[layer] = None if entry is None else _clean_layer(entry, _below(path, layer), fail)
    return layers


def named_layers(userbuffers: Mapping[str, Any]) -> dict[str, Any]:
    """Without the layers that are null, as Bridge's set-up hands it on."""
    return {layer: entry for layer, entry in userbuffers.items() if entry is not None}


def _clean_layer(entry: dict[Any, Any], path: str, fail: Fail) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key, option in entry.items():
        if key == "_target_":
            continue
        if isinstance(option, (list, tuple)):
            option = len(option) > 0
        if not isinstance(key, str):
            raise fail(path, f"an option's name is text, got {shown(key)}", None)
        if not _is_plain(option):
            raise fail(_below(path, key), f"expected a plain value, got {shown(option)}", None)
        if key in _FLAGS and isinstance(option, str):
            # "no" is true to Python, and no flag at all to Transformer Engine's C++.
            raise fail(_below(path, key), f"expected true or false, got {shown(option)}", "write it without quotes")
        if key in _WHOLE_NUMBERS and (not isinstance(option, int) or isinstance(option, bool) or abs(option) >= 2**31):
            hint = "write the number without quotes" if isinstance(option, str) else None
            raise fail(_below(path, key), f"expected a whole number, got {shown(option)}", hint)
        options[key] = option
    return options


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _is_plain(option: Any) -> bool:
    """A value that every output format can hold; infinity and NaN are not JSON."""
    if isinstance(option, float):
        return isfinite(option)
    return option is None or isinstance(option, (str, int))
