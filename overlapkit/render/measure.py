"""A measurement as one screen: what ranks moved in each group, how long it took and what of it was exposed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import IO, TYPE_CHECKING

from overlapkit.errors import printable
from overlapkit.measure.intervals import Times
from overlapkit.measure.measured import Measured, MeasuredRow, RankMeasured, Unattributed
from overlapkit.measure.row_comparison import Number
from overlapkit.measure.skew import Skew
from overlapkit.render.text import grid, print_on, title
from overlapkit.render.volume import Bytes
from overlapkit.render.volume_table import Line, human, measure, percent, ranks_text, to_the_byte, write_lines
from overlapkit.volume.rows import wire_numerator

if TYPE_CHECKING:
    from rich.console import Console

KINDS = {
    "nccl_log": "NCCL log",
    "torch_trace": "PyTorch trace",
    "nsys": "Nsight Systems",
    "nccl_inspector": "NCCL Inspector",
    "recorder": "recorder",
}
_BYTE_TITLES = ("calls", "message", "sent", "share")
_TIME_TITLES = ("time", "exposed", "hidden", "GB/s")
_FEW_SOURCES = 3
_LEAST_SKEW_US = 1.0
_MOST = 8  # lines of one kind that are shown before the rest is counted


def print_measured(found: Measured, stream: IO[str], *, exact: bool) -> None:
    """Tables of ranks that moved the same, then skew, what has no group, and what could not be read."""
    shown = to_the_byte if exact else human

    def write(out: Console) -> None:
        _head(found, out)
        _tables(found, shown, out)
        if found.skew is not None:
            _skew(found.skew, out)
        write_rest(found, found.notes, out)

    print_on(stream, write)


def of_steps(steps: int, *, whole_input: bool) -> str:
    """What the figures of an input are an average of."""
    counted = _count(steps, "step")
    return f"the whole input as {counted}" if whole_input else counted


def number_text(number: Number) -> str:
    """Calls per step; several steps may not share them evenly."""
    return f"{int(number):,}" if number == int(number) else f"{float(number):,.2f}"


def time_text(time_us: float) -> str:
    """Microseconds in the unit that suits them."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if time_us >= size:
            return f"{time_us / size:,.2f} {unit}"
    return f"{time_us:,.1f} µs"


def per_step(rank: RankMeasured) -> bool:
    """Whether the rank's rows are shown per optimizer step; else over its whole input."""
    return bool(rank.rows) and all(row.per_step is not None for row in rank.rows)


def figures(row: MeasuredRow, *, step: bool) -> tuple[Number, Number]:
    """Calls and message bytes of a row."""
    if step and row.per_step is not None:
        return row.per_step.count, row.per_step.message_bytes
    return row.count, row.message_bytes


def folded(ranks: Sequence[RankMeasured]) -> list[list[RankMeasured]]:
    """Ranks that moved the same, whatever it took them, in the order of their first."""
    found: dict[tuple[object, ...], list[RankMeasured]] = {}
    for rank in ranks:
        step = per_step(rank)
        moved = tuple((row.group, row.size, row.op, row.dtype, figures(row, step=step)) for row in rank.rows)
        found.setdefault((rank.pipeline_rank, rank.kind, rank.steps, step, moved), []).append(rank)
    return list(found.values())


def label(ranks: Sequence[RankMeasured]) -> str:
    """The ranks of one table: their stage and numbers, as far as they are known."""
    numbers = [range(rank.rank, rank.rank + 1) for rank in ranks if rank.rank is not None]
    if len(numbers) < len(ranks):
        return "A rank that is unknown" if len(ranks) == 1 else f"{len(ranks)} ranks, some unknown"
    stage = ranks[0].pipeline_rank
    known = sorted(set(numbers), key=lambda each: each.start)
    text = f"rank{'s' if len(known) > 1 else ''} {ranks_text(known)}"
    return text.capitalize() if stage is None else f"Stage {stage}, {text}"


