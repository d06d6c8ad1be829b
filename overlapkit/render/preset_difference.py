"""Two userbuffers configurations side by side."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

from overlapkit.errors import printable, shown
from overlapkit.presets.configurations import Configuration
from overlapkit.presets.differences import Difference
from overlapkit.render.buffers import write_table
from overlapkit.render.text import print_on

if TYPE_CHECKING:
    from rich.console import Console


def to_dict(one: Configuration, other: Configuration, found: Difference) -> dict[str, Any]:
    return {
        "a": {"name": one.source, "aliases": list(found.aliases[0])},
        "b": {"name": other.source, "aliases": list(found.aliases[1])},
        "equal": found.equal,
        "same_buffers": found.same_buffers,
        "made_for": {name: list(pair) for name, pair in found.made_for.items()},
        "layers": {layer: {name: list(pair) for name, pair in pairs.items()} for layer, pairs in found.layers.items()},
    }


def print_difference(
    one: Configuration, other: Configuration, found: Difference, stream: IO[str], *, transformer_engine: str
) -> None:
    def write(out: Console) -> None:
        for label, side, twins in (("A", one, found.aliases[0]), ("B", other, found.aliases[1])):
            also = f"  the same content: {', '.join(twins)}" if twins else ""
            out.print(f"{label}  {printable(side.source, limit=300)}{also}", soft_wrap=True)
        out.print(_verdict(found, transformer_engine), style="green" if found.equal else "bold", soft_wrap=True)
        rows = [["made for", name, *map(_cell, pair)] for name, pair in found.made_for.items()]
        for layer, pairs in found.layers.items():
            rows += [[layer, name, *map(_cell, pair)] for name, pair in pairs.items()]
        if rows:
            out.print()
            write_table(out, ["", "", "A", "B"], rows)

    print_on(stream, write)


def _verdict(found: Difference, transformer_engine: str) -> str:
    if found.equal:
        return "equal: every layer is the same"
    count = len(found.layers)
    text = f"{count} layer{'s' if count > 1 else ''} differ{'s' if count == 1 else ''}"
    if found.same_buffers:
        return f"{text} in what is written; Transformer Engine {transformer_engine} builds the same buffers of both"
    return text


def _cell(value: Any) -> str:
    return printable(value, limit=60) if isinstance(value, str) else shown(value)
