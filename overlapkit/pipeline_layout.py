"""Explicit pipeline layouts: ``Ettt|(tt|)*29,m|L`` or a list of stages, as Megatron-Core reads them.

Source: megatron-core transformer/pipeline_parallel_layer_layout.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlapkit.errors import shown

if TYPE_CHECKING:
    from overlapkit.facts import Facts

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


@dataclass(frozen=True, slots=True)
class LayerProblem:
    """Why the layers do not split over PP and VP, and who says so when.

    ``by`` and ``at`` are a decision's ``raised_by`` and ``raised_at``; both None: the launch goes on with
    another number of layers.
    """

    because: str
    by: str | None
    at: str | None


def _core(because: str) -> LayerProblem:
    return LayerProblem(because, "megatron-core", "validation")


def _silent(because: str) -> LayerProblem:
    return LayerProblem(because, None, None)


def layer_problem(f: Facts) -> LayerProblem | None:
    """What keeps the layers from splitting over PP and VP; None when they do.

    Source: megatron-core transformer/transformer_config.py (validation) and
    transformer/transformer_block.py get_num_layers_to_build (construction); Megatron-LM
    training/arguments.py; megatron-bridge models/gpt_provider.py.
    """
    if f.stages is not None:
        return _layout_problem(f, f.stages)
    model = f.recipe.model
    if model.num_layers is None:
        return None
    extra = int(bool(model.account_for_embedding_in_pipeline_split)) + int(
        bool(model.account_for_loss_in_pipeline_split)
    )
    if model.num_layers_in_first_pipeline_stage is None and model.num_layers_in_last_pipeline_stage is None:
        return _even_problem(f, model.num_layers, extra)
    if extra:
        return _core("layers of the first or last stage are given, and embedding or loss count as a layer: not both")
    return _uneven_problem(f, model.num_layers)


def _even_problem(f: Facts, layers: int, extra: int) -> LayerProblem | None:
    pp = f.parallelism.pp
    vp = f.parallelism.vp if pp > 1 else None
    chunks = pp * (vp or 1)
    if (layers + extra) % chunks == 0:
        return None
    counted = f"{layers} layers" + (f" and {extra} for embedding and loss" if extra else "")
    parts = f"{pp} stages" if vp is None or vp == 1 else f"{pp} stages times {vp} virtual stages = {chunks}"
    because = f"{counted} are not a multiple of {parts}"
    if f.megatron_lm and vp is None:
        return LayerProblem(because, "megatron-lm", "validation")
    if extra:
        return _core(because)
    if f.bridge and vp is not None and layers // pp % vp:
        return LayerProblem(because, "megatron-bridge", "construction")
    return LayerProblem(because, "megatron-core", "construction")


def _layout_problem(f: Facts, stages: tuple[str, ...]) -> LayerProblem | None:
    model, pp = f.recipe.model, f.parallelism.pp
    if len(stages) % pp:
        because = f"the layout has {len(stages)} stages, not a multiple of PP {pp}"
        return LayerProblem(because, "megatron-lm", "validation") if f.megatron_lm else _core(because)
    if (
        model.num_layers_in_first_pipeline_stage is not None
        or model.num_layers_in_last_pipeline_stage is not None
        or model.account_for_embedding_in_pipeline_split
        or model.account_for_loss_in_pipeline_split
    ):
        return _core("a layout says it all: no layers of the first or last stage, no account for embedding or loss")
    vp = model.virtual_pipeline_model_parallel_size
    if vp is not None and vp != len(stages) // pp:
        because = f"the layout has {len(stages) // pp} virtual stages, virtual_pipeline_model_parallel_size is {vp}"
        return LayerProblem(because, "megatron-lm", "validation") if f.megatron_lm else _core(because)
    everything = "".join(stages)
    if not everything.startswith("E") or not everything.endswith("L"):
        return _core("the layout does not begin with the embedding and end with the loss")
    if everything.count("E") != 1 or everything.count("L") != 1:
        return _core("the layout has more than one embedding or loss")
    if model.num_layers is not None and everything.count("t") != model.num_layers:
        return _core(f"the layout has {everything.count('t')} transformer layers, num_layers is {model.num_layers}")
    if everything.count("m") != (model.mtp_num_layers or 0):
        return _core(
            f"the layout has {everything.count('m')} MTP layers, mtp_num_layers is {model.mtp_num_layers or 0}"
        )
    return _mtp_problem(f, stages)


def _mtp_problem(f: Facts, stages: tuple[str, ...]) -> LayerProblem | None:
    """Where MTP layers may stand: last of all layers, in one stage, in the last virtual stage of its rank."""
    holders = [index for index, stage in enumerate(stages) if "m" in stage]
    if not holders:
        return None
    everything = "".join(stages)
    if "t" in everything[everything.index("m") :]:
        return _core("the layout has transformer layers behind the MTP layers")
    if len(holders) > 1:
        return _core("the layout has MTP layers in more than one stage")
    if holders[0] < len(stages) - f.parallelism.pp:
        return _core("the layout's MTP layers are not in the last virtual stage of their rank")
    if holders[0] != len(stages) - 1 and f.core_in(">=0.15.0,<0.16.0"):
        return _core("the layout's MTP layers are not in the last stage, beside the loss, as before Megatron-Core 0.16")
    return None


def _uneven_problem(f: Facts, layers: int) -> LayerProblem | None:
    model, vp = f.recipe.model, f.parallelism.vp
    middle, stages = layers, f.parallelism.pp
    for name, count in (
        ("first", model.num_layers_in_first_pipeline_stage),
        ("last", model.num_layers_in_last_pipeline_stage),
    ):
        if count is None:
            continue
        if count <= 0:
            return _core(f"the {name} stage has {count} layers")
        if vp is not None and count % vp:
            return _core(f"the {name} stage's {count} layers are not a multiple of {vp} virtual stages")
        middle, stages = middle - count, stages - 1
    left = f"{middle} layers are left for {stages} stages in the middle"
    if (middle != 0) != (stages != 0) and f.core_in(">=0.16.0"):
        return _core(left)
    if stages <= 0:
        return _silent(f"{left}: the model would not have {layers} layers") if middle or stages else None
    if middle % stages:
        return _core(f"{left}, not a multiple")
    if vp is not None and middle // stages % vp:
        return _core(f"{middle // stages} layers of a middle stage are not a multiple of {vp} virtual stages")
    return _silent(f"{left}: the model would not have {layers} layers") if middle < 0 else None
