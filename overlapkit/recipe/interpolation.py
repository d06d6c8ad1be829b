"""``${section.key}`` references, proved bounded before OmegaConf resolves them.

References to other keys of the same recipe are what a recipe may contain. Resolvers
(``${oc.env:HOME}``) would let a file read the machine it is looked at on: they are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from overlapkit.errors import RecipeError, nearest, printable

MAX_TEXT = 256 * 1024
MAX_NODES = 10_000
_REFERENCE = re.compile(r"(?<!\\)\$\{([^{}]*)\}")
_NESTED = re.compile(r"(?<!\\)\$\{[^{}]*\$\{")
_UNCLOSED = re.compile(r"(?<!\\)\$\{[^{}]*$")
_RESOLVER = re.compile(r"([\w.\-]+)\s*:")
_KEY_PATH = re.compile(r"\.*[\w\-]+(?:\.[\w\-]+|\[[\w\-]+\])*")


def has_interpolation(value: Any) -> bool:
    """Whether any text in the tree holds ``${``."""
    return any("${" in text for _, text in _texts(value, ""))


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
        raise fail(key, f"interpolation failed: {printable(str(error).splitlines()[0])}", None) from None
    return resolved


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every text of the tree with its dotted path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _texts(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _texts(child, f"{path}.{index}" if path else str(index))


class _Bounds:
    """Measures what resolving would produce, following each reference once."""

    def __init__(self, root: dict[str, Any], fail: Callable[[str, str, str | None], RecipeError]) -> None:
        self.root = root
        self.fail = fail
        self.sizes: dict[str, tuple[int, int]] = {}  # path -> nodes, characters
        self.open: list[str] = []

    def check(self) -> None:
        nodes, characters = self._size(self.root, "")
        if nodes > MAX_NODES or characters > MAX_TEXT:
            raise self.fail("", "its references expand beyond what any recipe needs", None)

    def _size(self, value: Any, path: str) -> tuple[int, int]:
        if not isinstance(value, (dict, list, str)):
            return 1, 20
        if isinstance(value, str):
            return self._text_size(value, path)
        children = value.items() if isinstance(value, dict) else enumerate(value)
        nodes, characters = 1, 0
        for key, child in children:
            more_nodes, more_characters = self._size(child, f"{path}.{key}" if path else str(key))
            nodes, characters = nodes + more_nodes, characters + more_characters
            if nodes > MAX_NODES or characters > MAX_TEXT:
                raise self.fail(path, "its references expand beyond what any recipe needs", None)
        return nodes, characters

    def _text_size(self, text: str, path: str) -> tuple[int, int]:
        if "${" not in text:
            return 1, len(text)
        if path in self.sizes:
            return self.sizes[path]
        if path in self.open:
            circle = " -> ".join([*self.open[self.open.index(path) :], path])
            raise self.fail(path, f"its reference goes in a circle: {printable(circle)}", None)
        if len(self.open) >= 100:
            raise self.fail(path, "a chain of more than 100 references", None)
        if _NESTED.search(text) or _UNCLOSED.search(text):
            raise self.fail(path, "a reference is ${section.key}, neither nested nor unclosed", None)
        self.open.append(path)
        nodes, characters = 1, len(text)
        for reference in _REFERENCE.findall(text):
            target, target_path = self._target(reference, path)
            more_nodes, more_characters = self._size(target, target_path)
            nodes, characters = nodes + more_nodes, characters + more_characters
        self.open.pop()
        self.sizes[path] = (nodes, characters)
        return nodes, characters

    def _target(self, reference: str, path: str) -> tuple[Any, str]:
        reference = reference.strip()
        resolver = _RESOLVER.match(reference)
        if resolver:
            hint = "write the value itself, or give it as an override on the command line"
            raise self.fail(path, f"the resolver ${{{resolver[1]}:…}} is not run", hint)
        if not _KEY_PATH.fullmatch(reference):
            raise self.fail(path, f"${{{printable(reference)}}} is not a reference to a key", None)
        keys = self._absolute(reference, path)
        value: Any = self.root
        for depth, key in enumerate(keys):
            if isinstance(value, str) and "${" in value:
                raise self.fail(path, f"${{{reference}}} reaches through another reference; refer to it directly", None)
            try:
                value = value[key] if isinstance(value, dict) else value[int(key)]
            except (KeyError, IndexError, ValueError, TypeError):
                near = nearest(key, map(str, value)) if isinstance(value, dict) else None
                meant = f"did you mean ${{{'.'.join([*keys[:depth], near])}}}?" if near else None
                raise self.fail(path, f"${{{printable(reference)}}} refers to no key", meant) from None
        return value, ".".join(keys)

    def _absolute(self, reference: str, path: str) -> list[str]:
        """Leading dots are relative to the key itself: one for its siblings, two for the level above."""
        name = reference.lstrip(".")
        keys = re.split(r"[.\[]", name.replace("]", ""))
        dots = len(reference) - len(name)
        return [*path.split(".")[:-dots], *keys] if dots else keys
