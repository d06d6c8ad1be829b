"""A tree of plain values to a :class:`Recipe`: every key known, every value of its kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from overlapkit.errors import nearest, shown
from overlapkit.recipe import sections
from overlapkit.recipe.keys import check_keys
from overlapkit.recipe.known_keys import known_keys
from overlapkit.recipe.place import Place
from overlapkit.recipe.schema import SECTIONS, specs_of
from overlapkit.recipe.sections import CommOverlap, MixedPrecision, Recipe
from overlapkit.recipe.userbuffers import clean_userbuffers

MAX_SIZES = 16
MAX_TEXT = 4_000
PEFT_SCHEMES = ("lora", "dora", "canonical_lora", "vlm_lora")
NO_PEFT = ("none", "null", "full")
_OWN_BUILDERS = ("mixed_precision", "comm_overlap")
_SINGLE = (bool, int, float, str)


def build_recipe(value: Mapping[str, Any], place: Place) -> Recipe:
    """The typed recipe.

    Raises:
        RecipeError: an unknown key, a value of the wrong kind, or a negative size.
    """
    is_dump = _is_dump(value)
    value, place = _transformer_on_model(value, place)
    check_keys(value, place, is_dump)
    parsed = {name: _section(name, value.get(name), place) for name in SECTIONS if name not in _OWN_BUILDERS}
    return Recipe(
        source=place.source,
        is_dump=is_dump,
        mixed_precision=_mixed_precision(value.get("mixed_precision"), place),
        comm_overlap=_comm_overlap(value, place, is_dump),
        peft=_peft(value.get("peft"), place),
        env_vars=_env_vars(value.get("env_vars"), place),
        written=_written(value, place, is_dump),
        overridden=place.overridden,
        foreign_keys=_foreign_keys(value, place, is_dump),
        others={name: _others(name, value.get(name)) for name in ("model", "optimizer", "ddp")},
        lines=place.lines,
        **parsed,
    )


def _foreign_keys(value: Mapping[str, Any], place: Place, is_dump: bool) -> tuple[tuple[str, str], ...]:
    if is_dump and not place.overridden:
        return ()
    return tuple(pair for pair in known_keys().partial(value) if not is_dump or place.changed(pair[0]))


def _is_dump(value: Mapping[str, Any]) -> bool:
    """Bridge writes a ``_target_`` into every node it dumps; people write one into single nodes."""
    model = value.get("model")
    return "_target_" in value or (isinstance(model, dict) and "_target_" in model)


def _transformer_on_model(value: Mapping[str, Any], place: Place) -> tuple[Mapping[str, Any], Place]:
    """The fields under ``model.transformer`` as if they stood on ``model``, where Megatron-LM's model
    configurations answer for them (megatron-core training/models/gpt.py, hybrid.py; Bridge from 0.6).
    """
    model = value.get("model")
    if not isinstance(model, dict) or model.get("transformer") is None:
        return value, place
    inner, prefix = model["transformer"], "model.transformer."
    if not isinstance(inner, dict):
        raise place.error("model.transformer", f"expected a mapping, got {shown(inner)}")
    chosen = {key: item for key, item in inner.items() if key not in model or f"{prefix}{key}" in place.overridden}
    lines = {f"model.{key}": line for key in chosen if (line := place.lines.get(f"{prefix}{key}")) is not None}
    changed = {f"model.{path[len(prefix) :]}" for path in place.overridden if path.startswith(prefix)}
    place = Place(place.source, {**place.lines, **lines}, place.overridden | changed)
    return {**value, "model": {**model, **chosen}}, place


def _written(value: Mapping[str, Any], place: Place, is_dump: bool) -> frozenset[str]:
    if is_dump and not place.overridden:
        return frozenset()
    return frozenset(
        f"{section}.{key}"
        for section, body in value.items()
        if isinstance(body, dict)
        for key, item in body.items()
        if item is not None and (not is_dump or place.changed(f"{section}.{key}"))
    )


# --- values -------------------------------------------------------------------------------------


def _section(name: str, body: Any, place: Place) -> Any:
    if body is None:
        return SECTIONS[name]()
    return SECTIONS[name](**_fields(name, body, place), **_extras(name, body))


def _fields(name: str, body: Any, place: Place) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise place.error(name, f"expected a mapping, got {shown(body)}")
    specs = specs_of(name)
    values = {}
    for key, item in body.items():
        spec = specs.get(key)
        if spec is None or item is None:
            continue
        values[key] = _value(item, spec, f"{name}.{key}", place)
    return values


def _others(name: str, body: Any) -> dict[str, Any]:
    """The single values, and lists of such, for which the section has no field."""
    fields = specs_of(name)
    return {
        key: item
        for key, item in (body or {}).items()
        if key not in fields and (isinstance(item, _SINGLE) or (isinstance(item, list) and _all_single(item)))
    }


def _all_single(items: list[Any]) -> bool:
    return all(isinstance(item, _SINGLE) for item in items)


def _extras(name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """What a section says other than by a field's value."""
    if name == "software":
        return {"transformer_engine_absent": "transformer_engine" in body and body["transformer_engine"] is None}
    if name == "dataset":
        target = body.get("_target_")
        return {"kind": target.rpartition(".")[2] if isinstance(target, str) else None}
    return {}


