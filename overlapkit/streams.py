"""The process's own streams."""

from __future__ import annotations

import os
import signal
import sys
from io import TextIOWrapper
from pathlib import Path


def prepare_streams() -> None:
    """Make writing fail neither on a character that the terminal's encoding lacks nor on a closed stream."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this as it ends every other command
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  open until the end
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
