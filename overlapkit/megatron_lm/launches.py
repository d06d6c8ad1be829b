"""A launch file as recipes: one for each way in which its branches can go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from overlapkit.errors import RecipeError, nearest, printable, shown
from overlapkit.megatron_lm.arguments import Arguments, read_arguments, recipe_of
from overlapkit.megatron_lm.flags import flags_of
from overlapkit.megatron_lm.launcher import cluster_of
from overlapkit.megatron_lm.outcome import Outcome
from overlapkit.megatron_lm.variables import split_variables
from overlapkit.megatron_lm.words import Launch, Word
from overlapkit.recipe import Recipe, recipe_from_mapping
from overlapkit.recipe.overrides import apply_overrides
from overlapkit.recipe.place import COMMAND_LINE, YAML_ENDINGS, Place
from overlapkit.versions import parse_version

# What the environment's own rules look at, so that a value has to be known.
_JUDGED = frozenset({"CUDA_DEVICE_MAX_CONNECTIONS", "UB_SKIPMC", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_ALGO"})


def load_launches(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Outcome, ...]:
    """The recipes that a launch script, a list of arguments or Megatron-LM's YAML of MODEL_ARGS says; taken first.

    Nothing in the file is executed. Overrides are ``section.key=value``; ``NAME=value`` gives a shell variable, as
    exported, where the file sets none or one that only a run could tell; ``1=value`` a positional parameter.

    Raises:
        RecipeError: the file cannot be read, or says something that only a run could tell and no override gives.
    """
    from overlapkit.recipe.yaml_source import read_text

    source = str(path)
    variables, overrides = split_variables(overrides)
    text = read_text(path)
    launches = _launches(text, source, variables)
    core = _core(overrides)
    return tuple(_outcome(launch, core, source, overrides) for launch in launches)


def _launches(text: str, source: str, variables: Mapping[str, str]) -> Sequence[Launch]:
    if source.endswith(YAML_ENDINGS):
        from overlapkit.megatron_lm.args_yaml import read_args_yaml

        return [read_args_yaml(text, source, variables)]
    from overlapkit.megatron_lm.script import read_script

    return read_script(text, source, variables)


def _core(overrides: Sequence[str]) -> str:
    """The Megatron-Core that the overrides name, or the one that is assumed."""
    from overlapkit.software import resolve_versions

    own = [override for override in overrides if override.startswith("software")]
    recipe = recipe_from_mapping({"software": {"framework": "megatron-lm"}}, own, source=COMMAND_LINE)
    place = Place(COMMAND_LINE, {}, recipe.overridden)
    return resolve_versions(recipe.software, megatron_lm=True, fail=place.error).megatron_core.text


def _outcome(launch: Launch, core: str, source: str, overrides: Sequence[str]) -> Outcome:
    arguments = _read(launch, core, source)
    cluster, lines, notes = cluster_of(launch)
    exports = launch.exports
    env_vars = None if exports is None else {name: _text(word) for name, word in exports.items()}
    lines |= arguments.lines
    lines |= {f"env_vars.{name}": word.line for name, word in (exports or {}).items()}
    mapping = recipe_of(arguments, cluster=cluster, env_vars=env_vars)
    recipe = recipe_from_mapping(mapping, overrides, source=source, lines=lines)
    recipe = replace(recipe, others={name: {**arguments.others, **own} for name, own in recipe.others.items()})
    unknown = _unknown(arguments, exports or {}, recipe)
    if unknown:
        raise _asks_for(unknown, source)
    # A word of blanks is what `\\ ` at the end of a line leaves, which a note tells.
    left = (word for word in arguments.strangers if word.text and word.text.strip())
    stray = next((word for word in left if not (word.text or "").startswith("-")), None)
    if stray is not None:
        problem = f"{shown(stray.text)} belongs to no flag, and Megatron-LM refuses what is left over"
        hint = "a flag that takes no value is on where it stands; leave its value out"
        raise RecipeError(problem, source=source, line=stray.line, hint=hint)
    strange = tuple(
        f"line {word.line}: Megatron-LM with core {core} has no {printable(word.text)}, and refuses what it has not"
        f"{_meant(word.text, core)}"
        for word in arguments.strangers
        if word.text and word.text.startswith("-")
    )
    notes = (*launch.notes, *arguments.notes, *notes, *strange)
    understood, _ = apply_overrides(mapping, overrides)
    return Outcome(
        when=launch.when,
        taken=launch.taken,
        contrary=launch.contrary,
        notes=notes,
        recipe=recipe,
        mapping=understood,
    )


def _meant(flag: str, core: str) -> str:
    near = nearest(flag, flags_of(parse_version(core), doubtful=True))
    return f"; did you mean {near}?" if near else ""


def _read(launch: Launch, core: str, source: str) -> Arguments:
    """The arguments; flags that only another version has count too, for the rules to judge what they ask for."""
    own = read_arguments(launch.arguments, core=core, source=source)
    if not own.strangers:
        return own
    every = read_arguments(launch.arguments, core=None, source=source)
    return replace(
        own,
        values={**every.values, **own.values},
        lines={**every.lines, **own.lines},
        others={**every.others, **own.others},
    )


def _text(word: Word) -> str:
    return word.written if word.text is None else word.text


def _unknown(arguments: Arguments, exports: Mapping[str, Word], recipe: Recipe) -> dict[str, Word]:
    """What only a run could tell and no override gives; a word that may be any flag is a note's business."""
    fields: dict[str, Word] = {field: word for field, word in arguments.unknown if field}
    fields |= {f"env_vars.{name}": word for name, word in exports.items() if word.text is None and name in _JUDGED}
    return {field: word for field, word in fields.items() if field not in recipe.overridden}


def _asks_for(unknown: Mapping[str, Word], source: str) -> RecipeError:
    asked = [f"{field} is {word.written} (line {word.line}: {word.unknown})" for field, word in unknown.items()]
    hint = f"give {' '.join(f'{field}=...' for field in unknown)}, or the script's variables as NAME=value"
    line = min(word.line for word in unknown.values())
    return RecipeError(f"only a run could tell: {'; '.join(asked)}", source=source, line=line, hint=hint)
