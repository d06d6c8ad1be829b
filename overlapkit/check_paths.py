"""Which files the arguments of ``check`` name: files, folders, globs, and the overrides among them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path

from overlapkit.errors import RecipeError, shown
from overlapkit.recipe.place import YAML_ENDINGS

SCRIPT_ENDINGS = (".sh",)
_OVERRIDE = re.compile(r"(?:[+~]*[A-Za-z_][\w\-.]*|[1-9]\d?)=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A file to look at. ``named``: the user wrote its path, so that it must be a recipe or a script.

    ``error`` is set for a folder that cannot be listed.
    """

    path: str
    named: bool
    error: RecipeError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What ``check`` was asked for: each file once, in the order of the arguments, and the overrides."""

    files: tuple[Found, ...]
    overrides: tuple[str, ...]


def select(arguments: Sequence[str]) -> Selection:
    """The files and overrides that the arguments name.

    An argument of the form ``section.key=value`` that names nothing on disk is an override. A folder stands for its
    ``*.yaml``, ``*.yml`` and ``*.sh`` at any depth, sorted, without hidden folders; a glob for what it matches, ``**``
    for folders at any depth. A file that several arguments lead to counts once, where it stands first.

    Raises:
        RecipeError: no path, or one that matches nothing.
    """
    paths: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        (overrides if is_override(argument) else paths).append(argument)
    if not paths:
        hint = "name files, folders or globs, for example: overlapkit check recipes"
        raise RecipeError("no recipe is named", source="check", hint=hint)
    return Selection(files=_once(found for path in paths for found in _expand(path)), overrides=tuple(overrides))


def relative_path(path: str) -> str | None:
    """``path`` from the current folder, with forward slashes; None outside of it."""
    here, there = Path.cwd(), Path(os.path.abspath(path))  # noqa: PTH100  links stay as the user wrote them
    return there.relative_to(here).as_posix() if there.is_relative_to(here) else None


def is_override(argument: str) -> bool:
    """Whether an argument among paths is ``section.key=value``: it has that form and names nothing on disk."""
    if not _OVERRIDE.match(argument) or os.path.lexists(argument):
        return False
    return not (has_magic(argument) and any(matches(argument)))


def _once(files: Iterable[Found]) -> tuple[Found, ...]:
    """Each file once, whatever links lead to it; named if any argument names it."""
    kept: dict[str, Found] = {}
    for found in files:
        identity = os.path.realpath(found.path)
        before = kept.get(identity)
        if before is None:
            kept[identity] = found
        elif found.named and not before.named:
            kept[identity] = Found(path=before.path, named=True)
    return tuple(kept.values())


def _expand(path: str) -> Iterator[Found]:
    if os.path.isdir(path):  # noqa: PTH112  Path.is_dir raises where a folder above may not be entered
        found = [
            each for each in files_below(path) if each.error or each.path.endswith((*YAML_ENDINGS, *SCRIPT_ENDINGS))
        ]
        if not found:
            raise RecipeError("no *.yaml, *.yml or *.sh in this folder", source=path)
        yield from found
    elif os.path.lexists(path):
        yield Found(path=path, named=True)
    elif has_magic(path):
        found = list(matches(path))
        if not found:
            raise RecipeError("matches no file", source=path)
        yield from found
    else:
        hint = "an override is section.key=value, for example model.tensor_model_parallel_size=4"
        raise RecipeError(f"no file or folder {shown(path)}", source="check", hint=hint if "=" in path else None)


def files_below(folder: str) -> Iterator[Found]:
    """The files in a folder at any depth, without hidden folders, and the folders that cannot be listed."""
    return _walk(folder, lambda names: _visible(names[-1]))


def matches(pattern: str) -> Iterator[Found]:
    """The files that a glob stands for, sorted; as in a shell, hidden names need a pattern with a dot.

    Not ``glob.glob``: its ``**`` follows links round and round.
    """
    parts = Path(pattern).parts
    fixed = next(index for index, part in enumerate(parts) if has_magic(part))
    base, wanted = str(Path(*parts[:fixed])), parts[fixed:]
    if wanted[-1] == "**":  # at the end: the files at any depth
        wanted += ("*",)
    for found in _walk(base, lambda names: _match(names, wanted, whole=False), once="**" in wanted):
        names = Path(found.path).parts[fixed:]
        if names and (found.error is not None or _match(names, wanted)):
            yield found


def _match(names: Sequence[str], wanted: Sequence[str], *, whole: bool = True) -> bool:
    """Whether a path is what a pattern wants; not ``whole``: whether it can be the beginning of such a path."""
    if not names:
        return not wanted if whole else bool(wanted)
    if not wanted:
        return False
    if wanted[0] == "**":
        below = _visible(names[0]) and _match(names[1:], wanted, whole=whole)
        return below or _match(names, wanted[1:], whole=whole)
    shows = _visible(names[0]) or wanted[0].startswith(".")
    return shows and fnmatchcase(names[0], wanted[0]) and _match(names[1:], wanted[1:], whole=whole)


def _visible(name: str) -> bool:
    return not name.startswith(".")


def _walk(folder: str, enters: Callable[[tuple[str, ...]], bool], *, once: bool = True) -> Iterator[Found]:
    """The files below a folder, sorted by name within each, and the folders that cannot be listed.

    ``enters`` says of a folder's names, counted from the first one, whether to go into it. ``once``: into each folder
    by one way only, so that links that lead back end.
    """
    seen: set[tuple[int, int]] = set()
    waiting: list[tuple[str, ...]] = [()]
    while waiting:
        names = waiting.pop()
        here = Path(folder, *names)
        try:
            status = here.stat()
            if once and (status.st_dev, status.st_ino) in seen:
                continue
            with os.scandir(here) as listing:
                entries = sorted((entry.name, _is_folder(entry)) for entry in listing)
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
            yield Found(path=str(here), named=False, error=RecipeError(problem, source=str(here)))
            continue
        seen.add((status.st_dev, status.st_ino))
        for name, is_folder in entries:
            if not is_folder:
                yield Found(path=str(here / name), named=False)
        below = [(*names, name) for name, is_folder in entries if is_folder]
        waiting += [way for way in reversed(below) if enters(way)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
