"""The plan as one screen that a person reads from top to bottom."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import IO, TYPE_CHECKING

from overlapkit.errors import printable
from overlapkit.plan import Decision, Plan, reason
from overlapkit.rules.estimated import ESTIMATED

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 120
# The rows of the first table: group, what overlaps, the setting that says so.
_FEATURES = (
    ("TP", "userbuffers", "model.tp_comm_overlap"),
    ("PP", "sends and receives", "model.overlap_p2p_comm"),
    ("PP", "embedding weight gradient", "model.defer_embedding_wgrad_compute"),
    ("DP", "gradient reduction", "ddp.overlap_grad_reduce"),
    ("DP", "parameter gathering", "ddp.overlap_param_gather"),
    ("EP", "all-to-all", "model.overlap_moe_expert_parallel_comm"),
    ("EP", "delayed weight gradients", "model.delay_wgrad_compute"),
)
# Rows that stand there even when nobody asked; the others only where there is something to say.
_ALWAYS = {("TP", "userbuffers"), ("DP", "gradient reduction"), ("DP", "parameter gathering")}
_FRAMEWORKS = {"megatron-bridge": "Megatron-Bridge", "megatron-lm": "Megatron-LM"}
STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}
_NARROW = 40  # columns that the wrapping text must have; with fewer it gets lines of its own
_SPACES_AT_END = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$")  # before or between colour codes


def print_on(stream: IO[str], write: Callable[[Console], None], *, at_least: int | None = None) -> None:
    """Let ``write`` fill a console and put the result on ``stream``.

    On a terminal: colour (plain text where NO_COLOR is set) and its width; elsewhere plain text of 120 columns.
    ``at_least`` columns in any case, for tables that would lose what does not fit. No line has spaces at its end.
    """
    from io import StringIO

    from rich.console import Console

    terminal = stream.isatty()
    buffer = StringIO()
    out = Console(
        file=buffer,
        force_terminal=terminal and not os.environ.get("NO_COLOR"),
        width=None if terminal else PIPED_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )
    out.width = max(out.width, at_least or 0)
    write(out)
    lines = (_SPACES_AT_END.sub(r"\1", line) for line in buffer.getvalue().splitlines())
    stream.write("".join(f"{line}\n" for line in lines))


def print_plan(plan: Plan, stream: IO[str]) -> None:
    """The whole plan on ``stream``."""
    print_on(stream, lambda out: write_plan(plan, out))


def write_plan(plan: Plan, out: Console) -> None:
    _head(plan, out)
    _features(plan, out)
    _notes(plan, out)
    _environment(plan, out)
    _findings(plan, out)


def grid(out: Console, rows: Iterable[Sequence[tuple[str, str]]]) -> None:
    """Rows of (text, style) cells in aligned columns; the last column wraps, below the others on a narrow terminal."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    cells = [[Text(printable(text, limit=1000), style) for text, style in row] for row in rows]
    fixed = [max(row[index].cell_len for row in cells) for index in range(len(cells[0]) - 1)]
    if sum(fixed) + 2 * len(fixed) + 2 + _NARROW > out.width:
        for row in cells:
            first = Text("  ").join(cell for cell in row[:-1] if cell)
            if first:
                out.print(Padding(first, (0, 0, 0, 2)))
            out.print(Padding(row[-1], (0, 0, 0, 6)))
        return
    table = Table.grid(padding=(0, 2))
    for index in range(len(cells[0])):
        table.add_column(no_wrap=index < len(cells[0]) - 1, overflow="fold")  # a long word loses nothing
    for row in cells:
        table.add_row(*row)
    out.print(Padding(table, (0, 0, 0, 2)))


def title(out: Console, text: str) -> None:
    out.print()
    out.print(text, style="bold")


def _head(plan: Plan, out: Console) -> None:
    text, style = verdict(plan)
    out.print(printable(plan.recipe, limit=300), style="bold", end="")
    out.print(f"  {text}", style=style)
    out.print(target_line(plan))
    out.print(mesh_line(plan))


def verdict(plan: Plan) -> tuple[str, str]:
    """Whether the job starts, in words, and their style."""
    errors = sum(d.severity == "error" for d in plan.decisions)
    warnings = sum(d.severity == "warning" for d in plan.decisions)
    counts = ", ".join(_count(n, what) for n, what in ((errors, "error"), (warnings, "warning")) if n)
    text = "would fail" if errors else "starts"
    return f"{text} ({counts})" if counts else text, "bold red" if errors else "green"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def target_line(plan: Plan) -> str:
    target = plan.target
    framework = _FRAMEWORKS[target.framework]
    if target.megatron_bridge:
        framework += f" {target.megatron_bridge}"
    engine = f"Transformer Engine {target.transformer_engine}" if target.transformer_engine else "no Transformer Engine"
    return f"{framework} · Megatron-Core {target.megatron_core} · {engine} · torch {target.torch}"


