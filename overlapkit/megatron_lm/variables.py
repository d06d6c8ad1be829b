"""``NAME=value`` beside ``section.key=value``: the variables that a launch script is given."""

from __future__ import annotations

import re
from collections.abc import Sequence

from overlapkit.recipe.schema import SECTIONS

_VARIABLE = re.compile(r"([A-Za-z_]\w*|[1-9]\d?)=(.*)", re.DOTALL)
_WHOLE_SECTIONS = frozenset(SECTIONS) | {"env_vars", "peft"}


def split_variables(arguments: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Shell variables (``1=value`` is a positional parameter) and overrides."""
    variables, overrides = {}, []
    for argument in arguments:
        match = _VARIABLE.fullmatch(argument)
        if match and match[1] not in _WHOLE_SECTIONS:
            variables[match[1]] = match[2]
        else:
            overrides.append(argument)
    return variables, tuple(overrides)
