"""The command line: one thin function per verb."""

from __future__ import annotations

import os
import sys
from enum import Enum
from typing import Annotated, Any, Optional

import typer

from overlapkit import __version__
from overlapkit.cli_estimate import estimate_command
from overlapkit.cli_measure import compare_command, measure_command
from overlapkit.cli_options import FailOn
from overlapkit.cli_presets import presets_app
from overlapkit.cli_search import search_command
from overlapkit.cli_volume import volume_command
from overlapkit.errors import OverlapkitError, RecipeError, printable
from overlapkit.streams import prepare_streams

app = typer.Typer(
    name="overlapkit",
    help="What will overlap in a Megatron job, what will not and why: before launch, without a GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(presets_app, name="presets")


class PlanFormat(str, Enum):
    text = "text"
    json = "json"
    yaml = "yaml"
    env = "env"
    bridge = "bridge"
    bridge_yaml = "bridge-yaml"
    megatron_lm = "megatron-lm"
    python = "python"


class PageFormat(str, Enum):
    text = "text"
    json = "json"
    markdown = "markdown"


class ReportFormat(str, Enum):
    text = "text"
    json = "json"
    github = "github"
    sarif = "sarif"


def _version(value: bool) -> None:
    if value:
        print(f"overlapkit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command("resolve")
def resolve_command(
    recipe: Annotated[
        Optional[str],  # noqa: UP045  typer on Python 3.10 reads this form
        typer.Argument(metavar="RECIPE", help="A YAML recipe, or a dump of Megatron-Bridge."),
    ] = None,
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="SECTION.KEY=VALUE", help="Overrides, applied in order; for a launch script NAME=VALUE too."
        ),
    ] = None,
    output: Annotated[
        PlanFormat,
        typer.Option("--format", "-f", metavar="FORM", help=f"One of {', '.join(form.value for form in PlanFormat)}."),
    ] = PlanFormat.text,
    megatron_lm_args: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="FILE",
            help="A launch script, arguments, or a YAML of MODEL_ARGS of Megatron-LM instead of a recipe.",
        ),
    ] = None,
    save: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE", help="Write the recipe that was understood."),
    ] = None,
    write_to: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--output", "-o", metavar="FILE", help="Write the plan to a file, and userbuffers beside it."),
    ] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Ask the installed megatron-core's own configuration classes too.")
    ] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say what each overlap saves of the step, and what is exposed.")
    ] = False,
    fail_on: Annotated[FailOn, typer.Option(help="Exit with 1 at a finding this grave or graver.")] = FailOn.error,
) -> None:
    """What will really be on, what will be off and why, and which environment to export.

    Example: overlapkit resolve recipes/llama2_7b_32xh20.yaml model.sequence_parallel=false
    """
    from overlapkit.outcomes import resolve_launch, resolve_recipe, that_count
    from overlapkit.output import opened, save_recipe, write_form
    from overlapkit.plan import as_grave_as

    if megatron_lm_args is not None:  # then the first argument is an override too
        outcomes = resolve_launch(megatron_lm_args, [*([recipe] if recipe else []), *(overrides or [])])
    elif recipe is not None:
        outcomes = resolve_recipe(recipe, overrides or [])
    else:
        raise RecipeError("no recipe is named", source="resolve", hint="for example: overlapkit resolve recipe.yaml")
    if validate:
        from dataclasses import replace

        from overlapkit.integrations.megatron import validated

        outcomes = tuple(replace(outcome, plan=validated(outcome.recipe, outcome.plan)) for outcome in outcomes)
    if estimate:
        from overlapkit.outcomes import estimated

        outcomes = tuple(map(estimated, outcomes))
    if save is not None:
        save_recipe(outcomes[0], save)
    with opened(write_to) as stream:
        if output is PlanFormat.text:
            from overlapkit.render.outcomes import print_outcomes

            print_outcomes(outcomes, stream)
        else:
            write_form(outcomes, output.value, write_to, stream)
    grave = as_grave_as(fail_on.value)
    decisions = (decision for outcome in that_count(outcomes) for decision in outcome.plan.decisions)
    raise typer.Exit(int(any(decision.severity in grave for decision in decisions)))


