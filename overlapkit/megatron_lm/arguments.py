"""Arguments of Megatron-LM to the fields of a recipe, read as its parser reads them.

What argparse does with ``allow_abbrev=False``, as Megatron-LM builds its parser: ``--flag value``, ``--flag=value``,
several values up to the next flag, the last of repeated flags counts, a negative number is a value, and no
abbreviations. Source: Megatron-LM training/arguments.py parse_args; CPython's argparse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from overlapkit.errors import RecipeError
from overlapkit.megatron_lm.fields import Found, convert, looks_like_a_flag, put_together, readers
from overlapkit.megatron_lm.flags import Flag, all_choices, flags_of
from overlapkit.megatron_lm.words import Word
from overlapkit.recipe.keys import keys_of
from overlapkit.recipe.schema import SECTIONS, specs_of
from overlapkit.versions import Version, parse_version

_ELSEWHERE = {
    "--yaml-cfg": "the configuration is in the file that --yaml-cfg names, not in these flags",
    "--use-checkpoint-args": "--use-checkpoint-args takes the model from the checkpoint, over what these flags say",
}
_KINDS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
_AT_LEAST = {"size": 1, "sizes": 1, "count": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What a list of arguments says.

    ``values`` maps dotted recipe fields to values, ``lines`` to 1-based lines. ``unknown`` pairs a field with the word
    whose value only a run could tell; the field is empty where the word may be any flag. ``strangers`` are words that
    this parser does not take, ``ignored`` counts flags that no field of a recipe stands for; ``others`` is what these
    say, by the name that Megatron-LM's own fields have. ``notes`` are sentences.
    """

    values: Mapping[str, Any]
    lines: Mapping[str, int]
    unknown: tuple[tuple[str, Word], ...]
    strangers: tuple[Word, ...]
    ignored: int
    others: Mapping[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Given:
    """A flag as it stands in the arguments, or (without a flag) a word that is none."""

    word: Word
    flag: Flag | None = None
    values: tuple[Word, ...] = ()


def read_arguments(words: Sequence[Word], *, core: Version | str | None, source: str) -> Arguments:
    """The recipe fields that the words after the training program say to the parser of this Megatron-Core.

    ``core`` None: whatever any version takes. Absent flags mean the parser's defaults; those that a recipe would take
    differently are among the values.

    Raises:
        RecipeError: a flag without its value or with one of the wrong kind; it names ``source`` and line.
        ValueError: ``core`` is no version.
    """
    flags = flags_of(parse_version(core) if isinstance(core, str) else core, doubtful=True)
    meanings = readers(flags)
    found: dict[str, Found] = {}
    ranks: dict[str, int] = {}
    unknown: list[tuple[str, Word]] = []
    strangers: list[Word] = []
    others: dict[str, Any] = {}
    notes, ignored = [], 0
    for given in _given(words, flags, source):
        if given.flag is None:
            if given.word.text is None:
                unknown.append(("", given.word))
            else:
                strangers.append(given.word)
            continue
        if given.flag.name in _ELSEWHERE:
            notes.append(f"line {given.word.line}: {_ELSEWHERE[given.flag.name]}")
        if given.flag.name == "--yaml-cfg":
            strangers.append(given.word)
            continue
        said = meanings.get(given.flag.meaning, ())
        if not said:
            ignored += 1
            others |= _other(given.flag, given.values)
        for field, kind, rank in said:
            value = _value(field, kind, given, source)
            if rank <= ranks.get(field, rank):
                found[field], ranks[field] = value, rank
    modules_flag = "--cuda-graph-modules" in flags
    fields = put_together(found, modules_flag=modules_flag, complete=not (unknown or notes))
    unknown += [(field, item.word) for field, item in fields.items() if not item.known and item.word is not None]
    return Arguments(
        values={field: item.value for field, item in fields.items() if item.known},
        lines={field: item.word.line for field, item in fields.items() if item.known and item.word is not None},
        unknown=tuple(unknown),
        strangers=tuple(strangers),
        ignored=ignored,
        others=others,
        notes=tuple(notes),
    )


# --- argparse's way with words ------------------------------------------------------------------


def _given(words: Sequence[Word], flags: Mapping[str, Flag], source: str) -> Iterator[_Given]:
    """Flags with their values, in order. Values of a flag that is not known are passed over with it."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word.text == "--":  # nothing after it is a flag, and Megatron-LM takes nothing else
            yield from map(_Given, words[position:])
            return
        name, explicit = _name_in(word, flags)
        flag = flags.get(name)
        if flag is None:
            yield _Given(word)
            if looks_like_a_flag(name):
                position += sum(1 for _ in _values_from(words, position, flags))
            continue
        if explicit is not None:
            if flag.values not in (1, "+", "*", "?"):
                raise _error(flag, f"takes {flag.values or 'no'} value{'s' if flag.values else ''}", word, source)
            yield _Given(word, flag, (explicit,))
            continue
        values = tuple(_values_from(words, position, flags, flag.values))
        if len(values) < (flag.values if isinstance(flag.values, int) else flag.values == "+"):
            few = "a value" if flag.values in (1, "+") else f"{flag.values} values"
            raise _error(flag, f"takes {few}, and {'there is none' if not values else 'has fewer'}", word, source)
        position += len(values)
        yield _Given(word, flag, values)


def _values_from(
    words: Sequence[Word], start: int, flags: Mapping[str, Flag], values: int | str = "*"
) -> Iterator[Word]:
    """The words from ``start`` that are a flag's values: up to the next flag, and no more than it takes."""
    most = values if isinstance(values, int) else 1 if values == "?" else len(words)
    for word in map(words.__getitem__, range(start, min(start + most, len(words)))):
        name, _ = _name_in(word, flags)
        if name in flags or looks_like_a_flag(name) or word.text == "--":
            return
        yield word


def _name_in(word: Word, flags: Mapping[str, Flag]) -> tuple[str, Word | None]:
    """The flag that a word is or begins with, and the value after its ``=``; the word itself where it is none."""
    text = word.text
    if text is None:  # the value may be unknown, and the flag before it in plain sight
        name, equals, _ = word.written.lstrip("'\"").partition("=")
        return (name, word) if equals and name in flags else ("", None)
    if text in flags or not text.startswith("-"):
        return text, None
    name, equals, value = text.partition("=")
    if equals and name in flags:
        return name, replace(word, text=value)
    return ("" if " " in text else text), None  # with a space in it argparse takes it for a value


def _value(field: str, kind: str, given: _Given, source: str) -> Found:
    flag = given.flag
    assert flag is not None
    if kind in ("sets", "clears", "given"):
        return Found(kind != "clears", given.word)
    if kind == "path":
        word = given.values[0]
        return Found(word.written if word.text is None else word.text, word)
    texts = []
    for word in given.values:
        if word.text is None:
            return Found(None, word, known=False)
        texts.append(word.text)
    word = given.values[0] if given.values else given.word

    def fail(problem: str) -> RecipeError:
        return _error(flag, problem, word, source)

    section, _, name = field.partition(".")
    kind_of_field, choices = specs_of(section).get(name, ("", ())) if section in SECTIONS else ("", ())
    allowed = all_choices().get(flag.name)
    value = convert(texts, flag, None if allowed is None else allowed | set(choices), fail)
    least = _AT_LEAST.get(kind_of_field)
    for item in value if isinstance(value, list) else [value]:
        if least is not None and item < least:
            raise fail(f"takes a whole number of at least {least}, not {item}")
    return Found(value, word)


def _other(flag: Flag, words: Sequence[Word]) -> dict[str, Any]:
    """What a flag says that no field of a recipe stands for; nothing where only a run could tell."""
    if flag.do in ("true", "false"):
        return {flag.dest: flag.do == "true"}
    kind = _KINDS.get(flag.kind or "")
    texts = [word.text for word in words if word.text is not None]
    if flag.do != "store" or kind is None or not texts or len(texts) < len(words):
        return {}
    try:
        values = [kind(text) for text in texts]
    except ValueError:
        return {}
    return {flag.dest: values[0] if len(values) == 1 else values}


def _error(flag: Flag, problem: str, word: Word, source: str) -> RecipeError:
    return RecipeError(problem, source=source, line=word.line, path=flag.name)


# --- the recipe ---------------------------------------------------------------------------------


def recipe_of(
    arguments: Arguments,
    *,
    cluster: Mapping[str, Any] | None = None,
    software: Mapping[str, Any] | None = None,
    env_vars: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The arguments as a recipe for Megatron-LM, in the form that ``recipe_from_mapping`` takes.

    Fields that no recipe has are left out. ``env_vars`` None: nothing is said of the environment.
    """
    recipe: dict[str, Any] = {
        "cluster": dict(cluster or {}),
        "software": {"framework": "megatron-lm", **(software or {})},
    }
    for field, value in arguments.values.items():
        section, _, key = field.partition(".")
        if key in keys_of(section):
            recipe.setdefault(section, {})[key] = _literal(value)
    if env_vars is not None:
        recipe["env_vars"] = {name: _literal(value) for name, value in env_vars.items()}
    return recipe


def _literal(value: Any) -> Any:
    """Text that stays as it is where a recipe would take ``${…}`` for a reference."""
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
