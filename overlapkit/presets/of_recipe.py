"""From what a recipe writes as its userbuffers configuration to the configuration itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from overlapkit import presets
from overlapkit.errors import RecipeError, nearest, shown
from overlapkit.plan import PresetChoice
from overlapkit.presets import NO_PRESET, Wanted
from overlapkit.recipe.place import YAML_ENDINGS, Place
from overlapkit.recipe.sections import AUTO, CommOverlap, Recipe
from overlapkit.recipe.userbuffers import clean_userbuffers, named_layers
from overlapkit.software import Versions
from overlapkit.userbuffers.check import LayerFlags, Report, check_userbuffers

_LAYER = re.compile("(qkv|proj|fc1|fc2)_(fprop|dgrad|wgrad)")


class Chosen(NamedTuple):
    """A recipe's configuration. ``null_layers`` are those that it names without an entry, and hands on so.

    ``own_file``: it stands in a preset's own file, below what the preset was made for, where no framework looks for it.
    """

    preset: PresetChoice
    userbuffers: Mapping[str, Any] | str | None
    null_layers: tuple[str, ...] = ()
    own_file: bool = False


_USERS = PresetChoice(name=None, aliases=(), match="user", differs={}, provenance="user")


def choose_userbuffers(
    recipe: Recipe, asked: CommOverlap, wanted: Wanted, place: Place, *, wanted_at_all: bool
) -> Chosen:
    """The configuration, and where it comes from.

    None: Transformer Engine's defaults. A text: a path that this machine does not have, kept as it is.

    Raises:
        RecipeError: a name that is no preset, or a file that holds no configuration.
    """
    if not wanted_at_all:
        return Chosen(NO_PRESET, None)
    section = "model" if recipe.comm_overlap is None else "comm_overlap"
    path = f"{section}.tp_comm_overlap_cfg"
    cfg = recipe.model.tp_comm_overlap_cfg if recipe.comm_overlap is None else asked.tp_comm_overlap_cfg
    if cfg is None:
        return Chosen(NO_PRESET, None)
    if cfg == AUTO:
        return Chosen(*presets.choose_nearest(wanted))
    if isinstance(cfg, str):
        return _named_or_file(cfg, path, recipe, wanted, place)
    return _given(clean_userbuffers(cfg, path, place.error), wanted)


def _given(layers: Mapping[str, Any], wanted: Wanted) -> Chosen:
    userbuffers = named_layers(layers)
    null_layers = tuple(layer for layer in layers if layer not in userbuffers)
    return Chosen(presets.recognise(userbuffers, wanted), userbuffers, null_layers)


def _named_or_file(text: str, path: str, recipe: Recipe, wanted: Wanted, place: Place) -> Chosen:
    if text in presets.preset_names():
        return Chosen(*presets.choose_named(text, wanted))
    if "/" not in text and not text.endswith(YAML_ENDINGS):
        near = nearest(text, presets.preset_names())
        hint = f"did you mean {near}?" if near else "`overlapkit presets list` names them; a file ends in .yaml"
        raise place.error(path, f"{shown(text)} is neither a preset nor a file", hint)
    file = Path(recipe.source).parent / text if recipe.source != "mapping" else Path(text)
    try:
        found = file.is_file()
    except (OSError, ValueError):
        found = False
    if not found:
        return Chosen(_USERS, text)
    layers, own_file = _read(file)
    return _given(layers, wanted)._replace(own_file=own_file)


def report_of(recipe: Recipe, versions: Versions, wanted: Wanted, chosen: Chosen, *, fp8: bool) -> Report | None:
    """What the recipe's Transformer Engine makes of a configuration; None where nothing is set up, or not known what.

    ``fp8``: whether the GEMMs of the layers are FP8.
    """
    engine, tp = versions.transformer_engine, wanted.tensor_model_parallel_size
    if engine is None or tp == 1 or isinstance(chosen.userbuffers, str):
        return None
    # Bridge's set-up takes null layers away; a file that is read, and Megatron-LM, hand them on.
    set_up = versions.megatron_bridge is not None and recipe.comm_overlap is not None
    nulls = dict.fromkeys(() if set_up else chosen.null_layers)
    return check_userbuffers(
        None if chosen.userbuffers is None else {**chosen.userbuffers, **nulls},
        transformer_engine=engine.text,
        tensor_model_parallel_size=tp,
        tokens=wanted.tokens_per_rank or None,  # fewer than CP ranks are a rule's matter
        hidden_size=wanted.hidden_size,
        quantization_modes=("fp8", "none") if wanted.quantization_modes_differ else ("fp8",) if fp8 else ("none",),
        flags=layer_flags(recipe),
    )


def layer_flags(recipe: Recipe) -> LayerFlags:
    """Which buffers the model's layers use; unset is Megatron-Core's default."""
    model = recipe.model
    return LayerFlags(
        tp_comm_overlap_ag=model.tp_comm_overlap_ag is not False,
        tp_comm_overlap_rs=model.tp_comm_overlap_rs is not False,
        tp_comm_overlap_rs_dgrad=bool(model.tp_comm_overlap_rs_dgrad),
        tp_comm_bulk_dgrad=model.tp_comm_bulk_dgrad is not False,
        tp_comm_bulk_wgrad=model.tp_comm_bulk_wgrad is not False,
        weights_train=recipe.peft is None,
    )


def read_userbuffers(file: Path) -> dict[str, Any]:
    """A file of the form that Megatron-LM's ``--tp-comm-overlap-cfg`` and our presets have.

    A recipe may name any file: one that is something else is refused without showing what is in it.

    Raises:
        RecipeError: it cannot be read, or holds no configuration.
    """
    return _read(file)[0]


def _read(file: Path) -> tuple[dict[str, Any], bool]:
    """The layers, and whether they stand in a preset's own file."""
    from overlapkit.recipe import yaml_source

    def fail(path: str, problem: str, hint: str | None = None) -> RecipeError:
        return RecipeError(problem, source=str(file), path=path.lstrip(".") or None, hint=hint)

    what = "a userbuffers configuration is a mapping of layers"
    document = yaml_source.parse(yaml_source.read_text(file), str(file), what=what)
    value = document.value.get("userbuffers", document.value)
    if not isinstance(value, dict) or not any(_LAYER.fullmatch(str(key)) for key in value):
        raise fail("", "not a userbuffers configuration", "its keys are layers such as qkv_fprop")
    return clean_userbuffers(value, "", fail), value is not document.value
