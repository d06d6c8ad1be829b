"""Where a recipe's values come from, so that an error can name it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from overlapkit.errors import RecipeError

COMMAND_LINE = "command line"
YAML_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Place:
    """A file (or ``mapping``), the 1-based line of each dotted path in it, and the paths overridden."""

    source: str
    lines: Mapping[str, int]
    overridden: frozenset[str]

    def changed(self, path: str) -> bool:
        """Whether an override set the field at ``path``, or a part of it, or the whole that it is part of."""
        return any(
            path == changed or path.startswith(f"{changed}.") or changed.startswith(f"{path}.")
            for changed in self.overridden
        )

    def error(self, path: str, problem: str, hint: str | None = None) -> RecipeError:
        """The error for the field at ``path``, with the file and line or the command line."""
        if self.changed(path):
            return RecipeError(problem, source=COMMAND_LINE, path=path, hint=hint)
        return RecipeError(problem, source=self.source, line=line_of(self.lines, path), path=path or None, hint=hint)


def line_of(lines: Mapping[str, int], path: str) -> int | None:
    """The line of ``path``, or of the nearest key above it."""
    while path and path not in lines:
        path = path.rpartition(".")[0]
    return lines.get(path)
