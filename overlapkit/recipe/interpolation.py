"""``${section.key}`` references, proved bounded before OmegaConf resolves them.

References to other keys of the same recipe are what a recipe may contain. Resolvers
(``${oc.env:HOME}``) would let a file read the machine it is looked at on: they are refused by name,
and so is everything else between ``${`` and ``}`` that is not the path of a key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from overlapkit.errors import RecipeError, nearest, printable

MAX_TEXT = 256 * 1024
MAX_NODES = 10_000
MAX_REFERENCES = 1_000
_MAX_CHAIN = 20
_RESOLVER = re.compile(r"\s*([\w.\-]+)\s*:")
KEY_PATH = re.compile(r"\.*[\w\-]+(?:\.[\w\-]+|\[[\w\-]+\])*")

_Path = tuple[Any, ...]
_Size = tuple[int, int, int]  # values, characters and references that resolving would produce


def has_interpolation(value: dict[Any, Any]) -> bool:
    """Whether any text in the tree of plain dicts, lists and values holds ``${``."""
    nodes: list[Any] = [value]
    for node in nodes:  # grows while it is walked
        for child in node.values() if node.__class__ is dict else node:
            kind = child.__class__
            if kind is str:
                if "${" in child:
                    return True
            elif kind is dict or kind is list:
                nodes.append(child)
    return False


def resolve_interpolations(
    value: dict[str, Any], fail: Callable[[str, str, str | None], RecipeError]
) -> dict[str, Any]:
    """The tree with every reference replaced by what it refers to.

    ``fail(path, problem, hint)`` builds the error for the field at ``path``.

    Raises:
        RecipeError: a resolver, a reference to nothing, a circle, or an expansion beyond the limits.
    """
    _Bounds(value, fail).check()
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        resolved: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(value), resolve=True)  # type: ignore[assignment]
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        key = str(getattr(error, "full_key", None) or "")
        problem = str(error).partition("\n")[0]
        raise fail(key, f"interpolation failed: {printable(problem)}", None) from None
    return resolved


def _bodies(text: str) -> Iterator[str | None]:
    """What stands between each ``${`` and ``}``; None for one that is not closed.

    As in OmegaConf's grammar an odd number of backslashes before it makes it plain text.
    """
    end = 0
    while (start := text.find("${", end)) >= 0:
        before = text[end:start]
        end = start + 2
        if (len(before) - len(before.rstrip("\\"))) % 2:
            continue
        close = text.find("}", end)
        yield text[end:close] if close >= 0 else None
        if close < 0:
            return


class _Bounds:
    """Measures what resolving would produce, following each reference once."""

    def __init__(self, root: dict[str, Any], fail: Callable[[str, str, str | None], RecipeError]) -> None:
        self.root = root
        self.fail_at = fail
        self.sizes: dict[_Path, _Size] = {}
        self.open: list[_Path] = []

    def check(self) -> None:
        self._size(self.root, ())

    def fail(self, path: _Path, problem: str, hint: str | None = None) -> RecipeError:
        return self.fail_at(_dotted(path), problem, hint)

    def _size(self, value: Any, path: _Path) -> _Size:
        if isinstance(value, str):
            return self._text_size(value, path) if "${" in value else (1, len(value), 0)
        if not isinstance(value, (dict, list)):
            return 1, 20, 0
        nodes, characters, references = 1, 0, 0
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            size = self._size(child, (*path, key))
            nodes, characters, references = nodes + size[0], characters + size[1], references + size[2]
            self._limit(nodes, characters, references, path)
        return nodes, characters, references

    def _limit(self, nodes: int, characters: int, references: int, path: _Path) -> None:
        if nodes > MAX_NODES or characters > MAX_TEXT:
            raise self.fail(path, "its references expand beyond what any recipe needs")
        if references > MAX_REFERENCES:
            raise self.fail(path, f"more than {MAX_REFERENCES:,} references, which no recipe needs")

    def _text_size(self, text: str, path: _Path) -> _Size:
        if path in self.sizes:
            return self.sizes[path]
        if path in self.open:
            circle = " -> ".join(map(_dotted, [*self.open[self.open.index(path) :], path]))
            raise self.fail(path, f"its reference goes in a circle: {printable(circle)}")
        if len(self.open) >= _MAX_CHAIN:
            raise self.fail(path, f"a chain of more than {_MAX_CHAIN} references")
        self.open.append(path)
        nodes, characters, references = 1, len(text), 0
        for body in _bodies(text):
            target = self._target(body, path)
            size = self._size(self._value(target, path), target)
            nodes, characters, references = nodes + size[0], characters + size[1], references + 1 + size[2]
            self._limit(nodes, characters, references, path)
        self.open.pop()
        self.sizes[path] = nodes, characters, references
        return self.sizes[path]

    def _target(self, body: str | None, path: _Path) -> _Path:
        """The path that a reference names, from the root."""
        resolver = _RESOLVER.match(body or "")
        if resolver:
            hint = "write the value itself, or give it as an override on the command line"
            raise self.fail(path, f"the resolver ${{{printable(resolver[1])}:…}} is not run", hint)
        if body is None or "${" in body:
            raise self.fail(path, "a reference is ${section.key}, neither nested nor unclosed")
        reference = body.strip()
        if not KEY_PATH.fullmatch(reference):
            raise self.fail(path, f"${{{printable(reference)}}} is not a reference to a key")
        name = reference.lstrip(".")
        keys = re.split(r"[.\[]", name.replace("]", ""))
        # Leading dots are relative to the key itself: one for its siblings, two for the level above.
        dots = len(reference) - len(name)
        return (*path[:-dots], *keys) if dots else tuple(keys)

    def _value(self, target: _Path, path: _Path) -> Any:
        """What stands at ``target``, for the reference at ``path``."""
        value: Any = self.root
        for depth, key in enumerate(target):
            if isinstance(value, str) and "${" in value:
                raise self.fail(path, f"{_reference(target)} reaches through another reference; refer to it directly")
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and str(key).isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                near = nearest(str(key), map(str, value)) if isinstance(value, dict) else None
                hint = f"did you mean {_reference((*target[:depth], near))}?" if near else None
                raise self.fail(path, f"{_reference(target)} refers to no key", hint)
        return value


def _dotted(path: _Path) -> str:
    return ".".join(map(str, path))


def _reference(path: _Path) -> str:
    return f"${{{printable(_dotted(path))}}}"