# --- tables ----------------------------------------------------------------------------------------


def _head(found: Measured, out: Console) -> None:
    # Several inputs may be of one rank; those of which it is unknown are taken for different ones.
    kinds = Counter(kind for kind, _ in {(r.kind, r.source if r.rank is None else r.rank) for r in found.ranks})
    inputs = ", ".join(f"{KINDS[kind]} of {_count(many, 'rank')}" for kind, many in kinds.items())
    out.print(inputs or "nothing", style="bold", end="")
    step = {per_step(rank) for rank in found.ranks}
    over = {frozenset({True}): "optimizer step", frozenset({False}): "input"}.get(frozenset(step), "input or step")
    out.print(f"  bytes per rank and {over}")
    for mesh in found.meshes:
        layout = mesh.layout
        sizes = {"TP": layout.tp, "PP": layout.pp, "CP": layout.cp, "EP": layout.ep, "DP": layout.dp}
        axes = " · ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis in ("TP", "PP", "DP"))
        of = f"{_count(layout.world_size, 'rank')}: " if len(found.meshes) > 1 else ""
        out.print(f"{of}{axes}, {'inferred from the input' if mesh.inferred else 'from the recipe'}")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _tables(found: Measured, shown: Bytes, out: Console) -> None:
    timed = any(rank.overlap is not None or any(row.time_us for row in rank.rows) for rank in found.ranks)
    groups = folded(found.ranks)
    tables = [list(_table(ranks, shown, timed=timed)) for ranks in groups]
    if not tables:
        return
    widths, label_width = measure(line for table in tables for line in table)
    for table, ranks in zip(tables, groups, strict=True):
        out.print()
        write_lines(out, table, widths, label_width)
        grid(out, [[(name, "dim"), (words, "dim")] for name, words in _origin(ranks, shown)])


def _origin(ranks: Sequence[RankMeasured], shown: Bytes) -> Iterator[tuple[str, str]]:
    """What a table was read from, what its steps were told by, and the rows that have nothing in them."""
    names = ", ".join(rank.source for rank in ranks[:_FEW_SOURCES])
    yield "from", names if len(ranks) <= _FEW_SOURCES else f"{names} and {len(ranks) - _FEW_SOURCES} more"
    rank = ranks[0]
    if rank.steps_by is not None:
        words = _count(rank.steps, "complete step") if rank.steps else "one mark, so that all counts as one step"
        yield "steps", f"{words}, by {rank.steps_by}"
    for group, ties in {row.group: row.ties for row in rank.rows if row.ties}.items():
        yield "ties", printable(f"{group} may as well be {', '.join(ties)}", limit=300)
    for row in rank.rows:
        if not _in_table(row, step=per_step(rank)):
            words = f"{row.group} {row.op} {row.dtype}: {_count(row.count, 'call')}, {shown(row.message_bytes)}"
            yield "outside", printable(words, limit=300)


def _in_table(row: MeasuredRow, *, step: bool) -> bool:
    """Whether any of the row's calls are in what the table shows."""
    return figures(row, step=step)[0] > 0


def _table(ranks: Sequence[RankMeasured], shown: Bytes, *, timed: bool) -> Iterator[Line]:
    """The groups that send most first, a line for each and one for each of its operations."""
    rank, step = ranks[0], per_step(ranks[0])
    whole = _sent(rank.rows, step=step)
    of = "step" if step else "input"
    head = f"{label(ranks)}: each sends {shown(whole)} per {of}" if rank.rows else f"{label(ranks)}: nothing attributed"
    yield Line(head, (*_BYTE_TITLES, *(_TIME_TITLES if timed else ())), "bold")
    if any(rank.overlap is not None for rank in ranks):
        whole_sent = shown(whole) if rank.rows else "unknown"
        yield Line("  all groups", ("", "", whole_sent, "", *_time_cells(_times(ranks, None)), ""))
    for (group, ranks_of), rows in _by_group([row for row in rank.rows if _in_table(row, step=step)], step=step):
        sent = _sent(rows, step=step)
        cells = ("", "", *((shown(sent), percent(sent, whole)) if rows[0].size else ("", "")))
        times = (*_time_cells(_times(ranks, group)), "") if timed else ()
        size = _count(ranks_of, "rank") if ranks_of else "size unknown"
        doubt = "" if rows[0].confidence == "exact" else rows[0].confidence
        words = ", ".join(filter(None, (group, size, doubt)))
        yield Line(f"  {printable(words, limit=300)}", (*cells, *times), "cyan")
        for row in rows:
            yield _row(row, ranks, shown, step=step, timed=timed)