def _value(item: Any, spec: tuple[str, tuple[str, ...]], path: str, place: Place) -> Any:
    kind, choices = spec
    check = _CHECKS.get(kind)
    if check is not None:
        expected = check(item)
        if expected is not None:
            raise place.error(path, f"expected {expected}, got {shown(item)}", _hint(kind, item))
        return item
    if kind == "choice":
        if not isinstance(item, str) or item not in choices:
            near = nearest(item, choices) if isinstance(item, str) else None
            hint = f"did you mean {near}?" if near else None
            raise place.error(path, f"expected one of {', '.join(choices)}, got {shown(item)}", hint)
        return item
    if kind in ("names", "sizes"):
        return _sequence(item, kind, path, place)
    if isinstance(item, str) and len(item) > MAX_TEXT:  # a layout is unrolled, in a time that grows with its square
        raise place.error(path, f"longer than {MAX_TEXT:,} characters, which no recipe needs")
    return item


def _is_int(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "size": lambda v: None if _is_int(v) and 1 <= v < 2**63 else "a whole number of at least 1",
    "count": lambda v: None if _is_int(v) and 0 <= v < 2**63 else "a whole number of at least 0",
    "integer": lambda v: None if _is_int(v) and abs(v) < 2**63 else "a whole number",
    "number": lambda v: (
        None
        if isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v < 2**63 and math.isfinite(v)
        else "a number above 0"
    ),
    "flag": lambda v: None if isinstance(v, bool) else "true or false",
    "text": lambda v: None if isinstance(v, str) else "text",
    "version": lambda v: None if isinstance(v, str) else 'a version as text, such as "2.10"',
}


def _hint(kind: str, item: Any) -> str | None:
    if kind == "version" and isinstance(item, (int, float)) and not isinstance(item, bool):
        return "write it in quotes: as a YAML number 2.10 is 2.1"
    if kind in ("size", "count", "integer") and isinstance(item, str):
        return "write the number without quotes"
    return None


def _sequence(item: Any, kind: str, path: str, place: Place) -> tuple[Any, ...]:
    if kind == "sizes":
        if not isinstance(item, list) or len(item) > MAX_SIZES or any(_CHECKS["size"](entry) for entry in item):
            expected = f"expected a list of whole numbers of at least 1, {MAX_SIZES} at most"
            raise place.error(path, f"{expected}, got {shown(item)}")
        return tuple(item)
    entries = item.split(",") if isinstance(item, str) else item
    if not isinstance(entries, list):
        raise place.error(path, f"expected a list of names, got {shown(item)}")
    return tuple(_name(entry, path, place) for entry in entries if entry != "")


