"""YAML text to plain Python values, bounded before anything is built, every key with its line.

Reads the parser's event stream instead of composing a tree: depth, size and aliases are counted as
they pass, so that neither a deep nor a self-multiplying document costs more than its limits.
Scalars mean what they mean to OmegaConf: YAML 1.1, but ``1e6`` is a number and dates are text.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from overlapkit.errors import RecipeError, printable, shown

MAX_BYTES = 256 * 1024
MAX_NODES = 10_000
MAX_DEPTH = 50
MAX_INTEGER = 2**63 - 1
_MAX_PATH = 1_000  # characters of a path that is kept for messages
_MAX_NUMBER = 200  # characters of a number; `1:1:1:…` takes a time that grows with their square

_TAG = "tag:yaml.org,2002:"
_MERGE = object()
_NOTHING = object()
# OmegaConf's own, which it tries after PyYAML's.
_FLOAT = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*(?:\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)$")


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file: its values, and the 1-based line of every dotted key path."""

    source: str
    value: dict[str, Any]
    lines: dict[str, int]


def read_text(path: str | Path) -> str:
    """The text of a recipe file, refused when it is larger than 256 KB or not UTF-8.

    Raises:
        RecipeError: missing, not a regular file, too large, or not UTF-8.
    """
    source = str(path)
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # opening a pipe could wait for ever
            raise RecipeError("not a regular file", source=source)
        with open(path, "rb", opener=_without_waiting) as stream:
            data = stream.read(MAX_BYTES + 1) or b""
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RecipeError(f"cannot be read: {reason}", source=source) from None
    if len(data) > MAX_BYTES:
        raise RecipeError(f"larger than {MAX_BYTES // 1024} KB, which no recipe needs", source=source)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"byte {error.start} is not UTF-8", source=source, line=line) from None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def parse(text: str, source: str, *, what: str = "a recipe is a mapping of sections") -> Document:
    """YAML text -> Document; ``what`` says what it should be.

    Raises:
        RecipeError: not YAML, not a single mapping, a duplicate key, a tag beyond plain YAML, or
            beyond the limits on nodes and depth.
    """
    builder = _Builder(text, source)
    value = builder.build()
    if value is _NOTHING:
        raise RecipeError("the file is empty", source=source)
    if not isinstance(value, dict):
        raise RecipeError(f"{what}, this is {_kind(value)}", source=source)
    return Document(source, value, builder.lines)


def _kind(value: Any) -> str:
    return "null" if value is None else "a list" if isinstance(value, list) else "a single value"


def parse_value(text: str, source: str) -> Any:
    """One value, such as the right-hand side of an override; no text at all is null.

    Raises:
        RecipeError: as ``parse``.
    """
    value = _Builder(text, source).build()
    return None if value is _NOTHING else value


def _yaml_error(error: yaml.YAMLError, text: str, source: str) -> RecipeError:
    if isinstance(error, yaml.reader.ReaderError):
        character: Any = error.character
        if isinstance(character, int):  # libyaml's, which counts in bytes
            return _character_error(character, text.encode()[: error.position], source)
        return _character_error(ord(character), text[: error.position].encode(), source)
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or "not YAML"
    return RecipeError(f"not YAML: {printable(str(problem))}", source=source, line=mark.line + 1 if mark else None)


def _character_error(code: int, before: bytes, source: str) -> RecipeError:
    line = before.count(b"\n") + 1
    return RecipeError(f"the character U+{code:04X} is not allowed in YAML", source=source, line=line)


@lru_cache(maxsize=1)
def _resolver() -> Callable[[str], str]:
    """Plain scalar -> tag: PyYAML's implicit types and OmegaConf's floats, without dates."""

    class RecipeResolver(yaml.resolver.Resolver):
        pass

    RecipeResolver.yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in pairs if tag != _TAG + "timestamp"]
        for first, pairs in yaml.resolver.Resolver.yaml_implicit_resolvers.items()
    }
    RecipeResolver.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+0123456789"))
    resolve: Any = RecipeResolver().resolve
    return lambda text: resolve(yaml.ScalarNode, text, (True, False))


