"""Explicit pipeline layouts: ``Ettt|(tt|)*29,m|L`` or a list of stages, as Megatron-Core reads them.

Source: megatron-core transformer/pipeline_parallel_layer_layout.py.
"""

from __future__ import annotations

import re
from typing import Any

from overlapkit.errors import shown

_MAX_LENGTH = 20_000
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_GROUP = re.compile(r"\(([^()]+)\)\*(\d{1,6})")
_SINGLE = re.compile(r"(.)\*(\d{1,6})")


def parse_layout(layout: Any) -> tuple[str, ...]:
    """One text per stage and chunk, in order: E embedding, t transformer layer, m MTP, L loss.

    Raises:
        ValueError: not a layout; the text says what is wrong.
    """
    if isinstance(layout, str):
        text = _unrolled(layout.replace(",", ""))
        unknown = sorted(set(text) - set("EtmL|"))
        if unknown:
            raise ValueError(f"{shown(unknown[0])} is not a layer; known are E, t, m and L")
        return tuple(text.split("|"))
    if not isinstance(layout, list) or not layout or not all(isinstance(stage, list) for stage in layout):
        raise ValueError(f"expected text such as Ett|tt|ttL or a list of stages, got {shown(layout)}")
    return tuple("".join(_letter(layer) for layer in stage) for stage in layout)


def _unrolled(text: str) -> str:
    for pattern in (_GROUP, _SINGLE):
        grown = len(text) + sum(len(unit) * int(times) for unit, times in pattern.findall(text))
        if grown > _MAX_LENGTH:
            raise ValueError(f"the layout unrolls to more than {_MAX_LENGTH:,} layers")
        text = pattern.sub(lambda match: match[1] * int(match[2]), text)
    return text


def _letter(layer: Any) -> str:
    """A layer's name, also as a dump writes the enum (``LayerType.decoder``)."""
    name = layer.rpartition(".")[2] if isinstance(layer, str) else ""
    if name in _LETTERS:
        return _LETTERS[name]
    if name in _LETTERS.values():
        return name
    raise ValueError(f"{shown(layer)} is not a layer; known are {', '.join(_LETTERS)}")