def mesh_line(plan: Plan) -> str:
    p = plan.parallelism
    parts = [f"{p.world_size} × {plan.target.gpu or 'unnamed GPU'}"]
    parts.append(f"TP {p.tp}" + (" with sequence parallelism" if p.sequence_parallel else ""))
    parts.append(f"PP {p.pp}" + (f" in {p.vp} virtual stages" if p.vp else ""))
    if p.cp > 1:
        parts.append(f"CP {p.cp}")
    if p.ep > 1:
        parts.append(f"EP {p.ep} (expert TP {p.etp})")
    parts.append(f"DP {p.dp}")
    if p.num_microbatches:
        parts.append(f"{p.num_microbatches} microbatches")
    return " · ".join(parts)


def _features(plan: Plan, out: Console) -> None:
    title(out, "What overlaps")
    rows = []
    for group, what, setting in _FEATURES:
        on = bool(plan.settings[setting])
        because, code = why(plan, setting, on)
        expected = (group, what) in _ALWAYS or (what == "all-to-all" and plan.parallelism.ep > 1)
        if not on and not code and not expected:
            continue
        fails = on and any(d.severity == "error" and d.subject == setting for d in plan.decisions)
        rows.append(
            [
                ("fails", "bold red") if fails else ("on", "green") if on else ("off", "dim"),
                (group, ""),
                (what, ""),
                (code, "cyan"),
                (because, ""),
            ]
        )
    grid(out, rows)


def why(plan: Plan, setting: str, on: bool) -> tuple[str, str]:
    """Why a setting has its value, and the rule: the first error about it, else the last of the gravest decisions."""
    decided = [d for d in plan.decisions if d.code not in ESTIMATED]  # which say what it is worth, not why it is so
    about = [d for d in decided if d.subject == setting and not (_idle(plan, d) and not on)]
    if setting == "model.tp_comm_overlap" and on:
        about += [d for d in decided if d.subject in ("preset", "model.tp_comm_overlap_cfg")]
    if not about:
        return ("as asked" if on else "not asked for"), ""
    errors = [d for d in about if d.severity == "error"]
    warnings = [d for d in about if d.severity == "warning"]
    best = errors[0] if errors else (warnings or about)[-1]
    return best.because, best.code


def _idle(plan: Plan, decision: Decision) -> bool:
    """A routine word about pipeline messages where there is no pipeline."""
    return plan.parallelism.pp == 1 and decision.severity == "info" and decision.subject == "model.overlap_p2p_comm"


def _notes(plan: Plan, out: Console) -> None:
    """What is worth knowing beyond the first table and the environment."""
    told = {setting for _, _, setting in _FEATURES} | {"preset", "model.tp_comm_overlap_cfg"}
    routine = {"DP001", "DP002", "PP001", "PP002", "PP012"}  # one per setting, the table has their gist
    notes = [
        d
        for d in plan.decisions
        if d.severity == "info"
        and (d.subject not in told or d.code in ESTIMATED)
        and not d.subject.startswith("env.")
        and d.code not in routine
    ]
    if notes:
        title(out, "Good to know")
        grid(out, [[(d.code, "cyan"), (d.subject, ""), (_note(d), "")] for d in notes])


def _note(decision: Decision) -> str:
    return f"{decision.because}; {decision.fix}" if decision.fix else decision.because


def _environment(plan: Plan, out: Console) -> None:
    title(out, "Export before launch")
    reasons = {d.subject: d for d in plan.decisions if d.subject.startswith("env.")}
    rows = []
    for name, value in plan.env.items():
        found = reasons[f"env.{name}"]
        rows.append([(f"{name}={value}", ""), (found.code, "cyan"), (found.because, "")])
    grid(out, rows or [[("nothing", "dim")]])


def _findings(plan: Plan, out: Console) -> None:
    """Errors and warnings, the gravest last, next to the prompt."""
    for severity, heading in (("warning", "Warnings"), ("error", "Fix first")):
        found = [d for d in plan.decisions if d.severity == severity]
        if not found:
            continue
        title(out, heading)
        rows: list[list[tuple[str, str]]] = []
        for d in found:
            rows.append([(d.code, STYLES[severity]), (d.subject, ""), (reason(d), "")])
            if d.fix:
                rows.append([("", ""), ("", ""), (f"→ {d.fix}", "green")])
        grid(out, rows)