@lru_cache(maxsize=1)
def _constructors() -> dict[str, Callable[[yaml.ScalarNode], Any]]:
    """Tag -> what makes a number or a truth value of a scalar."""
    safe = yaml.constructor.SafeConstructor()
    return {
        _TAG + "int": safe.construct_yaml_int,
        _TAG + "float": safe.construct_yaml_float,
        _TAG + "bool": safe.construct_yaml_bool,
    }


@dataclass(slots=True)
class _Frame:
    """An open collection: what it holds so far, and what its anchor will stand for."""

    value: dict[Any, Any] | list[Any]
    path: str
    anchor: str | None
    nodes_before: int
    depth: int = 1  # levels from here down, aliases included
    key: Any = None
    has_key: bool = False
    merges: list[dict[Any, Any]] | None = None  # what ``<<`` names, the one that counts most last


class _Builder:
    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        self.lines: dict[str, int] = {}
        self.stack: list[_Frame] = []
        self.anchors: dict[str, tuple[Any, int, int]] = {}  # value, nodes, depth
        self.open_anchors: set[str] = set()
        self.nodes = 0
        self.root: Any = _NOTHING

    def error(self, problem: str, event: yaml.Event, hint: str | None = None) -> RecipeError:
        path = self.stack[-1].path if self.stack else None
        line = event.start_mark.line + 1 if event.start_mark else None
        return RecipeError(problem, source=self.source, line=line, path=path or None, hint=hint)

    def build(self) -> Any:
        try:
            self._read()
        except yaml.YAMLError as error:
            raise _yaml_error(error, self.text, self.source) from None
        except UnicodeEncodeError as error:  # half of a surrogate pair, which a file cannot hold
            before = error.object[: error.start].encode()
            raise _character_error(ord(error.object[error.start]), before, self.source) from None
        return self.root

    def _read(self) -> None:
        documents = 0
        for event in self._events():
            if isinstance(event, yaml.ScalarEvent):
                self._scalar(event)
            elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
                self._open(event)
            elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
                self._close(event)
            elif isinstance(event, yaml.AliasEvent):
                self._alias(event)
            elif isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self.error("a second YAML document begins here; a recipe is one document", event)

    def _events(self) -> Iterator[yaml.Event]:
        loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        events: Iterator[yaml.Event] = yaml.parse(self.text, Loader=loader)
        return events

    def _count(self, nodes: int, depth: int, event: yaml.Event) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            raise self.error(f"more than {MAX_NODES:,} values (aliases expanded), which no recipe needs", event)
        if len(self.stack) + depth > MAX_DEPTH:
            raise self.error(f"nested deeper than {MAX_DEPTH} levels, which no recipe needs", event)

    def _open(self, event: yaml.MappingStartEvent | yaml.SequenceStartEvent) -> None:
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        if event.tag not in (None, _TAG + ("map" if is_mapping else "seq")):
            raise self.error(f"the tag {printable(str(event.tag))} is not allowed in a recipe", event)
        self._count(1, 1, event)
        if self._at_key():
            raise self.error("a key must be text, not a collection", event)
        path = self._child_path()
        if event.anchor is not None:
            self._check_anchor(event)
            self.open_anchors.add(event.anchor)
        value: dict[Any, Any] | list[Any] = {} if is_mapping else []
        self.stack.append(_Frame(value, path, event.anchor, self.nodes - 1))

    def _close(self, event: yaml.Event) -> None:
        frame = self.stack.pop()
        if frame.merges:
            own = frame.value
            assert isinstance(own, dict)
            merged: dict[Any, Any] = {}
            for mapping in frame.merges:
                merged.update(mapping)
            frame.value = {**merged, **own}
        if frame.anchor is not None:
            self.open_anchors.discard(frame.anchor)
            self.anchors[frame.anchor] = (frame.value, self.nodes - frame.nodes_before, frame.depth)
        self._put(frame.value, event, frame.depth)

    def _check_anchor(self, event: yaml.NodeEvent) -> None:
        if event.anchor in self.anchors or event.anchor in self.open_anchors:
            raise self.error(f"the anchor &{printable(str(event.anchor))} is given twice", event)

    def _alias(self, event: yaml.AliasEvent) -> None:
        name = str(event.anchor)
        if name in self.open_anchors:
            raise self.error(f"the alias *{printable(name)} stands inside what it names", event)
        if name not in self.anchors:
            raise self.error(f"the alias *{printable(name)} names no anchor", event)
        value, nodes, depth = self.anchors[name]
        self._count(nodes, depth, event)
        self._put(value, event, depth)

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        self._count(1, 0, event)
        value = self._scalar_value(event)
        if event.anchor is not None:
            self._check_anchor(event)
            self.anchors[event.anchor] = (value, 1, 0)
        self._put(value, event, 0)

    def _scalar_value(self, event: yaml.ScalarEvent) -> Any:
        tag = event.tag
        if tag is None:
            if not event.implicit[0]:
                return event.value
            tag = _resolver()(event.value)
        if tag == _TAG + "str":
            return event.value
        if tag == _TAG + "merge" and self._at_key():
            return _MERGE
        if tag == _TAG + "null":
            return None
        construct = _constructors().get(tag)
        if construct is None:
            raise self.error(f"the tag {printable(tag)} is not allowed in a recipe", event)
        try:
            if len(event.value) > _MAX_NUMBER:
                raise ValueError
            value = construct(yaml.ScalarNode(tag, event.value))
        except (ValueError, KeyError, IndexError, OverflowError):
            raise self.error(f"{shown(event.value)} is not a number that can be read", event) from None
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise self.error(f"{shown(value)} is beyond 64 bits", event)
        return value

    def _at_key(self) -> bool:
        return bool(self.stack) and isinstance(self.stack[-1].value, dict) and not self.stack[-1].has_key

    def _child_path(self) -> str:
        """The path of the value that comes next; below a very long one its own, so that paths stay small."""
        if not self.stack:
            return ""
        frame = self.stack[-1]
        if len(frame.path) > _MAX_PATH:
            return frame.path
        step = len(frame.value) if isinstance(frame.value, list) else "<<" if frame.key is _MERGE else frame.key
        return f"{frame.path}.{step}" if frame.path else str(step)

    def _put(self, value: Any, event: yaml.Event, depth: int) -> None:
        """Hand a finished value to the collection it stands in."""
        if not self.stack:
            self.root = value
            return
        frame = self.stack[-1]
        frame.depth = max(frame.depth, depth + 1)
        if isinstance(frame.value, list):
            frame.value.append(value)
        elif not frame.has_key:
            self._put_key(frame, value, event)
        else:
            frame.has_key = False
            if frame.key is _MERGE:
                frame.merges = self._merge_sources(value, event)
            else:
                frame.value[frame.key] = value

    def _put_key(self, frame: _Frame, key: Any, event: yaml.Event) -> None:
        assert isinstance(frame.value, dict)
        if key is None or isinstance(key, (dict, list)):
            raise self.error(f"a key must be text, not {'null' if key is None else 'a collection'}", event)
        frame.key, frame.has_key = key, True
        if key is _MERGE:
            if frame.merges is not None:
                raise self.error("the key << is given twice; merge a list of mappings", event)
            return
        if key in frame.value:
            raise self.error(f"the key {shown(key)} is given twice", event)
        frame.value[key] = None
        self.lines[self._child_path()] = event.start_mark.line + 1 if event.start_mark else 0

    def _merge_sources(self, value: Any, event: yaml.Event) -> list[dict[Any, Any]]:
        sources = value if isinstance(value, list) else [value]
        if not all(isinstance(source, dict) for source in sources):
            raise self.error("<<: merges mappings only", event)
        return sources[::-1]  # of several the first counts most
