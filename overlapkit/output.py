"""How an answer of the command line reaches stdout, files and stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TextIO

from overlapkit.errors import RecipeError, printable
from overlapkit.outcomes import ResolvedOutcome
from overlapkit.plan import reason


def save_recipe(outcome: ResolvedOutcome, path: str) -> None:
    """The recipe of a launch file as a YAML file."""
    from overlapkit.render.data import to_yaml

    if outcome.mapping is None:
        raise RecipeError("--save goes with --megatron-lm-args", source="resolve")
    Path(path).write_text(to_yaml(outcome.mapping), encoding="utf-8")


@contextmanager
def opened(path: str | None) -> Iterator[TextIO]:
    """stdout, or a file that is written when all of it is there."""
    if path is None:
        yield sys.stdout
        return
    buffer = StringIO()
    yield buffer
    Path(path).write_text(buffer.getvalue(), encoding="utf-8")


def write_form(outcomes: Sequence[ResolvedOutcome], form: str, write_to: str | None, stream: TextIO) -> None:
    """A form on ``stream``, what belongs to it beside it, and what it cannot say on stderr."""
    from overlapkit.render.forms import rendered, write_beside

    first = outcomes[0]
    is_file = write_to is not None and (Path(write_to).is_file() or not Path(write_to).exists())
    stem = Path(write_to if write_to and is_file else Path(first.recipe.source).name).with_suffix("")
    found = rendered(form, outcomes, userbuffers_path=f"{stem}.userbuffers.yaml")
    for path, text in found.beside.items():
        write_beside(path, text)
        say(f"{path} is written, for --tp-comm-overlap-cfg")
    stream.write(found.text)
    for sentence in found.cannot_express:
        say(f"not expressed: {sentence}")
    if form in ("json", "yaml"):
        return
    if first.mapping is not None and form != "env":
        say("not expressed: what the launch file says beyond a recipe, such as --lr or --data-path")
    for decision in first.plan.decisions:
        if decision.severity == "error" or (decision.severity == "warning" and form != "env"):
            fix = f"; {decision.fix}" if decision.fix else ""
            say(f"{decision.code} {decision.subject}: {reason(decision)}{fix}")
    for outcome in outcomes[1:]:
        say(f"another outcome: {' and '.join(outcome.when)}; --format text and json have it")
    for note in first.notes:
        say(note)


def say(text: str) -> None:
    print(printable(text, limit=1000), file=sys.stderr)
