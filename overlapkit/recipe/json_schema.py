"""The JSON Schema of a recipe, from the sections' dataclasses and the known keys: what editors complete and check by.

It refuses what :func:`overlapkit.recipe.recipe_from_mapping` refuses for its keys or the kinds of its values, and
describes every key. Draft 7 is the draft that editors' YAML language servers know best. Where a typed value stands, a
reference ``${section.key}`` may stand too: what it refers to is beyond a schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from overlapkit.recipe import build
from overlapkit.recipe.interpolation import KEY_PATH
from overlapkit.recipe.known_keys import known_keys
from overlapkit.recipe.schema import OURS, SECTIONS
from overlapkit.recipe.sections import AUTO

Schema = dict[str, Any]

_REFERENCE = rf"\$\{{\s*{KEY_PATH.pattern}\s*\}}"
_MAX_INTEGER = 2**63 - 1
_WIDTH = 120
_IN_WORDS = {
    "object": "a mapping",
    "array": "a list",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
}
_TARGET = "The class that a dump of Megatron-Bridge names. Data: never imported, never called."
_OTHER_SECTIONS = {
    "env_vars": "Environment of the process, by name; absent: what the plan says to export is taken to be exported.",
    "peft": "The adapter that is trained: a scheme such as lora, or its options. null: the whole model is trained.",
}


def recipe_schema() -> Schema:
    """The schema: strict for a hand-written recipe, open to further keys for a dump (it has ``_target_``)."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "urn:overlapkit:recipe",
        "title": "overlapkit recipe",
        "description": "A training configuration with the field names of Megatron-Bridge and Megatron-Core.",
        "type": "object",
        "if": {"$ref": "#/definitions/is_dump"},
        "then": {"$ref": "#/definitions/dump"},
        "else": {"$ref": "#/definitions/recipe"},
        "definitions": {
            "recipe": _recipe(),
            "dump": _dump(),
            "is_dump": _is_dump(),
            **{name: _section(name) for name in _section_names()},
            **{f"dump_{name}": _dump_section(name) for name in SECTIONS if name not in OURS},
            "userbuffers_layer": _userbuffers_layer(),
            **_kinds(),
            **_not_read(),
        },
    }


def schema_text() -> str:
    """The schema as the committed file has it: JSON in which whatever fits a line stands on one line."""
    return _printed(recipe_schema(), 0, 0) + "\n"


def _printed(value: Any, indent: int, before: int) -> str:
    """``value`` inside ``indent`` spaces, on a line where ``before`` characters are taken."""
    line = json.dumps(value)
    if before + len(line) < _WIDTH or not isinstance(value, (dict, list)):
        return line
    margin = " " * (indent + 1)
    if isinstance(value, list):
        opening, closing = "[]"
        entries = [(margin, item) for item in value]
    else:
        opening, closing = "{}"
        entries = [(f"{margin}{json.dumps(key)}: ", item) for key, item in value.items()]
    lines = [head + _printed(item, indent + 1, len(head)) for head, item in entries]
    return "\n".join([opening, ",\n".join(lines), " " * indent + closing])


# --- the whole -----------------------------------------------------------------------------------


def _section_names() -> list[str]:
    return list(dict.fromkeys((*SECTIONS, *known_keys().sections)))


def _recipe() -> Schema:
    return {
        "description": "A recipe written by hand: a key that nobody knows is a mistake.",
        "properties": {name: _ref(name) for name in _section_names()},
        "additionalProperties": False,
    }


def _dump() -> Schema:
    """Of a section that is not read anything passes; ``env_vars`` and ``peft`` have their forms in a dump too."""
    read = {name: _ref(name if name in OURS else f"dump_{name}") for name in SECTIONS}
    peft = {"description": _OTHER_SECTIONS["peft"], **_peft_form()}
    return {
        "description": "A file that Megatron-Bridge wrote, with a cluster section: keys about other things pass.",
        "properties": {"_target_": _target(), **read, "env_vars": _ref("env_vars"), "peft": peft},
    }


def _is_dump() -> Schema:
    named = {"required": ["_target_"]}
    model = {"required": ["model"], "properties": {"model": {"type": "object", **named}}}
    return {"description": "Bridge writes a _target_ into every node that it dumps.", "anyOf": [named, model]}