def _row(row: MeasuredRow, ranks: Sequence[RankMeasured], shown: Bytes, *, step: bool, timed: bool) -> Line:
    count, message = figures(row, step=step)
    words = f"    {printable(f'{row.op}  {row.dtype}')}"
    cells = (number_text(count), shown(float(message)), shown(_sent([row], step=step)) if row.size else "", "")
    times = (_summed(row, ranks, step=step), "", "", _bandwidth(row, ranks)) if timed else ()
    return Line(words, (*cells, *times))


def _by_group(rows: Sequence[MeasuredRow], *, step: bool) -> list[tuple[tuple[str, int], list[MeasuredRow]]]:
    groups: dict[tuple[str, int], list[MeasuredRow]] = {}
    for row in sorted(rows, key=lambda row: -_sent([row], step=step)):
        groups.setdefault((row.group, row.size), []).append(row)
    return sorted(groups.items(), key=lambda item: -_sent(item[1], step=step))


def _sent(rows: Sequence[MeasuredRow], *, step: bool) -> int:
    """Ring-equivalent bytes, rounded down once, not row by row."""
    moved = ((row.op, row.size, figures(row, step=step)[1]) for row in rows if row.size)
    return int(sum(Fraction(wire_numerator(op, size, 1), size) * message for op, size, message in moved))


def _times(ranks: Sequence[RankMeasured], group: str | None) -> Times | None:
    """The mean time of a group (None: of all communication) over the ranks and their complete steps, if any."""
    parts: list[Times] = []
    for rank in ranks:
        if rank.overlap is None:
            continue
        for part in rank.overlap.steps or (rank.overlap,):
            times = part.total if group is None else part.groups.get(group)
            parts.append(times or Times(time_us=0.0, exposed_us=0.0))
    if not parts:
        return None
    many = len(parts)
    return Times(time_us=sum(part.time_us for part in parts) / many, exposed_us=sum(p.exposed_us for p in parts) / many)


def _time_cells(times: Times | None) -> tuple[str, str, str]:
    if times is None or not times.time_us:
        return ("", "", "")
    hidden = percent(times.hidden_us, times.time_us)
    return time_text(times.time_us), time_text(times.exposed_us), hidden


def _summed(row: MeasuredRow, ranks: Sequence[RankMeasured], *, step: bool) -> str:
    """The time of the calls, added up, where nothing says when they ran; the mean of the ranks."""
    part = float(figures(row, step=step)[0] / Fraction(row.count))
    mean = _mean(None if each.times is not None else each.summed_us for each in _same_rows(row, ranks))
    return time_text(part * mean) if mean else ""


def _bandwidth(row: MeasuredRow, ranks: Sequence[RankMeasured]) -> str:
    """The bus bandwidth, the mean of the ranks."""
    mean = _mean(each.busbw_gbps for each in _same_rows(row, ranks))
    return "" if mean is None else f"{mean:,.1f}"


def _same_rows(row: MeasuredRow, ranks: Sequence[RankMeasured]) -> Iterator[MeasuredRow]:
    key = (row.group, row.size, row.op, row.dtype)
    return (each for rank in ranks for each in rank.rows if (each.group, each.size, each.op, each.dtype) == key)


