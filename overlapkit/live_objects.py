"""Live configuration objects as a recipe's mapping, and a plan's settings written onto them.

Any objects will do that have the attributes of Megatron-Core's TransformerConfig, OptimizerConfig and
DistributedDataParallelConfig, or of Bridge's own classes: nothing of these packages is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from overlapkit.recipe.schema import specs_of

SECTIONS = ("model", "optimizer", "ddp")
# An object holds every field with its class's defaults, as a dump does: what is not there was not left out by a user.
_DUMP = "live objects"
_USERBUFFERS = ("model.tp_comm_overlap_cfg", "model.tp_comm_bootstrap_backend")


def recipe_mapping(*, model: Any, optimizer: Any = None, ddp: Any = None, **sections: Any) -> dict[str, Any]:
    """What live objects say, in the form of a dump of Megatron-Bridge; ``sections`` are further ones, as plain values.

    ``comm_overlap`` is null unless it is among ``sections``: the objects' own values stand. A value that no recipe
    can hold (a dtype, a function, an object) is left out.
    """
    objects = dict(zip(SECTIONS, (model, optimizer, ddp), strict=True))
    found = {name: _attributes(name, each) for name, each in objects.items() if each is not None}
    return {"_target_": _DUMP, "comm_overlap": None, **found, **sections}


def write_settings(
    settings: Mapping[str, Any], *, model: Any, optimizer: Any = None, ddp: Any = None, only: Iterable[str] = SECTIONS
) -> None:
    """Sets the settings of a plan on the objects that have such an attribute, section by section of ``only``.

    The userbuffers and the backend of a model that overlaps are set whether or not its class has the fields, as Bridge
    does: its initialization reads them.
    """
    always = _USERBUFFERS if settings.get("model.tp_comm_overlap") else ()
    objects = dict(zip(SECTIONS, (model, optimizer, ddp), strict=True))
    for path, value in settings.items():
        section, _, name = path.partition(".")
        owner = objects[section]
        if section not in only or owner is None:
            continue
        if hasattr(owner, name) or path in always:
            setattr(owner, name, value)


def _attributes(section: str, owner: Any) -> dict[str, Any]:
    values = {}
    for name, (kind, _) in specs_of(section).items():
        value = plain(getattr(owner, name, None))
        # 0 is what a size is in Megatron-Core's dataclasses before someone sets it.
        if value is not None and not (kind == "size" and value == 0):
            values[name] = value
    return values


def plain(value: Any) -> Any:
    """A value as a recipe can hold it: None for what has no plain form.

    Members of enums are their names, dataclasses mappings without what is None in them; a pipeline layout is what it
    was made of (``input_data`` of megatron-core's PipelineParallelLayerLayout).
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        named = {spec.name: plain(getattr(value, spec.name)) for spec in fields(value)}
        return {name: item for name, item in named.items() if item is not None}
    return plain(getattr(value, "input_data", None))