# --- sections ------------------------------------------------------------------------------------


def _section(name: str) -> Schema:
    if name == "env_vars":
        return _env_vars()
    properties = _typed(name) if name in SECTIONS else {}
    if name not in OURS:
        known = known_keys().tables[name]
        properties |= {key: _ref(_not_read_name(known[key])) for key in known if key not in properties}
    if name == "model":
        properties["transformer"] = _transformer("model")
    return {
        "description": _description(name),
        **_section_form(name),
        "properties": {**properties, "_target_": _target()},
        "additionalProperties": False,
    }


def _dump_section(name: str) -> Schema:
    properties = {key: _ref(f"{name}/properties/{key}") for key in (*_typed(name), "_target_")}
    if name == "model":
        properties["transformer"] = _transformer("dump_model")
    return {"description": _description(name), **_section_form(name), "properties": properties}


def _section_form(name: str) -> Schema:
    """A mapping, null, or a reference; of a section that is not read the loader looks at nothing but the keys."""
    if name == "mixed_precision":
        from overlapkit.precision import named_precisions

        known = named_precisions()
        return _texts(known, [name.replace("_", "[-_]") for name in known], "not a precision recipe of Megatron-Bridge")
    if name == "peft":
        return _peft_form()
    return _or_reference("object") if name in SECTIONS else {}


def _peft_form() -> Schema:
    words = build.PEFT_SCHEMES + build.NO_PEFT
    any_case = ["".join(f"[{c}{c.upper()}]" if c.isalpha() else c for c in word) for word in words]
    return _texts(words, any_case, f"expected one of {', '.join(build.PEFT_SCHEMES)}, or none")


def _texts(examples: Iterable[str], patterns: Iterable[str], otherwise: str) -> Schema:
    """A mapping, null, a reference or one of some texts."""
    pattern = _whole("|".join([*patterns, _REFERENCE]))
    return {**_or_reference("object"), "pattern": pattern, "patternErrorMessage": otherwise, "examples": list(examples)}


def _description(name: str) -> str:
    if name in SECTIONS:
        return _plain(SECTIONS[name].__doc__)
    return _OTHER_SECTIONS.get(name, f"Megatron-Bridge's section {name}, which overlapkit does not read.")


def _env_vars() -> Schema:
    return {
        "description": _description("env_vars"),
        **_or_reference("object"),
        "properties": {"_target_": _target()},
        "propertyNames": {"minLength": 1},
        "additionalProperties": {"type": ["string", "number", "boolean"]},
    }


def _transformer(section: str) -> Schema:
    return {
        "description": "The model's fields, where newer versions keep them.",
        "anyOf": [{"type": "null"}, _ref("reference"), {"type": "object", "allOf": [_ref(section)]}],
    }


# --- fields --------------------------------------------------------------------------------------


def _typed(section: str) -> dict[str, Schema]:
    """The fields of a section that are read, each by its kind."""
    found = {}
    for spec in fields(SECTIONS[section]):
        if "doc" not in spec.metadata:
            continue
        form = _form(f"{section}.{spec.name}", spec.metadata)
        found[spec.name] = {"description": _described(section, spec.name, spec.metadata["doc"]), **form}
    return found


def _described(section: str, key: str, doc: str) -> str:
    text = _plain(doc)
    snapshots = "23" if section in OURS else known_keys().tables[section].get(key)
    if snapshots is None:
        return f"{text} (an argument of Megatron-LM)"
    return text if {"2", "3"} <= set(snapshots) else f"{text} (in {_in_words(snapshots)})"


def _form(path: str, metadata: Mapping[str, Any]) -> Schema:
    if path == "comm_overlap.tp_comm_overlap":
        return _one_of((True, False, AUTO))
    if path == "comm_overlap.tp_comm_overlap_cfg":
        return _tp_comm_overlap_cfg()
    kind = metadata.get("kind", "text")  # what is left without one is tp_comm_bootstrap_backend
    return _one_of(metadata["choices"]) if kind == "choice" else {"allOf": [_ref(kind)], **_examples(path)}


def _one_of(values: Iterable[Any]) -> Schema:
    return {"anyOf": [{"enum": [*values, None]}, _ref("reference")]}


