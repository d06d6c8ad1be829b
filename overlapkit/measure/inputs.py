"""Which files the paths of ``measure`` name, what kind each is by what it holds, and what its reader finds in it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import has_magic
from importlib import import_module
from pathlib import Path
from types import ModuleType

from overlapkit.check_paths import Found, files_below, matches
from overlapkit.errors import OverlapkitError, printable, shown
from overlapkit.measure.events import Problem, Reading, Recording
from overlapkit.measure.readers.gz import up_to_damage
from overlapkit.measure.readers.nccl_log.lines import NO_LINE

# The readers, in the order in which they are asked: the surest sign first.
KINDS = ("nsys", "recorder", "nccl_inspector", "torch_trace", "nccl_log")
_HEAD_BYTES = 64 << 10
_MOST_FILES = 100_000
_MOST_SHOWN = 3  # of files or reasons in one line
# Endings of files that hold a measurement in a form that cannot be read, and what to do with them.
_TO_CONVERT = {
    ".nsys-rep": "export it first: nsys export --type sqlite {name}",
    ".qdrep": "export it first: nsys export --type sqlite {name}",
    ".ncu-rep": "Nsight Compute profiles single kernels, not a job",
    ".zst": "decompress it first",
    ".xz": "decompress it first",
    ".bz2": "decompress it first",
    ".zip": "unpack it first",
    ".tar": "unpack it first",
}


class InputError(OverlapkitError):
    """None of the paths gives a measurement."""

    exit_code = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The files to read, by kind, what was left out and why, and the size of all of them on disk.

    ``passed`` are files of no kind that is read, in folders; ``found`` those to read that no path names itself.
    """

    files: tuple[tuple[str, tuple[Path, ...]], ...]
    problems: tuple[Problem, ...] = ()
    passed: tuple[str, ...] = ()
    found: frozenset[str] = frozenset()
    total_bytes: int = 0


def select_inputs(paths: Sequence[str | Path]) -> Inputs:
    """The files that the paths name: files, folders (all that can be read in them, at any depth), globs.

    A file that several paths lead to counts once. In a folder, files of no kind that is read are passed over; one that
    is named is a problem.

    Raises:
        InputError: no path, or nothing that can be read behind any of them.
    """
    if not paths:
        raise InputError("no log or trace is named; name files, folders or globs")
    by_kind: dict[str, list[Path]] = {}
    problems: list[Problem] = []
    passed: list[str] = []
    unnamed: set[str] = set()
    total = 0
    for found in _files(paths):
        kind, why = (None, found.error.problem) if found.error is not None else _kind(Path(found.path))
        if kind is not None:
            by_kind.setdefault(kind, []).append(Path(found.path))
            total += _size(found.path)
            if not found.named:
                unnamed.add(_shown(found.path))
        elif found.named or found.error is not None or why.startswith("cannot"):
            problems.append(Problem(source=_shown(found.path), what=why))
        else:
            passed.append(_shown(found.path))
    if not by_kind:
        raise InputError(_nothing(problems, passed))
    return Inputs(
        files=tuple((kind, tuple(by_kind[kind])) for kind in KINDS if kind in by_kind),
        problems=tuple(problems),
        passed=tuple(passed),
        found=frozenset(unnamed),
        total_bytes=total,
    )


def read_inputs(inputs: Inputs, progress: Callable[[int], None] | None = None) -> Reading:
    """What the readers find in the files; ``progress`` is told the bytes that were read since it was told last.

    A text that a folder holds may be a log until it is read; where no line of it is NCCL's, it is passed over too.

    Raises:
        InputError: nothing was found in any of them.
    """
    recordings: list[Recording] = []
    problems, passed = list(inputs.problems), list(inputs.passed)
    notes: list[str] = []
    for kind, paths in inputs.files:
        reading = _reader(kind).read(paths, progress)
        recordings += reading.recordings
        for problem in reading.problems:
            if problem.what == NO_LINE and problem.source in inputs.found:
                passed.append(problem.source)
            else:
                problems.append(problem)
        notes += reading.notes
    if not recordings:
        raise InputError(_nothing(problems, passed))
    if passed:
        names = [Path(name).name for name in passed]
        words = "1 file holds" if len(passed) == 1 else f"{len(passed)} files hold"
        notes.insert(0, f"{words} no measurement of a kind that is read: {_first(names, ', ')}")
    return Reading(recordings=tuple(recordings), problems=tuple(problems), notes=tuple(dict.fromkeys(notes)))


def _nothing(problems: Sequence[Problem], passed: Sequence[str]) -> str:
    """One line that says why there is nothing to report."""
    if not problems and not passed:
        return "no file there"
    if not problems:
        names = _first([Path(name).name for name in passed], ", ")
        return f"none of the {len(passed)} files is an NCCL log, a trace or a recording: {names}"
    why = [printable(str(problem), limit=560) for problem in problems]
    return _first([*why, *(f"{name}: no measurement" for name in passed)], "; ")


def _first(texts: Sequence[str], between: str) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(texts) - _MOST_SHOWN} more" if len(texts) > _MOST_SHOWN else ""
    return between.join(texts[:_MOST_SHOWN]) + more


def _shown(path: str) -> str:
    """As the readers name a file."""
    return printable(path, limit=300)


def _files(paths: Sequence[str | Path]) -> Iterator[Found]:
    """Each file once, as the first path leads to it."""
    seen: set[str] = set()
    for path in paths:
        for found in _expand(str(path)):
            identity = os.path.realpath(found.path)
            if identity not in seen:
                seen.add(identity)
                if len(seen) > _MOST_FILES:
                    raise InputError(f"more than {_MOST_FILES:,} files: name fewer")
                yield found


def _expand(path: str) -> Iterable[Found]:
    if "\0" in path:
        raise InputError(f"no file or folder {shown(path)}")
    if os.path.isdir(path):  # noqa: PTH112  Path.is_dir raises where a folder above may not be entered
        return files_below(path)
    if not os.path.lexists(path) and has_magic(path):
        found = tuple(matches(path))
        if found:
            return found
    return (Found(path=path, named=True),)


def _kind(path: Path) -> tuple[str | None, str]:
    """The kind of a file, or None and why it has none."""
    try:
        if not path.is_file():
            return None, "no file or folder" if not os.path.lexists(path) else "cannot be read: no ordinary file"
        head = _head(path)
    except OSError as error:
        return None, f"cannot be read: {error.strerror or error}"
    except (EOFError, zlib.error) as error:
        return None, f"cannot be decompressed: {error}"
    if not head:
        return None, "empty" if not _size(str(path)) else "a gz file that is empty or cut"
    for kind in KINDS:
        if _reader(kind).recognises(head, path):
            return kind, ""
    hint = next((text for ending, text in _TO_CONVERT.items() if path.name.endswith(ending)), None)
    if hint is not None:
        return None, hint.format(name=path.name)
    return None, "no NCCL log, PyTorch trace, Nsight Systems export, NCCL Inspector dump or recording"


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:  # gone since it was looked at: its reader says so
        return 0


def _head(path: Path) -> bytes:
    """The first bytes of what a file holds, decompressed where it is gzip, however large it becomes."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head.startswith(b"\x1f\x8b"):
        return head
    member = zlib.decompressobj(wbits=31)
    before = member.copy()
    try:
        return member.decompress(head, _HEAD_BYTES)
    except zlib.error:
        found = b""
        for block in up_to_damage(before, head):
            found += block
            if len(found) >= _HEAD_BYTES:
                break
        if not found:
            raise
        return found


def _reader(kind: str) -> ModuleType:
    return import_module(f"overlapkit.measure.readers.{kind}")
