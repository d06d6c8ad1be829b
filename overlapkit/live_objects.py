"""Live configuration objects as a recipe's mapping, and a plan's settings written onto them.

Any objects will do that have the attributes of Megatron-Core's TransformerConfig, OptimizerConfig and
DistributedDataParallelConfig, or of Bridge's own classes: nothing of these packages is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

from overlapkit.errors import RecipeError
from overlapkit.recipe.schema import specs_of

SECTIONS = ("model", "optimizer", "ddp")
# An object holds every field with its class's defaults, as a dump does: what is not there was not left out by a user.
_DUMP = "live objects"
_USERBUFFERS = ("model.tp_comm_overlap", "model.tp_comm_overlap_cfg", "model.tp_comm_bootstrap_backend")
# Fields of these kinds hold nothing but numbers and flags: another object there is a mistake.
_NUMBERS = ("size", "count", "integer", "number", "flag")
_NOT_THERE = object()
_DEEPEST = 8  # levels of a value; no field of a recipe needs more than three


def recipe_mapping(*, model: Any, optimizer: Any = None, ddp: Any = None, **sections: Any) -> dict[str, Any]:
    """What live objects say, in the form of a dump of Megatron-Bridge; ``sections`` are further ones, as plain values.

    ``comm_overlap`` is null unless it is among ``sections``: the objects' own values stand. A value that no recipe
    can hold (a dtype, a function, an object) is left out, and kept where a number or a flag belongs, which refuses it.

    Raises:
        RecipeError: an attribute that cannot be read.
    """
    objects = dict(zip(SECTIONS, (model, optimizer, ddp), strict=True))
    found = {name: _attributes(name, each) for name, each in objects.items() if each is not None}
    return {"_target_": _DUMP, "comm_overlap": None, **found, **sections}


def write_settings(
    settings: Mapping[str, Any], *, model: Any, optimizer: Any = None, ddp: Any = None, only: Iterable[str] = SECTIONS
) -> None:
    """Sets the settings of a plan on the objects that have such an attribute, section by section of ``only``.

    What a model that overlaps needs for userbuffers is set whether or not its class has the fields, as Bridge does: its
    initialization reads them. Each object gets a copy of its own. Where one setting cannot be set, all objects are as
    they were.

    Raises:
        RecipeError: an object does not take a setting: a frozen class, a property without a setter.
    """
    always = _USERBUFFERS if settings.get("model.tp_comm_overlap") else ()
    objects = dict(zip(SECTIONS, (model, optimizer, ddp), strict=True))
    before: list[tuple[Any, str, Any]] = []
    for path, value in settings.items():
        section, _, name = path.partition(".")
        owner = objects[section]
        if section not in only or owner is None:
            continue
        try:
            found = getattr(owner, name, _NOT_THERE)
            if found is _NOT_THERE and path not in always:
                continue
            before.append((owner, name, found))
            setattr(owner, name, deepcopy(value))
        except Exception as error:
            _restore(before)
            text = f"a {type(owner).__name__} does not take the plan's settings: {error}"
            raise RecipeError(text, path=path) from None


def _restore(before: list[tuple[Any, str, Any]]) -> None:
    for owner, name, value in reversed(before):
        with suppress(Exception):
            if value is _NOT_THERE:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _attributes(section: str, owner: Any) -> dict[str, Any]:
    values = {}
    for name, (kind, _) in specs_of(section).items():
        try:
            found = getattr(owner, name, None)
        except Exception as error:
            text = f"cannot be read: {type(error).__name__}: {error}"
            raise RecipeError(text, source=_DUMP, path=f"{section}.{name}") from None
        value = plain(found)
        if kind == "size" and value == 0:  # as a size is in Megatron-Core's dataclasses before someone sets it
            continue
        if value is not None:
            values[name] = value
        elif found is not None and kind in _NUMBERS:
            values[name] = found
    return values | _others(section, owner)


def _others(section: str, owner: Any) -> dict[str, Any]:
    """The numbers, flags and texts of a dataclass that no rule reads; Megatron-Core's constructors do."""
    if not is_dataclass(owner) or isinstance(owner, type):
        return {}
    names = [spec.name for spec in fields(owner) if spec.name not in specs_of(section)]
    found = {name: getattr(owner, name, None) for name in names}
    return {name: plain(value) for name, value in found.items() if isinstance(value, (bool, int, float, str))}


def plain(value: Any, levels: int = _DEEPEST) -> Any:
    """A value as a recipe can hold it: None for what has no plain form, and for what is deeper than ``levels``.

    Members of enums are their names, dataclasses mappings without what is None in them, numbers and flags of numpy and
    torch those of Python; a pipeline layout is what it was made of (``input_data`` of megatron-core's
    PipelineParallelLayerLayout).
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if levels == 0 or isinstance(value, (bytes, bytearray, type)):
        return None
    if isinstance(value, (Sequence, Set)):
        return [plain(item, levels - 1) for item in (sorted(value, key=str) if isinstance(value, Set) else value)]
    if isinstance(value, Mapping):
        return {str(key): plain(item, levels - 1) for key, item in value.items()}
    if is_dataclass(value):
        named = {spec.name: plain(getattr(value, spec.name), levels - 1) for spec in fields(value)}
        return {name: item for name, item in named.items() if item is not None}
    held = getattr(value, "input_data", None)
    return _scalar(value) if held is None else plain(held, levels - 1)


def _scalar(value: Any) -> Any:
    """What numpy's flags and torch's tensors of one element hold."""
    try:
        held = value.item()
    except Exception:
        return None
    return held if isinstance(held, (bool, int, float)) else None
