"""The verb ``estimate``: how long a step takes and where the time goes."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Annotated, Optional

import typer

from overlapkit.cli_options import refuse_script


class EstimateFormat(str, Enum):
    text = "text"
    json = "json"
    csv = "csv"


def estimate_command(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML recipe, or a dump of Megatron-Bridge.")],
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045  typer on Python 3.10 reads this form
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Overrides, applied in order."),
    ] = None,
    output: Annotated[EstimateFormat, typer.Option("--format", "-f", help="Form of the answer.")] = EstimateFormat.text,
    plot: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE.svg|png", help="Draw the step and its pipeline; needs matplotlib."),
    ] = None,
    trace: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE.json[.gz]", help="Write the step as a Chrome trace, for Perfetto."),
    ] = None,
) -> None:
    """How long an optimizer step takes, where the time goes, and what each overlap saves.

    Example: overlapkit estimate recipes/llama3_70b_64xh100.yaml
    """
    from overlapkit.cost.estimate import estimate_of
    from overlapkit.facts import derive
    from overlapkit.resolver import plan as plan_of
    from overlapkit.resolver import read_recipe

    refuse_script(recipe)
    if plot is not None:
        from overlapkit.render.plots import check_plot

        check_plot(plot)
    if trace is not None:
        from overlapkit.render.estimate_trace import check_trace

        check_trace(trace)
    facts = derive(read_recipe(recipe, overrides or []))
    plan = plan_of(facts)
    found = estimate_of(facts, plan)
    if plot is not None:
        from overlapkit.render.estimate_plot import plot as draw

        draw(found, plot)
    if trace is not None:
        from overlapkit.render.estimate_trace import write_trace

        write_trace(found, trace)
    if output is EstimateFormat.csv:
        from overlapkit.render.estimate_csv import to_csv

        sys.stdout.write(to_csv(found))
    elif output is EstimateFormat.json:
        from overlapkit.render.data import write_data

        write_data(found.to_dict(), "json", sys.stdout)
    else:
        from overlapkit.render.estimate import print_estimate

        print_estimate(found, plan, sys.stdout)
