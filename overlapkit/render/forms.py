"""A plan in the forms that frameworks and programs read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlapkit.errors import RecipeError
from overlapkit.outcomes import ResolvedOutcome
from overlapkit.plan import reason

_MARK = "# Written by overlapkit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """``text`` is the form, ``cannot_express`` what it leaves out, in sentences; ``beside`` files that belong to it."""

    text: str
    cannot_express: tuple[str, ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict)


def rendered(form: str, outcomes: Sequence[ResolvedOutcome], *, userbuffers_path: str = "") -> Rendered:
    """The form of the first outcome; JSON and YAML have every outcome of a launch file.

    ``userbuffers_path`` is where the configuration for Megatron-LM's --tp-comm-overlap-cfg will be.
    """
    first = outcomes[0]
    recipe, plan = first.recipe, first.plan
    if form in ("json", "yaml"):
        from overlapkit.render.data import to_json, to_yaml

        value = plan_dict(outcomes)
        return Rendered(text=to_json(value) if form == "json" else to_yaml(value))
    if form == "env":
        from overlapkit.render.env import to_env

        return Rendered(text=to_env(plan.env))
    if form == "megatron-lm":
        return _megatron_lm(first, userbuffers_path)
    if form == "bridge":
        from overlapkit.render.bridge import to_bridge as write
    elif form == "bridge-yaml":
        from overlapkit.render.bridge_yaml import to_bridge_yaml as write
    else:
        from overlapkit.render.python import to_python as write
    text, cannot_express = write(recipe, plan)
    return Rendered(text=text, cannot_express=cannot_express)


def plan_dict(outcomes: Sequence[ResolvedOutcome]) -> dict[str, Any]:
    """The first outcome's plan; where a launch file has several, or notes, all of them under ``outcomes``."""
    value = outcomes[0].plan.to_dict()
    if len(outcomes) > 1 or outcomes[0].notes:
        value["outcomes"] = [outcome.to_dict() for outcome in outcomes]
    return value


def _megatron_lm(outcome: ResolvedOutcome, userbuffers_path: str) -> Rendered:
    from overlapkit.render.data import to_yaml
    from overlapkit.render.megatron_lm import to_megatron_lm, to_text

    found = to_megatron_lm(outcome.recipe, outcome.plan, userbuffers_path=userbuffers_path)
    beside = {}
    if found.userbuffers is not None:
        beside[userbuffers_path] = f"{_MARK} for --tp-comm-overlap-cfg.\n{to_yaml(dict(found.userbuffers))}"
    said = (*found.cannot_express, *_refused(outcome, found.arguments))
    return Rendered(text=to_text(found.arguments), cannot_express=said, beside=beside)


def _refused(outcome: ResolvedOutcome, arguments: Sequence[str]) -> Iterator[str]:
    """What Megatron-LM refuses of a translated plan, where Bridge takes it."""
    if outcome.plan.target.framework == "megatron-lm":
        return
    from overlapkit.megatron_lm.arguments import read_arguments, recipe_of
    from overlapkit.megatron_lm.words import Word
    from overlapkit.resolver import resolve

    target, parallelism = outcome.plan.target, outcome.plan.parallelism
    words = [Word(text, text, 1) for text in arguments]
    read = read_arguments(words, core=target.megatron_core, source=outcome.recipe.source)
    versions = {"megatron_core": target.megatron_core, "transformer_engine": target.transformer_engine}
    cluster = {"gpu": target.gpu, "num_gpus": parallelism.world_size}
    again = resolve(recipe_of(read, cluster=cluster, software={**versions, "torch": target.torch}))
    known = {decision.code for decision in outcome.plan.decisions if decision.severity == "error"}
    for decision in again.decisions:
        if decision.severity == "error" and decision.code not in known:
            yield f"Megatron-LM would refuse {decision.subject}: {reason(decision)}; {decision.fix}"


def write_beside(path: str, text: str) -> None:
    """Writes a file of ours; one that somebody else wrote stays.

    Raises:
        RecipeError: there is another file, or it cannot be written.
    """
    target = Path(path)
    try:
        if target.exists() and not target.read_text("utf-8", errors="replace").startswith(_MARK):
            hint = "move it, or choose another place with --output"
            raise RecipeError("is there already, and not overlapkit's", source=path, hint=hint)
        target.write_text(text, "utf-8")
    except OSError as error:
        raise RecipeError(f"cannot be written: {error.strerror}", source=path) from None
