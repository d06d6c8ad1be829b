"""Presets as a list and one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

from overlapkit.presets import Preset
from overlapkit.render.text import print_on

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_COLUMNS = {
    "gpu": "GPU",
    "precision": "precision",
    "hidden_size": "hidden",
    "tensor_model_parallel_size": "TP",
    "context_parallel_size": "CP",
    "micro_batch_size": "MBS",
    "seq_length": "sequence",
    "provenance": "from",
    "name": "name",
}


def header(preset: Preset) -> dict[str, Any]:
    """Everything about a preset but its configuration."""
    return {name: getattr(preset, name) for name in Preset.__dataclass_fields__ if name != "userbuffers"}


def print_list(presets: Sequence[Preset], stream: IO[str]) -> None:
    """One line per preset."""
    rows = [[str(getattr(preset, name)) for name in _COLUMNS] for preset in presets]
    print_on(stream, lambda out: out.print(_table(list(_COLUMNS.values()), rows)), at_least=160)


def print_preset(preset: Preset, stream: IO[str]) -> None:
    """What the preset was tuned for, then a line per layer."""
    options = list(dict.fromkeys(option for entry in preset.userbuffers.values() for option in entry))
    rows = [[layer, *(_cell(entry.get(option)) for option in options)] for layer, entry in preset.userbuffers.items()]

    def write(out: Console) -> None:
        for name, value in header(preset).items():
            out.print(f"{name}: {_cell(value)}", soft_wrap=True)
        out.print()
        out.print(_table(["layer", *options], rows))

    print_on(stream, write, at_least=120)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)
