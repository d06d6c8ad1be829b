"""A search as one screen: the fastest layouts, the Pareto front, and what became of the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from overlapkit.errors import printable
from overlapkit.render.text import print_on, title
from overlapkit.render.volume_csv import written
from overlapkit.search.ranking import Ranking
from overlapkit.search.result import Found, Search

if TYPE_CHECKING:
    from rich.console import Console

_GIB = 2**30
_REASONS = 6  # of the refusals that are told
_FRONT = 12  # layouts of the front that are shown; JSON has all
_NAMES = ("TP", "grads", "params", "p2p", "EP", "delayed wgrad")  # of Overlaps
_RIGHT = frozenset({"step", "80 % lie in", "GiB", "GPUs", "TP", "PP", "VP", "CP", "EP", "MBS"})


def print_search(found: Search, stream: IO[str]) -> None:
    """The whole answer on ``stream``."""
    print_on(stream, lambda out: _write(found, out), at_least=100)


def _write(found: Search, out: Console) -> None:
    capacity = found.capacity_bytes / _GIB
    out.print(f"{printable(found.recipe)}: {found.judged:,} layouts on {found.gpu}, {capacity:.0f} GiB each")
    if found.best:
        title(out, "Fastest, each with the overlaps that are best for it")
        _table(found.best, out)
    if len(found.front) > 1:
        title(out, "Less memory: the fastest layout for each")
        _table(_spread(found.front), out)
        if len(found.front) > _FRONT:
            out.print(f"{_FRONT} of {len(found.front)} layouts; --format json has all.", style="dim")
    title(out, "Layouts")
    _counts(found, out)
    out.print(
        f"Memory may be {100 * found.memory_error:.0f} % above what is predicted; layouts that leave no room for it "
        "count as too large. Every layout shown passed all rules.",
        style="dim",
    )


def _spread(front: Sequence[Found]) -> Sequence[Found]:
    """As many as are shown, from end to end."""
    if len(front) <= _FRONT:
        return front
    return [front[round(index * (len(front) - 1) / (_FRONT - 1))] for index in range(_FRONT)]


def _table(found: Sequence[Found], out: Console) -> None:
    from rich.table import Table

    rows = [_row(each) for each in found]
    several = {name for name in rows[0] if len({row[name] for row in rows}) > 1}
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    names = [name for name in rows[0] if name in several or name not in ("GPUs", "VP", "CP", "EP", "SP")]
    for name in names:
        table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=name != "overlaps")
    for row in rows:
        table.add_row(*(row[name] for name in names))
    out.print(table)
    same = {name: rows[0][name] for name in rows[0] if name not in names and rows[0][name] not in ("1", "no")}
    if same:
        out.print(f"all with {', '.join(f'{name} {value}' for name, value in same.items())}", style="dim")


def _row(found: Found) -> dict[str, str]:
    point = found.layout.point
    low, high = found.interval
    return {
        "step": _seconds(found.seconds),
        "80 % lie in": f"{_seconds(low)}–{_seconds(high)}",
        "GiB": f"{found.memory.total / _GIB:.1f}",
        "GPUs": str(point.gpus),
        "TP": str(point.tp),
        "SP": "yes" if found.layout.sequence_parallel else "no",
        "PP": str(point.pp),
        "VP": str(point.vp),
        "CP": str(point.cp),
        "EP": str(point.ep),
        "MBS": str(point.micro_batch_size),
        "recompute": found.layout.recompute,
        "overlaps": ", ".join(name for name, on in zip(_NAMES, found.overlaps, strict=True) if on) or "none",
    }


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _counts(found: Search, out: Console) -> None:
    ranked = f"{found.ranked:>13,}  legal and fit the memory"
    if found.interrupted:
        ranked += f" before the interruption, {found.points:,} of {found.all_points:,} points of the space"
    out.print(ranked)
    for reason, count in found.too_large.items():
        out.print(f"{count:>13,}  {reason}")
    refused = list(found.refused.items())
    for reason, count in refused[:_REASONS]:
        out.print(f"{count:>13,}  {printable(reason, limit=100)}")
    rest = sum(count for _, count in refused[_REASONS:])
    if rest:
        out.print(f"{rest:>13,}  refused for other reasons")


def to_csv(found: Search) -> str:
    """A line per layout: the best with their rank, then those of the front that are not among them."""
    best = {(each.layout, each.overlaps): rank for rank, each in enumerate(found.best, start=1)}
    front = {(each.layout, each.overlaps) for each in found.front}
    others = [each for each in found.front if (each.layout, each.overlaps) not in best]
    lines: list[Mapping[str, Any]] = []
    for each in (*found.best, *others):
        key = (each.layout, each.overlaps)
        values = each.to_dict()
        lines.append(
            {
                "rank": best.get(key),
                "on_front": key in front,
                "step_time_s": each.seconds,
                "low_s": each.interval[0],
                "high_s": each.interval[1],
                "tokens_per_s_per_gpu": each.tokens_per_s_per_gpu,
                "memory_bytes": each.memory.total,
                **values["layout"],
                **values["overlaps"],
                "overrides": " ".join(each.changes),
            }
        )
    return written(tuple(lines[0]) if lines else ("rank",), lines)


@contextmanager
def progress() -> Iterator[Callable[[Ranking, int], None]]:
    """A bar on stderr while a search runs, only where a person sees it."""
    if not sys.stderr.isatty():
        yield lambda ranking, size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR")))
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("layouts", total=None)

        def report(ranking: Ranking, size: int) -> None:
            best = f", best {_seconds(ranking.best[0].seconds)}" if ranking.best else ""
            bar.update(task, total=size, completed=ranking.points, description=f"{ranking.judged:,} layouts{best}")

        yield report
