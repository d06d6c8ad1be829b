"""Two configurations of a recipe side by side: what a change does to each group and operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import IO, TYPE_CHECKING, Any

from overlapkit.errors import printable
from overlapkit.render.text import grid, mesh_line, print_on, title
from overlapkit.render.volume import Bytes, head
from overlapkit.render.volume_table import (
    ABSENT,
    Line,
    arrow,
    human,
    marks,
    measure,
    percent,
    ranks_of,
    stages_text,
    to_the_byte,
    write_lines,
)
from overlapkit.volume.configuration import Configuration
from overlapkit.volume.predict import SCHEMA_VERSION, Stage
from overlapkit.volume.rows import Row, total_wire_bytes

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class RowPair:
    """A row before and after, None where there is none; ``known`` is one that is there."""

    before: Row | None
    after: Row | None
    known: Row

    @property
    def sides(self) -> tuple[Row | None, Row | None]:
        return self.before, self.after

    @property
    def differs(self) -> bool:
        return _figures(self.before) != _figures(self.after)


@dataclass(frozen=True, slots=True)
class StagePair:
    """A stage's rows before and after, by group; None for a stage that one of them does not have."""

    before: Stage | None
    after: Stage | None

    @property
    def rows(self) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
        return (self.before.rows if self.before else (), self.after.rows if self.after else ())

    def groups(self) -> dict[str, list[RowPair]]:
        """Every group's rows, by operation and type."""
        one, other = ({(r.group, r.op, r.dtype, not r.observable): r for r in rows} for rows in self.rows)
        groups: dict[str, list[RowPair]] = {}
        for key in sorted({*one, *other}):
            groups.setdefault(key[0], []).append(RowPair(one.get(key), other.get(key), other.get(key) or one[key]))
        return groups


def to_dict(before: Configuration, after: Configuration, diff: Sequence[str], *, phases: bool, nodes: bool) -> Any:
    """Both volumes as plain values, each with the overrides that it has beyond the command's."""
    configurations = [
        {"overrides": list(overrides), "volume": found.volume.to_dict(phases=phases, nodes=nodes)}
        for found, overrides in ((before, ()), (after, diff))
    ]
    return {"schema_version": SCHEMA_VERSION, "configurations": configurations}


def print_diff(
    before: Configuration, after: Configuration, diff: Sequence[str], stream: IO[str], *, exact: bool
) -> None:
    """A table per stage with what differs, ``before → after``; groups that do not are named below it."""
    shown = to_the_byte if exact else human

    def write(out: Console) -> None:
        head(before.plan, out)
        out.print(f"→ {printable(' '.join(diff), limit=1000)}", style="bold")
        if mesh_line(after.plan) != mesh_line(before.plan):
            out.print(mesh_line(after.plan))
        if not after.plan.ok:
            out.print("which would fail: overlapkit resolve says why", style="bold red")
        _stages(before, after, shown, out, exact=exact)
        _sums(before, after, shown, out)

    print_on(stream, write)


# --- stages ----------------------------------------------------------------------------------------


def _stages(before: Configuration, after: Configuration, shown: Bytes, out: Console, *, exact: bool) -> None:
    alike = _alike(before.volume.stages, after.volume.stages)
    tables = [list(_table(pairs, shown, exact=exact)) for pairs in alike]
    widths, label_width = measure(line for table in tables for line in table)
    for table, pairs in zip(tables, alike, strict=True):
        out.print()
        write_lines(out, table, widths, label_width)
        same = [group for group, rows in pairs[0].groups().items() if not any(row.differs for row in rows)]
        if same:
            grid(out, [[("unchanged", "dim"), (", ".join(same), "dim")]])


def _alike(before: Sequence[Stage], after: Sequence[Stage]) -> list[list[StagePair]]:
    """Pairs of stages that follow one another and have the same rows from one to the next."""
    found: list[list[StagePair]] = []
    for pair in (StagePair(*stages) for stages in zip_longest(before, after)):
        if found and found[-1][0].rows == pair.rows:
            found[-1].append(pair)
        else:
            found.append([pair])
    return found


def _table(pairs: Sequence[StagePair], shown: Bytes, *, exact: bool) -> Iterator[Line]:
    """The stages, then the groups that differ, those that change most first, each with its rows that differ.

    Exact figures leave no room for the change.
    """

    def line(words: str, style: str, calls: str, message: str, sent: Sequence[int | None]) -> Line:
        texts = [ABSENT if figure is None else shown(figure) for figure in sent]
        change = () if exact else (_change(sent[0] or 0, sent[1] or 0, shown),)
        return Line(words, (calls, message, arrow(*texts), *change), style)

    first = pairs[0]
    yield Line(_label(pairs), ("calls", "message", "sent", *(() if exact else ("change",))), "bold")
    whole = [stage.wire_bytes() if stage else None for stage in (first.before, first.after)]
    yield line("  all groups", "bold", "", "", whole)
    changed = {group: rows for group, rows in first.groups().items() if any(row.differs for row in rows)}
    for group, rows in sorted(changed.items(), key=lambda item: -abs(_sent(item[1])[1] - _sent(item[1])[0])):
        yield line(f"  {_group_text(group, rows)}", "cyan", "", "", _sent(rows))
        for pair in rows:
            if pair.differs:
                words = f"    {pair.known.op}  {pair.known.dtype}  {', '.join(marks(pair.known))}".rstrip()
                calls = arrow(*(f"{side.count:,}" if side else ABSENT for side in pair.sides))
                message = arrow(*(shown(side.message_bytes) if side else ABSENT for side in pair.sides))
                yield line(words, "", calls, message, [side.wire_bytes if side else None for side in pair.sides])


def _label(pairs: Sequence[StagePair]) -> str:
    sides = [[pair.before for pair in pairs if pair.before], [pair.after for pair in pairs if pair.after]]
    numbers = [stage.pipeline_rank for stage in sides[0] or sides[1]]
    return f"{stages_text(numbers)}, ranks {arrow(*(ranks_of(side) if side else ABSENT for side in sides))}"


def _group_text(group: str, rows: Sequence[RowPair]) -> str:
    sizes = dict.fromkeys(row.size for side in (0, 1) for pair in rows if (row := pair.sides[side]))
    return f"{group}, {arrow(*map(str, sizes))} ranks"


def _sent(rows: Sequence[RowPair]) -> tuple[int, int]:
    before = total_wire_bytes(row.before for row in rows if row.before)
    return before, total_wire_bytes(row.after for row in rows if row.after)


def _figures(row: Row | None) -> tuple[int, ...]:
    return () if row is None else (row.size, row.count, row.message_bytes)


def _change(before: int, after: int, shown: Bytes) -> str:
    if before == after:
        return "none"
    return f"{'+' if after > before else '−'}{shown(abs(after - before))}"


# --- the whole job -----------------------------------------------------------------------------------


def _sums(before: Configuration, after: Configuration, shown: Bytes, out: Console) -> None:
    jobs = before.job_bytes, after.job_bytes
    text = f"All ranks together send {arrow(shown(jobs[0]), shown(jobs[1]))}"
    if jobs[0] != jobs[1]:
        text += f", {percent(abs(jobs[1] - jobs[0]), jobs[0])} {'less' if jobs[1] < jobs[0] else 'more'}"
    title(out, text)
    if before.volume.layout.node is not None and after.volume.layout.node is not None:
        nodes = [sum(found.volume.between_nodes().values()) for found in (before, after)]
        out.print(f"of it between nodes {arrow(shown(nodes[0]), shown(nodes[1]))}")
