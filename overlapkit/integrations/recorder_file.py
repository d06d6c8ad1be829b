"""The file that a recorder appends to. Its lines: :mod:`overlapkit.measure.readers.recorder`, which reads them."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from overlapkit.errors import RecipeError, printable
from overlapkit.measure.readers.recorder import FORMAT, SCHEMA_VERSION


class RecorderFile:
    """Lines of JSON, each of which is on the disk's side when ``write`` returns: what is written outlives the process.

    A disk that is full must not end a training: the first line that cannot be written is told on stderr, and no other
    is tried.
    """

    def __init__(self, folder: Path, *, torch_version: str, steps: tuple[int, int] | None) -> None:
        """Makes the folder and the file, whose name holds the host and the process.

        Raises:
            RecipeError: they cannot be made.
        """
        host = socket.gethostname()
        self.path = folder / f"recorder.{re.sub(r'[^A-Za-z0-9_.-]+', '_', host)}.{os.getpid()}.jsonl"
        header = {FORMAT: SCHEMA_VERSION, "host": host, "pid": os.getpid(), "torch": torch_version, "steps": steps}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: int | None = self._new()
            os.write(self._file, _line(header))
        except OSError as error:
            raise RecipeError(f"nothing can be recorded in it: {error.strerror}", source=str(folder)) from None

    def _new(self) -> int:
        """A file that was not there: a process of another container or run may have had the same host and number."""
        first, again = self.path, 1
        while True:
            try:
                return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
            except FileExistsError:
                again += 1
                self.path = first.with_name(f"{first.stem}.{again}{first.suffix}")

    @property
    def writable(self) -> bool:
        return self._file is not None

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        data = b"".join(map(_line, lines))
        if self._file is None or not data:
            return
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self.close()
            where = printable(str(self.path), limit=300)
            print(f"overlapkit: recording ends: {where}: {error.strerror}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is written from now on."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
