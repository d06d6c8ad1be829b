"""The verb ``volume``: how many bytes each group of ranks moves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from overlapkit.cli_options import refuse_script
from overlapkit.errors import RecipeError

if TYPE_CHECKING:
    from overlapkit.volume.configuration import Configuration


class VolumeFormat(str, Enum):
    text = "text"
    json = "json"
    csv = "csv"


def volume_command(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML recipe, or a dump of Megatron-Bridge.")],
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045  typer on Python 3.10 reads this form
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Overrides, applied in order."),
    ] = None,
    output: Annotated[VolumeFormat, typer.Option("--format", "-f", help="Form of the answer.")] = VolumeFormat.text,
    diff: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="SECTION.KEY=VALUE", help="Beside it the same recipe with this too; can be given several times."
        ),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Text: bytes to the byte.")] = False,
    phases: Annotated[bool, typer.Option("--phases", help="Each row's parts: forward, backward, …")] = False,
    nodes: Annotated[bool, typer.Option("--nodes", help="Text and JSON: every pair of nodes.")] = False,
    plot: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE.svg|png", help="Draw bars per group and stage; needs matplotlib."),
    ] = None,
    data_broadcast: Annotated[
        bool, typer.Option("--data-broadcast", help="With the batch that Megatron-LM broadcasts over TP.")
    ] = False,
) -> None:
    """How many bytes each group of ranks moves per optimizer step, by which operation, and between which nodes.

    Example: overlapkit volume recipes/llama2_7b_32xh20.yaml
    """
    from overlapkit.volume.configuration import configure

    _refuse(recipe, output, diff=bool(diff), phases=phases, nodes=nodes)
    if plot is not None:
        from overlapkit.render.plots import check_plot

        check_plot(plot)
    found = configure(recipe, overrides or [], data_broadcast=data_broadcast)
    other = None
    if diff:
        other = configure(recipe, [*(overrides or []), *diff], data_broadcast=data_broadcast)
    volumes = (
        {"recipe": found.volume} if other is None else {"recipe": found.volume, " ".join(diff or ()): other.volume}
    )
    if plot is not None:
        from overlapkit.render.volume_plot import plot as draw

        draw(volumes, plot)
    if output is VolumeFormat.csv:
        from overlapkit.render.volume_csv import to_csv

        sys.stdout.write(to_csv(volumes, phases=phases))
    elif output is VolumeFormat.json:
        _write_json(found, other, diff or [], phases=phases, nodes=nodes)
    elif other is not None:
        from overlapkit.render.volume_diff import print_diff

        print_diff(found, other, diff or [], sys.stdout, exact=exact)
    else:
        from overlapkit.render.volume import print_volume
        from overlapkit.volume.levers import largest_levers

        levers = largest_levers(recipe, found, data_broadcast=data_broadcast)
        print_volume(found, levers, sys.stdout, exact=exact, phases=phases, nodes=nodes)


def _refuse(recipe: str, output: VolumeFormat, *, diff: bool, phases: bool, nodes: bool) -> None:
    """Raises for options that would be passed over in silence."""
    refuse_script(recipe)
    if nodes and output is VolumeFormat.csv:
        raise RecipeError("--nodes goes with --format text and json", source="volume")
    if diff and output is VolumeFormat.text and (phases or nodes):
        option = "--phases" if phases else "--nodes"
        raise RecipeError(f"{option} goes with --diff in --format json", source="volume")


def _write_json(
    found: Configuration, other: Configuration | None, diff: Sequence[str], *, phases: bool, nodes: bool
) -> None:
    from overlapkit.render.data import to_json
    from overlapkit.render.volume_diff import to_dict

    if other is None:
        value = found.volume.to_dict(phases=phases, nodes=nodes)
    else:
        value = to_dict(found, other, diff, phases=phases, nodes=nodes)
    sys.stdout.write(to_json(value))
