"""The YAML files of Megatron-LM's functional tests: ``MODEL_ARGS`` with a value per flag, ``ENV_VARS``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from overlapkit.errors import RecipeError, printable, shown
from overlapkit.megatron_lm.flags import flags_of
from overlapkit.megatron_lm.words import Launch, Word
from overlapkit.recipe import yaml_source

_ARGUMENTS = "MODEL_ARGS"
_SECOND_RUN = "MODEL_ARGS_2"


def is_args_yaml(value: Mapping[Any, Any]) -> bool:
    """Whether a parsed YAML file is of this form rather than a recipe."""
    return _ARGUMENTS in value


def read_args_yaml(text: str, source: str, variables: Mapping[str, str] | None = None) -> Launch:
    """The launch that a file of functional tests describes, each word with the line of its key.

    A flag whose value is true stands alone; false and null leave it out, with a note. A list gives several values, and
    so does a text with blanks in [ ], or of a flag that takes several. ``${NAME}`` is filled in from ``variables``, as
    the tests' runner does from its environment. ``MODEL_ARGS`` may be a list of words or of such mappings, too.
    Source: tests/functional_tests/shell_test_utils/_run_training.sh of Megatron-LM.

    Raises:
        RecipeError: not YAML, no ``MODEL_ARGS``, or a value that no command line can hold.
    """
    document = yaml_source.parse(text, source, what="arguments are a mapping of MODEL_ARGS and ENV_VARS")
    if not is_args_yaml(document.value):
        raise RecipeError(f"{_ARGUMENTS} is missing", source=source, hint="it maps each flag to its value")
    reader = _Reader(document, dict(variables or {}))
    words = reader.arguments(document.value[_ARGUMENTS], _ARGUMENTS)
    if not words:
        raise RecipeError("holds no flags", source=source, line=document.lines[_ARGUMENTS], path=_ARGUMENTS)
    return Launch(
        line=document.lines[_ARGUMENTS],
        arguments=tuple(words),
        exports=reader.exports(document.value.get("ENV_VARS")),
        notes=(
            *reader.notes,
            *(
                f"line {document.lines[key]}: {key} is not read"
                for key in (_SECOND_RUN, "BEFORE_SCRIPT")
                if document.value.get(key)
            ),
        ),
    )


class _Reader:
    def __init__(self, document: yaml_source.Document, variables: Mapping[str, str]) -> None:
        self.lines = document.lines
        self.source = document.source
        self.variables = variables
        self.notes: list[str] = []

    def error(self, problem: str, path: str) -> RecipeError:
        return RecipeError(problem, source=self.source, line=self.lines.get(path), path=path)

    def arguments(self, value: Any, path: str) -> list[Word]:
        if isinstance(value, Mapping):
            return [word for flag, item in value.items() for word in self._flag(flag, item, f"{path}.{flag}")]
        if not isinstance(value, list):
            raise self.error(f"maps each flag to its value, this is {shown(value)}", path)
        words: list[Word] = []
        for number, item in enumerate(value):
            inner = f"{path}.{number}"
            if isinstance(item, Mapping):
                words += self.arguments(item, inner)
            else:
                words += self._values(item, self.lines[path], inner)
        return words

    def _flag(self, flag: Any, value: Any, path: str) -> list[Word]:
        line = self.lines.get(path, 1)
        if not isinstance(flag, str) or not flag.startswith("-"):
            raise self.error(f"{shown(flag)} is not a flag", path)
        if value is None or value is False:
            said = f"{printable(flag)} is {'null' if value is None else 'false'} and left out"
            self.notes.append(f"line {line}: {said}; runners that pass it on start nothing, as the parser refuses it")
            return []
        written = Word(flag, flag, line)
        if value is True:
            return [written]
        if isinstance(value, str) and (one := _one_value(flag, value)) is not None:
            return [written, self._filled_in(one, line)]
        values = value if isinstance(value, list) else [value.strip()[1:-1] if _in_brackets(value) else value]
        return [written, *(word for item in values for word in self._values(item, line, path))]

    def _values(self, value: Any, line: int, path: str) -> list[Word]:
        if isinstance(value, (Mapping, list)) or value is None:
            raise self.error(f"a flag has no value such as {shown(value)}", path)
        return [self._filled_in(word, line) for word in _text(value).split()]

    def exports(self, value: Any) -> dict[str, Word]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(f"maps each variable to its value, this is {shown(value)}", "ENV_VARS")
        exports = {}
        for name, item in value.items():
            path = f"ENV_VARS.{name}"
            if isinstance(item, (Mapping, list)):
                raise self.error(f"a variable has no value such as {shown(item)}", path)
            if item is not None:
                exports[str(name)] = self._filled_in(_text(item), self.lines.get(path, 1))
        return exports

    def _filled_in(self, text: str, line: int) -> Word:
        """A word with its variables replaced; only ``$NAME`` and ``${NAME}``, nothing else is expanded."""
        missing: list[str] = []

        def value_of(found: re.Match[str]) -> str:
            name = found.group(1) or found.group(2)
            if name not in self.variables:
                missing.append(f"${name} is not set in this file")
            return self.variables.get(name, "")

        filled = re.sub(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", value_of, text)
        if missing:
            return Word(None, text, line, "; ".join(dict.fromkeys(missing)))
        return Word(filled, text, line)


def _in_brackets(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\[[^]]+\]", value.strip()) is not None


def _one_value(flag: str, text: str) -> str | None:
    """The text as one word where the runner quotes it and the flag takes a single value."""
    known = flags_of(None, doubtful=True).get(flag)
    single = known is not None and known.values == 1 and not _in_brackets(text)
    return " ".join(text.split()) if single else None


def _text(value: Any) -> str:
    """As a command line has it: YAML's true is the word true."""
    return str(value).lower() if isinstance(value, bool) else str(value)