def _mean(figures: Iterable[float | None]) -> float | None:
    known = [one for one in figures if one is not None]
    return sum(known) / len(known) if known else None


# --- below the tables ------------------------------------------------------------------------------


def _skew(found: Skew, out: Console) -> None:
    title(out, "Skew between ranks")
    rows = []
    if found.steps:
        slowest = Counter(step.slowest.rank for step in found.steps)
        rank, times = slowest.most_common(1)[0]
        longest = max(step.slowest.time_us - step.fastest.time_us for step in found.steps)
        words = f"rank {rank} is slowest in {times} of {_count(len(found.steps), 'step')}; ranks differ by up to"
        rows.append([("steps", ""), (f"{words} {time_text(longest)}", "")])
    uneven = [one for one in found.groups if one.step is None and one.skew_us >= _LEAST_SKEW_US]
    whole = sorted(uneven, key=lambda one: -one.skew_us)
    for one in whole[:_MOST]:
        waited = f"rank {one.shortest.rank} is waited for, rank {one.longest.rank} waits longest"
        rows.append([(one.group, ""), (f"{time_text(one.skew_us)}: {waited} (ranks {_few(one.ranks)})", "")])
    if len(whole) > _MOST:
        rows.append([("", ""), (f"and {len(whole) - _MOST} groups more, which --format json has", "dim")])
    grid(out, rows or [[("none", "dim")]])


def _few(ranks: Sequence[int]) -> str:
    return ranks_text(range(rank, rank + 1) for rank in ranks)


def write_rest(found: Measured, notes: Sequence[str], out: Console) -> None:
    """What has no group, what moved nothing, what could not be read, and what the sources lack."""
    _unattributed(found, out)
    alone = sum(row.count for rank in found.ranks for row in rank.single_rank)
    if alone:
        title(out, f"Groups of one rank: {_count(alone, 'call')}, which move nothing")
    if found.problems:
        title(out, f"Not read: {_count(len(found.problems), 'problem')}")
        _some([[(str(problem), "yellow")] for problem in found.problems], out)
    if notes:
        title(out, "Notes")
        _some([[(note, "dim")] for note in dict.fromkeys(notes)], out)


def _unattributed(found: Measured, out: Console) -> None:
    lost = [(rank, one) for rank in found.ranks for one in rank.unattributed]
    if not lost:
        return
    known = [one.message_bytes for _, one in lost if one.message_bytes is not None]
    total = [human(sum(known))] if known else []
    unknown = ["kernels of unknown bytes"] if len(known) < len(lost) else []
    title(out, f"Not attributed to a group: {' and '.join([*total, *unknown])}")
    lost.sort(key=lambda pair: (-(pair[1].message_bytes or 0), -(pair[1].time_us or 0.0)))
    rows = []
    for rank, one in lost:
        where = printable(rank.source if rank.rank is None else f"rank {rank.rank}", limit=60)
        rows.append([(f"{where}, {_lost_words(one)}", ""), (one.why, "yellow")])
    _some(rows, out)


def _lost_words(one: Unattributed) -> str:
    """Calls with their bytes, kernels with their time of the whole input."""
    if one.message_bytes is not None:
        return f"{one.communicator}: {_count(one.count, one.op + ' call')}, {human(one.message_bytes)}"
    words = _count(one.count, f"{one.op} kernel")
    if one.time_us is not None:
        words += f", {time_text(one.time_us)}"
    return words if one.exposed_us is None else f"{words}, {time_text(one.exposed_us)} of it exposed"


def _some(rows: list[list[tuple[str, str]]], out: Console) -> None:
    shown = rows[:_MOST]
    if len(rows) > _MOST:
        more = (f"and {len(rows) - _MOST:,} more, which --format json has", "dim")
        shown.append([more, *[("", "")] * (len(rows[0]) - 1)])
    grid(out, shown)