def _examples(path: str) -> Schema:
    """What an editor offers where a text may have further spellings."""
    from overlapkit.catalogue import gpu_names, software_rows

    if path == "cluster.gpu":
        return {"examples": list(gpu_names())}
    if path == "software.container":
        return {"examples": [row.name for row in software_rows() if row.is_container]}
    return {}


def _tp_comm_overlap_cfg() -> Schema:
    from overlapkit.presets import preset_names

    return {
        "type": ["object", "string", "null"],
        "properties": {"_target_": _target()},
        "additionalProperties": _ref("userbuffers_layer"),
        "examples": [AUTO, *preset_names()],
    }


def _userbuffers_layer() -> Schema:
    return {
        "description": "Options of a layer's GEMM, for example {method: ring_exchange}. null: none.",
        **_or_reference("object"),
        "properties": {"_target_": _target()},
        "additionalProperties": {"type": ["string", "number", "boolean", "array", "null"]},
    }


# --- kinds ---------------------------------------------------------------------------------------


def _kinds() -> dict[str, Schema]:
    text = {"type": ["string", "null"]}
    size = {"minimum": 1, "maximum": _MAX_INTEGER}
    name = {"type": "object", "required": ["_name_"], "properties": {"_name_": {"type": "string"}}}
    whole = {
        "size": size,
        "count": {"minimum": 0, "maximum": _MAX_INTEGER},
        "integer": {"minimum": -_MAX_INTEGER, "maximum": _MAX_INTEGER},
    }
    forms: dict[str, Schema] = {
        **{kind: {**_or_reference("integer"), **bounds} for kind, bounds in whole.items()},
        "number": {**_or_reference("number"), "exclusiveMinimum": 0, "exclusiveMaximum": 2**63},
        "flag": _or_reference("boolean"),
        "text": text,
        "version": {**text, "errorMessage": "write the version in quotes: as a number 2.10 is 2.1"},
        "names": {"type": ["array", "string", "null"], "items": {"anyOf": [{"type": "string"}, name]}},
        "sizes": {
            **_or_reference("array"),
            "maxItems": build.MAX_SIZES,
            "items": {"type": ["integer", "string"], "pattern": _whole(_REFERENCE), **size},
        },
        "anything": {"maxLength": build.MAX_TEXT},
    }
    reference: Schema = {"description": "A reference to another key.", "type": "string", "pattern": _whole(_REFERENCE)}
    return {**forms, "reference": reference}


def _or_reference(kind: str) -> Schema:
    """A value of a JSON type, null, or a reference in its place; editors know the last keyword, others pass it over."""
    return {
        "type": [kind, "string", "null"],
        "pattern": _whole(_REFERENCE),
        "patternErrorMessage": f"expected {_IN_WORDS[kind]}, or a reference such as ${{cluster.num_gpus}}",
    }


def _whole(pattern: str) -> str:
    return f"^(?:{pattern})$"


def _not_read() -> dict[str, Schema]:
    """Definitions of the keys that are known and not read, one for each set of versions that knows them."""
    tables = known_keys().tables
    sets = sorted({snapshots for section in tables if section for snapshots in tables[section].values()})
    return {
        _not_read_name(snapshots): {"description": f"Not read by overlapkit. In {_in_words(snapshots)}."}
        for snapshots in sets
    }


def _not_read_name(snapshots: str) -> str:
    return f"not_read_{snapshots}"


def _in_words(snapshots: str) -> str:
    """``"013"`` -> "megatron-core 0.16.1 and 0.19.2, megatron-bridge 0.6.2"."""
    versions: dict[str, list[str]] = {}
    for index in snapshots:
        package, _, number = known_keys().snapshots[int(index)].rpartition(" ")
        versions.setdefault(package, []).append(number)
    return ", ".join(f"{package} {' and '.join(numbers)}" for package, numbers in versions.items())


def _target() -> Schema:
    return {"description": _TARGET}


def _ref(definition: str) -> Schema:
    return {"$ref": f"#/definitions/{definition}"}


def _plain(text: str | None) -> str:
    """A docstring's words on one line, as editors show them."""
    return " ".join((text or "").replace("``", "`").split())
