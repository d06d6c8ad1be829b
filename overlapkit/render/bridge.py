"""Command-line overrides for a Megatron-Bridge recipe, in Hydra's override grammar."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from overlapkit.errors import printable
from overlapkit.plan import Plan
from overlapkit.recipe.sections import Recipe
from overlapkit.render.bridge_values import bridge_tree, bridge_values, environment_elsewhere, is_word, uninterpolated

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_AFTER_COLON = re.compile(r"[A-Za-z0-9_./:-]*")


def to_bridge(recipe: Recipe, plan: Plan) -> tuple[str, tuple[str, ...]]:
    """One override per line, quoted for a POSIX shell, and what they do not say, as sentences.

    In bash ``eval "overrides=($(overlapkit resolve recipe.yaml --format bridge))"`` makes an array of them, for
    ``"${overrides[@]}"`` behind the training script's own arguments. They are for Bridge's
    ``process_config_with_overrides``: ``++`` sets a field whether or not the model's class has it, and ``_target_``
    makes Bridge build the object, be it None in the recipe.
    """
    overrides, said = bridge_overrides(recipe, plan)
    return "".join(f"{shlex.quote(override)}\n" for override in overrides), said


def bridge_overrides(recipe: Recipe, plan: Plan, *, leaves: bool = False) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The overrides as they are, and what they do not say. ``leaves``: one for each value inside a mapping.

    Those of leaves have nothing that a shell reads, lists and quoted text aside.
    """
    values = bridge_values(recipe, plan)
    said = [*values.not_carried, *environment_elsewhere(values)]
    found = []
    for path, value in _flat(bridge_tree(values), leaves=leaves):
        problem = _inexpressible(path, value)
        if problem:
            said.append(f"{printable('.'.join(path))} is left out: {problem}; --format bridge-yaml can hold it")
            continue
        if len(path) == 2 and path[1] == "_target_":  # null first: a mapping merges with what the recipe has there
            found.append(f"{path[0]}=null")
        plain = leaves and isinstance(value, str) and _is_plain(value)
        found.append(f"{'' if len(path) == 1 else '++'}{'.'.join(path)}={value if plain else hydra_value(value)}")
    return tuple(found), tuple(said)


def _is_plain(text: str) -> bool:
    """Whether Hydra reads it as this text where a value begins: there, unlike in YAML, colons do not matter."""
    start, _, rest = text.partition(":")
    return is_word(start) and _AFTER_COLON.fullmatch(rest) is not None


def _flat(
    tree: Mapping[str, Any], above: tuple[str, ...] = (), *, leaves: bool
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and value of every override: a section's fields, of a userbuffers configuration its layers."""
    for key, value in tree.items():
        path = (*above, key)
        if path == ("model", "tp_comm_overlap_cfg") and isinstance(value, Mapping):
            yield path, None  # as above, fields of another class included
        split = len(path) == 1 or path == ("comm_overlap", "tp_comm_overlap_cfg") or leaves
        if isinstance(value, Mapping) and value and split:
            yield from _flat(value, path, leaves=leaves)
        else:
            yield path, value


def _inexpressible(path: tuple[str, ...], value: Any) -> str | None:
    """Why an argument of a command, or Hydra's grammar, cannot hold a value."""
    if not all(_is_key(key) for key in path):
        return "its name is none that an override can have"
    for text in _texts(value):
        if "\0" in text:
            return "no command line can hold a NUL"
        if not text.isprintable() and any("\ud800" <= character <= "\udfff" for character in text):
            return "no command line can hold half of a surrogate pair"
    return None if _plain_keys(value) else "Hydra does not take its keys"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _plain_keys(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_key(key) and _plain_keys(item) for key, item in value.items())
    return not isinstance(value, (list, tuple)) or all(_plain_keys(item) for item in value)


def _is_key(key: str) -> bool:
    return _KEY.fullmatch(key) is not None and is_word(key)


def hydra_value(value: Any) -> str:
    """A plain value in Hydra's grammar; text without quotes only where it is a word.

    Source: hydra/grammar/OverrideLexer.g4 and OverrideParser.g4 (1.3).
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {hydra_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(hydra_value, value)) + "]"
    return repr(value)


def _text(text: str) -> str:
    if is_word(text):
        return text
    # Within quotes only a quote is escaped, and the backslashes before it or before the closing one.
    quoted = re.sub(r'(\\*)("|\Z)', lambda match: match[1] * 2 + ('\\"' if match[2] else ""), uninterpolated(text))
    return f'"{quoted}"'
