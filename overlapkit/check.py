"""Many recipes and launch scripts at once: their plans, and what could not be used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlapkit.check_paths import SCRIPT_ENDINGS, Found, Selection
from overlapkit.errors import RecipeError
from overlapkit.megatron_lm.outcome import Outcome
from overlapkit.megatron_lm.variables import split_variables
from overlapkit.outcomes import ResolvedOutcome, load_outcomes, resolved, that_count
from overlapkit.recipe import load_recipe
from overlapkit.recipe.place import COMMAND_LINE, YAML_ENDINGS, Place
from overlapkit.recipe.schema import SECTIONS
from overlapkit.recipe.yaml_source import MAX_BYTES, parse, read_text

# Where a text that is no YAML would be a recipe, or Megatron-LM's arguments, and where a script launches a training.
_SECTION_LINE = re.compile(rf"^(?:{'|'.join(SECTIONS)})[ \t]*:", re.MULTILINE)
_ARGUMENTS_LINE = re.compile(r"^MODEL_ARGS[ \t]*:", re.MULTILINE)
_FLAGS = "(?:tensor|pipeline)-model-parallel-size|num-layers|micro-batch-size"
_LAUNCH = re.compile(rf"^(?![ \t]*#).*(?:\bpretrain\w*\.py\b|--(?:{_FLAGS})\b)", re.MULTILINE)


LoadOutcomes = Callable[[str, Sequence[str]], Iterable[Outcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A file with the outcomes that have a plan; ``error`` is why it, or its outcome ``error_when``, has none."""

    path: str
    outcomes: tuple[ResolvedOutcome, ...] = ()
    error: RecipeError | None = None
    error_when: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Usable, and no plan has an error."""
        return self.error is None and all(outcome.plan.ok for outcome in self.outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A file of a folder or glob that is neither a recipe nor a launch script."""

    path: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What ``check`` found, in the order of its arguments."""

    files: tuple[Checked, ...]
    passed_over: tuple[PassedOver, ...]


def check(selection: Selection, load: LoadOutcomes = load_outcomes) -> Report:
    """Every file of the selection, judged. A file that cannot be used is part of the report and stops no other.

    ``load`` reads a launch script or Megatron-LM's arguments.

    Raises:
        RecipeError: an override that no recipe takes.
    """
    _, overrides = split_variables(selection.overrides)  # variables are for launch scripts alone
    _check_overrides(overrides)
    results = [_check_file(found, selection.overrides, overrides, load) for found in selection.files]
    return Report(
        files=tuple(result for result in results if isinstance(result, Checked)),
        passed_over=tuple(result for result in results if isinstance(result, PassedOver)),
    )


def _check_overrides(overrides: Sequence[str]) -> None:
    """One line for a wrong override, not one per file."""
    if overrides:
        from overlapkit.recipe.keys import check_keys
        from overlapkit.recipe.overrides import apply_overrides

        value, changed = apply_overrides({}, overrides)
        check_keys(value, Place(COMMAND_LINE, {}, changed), is_dump=False)


# --- one file ------------------------------------------------------------------------------------


def _check_file(
    found: Found, given: Sequence[str], overrides: Sequence[str], load: LoadOutcomes
) -> Checked | PassedOver:
    """The plans of one file or why it cannot be used; of one that was only found, why it is passed over.

    ``given`` are the overrides with the variables of launch scripts.
    """
    path = found.path
    if found.error is not None:
        return Checked(path=path, error=found.error)
    try:
        text = read_text(path)
    except RecipeError as error:
        why = None if found.named else _why_unread(path, error)
        return Checked(path=path, error=error) if why is None else PassedOver(path=path, why=why)
    if _is_script(path, text):
        if not found.named and not path.endswith(YAML_ENDINGS) and not _LAUNCH.search(text):
            return PassedOver(path=path, why="no training launch")
        return _check_script(path, given, load)
    checked = _check_recipe(path, overrides)
    if not found.named and not _says_something(checked, text):
        return PassedOver(path=path, why="no section of a recipe")
    return checked


def _check_recipe(path: str, overrides: Sequence[str]) -> Checked:
    try:
        recipe = load_recipe(path, overrides)
        return Checked(path=path, outcomes=(resolved(recipe),))
    except RecipeError as error:
        return Checked(path=path, error=error)


def _check_script(path: str, given: Sequence[str], load: LoadOutcomes) -> Checked:
    """Every outcome of a launch script; of those that cannot be used the first is told."""
    try:
        loaded = that_count(tuple(load(path, given)))
    except RecipeError as error:
        return Checked(path=path, error=error)
    outcomes: list[ResolvedOutcome] = []
    unusable: list[tuple[RecipeError, tuple[str, ...]]] = []
    for each in loaded:
        try:
            outcomes.append(resolved(each))
        except RecipeError as error:
            unusable.append((error, each.when))
    first, when = unusable[0] if unusable else (None, ())
    return Checked(path=path, outcomes=tuple(outcomes), error=first, error_when=when)


# --- what a file is ------------------------------------------------------------------------------


def _is_script(path: str, text: str) -> bool:
    """Whether Megatron-LM's flags are read out of it: a script, a list of arguments, or YAML with MODEL_ARGS."""
    if path.endswith(SCRIPT_ENDINGS):
        return True
    if path.endswith(YAML_ENDINGS):
        if "MODEL_ARGS" not in text:  # the usual case costs no second parse
            return False
        value = _values(text)
        return "MODEL_ARGS" in value if value is not None else bool(_ARGUMENTS_LINE.search(text))
    return not _has_section(text)


def _says_something(checked: Checked, text: str) -> bool:
    """Whether a YAML file that was only found has a section of a recipe."""
    if checked.error is not None:
        return _has_section(text)
    return any(name in outcome.recipe.lines for outcome in checked.outcomes for name in SECTIONS)


def _has_section(text: str) -> bool:
    value = _values(text)
    if value is None:
        return bool(_SECTION_LINE.search(text))
    return any(isinstance(value.get(name), dict) for name in SECTIONS)


def _values(text: str) -> dict[str, Any] | None:
    try:
        return parse(text, "").value
    except RecipeError:
        return None


def _why_unread(path: str, error: RecipeError) -> str | None:
    """Why a file that was only found need not be readable: too large for a recipe, or of a kind we do not read."""
    try:
        too_large = Path(path).stat().st_size > MAX_BYTES
    except OSError:
        return None
    known = path.endswith((*YAML_ENDINGS, *SCRIPT_ENDINGS))
    return error.problem if too_large or not known else None
