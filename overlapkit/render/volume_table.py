"""What the texts about volumes share: bytes for people, groups and stages in words, lines with figures at their end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlapkit.volume.predict import Stage
from overlapkit.volume.rows import Row

if TYPE_CHECKING:
    from rich.console import Console

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_PLACES = {"intra_node": "within a node", "inter_node": "across nodes", "mixed": "mixed"}
ABSENT = "–"
_GAP = 2
_LEAST_LABEL = 24  # columns that the words of a line keep on a narrow terminal


def human(number: float) -> str:
    """Bytes in powers of 1000, as network links are rated, with one decimal."""
    unit = 0
    while abs(round(number, 1)) >= 1000 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.1f} {_UNITS[unit]}" if unit else f"{number:,.0f} B"


def to_the_byte(number: float) -> str:
    return f"{number:,.0f}"


def percent(part: float, whole: float) -> str:
    """A share; one too small for its decimal is not shown as nothing."""
    share = 100 * part / whole if whole else 0.0
    return "<0.1 %" if 0 < share < 0.05 else f"{share:.1f} %"


def arrow(before: str, after: str | None = None) -> str:
    """What was and what is, once where both are the same."""
    return before if after is None or before == after else f"{before} → {after}"


def ranks_text(ranks: Iterable[range]) -> str:
    """Ranges of ranks, those that follow one another as one."""
    joined: list[range] = []
    for part in sorted(ranks, key=lambda found: found.start):
        if joined and joined[-1].stop == part.start:
            joined[-1] = range(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in joined)


def stages_text(numbers: Sequence[int]) -> str:
    """Stages that follow one another."""
    return f"Stage {numbers[0]}" if len(numbers) == 1 else f"Stages {numbers[0]} to {numbers[-1]}"


def alike(stages: Sequence[Stage]) -> dict[str, tuple[Stage, ...]]:
    """Stages that follow one another and move the same, by their numbers and ranks."""
    found: list[tuple[Stage, ...]] = []
    for stage in stages:
        if found and found[-1][0].rows == stage.rows:
            found[-1] = (*found[-1], stage)
        else:
            found.append((stage,))
    return {f"{_numbers(group)}, ranks {ranks_of(group)}": group for group in found}


def _numbers(stages: Sequence[Stage]) -> str:
    return stages_text([stage.pipeline_rank for stage in stages])


def ranks_of(stages: Iterable[Stage]) -> str:
    return ranks_text(part for stage in stages for part in stage.ranks)


def place_text(placement: str | None) -> str:
    return _PLACES.get(placement or "", "")


def marks(row: Row) -> tuple[str, ...]:
    """What is to be known about a row's figures."""
    found = []
    if not row.observable:
        found.append("not NCCL")
    if not row.exact:
        found.append("if balanced")
    if row.evidence == "source":
        found.append("from source")
    return tuple(found)


LEGEND = {
    "not NCCL": "userbuffers, DeepEP or HybridEP move it: no log or trace of NCCL has it",
    "if balanced": "routing decides the bytes; these are those of balanced experts",
    "from source": "read in the source; the rest is compared with runs of Megatron-Core",
}


@dataclass(frozen=True, slots=True)
class Line:
    """Words, and figures for the columns at the end of the line."""

    label: str
    cells: tuple[str, ...]
    style: str = ""


def write_lines(out: Console, lines: Sequence[Line], widths: Sequence[int], label_width: int) -> None:
    """Lines with their figures aligned to the right, the first with the columns' titles.

    Words that are too long have a line of their own above the figures; where columns have no room, figures follow
    their titles.
    """
    room = min(label_width, out.width - sum(widths) - _GAP * len(widths))
    if room < min(label_width, _LEAST_LABEL):
        _write_without_columns(out, lines)
        return
    for line in lines:
        cells = "".join(" " * _GAP + cell.rjust(width) for cell, width in zip(line.cells, widths, strict=True))
        if len(line.label) <= room:
            out.print((line.label.ljust(room) + cells).rstrip(), style=line.style)
            continue
        out.print(line.label, style=line.style)
        if cells.strip():
            out.print((" " * room + cells).rstrip(), style=line.style)


def _write_without_columns(out: Console, lines: Sequence[Line]) -> None:
    from rich.padding import Padding

    titles = lines[0].cells
    for line in lines:
        out.print(line.label, style=line.style)
        figures = [f"{title} {cell}" for title, cell in zip(titles, line.cells, strict=True) if cell and cell != title]
        if figures:
            out.print(Padding(", ".join(figures), (0, 0, 0, 6)), style=line.style)


def measure(lines: Iterable[Line]) -> tuple[list[int], int]:
    """The widths of the columns and of the words."""
    found = list(lines)
    columns = zip(*(line.cells for line in found), strict=True)
    return [max(map(len, column)) for column in columns], max(len(line.label) for line in found)
