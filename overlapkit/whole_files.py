"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from overlapkit.errors import RecipeError


def write_whole(folder: Path, texts: Mapping[str, str]) -> tuple[Path, ...]:
    """Writes every text under its name into ``folder``, which is made where it is missing; their paths, in order.

    All are written under other names first, so that a full disk leaves none of them, and what was there as it was.

    Raises:
        RecipeError: the folder or a file cannot be written.
    """
    pending: dict[Path, Path] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            path = folder / name
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            other = _beside(path)
            pending[other] = path
            with other.open("w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())  # a disk may say only here that it is full
        for other, path in pending.items():
            other.replace(path)
    except OSError as error:
        raise _unwritable(error, str(error.filename or folder)) from None
    finally:
        for other in pending:  # of Ctrl-C, too, nothing stays
            other.unlink(missing_ok=True)
    return tuple(pending.values())


@contextmanager
def whole_file(path: str) -> Iterator[BinaryIO]:
    """A file to write bytes to, which is there under its name when all of them are, else what was there before.

    What is no regular file, such as a pipe, is written to as it is.

    Raises:
        RecipeError: it cannot be written.
    """
    try:
        target = Path(os.path.realpath(path))  # a link stays a link
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():
            with target.open("wb") as stream:
                yield stream
            return
        other = _beside(target)
        try:
            with other.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            if target.exists():
                other.chmod(target.stat().st_mode)
            other.replace(target)
        finally:
            other.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(error, path) from None


def check_writable(path: str) -> None:
    """That there is a folder for the file, before any work is done for it.

    Raises:
        RecipeError: there is none.
    """
    if not Path(path).parent.is_dir():
        raise RecipeError(f"cannot be written: {os.strerror(errno.ENOENT)}", source=path)


def check_folder(path: str) -> None:
    """That files can be written to a folder, which may be missing as yet, before any work is done for them.

    Raises:
        RecipeError: they cannot.
    """
    there = Path(path)
    while not there.exists() and there != there.parent:
        there = there.parent
    if not path or not there.is_dir() or not os.access(there, os.W_OK):
        number = errno.ENOENT if not path else errno.EACCES if there.is_dir() else errno.EEXIST
        raise RecipeError(f"cannot be written: {os.strerror(number)}", source=path or "''")


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _unwritable(error: OSError, path: str) -> RecipeError:
    return RecipeError(f"cannot be written: {error.strerror or error}", source=path)
