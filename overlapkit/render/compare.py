"""A comparison as one screen: what differs per stage, likely reasons, overlap as asked, planned and seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING

from overlapkit.errors import printable
from overlapkit.measure.comparison import Comparison, RankComparison
from overlapkit.measure.overlap_seen import OverlapSeen
from overlapkit.measure.row_comparison import Figures, RowComparison
from overlapkit.render.measure import KINDS, number_text, of_steps, time_text, write_rest
from overlapkit.render.text import grid, mesh_line, print_on, target_line, title, why
from overlapkit.render.volume import Bytes
from overlapkit.render.volume_table import (
    ABSENT,
    Line,
    arrow,
    human,
    measure,
    percent,
    ranks_text,
    to_the_byte,
    write_lines,
)

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {
    "equal": "green",
    "differs": "red",
    "not observable": "dim",
    "not predicted": "yellow",
    "not seen": "red",
    "beside steps": "dim",
}
_MOST_UNPAIRED = 8
_FEW_CAUSES = 3


def print_comparison(found: Comparison, stream: IO[str], *, exact: bool) -> None:
    """Tables per stage with ``predicted → measured``, then reasons, overlap, and what was not compared."""
    shown = to_the_byte if exact else human

    def write(out: Console) -> None:
        _head(found, out)
        _stages(found, shown, out)
        _reasons(found, out)
        _overlap(found, out)
        _not_compared(found, out)
        write_rest(found.measured, found.notes, out)

    print_on(stream, write)


def word(row: RowComparison) -> str:
    """The status for people; a predicted row that is not there at all is one of its own."""
    if row.status == "differs" and row.measured is None:
        return "not seen"
    return row.status.replace("_", " ")


def _head(found: Comparison, out: Console) -> None:
    plan = found.configuration.plan
    rows = [row for ranks in _alike(found.ranks) for row in ranks[0].rows]
    counted = f"{len(rows):,} row{'s' if len(rows) != 1 else ''}"
    differing = sum(not row.matches for row in rows)
    out.print(printable(plan.recipe, limit=300), style="bold", end="")
    if found.equal:
        out.print(f"  is what was measured in all {counted}", style="green")
    elif not found.ranks:
        out.print("  nothing could be compared", style="bold red")
    elif not differing:
        out.print(f"  is what was measured in all {counted} that could be compared", style="yellow")
    else:
        out.print(f"  differs from what was measured in {differing:,} of {counted}", style="bold red")
    out.print(target_line(plan))
    out.print(mesh_line(plan))
    for cause, many in Counter(one.why for one in found.unpaired).most_common(_FEW_CAUSES):
        inputs = "1 input is" if many == 1 else f"{many:,} inputs are"
        out.print(f"{inputs} not compared: {printable(cause, limit=300)}", style="yellow")


# --- stages ----------------------------------------------------------------------------------------


def _stages(found: Comparison, shown: Bytes, out: Console) -> None:
    groups = _alike(found.ranks)
    tables = [list(_table(ranks, shown)) for ranks in groups]
    if not tables:
        return
    widths, label_width = measure(line for table in tables for line in table)
    for table, ranks in zip(tables, groups, strict=True):
        out.print()
        write_lines(out, table, widths, label_width)
        rows = [[("equal", "green"), (_same(ranks[0].rows), "dim")]] if _same(ranks[0].rows) else []
        rows += [[("note", "dim"), (note, "dim")] for note in (*_row_notes(ranks[0].rows), *ranks[0].notes)]
        if ranks[0].outside_steps:
            rows.append([("outside", "dim"), (_outside(ranks[0]), "dim")])
        if rows:
            grid(out, rows)


def _outside(rank: RankComparison) -> str:
    """What lies outside the complete steps, and what lies nowhere else."""
    calls, moved = (sum(getattr(one, name) for one in rank.outside_steps) for name in ("count", "message_bytes"))
    inside = {row.group for row in rank.rows if row.measured is not None}
    text = f"{calls:,} calls, {human(moved)}, of set-up and of steps that are cut: not compared"
    alone = dict.fromkeys(one.group for one in rank.outside_steps if one.group not in inside)
    return printable(f"{text}; only there: {', '.join(alone)}" if alone else text, limit=500)


def _row_notes(rows: Sequence[RowComparison]) -> Iterator[str]:
    """What is to be said of a group's rows, once for those of which it is the same."""
    told: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.note is not None and row.status != "not_observable":
            told.setdefault((row.group, row.note), []).append(f"{row.op} {row.dtype}")
    for (group, note), ops in told.items():
        yield printable(f"{group} {', '.join(ops)}: {note}", limit=500)


def _alike(ranks: Sequence[RankComparison]) -> list[list[RankComparison]]:
    """Ranks of which the same is to be said."""
    found: dict[tuple[object, ...], list[RankComparison]] = {}
    for rank in ranks:
        key = (rank.pipeline_rank, rank.kind, rank.steps, rank.whole_input, rank.rows, rank.notes)
        found.setdefault(key, []).append(rank)
    return sorted(found.values(), key=lambda group: group[0].pipeline_rank)