@app.command("check")
def check_command(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="Recipes, launch scripts, folders or globs; SECTION.KEY=VALUE for all."),
    ],
    output: Annotated[ReportFormat, typer.Option("--format", "-f", help="Form of the report.")] = ReportFormat.text,
    fail_on: Annotated[FailOn, typer.Option(help="Exit with 1 at a finding this grave or graver.")] = FailOn.error,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Name the files that are passed over.")] = False,
) -> None:
    """Many recipes and launch scripts at once, for CI and pre-commit.

    Example: overlapkit check recipes --format github
    """
    from overlapkit.check import check
    from overlapkit.check_paths import select
    from overlapkit.findings import exit_code

    report = check(select(paths))
    least: Any = "info" if fail_on is FailOn.info else "warning"
    if output is ReportFormat.text:
        from overlapkit.render.check import print_report

        print_report(report, sys.stdout, least=least, name_passed_over=verbose)
    elif output is ReportFormat.json:
        from overlapkit.render.check import to_dict
        from overlapkit.render.data import write_data

        write_data(to_dict(report), "json", sys.stdout)
    elif output is ReportFormat.github:
        from overlapkit.render.github import to_github

        sys.stdout.write(to_github(report, least=least))
    else:
        from overlapkit.render.data import write_data
        from overlapkit.render.sarif import to_sarif

        write_data(to_sarif(report, least=least), "json", sys.stdout)
    raise typer.Exit(exit_code(report, fail_on.value))


app.command("volume")(volume_command)
app.command("estimate")(estimate_command)
app.command("search")(search_command)
app.command("measure")(measure_command)
app.command("compare")(compare_command)


@app.command("schema")
def schema_command() -> None:
    """The JSON Schema of a recipe, for editors and validators.

    Example: overlapkit schema
    """
    from overlapkit.recipe.json_schema import schema_text

    sys.stdout.write(schema_text())


@app.command("explain")
def explain_command(
    code: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="[CODE]", help="A rule's code, for example TP002."),
    ] = None,
    all_rules: Annotated[bool, typer.Option("--all", help="Every rule.")] = False,
    output: Annotated[PageFormat, typer.Option("--format", "-f", help="Form of the page.")] = PageFormat.text,
) -> None:
    """The documentation of a rule: what it says, why, and what to do.

    Example: overlapkit explain TP002
    """
    from overlapkit.render import page
    from overlapkit.rules import documented

    rules = documented()
    if all_rules == (code is not None):
        raise RecipeError("give a code or --all", source="explain", hint="for example: overlapkit explain TP002")
    if code is not None:
        rules = {code.upper(): _rule(code, rules)}
    ordered = [rules[name] for name in sorted(rules)]
    if output is PageFormat.markdown:
        sys.stdout.write(page.to_markdown(ordered))
    elif output is PageFormat.json:
        from overlapkit.render.data import write_data

        pages = [page.to_dict(rule) for rule in ordered]
        write_data(pages[0] if code is not None else pages, "json", sys.stdout)
    else:
        sys.stdout.write(("\n" + "-" * 100 + "\n\n").join(page.to_text(rule) for rule in ordered))


def _rule(code: str, rules: dict[str, Any]) -> Any:
    from overlapkit.errors import nearest, shown

    found = rules.get(code.upper())
    if found is None:
        near = nearest(code.upper(), rules)
        hint = f"did you mean {near}? " if near else ""
        hint = f"{hint}overlapkit explain --all lists them"
        raise RecipeError(f"{shown(code)} is not a rule's code", source="explain", hint=hint)
    return found


def main() -> None:
    """The console script: every error of ours is one line on stderr and the exit code of the contract."""
    prepare_streams()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where a full disk can still be reported
    except OverlapkitError as error:
        print(f"overlapkit: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # before a verb begins; those that take long see to it themselves
        print("overlapkit: interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"overlapkit: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
