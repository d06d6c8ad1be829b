"""``export`` lines that are safe to eval whatever the values hold."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def to_env(env: Mapping[str, str]) -> str:
    """One line per variable: ``export NAME=value``, the value quoted for a POSIX shell.

    Raises:
        ValueError: a name that no shell would take, or a value that no environment can hold.
    """
    lines = []
    for name, value in env.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a variable's name")
        if "\0" in value:
            raise ValueError(f"the value of {name} has a NUL in it")
        lines.append(f"export {name}={shlex.quote(value)}\n")
    return "".join(lines)
