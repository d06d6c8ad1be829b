"""The verb ``search``: the fastest layouts of a recipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from overlapkit.cli_options import refuse_script
from overlapkit.errors import RecipeError

if TYPE_CHECKING:
    from overlapkit.search.result import Found

_INTERRUPTED = 130
_MOST_SHOWN = 1_000
_MOST_WORKERS = 1_024


class SearchFormat(str, Enum):
    text = "text"
    json = "json"
    csv = "csv"


def _range(name: str, help_text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(name, metavar="SIZES", help=help_text)
    return option


def search_command(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML recipe, or a dump of Megatron-Bridge.")],
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045  typer on Python 3.10 reads this form
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Overrides, applied in order."),
    ] = None,
    gpus: Annotated[Optional[str], _range("--gpus", "Numbers of GPUs; the recipe's when absent.")] = None,  # noqa: UP045
    tp: Annotated[Optional[str], _range("--tp", "TP: 1,2,4 or 1-8; usual sizes when absent.")] = None,  # noqa: UP045
    pp: Annotated[Optional[str], _range("--pp", "PP: pipeline stages.")] = None,  # noqa: UP045
    vp: Annotated[Optional[str], _range("--vp", "VP: chunks per stage, 1 for none.")] = None,  # noqa: UP045
    cp: Annotated[Optional[str], _range("--cp", "CP: ranks that share a sequence.")] = None,  # noqa: UP045
    ep: Annotated[Optional[str], _range("--ep", "EP: ranks that share the experts.")] = None,  # noqa: UP045
    mbs: Annotated[Optional[str], _range("--mbs", "Micro-batch sizes.")] = None,  # noqa: UP045
    recompute: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="KINDS", help="Some of none,selective,full; all when absent."),
    ] = None,
    top: Annotated[int, typer.Option("--top", "-n", metavar="N", help="Layouts to show and to save.")] = 10,
    output: Annotated[SearchFormat, typer.Option("--format", "-f", help="Form of the answer.")] = SearchFormat.text,
    save_recipes: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--save-recipes", metavar="DIR", help="Write the layouts shown as recipes."),
    ] = None,
    workers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="N", help="Processes; one per core when absent."),
    ] = None,
    submit: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="EXECUTOR.py",
            help="Measure them: a NeMo-Run experiment by this file's executor(), task().",
        ),
    ] = None,
) -> None:
    """The fastest layouts of a model on its GPUs: which are legal, fit the memory, and how long a step takes.

    Example: overlapkit search recipes/llama3_70b_64xh100.yaml --tp 4,8 --pp 2,4
    """
    with _ended_by_interrupts():
        from overlapkit.render.search import progress
        from overlapkit.search.find import read_source, search
        from overlapkit.search.work import usual_workers

        _refuse(recipe, top, workers, submit, save_recipes)
        named = {"gpus": gpus, "tp": tp, "pp": pp, "vp": vp, "cp": cp, "ep": ep, "micro_batch_size": mbs}
        ranges = {axis: text for axis, text in named.items() if text is not None}
        source = read_source(recipe, overrides or [])
        with progress() as report:
            found = search(
                source, ranges, recompute=recompute, top=top, workers=workers or usual_workers(), report=report
            )
        if output is SearchFormat.text:
            from overlapkit.render.search import print_search

            print_search(found, sys.stdout)
        elif output is SearchFormat.json:
            from overlapkit.render.data import write_data

            write_data(found.to_dict(), "json", sys.stdout)
        else:
            from overlapkit.render.search import to_csv

            sys.stdout.write(to_csv(found))
        files = _saved(recipe, found.best, save_recipes, submit)
        if found.interrupted:
            judged = f"{found.judged:,} layouts judged, {found.points:,} of {found.all_points:,} points of the space"
            print(f"overlapkit: interrupted: {judged}", file=sys.stderr)
            raise typer.Exit(_INTERRUPTED)
        if submit is not None:
            from overlapkit.integrations.nemo_run.submission import submit as launch

            launch(files, Path(submit), name=f"search_{Path(recipe).stem}")


@contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """Ctrl-C before there is anything to show, and a second one, end the command with one line."""
    try:
        yield
    except KeyboardInterrupt:
        print("overlapkit: interrupted", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None


def _saved(recipe: str, best: Sequence[Found], folder: str | None, submit: str | None) -> tuple[Path, ...]:
    """The recipe files; an experiment reads them after this command has ended, so it has them beside its own file."""
    from overlapkit.output import say
    from overlapkit.search.saving import save_recipes

    if folder is None and submit is None:
        return ()
    files = save_recipes(recipe, best, folder if folder is not None else Path(f"search_{Path(recipe).stem}"))
    if files:
        say(f"{len(files)} {'recipe is' if len(files) == 1 else 'recipes are'} written to {files[0].parent}")
    return files


def _refuse(recipe: str, top: int, workers: int | None, submit: str | None, folder: str | None) -> None:
    """Raises for options that cannot be meant.

    Raises:
        RecipeError: what is wrong with one of them.
    """
    refuse_script(recipe)
    if not 1 <= top <= _MOST_SHOWN:
        raise RecipeError(f"{top} is not between 1 and {_MOST_SHOWN:,}", source="--top")
    if workers is not None and not 1 <= workers <= _MOST_WORKERS:
        raise RecipeError(f"{workers} is not between 1 and {_MOST_WORKERS:,}", source="--workers")
    if submit is not None and not Path(submit).is_file():
        raise RecipeError("there is no such file", source=submit, hint="name a Python file that has executor()")
    if submit is not None:
        import overlapkit.integrations.nemo_run  # noqa: F401  says before the search that it is not installed
    if folder is not None:
        from overlapkit.whole_files import check_folder

        check_folder(folder)
