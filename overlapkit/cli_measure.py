"""The verbs ``measure`` and ``compare``: what logs and traces show, alone and beside a recipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from overlapkit.errors import RecipeError

if TYPE_CHECKING:
    from overlapkit.measure.comparison import Unpaired
    from overlapkit.measure.inputs import InputError


class MeasureFormat(str, Enum):
    text = "text"
    json = "json"
    csv = "csv"


Format = Annotated[MeasureFormat, typer.Option("--format", "-f", help="Form of the answer.")]
Exact = Annotated[bool, typer.Option("--exact", help="Text: bytes to the byte.")]
Steps = Annotated[
    Optional[int],  # noqa: UP045  typer on Python 3.10 reads this form
    typer.Option(min=1, metavar="N", help="Optimizer steps that an input covers, where nothing in it marks them."),
]
Plot = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="FILE.svg|png", help="Draw bars per group; needs matplotlib."),
]
DataBroadcast = Annotated[
    bool, typer.Option("--data-broadcast", help="With the batch that Megatron-LM broadcasts over TP.")
]


def measure_command(
    arguments: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="PATH", help="Logs and traces: files, folders, globs; SECTION.KEY=VALUE for --recipe."),
    ] = None,
    recipe: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="RECIPE", help="The job's recipe: its layout tells groups apart."),
    ] = None,
    output: Format = MeasureFormat.text,
    exact: Exact = False,
    steps: Steps = None,
    plot: Plot = None,
    how: Annotated[
        bool,
        typer.Option(
            "--how",
            help="What a job has to leave behind; what to set in it for the words after it: megatron-lm, bridge, "
            "nemo-run; nccl-log, torch-trace, nsys, nccl-inspector, recorder.",
        ),
    ] = False,
) -> None:
    """What each group of ranks really moved, how long it took and what of it was exposed, from logs and traces.

    Example: overlapkit measure tests/measure/nccl/tied_pp2.r0.log.gz --recipe tests/measure/tied_pp2.yaml
    """
    if how:
        _print_how(arguments or [])
        return
    paths, overrides = _split("measure", arguments or [])
    if overrides and recipe is None:
        raise RecipeError("overrides need --recipe", source="measure")
    _check_plot(plot)
    from overlapkit.measure import measure

    with _progress() as told:
        found = measure(paths, recipe, overrides, steps=steps, progress=told)
    if plot is not None:
        from overlapkit.render.measure_plot import plot_measured

        plot_measured(found, plot)
    if output is MeasureFormat.json:
        _write_json(found.to_dict())
    elif output is MeasureFormat.csv:
        from overlapkit.render.measure_csv import measured_to_csv

        sys.stdout.write(measured_to_csv(found))
    else:
        from overlapkit.render.measure import print_measured

        print_measured(found, sys.stdout, exact=exact)


def compare_command(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML recipe, or a dump of Megatron-Bridge.")],
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="Logs and traces: files, folders, globs; SECTION.KEY=VALUE for RECIPE."),
    ],
    output: Format = MeasureFormat.text,
    exact: Exact = False,
    steps: Steps = None,
    plot: Plot = None,
    data_broadcast: DataBroadcast = False,
) -> None:
    """Predicted against measured, row by row, with likely reasons; exits with 1 when they differ, 3 without a pair.

    Example: overlapkit compare tests/measure/tied_pp2.yaml tests/measure/nccl/tied_pp2.r0.log.gz
    """
    paths, overrides = _split("compare", arguments)
    _check_plot(plot)
    from overlapkit.measure.comparison import compare

    with _progress() as told:
        found = compare(recipe, paths, overrides, data_broadcast=data_broadcast, steps=steps, progress=told)
    if plot is not None:
        from overlapkit.render.measure_plot import plot_comparison

        plot_comparison(found, plot)
    if output is MeasureFormat.json:
        _write_json(found.to_dict())
    elif output is MeasureFormat.csv:
        from overlapkit.render.measure_csv import comparison_to_csv

        sys.stdout.write(comparison_to_csv(found))
    elif found.ranks:
        from overlapkit.render.compare import print_comparison

        print_comparison(found, sys.stdout, exact=exact)
    if not found.ranks:
        raise _nothing_compared(found.unpaired)
    raise typer.Exit(int(not found.equal))


def _nothing_compared(unpaired: Sequence[Unpaired]) -> InputError:
    """Says why the first input has no pair; inputs that could be read are not the same as inputs that were compared."""
    from overlapkit.measure.inputs import InputError

    if not unpaired:
        return InputError("nothing could be compared: the inputs hold no process")
    first, *more = unpaired
    others = f" (and {len(more):,} inputs more)" if more else ""
    return InputError(f"nothing could be compared: {first.source}: {first.why}{others}")


def _split(verb: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The paths and the overrides among the arguments.

    Raises:
        RecipeError: no path is among them.
    """
    from overlapkit.check_paths import is_override

    overrides = [argument for argument in arguments if is_override(argument)]
    paths = [argument for argument in arguments if argument not in overrides]
    if not paths:
        hint = "name files, folders or globs; overlapkit measure --how says what a job has to leave behind"
        raise RecipeError("no log or trace is named", source=verb, hint=hint)
    return paths, overrides


def _check_plot(plot: str | None) -> None:
    if plot is not None:
        from overlapkit.render.plots import check_plot

        check_plot(plot)


def _write_json(value: object) -> None:
    from overlapkit.render.data import to_json

    sys.stdout.write(to_json(value))


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """Bytes read so far and in all, on a terminal, while reading takes its time."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("reading", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("reading", total=None)
        yield lambda more, total: shown.update(task, advance=more, total=total)


def _print_how(words: Sequence[str]) -> None:
    """The instructions for the frameworks and inputs that the words name; without words a table of the inputs."""
    from overlapkit.measure.how import FRAMEWORKS, SOURCES, overview, page

    if not words:
        sys.stdout.write(overview())
        return
    named = [_how_word(word, (*FRAMEWORKS, *SOURCES)) for word in words]
    frameworks: list[str | None] = [word for word in named if word in FRAMEWORKS] or [None]
    sources: list[str | None] = [word for word in named if word in SOURCES] or [None]
    sys.stdout.write("\n".join(page(framework, source) for framework in frameworks for source in sources))


def _how_word(word: str, known: Sequence[str]) -> str:
    """The known word that the given one is or begins.

    Raises:
        RecipeError: it is the beginning of none, or of several.
    """
    from overlapkit.errors import nearest, shown

    begun = [word] if word in known else [each for each in known if word and each.startswith(word)]
    if len(begun) == 1:
        return begun[0]
    if begun:
        raise RecipeError(f"{shown(word)} may be {' or '.join(begun)}", source="--how")
    near = nearest(word, known)
    hint = f"did you mean {near}? " if near else ""
    hint += f"known are {', '.join(known)}"
    raise RecipeError(f"{shown(word)} is no framework and no input", source="--how", hint=hint)
