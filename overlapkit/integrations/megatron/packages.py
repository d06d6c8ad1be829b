"""Which packages are installed here, and megatron-core itself where it is."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType

from overlapkit.errors import MissingPackageError, printable
from overlapkit.versions import parse_version

# A component of a recipe's ``software`` -> its module and its distribution.
_COMPONENTS = {
    "megatron_bridge": ("megatron.bridge", "megatron-bridge"),
    "megatron_core": ("megatron.core", "megatron-core"),
    "torch": ("torch", "torch"),
}
_EXTRA = "pip install 'overlapkit[megatron]'"
_BROKEN_ENGINE = "a broken Transformer Engine keeps it from importing: pip uninstall transformer-engine"


@contextmanager
def quietly() -> Iterator[None]:
    """What packages warn of, on a machine without GPUs or of their own defaults, is not shown, and what they print goes
    to stderr: stdout is for the answer alone."""
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        yield


def megatron_core() -> ModuleType:
    """``megatron.core``, imported.

    Raises:
        MissingPackageError: it is not installed, or cannot be imported. Without CUDA, Transformer Engine's
            metapackage alone makes it raise other things than an ImportError.
    """
    from importlib import import_module

    try:
        with quietly():
            return import_module("megatron.core")
    except Exception as error:
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        frames = traceback.extract_tb(error.__traceback__)
        engine = any("transformer_engine" in Path(frame.filename).parts for frame in frames)
        reason = f"{kind}{printable(said_by(error), limit=200)}"
        text = f"megatron-core cannot be imported here ({reason}): {_BROKEN_ENGINE if engine else _EXTRA}"
        raise MissingPackageError(text) from None


def said_by(error: Exception) -> str:
    """What an exception says, in one line; its class where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def versions_here() -> dict[str, str]:
    """Megatron-Bridge, Megatron-Core and torch as far as they are here, by their names in a recipe's ``software``."""
    found = {name: _version_here(module, distribution) for name, (module, distribution) in _COMPONENTS.items()}
    return {name: text for name, text in found.items() if text is not None}


def _version_here(module: str, distribution: str) -> str | None:
    """The version of a package: of the module that is loaded, else of what is installed; None for neither.

    A checkout on the path has no metadata, or that of another installation. Nothing is imported.
    """
    from importlib.metadata import PackageNotFoundError, version

    found = getattr(sys.modules.get(module), "__version__", None)
    if found is None:
        try:
            found = version(distribution)
        except PackageNotFoundError:
            return None
    try:
        return parse_version(str(found)).text
    except ValueError:
        return None
