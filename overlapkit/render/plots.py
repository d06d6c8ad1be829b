"""What all pictures share: their names, matplotlib where it is there, and files that are the same every time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from overlapkit.errors import MissingPackageError, RecipeError, printable, shown
from overlapkit.whole_files import check_writable, whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ENDINGS = (".svg", ".png")


def check_plot(path: str) -> None:
    """That a picture can be made of this name, here.

    Raises:
        RecipeError: another ending than .svg or .png, or no such folder.
        MissingPackageError: matplotlib cannot be imported.
    """
    if Path(path).suffix.lower() not in _ENDINGS:
        raise RecipeError(f"{shown(path)} is neither .svg nor .png", source="--plot", hint="end its name with .svg")
    check_writable(path)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingPackageError("--plot needs matplotlib: pip install 'overlapkit[plot]'") from None


def save_figure(path: str, size: tuple[float, float], draw: Callable[[Figure], None]) -> None:
    """Lets ``draw`` fill a figure of ``size`` inches and writes it; the same drawing gives the same file.

    Raises:
        RecipeError: the file cannot be written; what was there stays.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "overlapkit", "svg.fonttype": "none", "hatch.linewidth": 0.6}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        ending = Path(path).suffix.lower().removeprefix(".")
        metadata = {"Date": None} if ending == "svg" else {"Software": "overlapkit"}
        with whole_file(path) as stream:
            figure.savefig(stream, format=ending, metadata=metadata, dpi=150)


def plain_text(text: str) -> str:
    """A text as it is: dollar signs would begin a formula."""
    return printable(text, limit=120).replace("$", r"\$")
