"""A Python literal of untrusted text, bounded before Python's parser sees it.

`ast.literal_eval` runs nothing, but its parser recurses: deep nesting and long chains of operators can end the
interpreter. Here only brackets, texts, numbers and constants pass, and the limits are those of a YAML file.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from overlapkit.recipe.yaml_source import MAX_DEPTH, MAX_NODES

NO_LITERAL = object()
_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+|#[^\n]*)"
    r"|(?P<open>[{\[(])|(?P<close>[}\])])|(?P<between>[,:])"
    r"|(?P<value>(?:True|False|None)\b|-?[0-9][0-9A-Za-z_.]{0,60}(?![0-9A-Za-z_.])"
    r"|\"(?:[^\"\\\n]|\\[^\n])*\"|'(?:[^'\\\n]|\\[^\n])*')"
)


def read_literal(text: str) -> Any:
    """The dict, list or tuple that ``text`` writes; `NO_LITERAL` where it is anything else, or gives a key twice."""
    if not _is_bounded(text):
        return NO_LITERAL
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an escape such as "\d", which is ours neither to judge nor to print
            tree = ast.parse(text.strip(), mode="eval")
            value = ast.literal_eval(tree)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return NO_LITERAL
    return value if isinstance(value, (dict, list, tuple)) and not _repeats_a_key(tree) else NO_LITERAL


def _repeats_a_key(tree: ast.AST) -> bool:
    """Python keeps the last in silence; read as YAML, the file is refused with the line of the second."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            if len(set(keys)) < len(keys):
                return True
    return False


def _is_bounded(text: str) -> bool:
    """Whether nothing but a literal's tokens stand there, nested and many within the limits."""
    at = depth = values = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            return False
        kind, at = token.lastgroup, token.end()
        if kind in ("open", "value"):
            values += 1
        depth += (kind == "open") - (kind == "close")
        if depth > MAX_DEPTH or depth < 0 or values > 2 * MAX_NODES:
            return False
    return depth == 0
