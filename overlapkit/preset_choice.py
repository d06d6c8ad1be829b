"""From what a recipe writes as its userbuffers configuration to the configuration itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlapkit import presets
from overlapkit.errors import RecipeError, nearest, shown
from overlapkit.plan import PresetChoice
from overlapkit.presets import NO_PRESET, Wanted
from overlapkit.recipe.place import YAML_ENDINGS, Place
from overlapkit.recipe.sections import AUTO, CommOverlap, Recipe
from overlapkit.recipe.userbuffers import clean_userbuffers

Chosen = tuple[PresetChoice, "Mapping[str, Any] | str | None"]
_LAYER = re.compile("(qkv|proj|fc1|fc2)_(fprop|dgrad|wgrad)")
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
        return NO_PRESET, None
    section = "model" if recipe.comm_overlap is None else "comm_overlap"
    path = f"{section}.tp_comm_overlap_cfg"
    cfg = recipe.model.tp_comm_overlap_cfg if recipe.comm_overlap is None else asked.tp_comm_overlap_cfg
    if cfg is None:
        return NO_PRESET, None
    if cfg == AUTO:
        return presets.choose_nearest(wanted)
    if isinstance(cfg, str):
        return _named_or_file(cfg, path, recipe, wanted, place)
    userbuffers = clean_userbuffers(cfg, path, place.error)
    return presets.recognise(userbuffers, wanted), userbuffers


def _named_or_file(text: str, path: str, recipe: Recipe, wanted: Wanted, place: Place) -> Chosen:
    if text in presets.preset_names():
        return presets.choose_named(text, wanted)
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
        return _USERS, text
    userbuffers = read_userbuffers(file)
    return presets.recognise(userbuffers, wanted), userbuffers


def read_userbuffers(file: Path) -> dict[str, Any]:
    """A file of the form that Megatron-LM's ``--tp-comm-overlap-cfg`` and our presets have.

    A recipe may name any file: one that is something else is refused without showing what is in it.

    Raises:
        RecipeError: it cannot be read, or holds no configuration.
    """
    from overlapkit.recipe import yaml_source

    def fail(path: str, problem: str, hint: str | None = None) -> RecipeError:
        return RecipeError(problem, source=str(file), path=path.lstrip(".") or None, hint=hint)

    what = "a userbuffers configuration is a mapping of layers"
    document = yaml_source.parse(yaml_source.read_text(file), str(file), what=what)
    value = document.value.get("userbuffers", document.value)
    if not isinstance(value, dict) or not any(_LAYER.fullmatch(str(key)) for key in value):
        raise fail("", "not a userbuffers configuration", "its keys are layers such as qkv_fprop")
    cleaned: dict[str, Any] = clean_userbuffers(value, "", fail)
    return cleaned