def _table(ranks: Sequence[RankComparison], shown: Bytes) -> Iterator[Line]:
    """The groups with a row that is not equal, and all their rows."""
    first = ranks[0]
    known = [range(rank.rank, rank.rank + 1) for rank in ranks if rank.rank is not None]
    named = f"rank{'s' if len(known) > 1 else ''} {ranks_text(known)}" if known else f"{len(ranks)} inputs"
    source = f"{KINDS[first.kind]}, {of_steps(first.steps, whole_input=first.whole_input)}"
    yield Line(f"Stage {first.pipeline_rank}, {named}: {source}", ("calls", "message", "change", ""), "bold")
    for group, rows in _by_group(first.rows).items():
        if all(row.status == "equal" for row in rows):
            continue
        yield Line(f"  {printable(group)}, {rows[0].size} ranks", ("", "", "", ""), "cyan")
        for row in rows:
            yield _line(row, shown)


def _by_group(rows: Sequence[RowComparison]) -> dict[str, list[RowComparison]]:
    groups: dict[str, list[RowComparison]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups


def _same(rows: Sequence[RowComparison]) -> str:
    groups = _by_group(rows)
    return ", ".join(group for group, found in groups.items() if all(row.status == "equal" for row in found))


def _line(row: RowComparison, shown: Bytes) -> Line:
    sides = (row.predicted, row.measured)
    if row.status == "not_observable":
        sides = (row.predicted, row.predicted)
    calls = arrow(*(ABSENT if side is None else number_text(side.count) for side in sides))
    message = arrow(*(ABSENT if side is None else shown(float(side.message_bytes)) for side in sides))
    status = word(row)
    return Line(f"    {printable(f'{row.op}  {row.dtype}')}", (calls, message, _change(row), status), _STYLES[status])


def _change(row: RowComparison) -> str:
    one, other = row.predicted, row.measured
    if row.status != "differs" or one is None or other is None or one.message_bytes == other.message_bytes:
        return ""
    return _signed(one, other)


def _signed(one: Figures, other: Figures) -> str:
    more = float(other.message_bytes) - float(one.message_bytes)
    return f"{'+' if more > 0 else '−'}{percent(abs(more), float(one.message_bytes))}"


# --- below the tables ------------------------------------------------------------------------------


def _reasons(found: Comparison, out: Console) -> None:
    if found.reasons:
        title(out, "Likely reasons: with each of these changes, on top of the ones before, more rows match")
        rows = []
        for reason in found.reasons:
            words = " or: ".join((reason.what, *reason.or_else))
            to = f"{reason.before} → {reason.after} rows differ"
            change = " ".join((*reason.overrides, *(("--data-broadcast",) if reason.data_broadcast else ())))
            rows.append([(words, ""), (to, "green" if reason.after == 0 else "yellow"), (change, "dim")])
        grid(out, rows)
    elif any(not rank.equal for rank in found.ranks):
        title(out, "No single change of the recipe makes more rows match")


def _overlap(found: Comparison, out: Console) -> None:
    if not found.overlap:
        return
    if all(one.time_us is None for one in found.overlap):
        title(out, "Overlap: no input has times of it")
        return
    title(out, "Overlap: asked for, planned, and seen on a rank on average, over its whole input")
    plan, rows = found.configuration.plan, []
    for one in found.overlap:
        because, code = why(plan, one.setting, one.planned)
        rows.append(
            [
                (one.axis, ""),
                (one.what, ""),
                (_asked(one), ""),
                ("planned on", "green") if one.planned else ("planned off", "dim"),
                (f"{_times(one)}; {because}" + (f" ({code})" if code else ""), ""),
            ]
        )
    grid(out, rows)


def _asked(one: OverlapSeen) -> str:
    words = {True: "asked for", False: "asked off", None: "not asked"}
    return words[one.requested] if one.requested in (True, False, None) else f"asked {one.requested}"


def _times(one: OverlapSeen) -> str:
    if one.time_us is None or one.exposed_us is None or one.hidden_us is None:
        return "no times seen"
    hidden = percent(one.hidden_us, one.time_us)
    return f"{time_text(one.time_us)}, of it {time_text(one.exposed_us)} exposed, {hidden} hidden"


def _not_compared(found: Comparison, out: Console) -> None:
    rows = [[(one.source, ""), (one.why, "yellow")] for one in found.unpaired[:_MOST_UNPAIRED]]
    if len(found.unpaired) > _MOST_UNPAIRED:
        rows.append([("", ""), (f"and {len(found.unpaired) - _MOST_UNPAIRED} more", "yellow")])
    if found.ranks and found.stages_without_input:
        numbers = ", ".join(map(str, found.stages_without_input))
        rows.append([(f"stage {numbers}", ""), ("nothing was measured of it", "dim")])
    if rows:
        title(out, "Not compared")
        grid(out, rows)
