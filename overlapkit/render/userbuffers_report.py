"""What Transformer Engine makes of a configuration, for a person: buffers first, then what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from overlapkit.errors import printable
from overlapkit.presets.checking import Answer
from overlapkit.presets.configurations import Configuration
from overlapkit.render.buffers import mib, write_buffers
from overlapkit.render.text import STYLES, grid, print_on, title
from overlapkit.userbuffers.check import Problem, Report
from overlapkit.userbuffers.releases import taken_for
from overlapkit.versions import parse_version

if TYPE_CHECKING:
    from rich.console import Console

_HEADINGS = (("info", "Good to know"), ("warning", "Warnings"), ("error", "Fix first"))
_MODES = {"none": "BF16 GEMMs", "fp8": "FP8 GEMMs"}


def print_report(answer: Answer, stream: IO[str]) -> None:
    """The configuration's verdict, its buffers, and what is to be said of them."""
    configuration, report, tp = answer.configuration, answer.report, answer.tensor_model_parallel_size

    def write(out: Console) -> None:
        _write_verdict(configuration, report, out)
        parts = [
            f"{configuration.form} · {_engine(answer.transformer_engine)}",
            f"TP {tp}{' (assumed, --tp)' if answer.assumed_tp else ''}",
            "tokens unknown (--tokens)" if configuration.tokens is None else f"{configuration.tokens} tokens",
            "hidden size unknown (--hidden-size)"
            if configuration.hidden_size is None
            else f"hidden {configuration.hidden_size}",
            " and ".join(_MODES[mode] for mode in answer.quantization_modes),
        ]
        out.print(" · ".join(parts), soft_wrap=True)
        if report.buffers:
            out.print()
            write_buffers(
                out,
                report.buffers,
                tensor_model_parallel_size=tp,
                tokens=configuration.tokens,
                hidden_size=configuration.hidden_size,
                named=answer.named,
            )
        if report.bytes is not None:
            out.print(f"{mib(report.bytes)} of buffers on each GPU")
        _write_problems(report.problems, out)

    print_on(stream, write)


def _engine(text: str) -> str:
    known = taken_for(parse_version(text))
    taken = "" if known is None else f" (not known, taken for {known})"
    return f"Transformer Engine {text.strip()}{taken}"


def _write_verdict(configuration: Configuration, report: Report, out: Console) -> None:
    errors, warnings = (sum(p.severity == each for p in report.problems) for each in ("error", "warning"))
    counts = [f"{n} {what}{'s' if n > 1 else ''}" for n, what in ((errors, "error"), (warnings, "warning")) if n]
    text = "fails" if errors else "works"
    out.print(printable(configuration.source, limit=300), style="bold", end="", soft_wrap=True)
    told = f" ({', '.join(counts)})" if counts else ""
    out.print(f"  {text}{told}", style="bold red" if errors else "green")


def _write_problems(problems: Sequence[Problem], out: Console) -> None:
    for severity, heading in _HEADINGS:
        rows = [
            [(problem.code, STYLES[severity]), (problem.layer or "all layers", ""), (_reason(problem), "")]
            for problem in problems
            if problem.severity == severity
        ]
        if rows:
            title(out, heading)
            grid(out, rows)


def _reason(problem: Problem) -> str:
    if problem.raised_at is None:
        return problem.because
    if problem.exception is None:
        return f"{problem.because} (raises at {problem.raised_at})"
    text = f": {problem.message}" if problem.message else ""
    return f"{problem.because} ({problem.raised_at} raises {problem.exception}{text})"