def _name(entry: Any, path: str, place: Place) -> str:
    """A name, or an enum member as Bridge dumps it (``CudaGraphScope.attn`` or with ``_name_``)."""
    if isinstance(entry, dict) and isinstance(entry.get("_name_"), str):
        entry = entry["_name_"]
    if not isinstance(entry, str):
        raise place.error(path, f"expected a list of names, got {shown(entry)} in it")
    return entry.strip().rpartition(".")[2]


# --- sections with a form of their own -----------------------------------------------------------


def _mixed_precision(body: Any, place: Place) -> MixedPrecision | None:
    if body is None:
        return None
    if isinstance(body, str):
        from overlapkit.precision import named_precisions

        name = body.replace("-", "_")
        if name not in named_precisions():
            near = nearest(name, named_precisions())
            raise place.error(
                "mixed_precision",
                f"{shown(body)} is not a precision recipe of Megatron-Bridge",
                f"did you mean {near}?" if near else None,
            )
        return MixedPrecision(name=name)
    return MixedPrecision(**_fields("mixed_precision", body, place))


def _comm_overlap(value: Mapping[str, Any], place: Place, is_dump: bool) -> CommOverlap | None:
    if "comm_overlap" not in value:
        return None if is_dump else CommOverlap()
    body = value["comm_overlap"]
    if body is None:
        return None
    values = _fields("comm_overlap", body, place)
    if is_dump or "_target_" in body:  # Bridge's own dataclass, so its defaults
        values |= {"tp_comm_overlap": None, "tp_comm_overlap_cfg": None}
    if "tp_comm_overlap" in body:
        values["tp_comm_overlap"] = _tp_comm_overlap(body["tp_comm_overlap"], place)
    if "tp_comm_overlap_cfg" in body:
        path = "comm_overlap.tp_comm_overlap_cfg"
        cfg = body["tp_comm_overlap_cfg"]
        values["tp_comm_overlap_cfg"] = clean_userbuffers(cfg, path, place.error)
        values["tp_comm_overlap_cfg_is_dataclass"] = isinstance(cfg, dict) and "_target_" in cfg
    if "tp_comm_bootstrap_backend" in body:
        backend = body["tp_comm_bootstrap_backend"]
        if backend is not None and not isinstance(backend, str):
            raise place.error("comm_overlap.tp_comm_bootstrap_backend", f"expected text, got {shown(backend)}")
        values["tp_comm_bootstrap_backend"] = backend
    return CommOverlap(**values)


def _tp_comm_overlap(item: Any, place: Place) -> Any:
    if item is None or isinstance(item, bool) or item == sections.AUTO:
        return item
    raise place.error("comm_overlap.tp_comm_overlap", f"expected true, false or auto, got {shown(item)}")


def _peft(body: Any, place: Place) -> str | None:
    """The adapter's scheme: named by text, by a dump's class, or LoRA when only its options are given."""
    if body is None:
        return None
    if isinstance(body, str):
        if body.lower() in NO_PEFT:
            return None
        if body.lower() not in PEFT_SCHEMES:
            raise place.error("peft", f"expected one of {', '.join(PEFT_SCHEMES)}, got {shown(body)}")
        return body.lower()
    if not isinstance(body, dict):
        raise place.error("peft", f"expected lora, dora or a mapping, got {shown(body)}")
    target = body.get("_target_")
    return target.rpartition(".")[2].lower() if isinstance(target, str) else "lora"


def _env_vars(body: Any, place: Place) -> dict[str, str] | None:
    """Names to values, as Bridge writes them into the environment: ``str(value)``."""
    if body is None:
        return None
    if not isinstance(body, dict):
        raise place.error("env_vars", f"expected a mapping of variables, got {shown(body)}")
    result = {}
    for name, item in body.items():
        if name == "_target_":
            continue
        if not isinstance(name, str) or not name:
            raise place.error("env_vars", f"a variable's name is text, got {shown(name)}")
        if not isinstance(item, (str, int, float, bool)):
            raise place.error(f"env_vars.{name}", f"expected text or a number, got {shown(item)}")
        result[name] = str(item)
    return result
