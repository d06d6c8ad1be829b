"""Explicit pipeline layouts: ``Ettt|(tt|)*29,m|L`` or a list of stages, as Megatron-Core reads them.

Source: megatron-core transformer/pipeline_parallel_layer_layout.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from overlapkit.errors import shown

if TYPE_CHECKING:
    from overlapkit.recipe.sections import Model

_MAX_LENGTH = 20_000
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_GROUP = re.compile(r"\(([^)]+)\)\*(\d{1,6})")
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


def layer_problem(model: Model, stages: tuple[str, ...] | None, pp: int, vp: int | None) -> tuple[str, str] | None:
    """Why the layers do not split over PP and VP, and when Megatron-Core says so; None when they do.

    Source: megatron-core transformer/transformer_config.py (validation) and
    transformer/transformer_block.py get_num_layers_to_build (construction).
    """
    if stages is not None:
        return _layout_problem(model, stages, pp)
    layers = model.num_layers
    if layers is None:
        return None
    first, last = model.num_layers_in_first_pipeline_stage, model.num_layers_in_last_pipeline_stage
    if first is not None or last is not None:
        return _uneven_problem(layers, first, last, pp, vp)
    extra = int(bool(model.account_for_embedding_in_pipeline_split)) + int(
        bool(model.account_for_loss_in_pipeline_split)
    )
    chunks = pp * (vp or 1)
    if (layers + extra) % chunks == 0:
        return None
    counted = f"{layers} layers" + (f" and {extra} for embedding and loss" if extra else "")
    parts = f"{pp} stages" if not vp or vp == 1 else f"{pp} stages times {vp} virtual stages = {chunks}"
    return f"{counted} are not a multiple of {parts}", "validation" if extra else "construction"


def _layout_problem(model: Model, stages: tuple[str, ...], pp: int) -> tuple[str, str] | None:
    at = "validation"
    if len(stages) % pp:
        return f"the layout has {len(stages)} stages, not a multiple of PP {pp}", at
    vp = model.virtual_pipeline_model_parallel_size
    if vp is not None and vp != len(stages) // pp:
        return f"the layout has {len(stages) // pp} virtual stages, virtual_pipeline_model_parallel_size is {vp}", at
    everything = "".join(stages)
    if model.num_layers is not None and everything.count("t") != model.num_layers:
        return f"the layout has {everything.count('t')} transformer layers, num_layers is {model.num_layers}", at
    if everything.count("m") != (model.mtp_num_layers or 0):
        return f"the layout has {everything.count('m')} MTP layers, mtp_num_layers is {model.mtp_num_layers or 0}", at
    if not everything.startswith("E") or not everything.endswith("L"):
        return "the layout does not begin with the embedding and end with the loss", at
    return None


def _uneven_problem(
    layers: int, first: int | None, last: int | None, pp: int, vp: int | None
) -> tuple[str, str] | None:
    at = "validation"
    middle, stages = layers, pp
    for name, count in (("first", first), ("last", last)):
        if count is None:
            continue
        if count <= 0:
            return f"the {name} stage has {count} layers", at
        if vp is not None and count % vp:
            return f"the {name} stage's {count} layers are not a multiple of {vp} virtual stages", at
        middle, stages = middle - count, stages - 1
    if middle < 0:
        return f"the first and last stage have more layers than the model's {layers}", "construction"
    if (middle != 0) != (stages != 0):
        return f"{middle} layers are left for {stages} stages in the middle", at
    if stages and middle % stages:
        return f"{middle} layers are left for {stages} stages in the middle, not a multiple", at
    if stages and vp is not None and (middle // stages) % vp:
        return f"{middle // stages} layers of a middle stage are not a multiple of {vp} virtual stages", at
    return None
