"""A volume as one screen that a person reads from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING

from overlapkit.errors import printable
from overlapkit.plan import Plan
from overlapkit.render.text import grid, mesh_line, print_on, target_line, title, verdict
from overlapkit.render.volume_table import (
    LEGEND,
    Line,
    alike,
    human,
    marks,
    measure,
    percent,
    place_text,
    to_the_byte,
    write_lines,
)
from overlapkit.volume.configuration import Configuration
from overlapkit.volume.levers import Lever
from overlapkit.volume.predict import Stage, Volume
from overlapkit.volume.rows import Row, total_wire_bytes, wire_bytes

if TYPE_CHECKING:
    from rich.console import Console

Bytes = Callable[[float], str]
_PAIRS_SHOWN = 8


def print_volume(
    found: Configuration, levers: Sequence[Lever], stream: IO[str], *, exact: bool, phases: bool, nodes: bool
) -> None:
    """Tables per stage, bytes between nodes, levers. ``nodes`` gives each pair of nodes a line of its own."""
    shown = to_the_byte if exact else human

    def write(out: Console) -> None:
        head(found.plan, out)
        _stages(found.volume, shown, out, phases=phases)
        _legend(found.volume, out)
        _between_nodes(found.volume, shown, out, each=nodes)
        _levers(levers, shown, out)

    print_on(stream, write)


def head(plan: Plan, out: Console) -> None:
    out.print(printable(plan.recipe, limit=300), style="bold", end="")
    out.print("  bytes per rank and optimizer step")
    if not plan.ok:
        text, style = verdict(plan)
        out.print(f"{text}: overlapkit resolve says why", style=style)
    out.print(target_line(plan))
    out.print(mesh_line(plan))


# --- stages ----------------------------------------------------------------------------------------


def _stages(volume: Volume, shown: Bytes, out: Console, *, phases: bool) -> None:
    same = alike(volume.stages)
    tables = [list(_table(label, stages[0], shown, phases=phases)) for label, stages in same.items()]
    widths, label_width = measure(line for table in tables for line in table)
    for table in tables:
        out.print()
        write_lines(out, table, widths, label_width)


def _table(label: str, stage: Stage, shown: Bytes, *, phases: bool) -> Iterator[Line]:
    """One table: the groups that send most first, a line for each and one for each of its operations."""
    whole = stage.wire_bytes()
    yield Line(f"{label}: each sends {shown(whole)}", ("calls", "message", "sent", "share"), "bold")
    operations = max((len(row.op) for row in stage.rows), default=0)
    for group, rows in _by_group(stage.rows):
        sent = total_wire_bytes(rows)
        yield Line(f"  {_group_text(group, rows[0])}", ("", "", shown(sent), percent(sent, whole)), "cyan")
        for row in rows:
            words = f"    {row.op.ljust(operations)}  {row.dtype.ljust(8)}  {', '.join(marks(row))}".rstrip()
            yield Line(words, (f"{row.count:,}", shown(row.message_bytes), shown(row.wire_bytes), ""))
            if phases:
                yield from _phases(row, shown)


def _by_group(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: -row.wire_bytes):
        groups.setdefault(row.group, []).append(row)
    return sorted(groups.items(), key=lambda item: -total_wire_bytes(item[1]))


def _group_text(group: str, row: Row) -> str:
    return ", ".join(part for part in (group, f"{row.size} ranks", place_text(row.placement)) if part)


def _phases(row: Row, shown: Bytes) -> Iterator[Line]:
    for share in row.phases:
        sent = wire_bytes(row.op, row.size, share.message_bytes)
        cells = (f"{share.count:,}", shown(share.message_bytes), shown(sent), "")
        yield Line(f"      {share.phase}", cells, "dim")


def _legend(volume: Volume, out: Console) -> None:
    """What the marks mean that occur, and what was taken where the recipe is silent."""
    seen = {mark for stage in volume.stages for row in stage.rows for mark in marks(row)}
    rows = [[(mark, "yellow"), (text, "")] for mark, text in LEGEND.items() if mark in seen]
    if volume.assumed:
        rows.append([("assumed", "yellow"), (", ".join(volume.assumed), "")])
    if rows:
        out.print()
        grid(out, rows)


# --- nodes -----------------------------------------------------------------------------------------


def _between_nodes(volume: Volume, shown: Bytes, out: Console, *, each: bool) -> None:
    node = volume.layout.node
    if node is None:
        title(out, "Between nodes: unknown without cluster.gpu or cluster.gpus_per_node")
        return
    pairs = volume.between_nodes()
    if not pairs:
        title(out, "Between nodes: nothing, NVLink joins all ranks")
        return
    sums: dict[int, int] = {}
    for (source, _), moved in pairs.items():
        sums[source] = sums.get(source, 0) + moved
    most = max(sums, key=lambda source: (sums[source], -source))
    title(out, f"Between nodes of {node} GPUs: node {most} sends most, {shown(sums[most])}")
    if each:
        grid(out, [[(shown(moved), ""), (f"{a} → {b}", "")] for (a, b), moved in pairs.items()])
        return
    grid(out, [[(moved, ""), (_few(names), "")] for moved, names in _pairs_by_bytes(pairs, shown).items()])


def _pairs_by_bytes(pairs: dict[tuple[int, int], int], shown: Bytes) -> dict[str, list[str]]:
    """The pairs that move the same, as far as is shown, the largest first; both directions as one where they do."""
    found: dict[str, list[str]] = {}
    for (a, b), moved in sorted(pairs.items(), key=lambda item: -item[1]):
        text, back = shown(moved), pairs.get((b, a))
        both = back is not None and shown(back) == text
        if not both or a < b:
            found.setdefault(text, []).append(f"{a} ↔ {b}" if both else f"{a} → {b}")
    return found


def _few(names: Sequence[str]) -> str:
    more = len(names) - _PAIRS_SHOWN
    shown = ", ".join(names[:_PAIRS_SHOWN])
    return f"{shown} and {more} more, which --nodes lists" if more > 0 else shown


# --- levers ----------------------------------------------------------------------------------------


def _levers(levers: Sequence[Lever], shown: Bytes, out: Console) -> None:
    if not levers:
        title(out, "No switch of the recipe changes what a rank sends by 0.1 %")
        return
    title(out, "Largest levers, by what a rank sends on average (not by memory or time)")
    rows = []
    for lever in levers:
        verb, style = ("saves", "green") if lever.change < 0 else ("costs", "red")
        amount = f"{shown(abs(lever.change))}, {percent(abs(lever.share), 1)}"
        rows.append([(lever.what, ""), (verb, style), (amount, ""), (" ".join(lever.overrides), "dim")])
    grid(out, rows)
