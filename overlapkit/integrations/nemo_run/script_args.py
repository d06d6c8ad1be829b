"""The arguments that a plan adds to a run.Script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from overlapkit.errors import RecipeError, shown
from overlapkit.facts import MEGATRON_LM
from overlapkit.integrations.nemo_run.environment import Environment
from overlapkit.plan import Plan
from overlapkit.recipe.sections import Recipe

FORMS = ("auto", "bridge", "megatron-lm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptArgs:
    """What a converter gets. ``recipe`` is None where the plugin was given a plan alone.

    ``env`` holds the variables of the plan and of the recipe as the process will see them, without those of the recipe
    alone that the user set elsewhere, which may be secrets. ``manual_gc_interval``, in steps, is None unless garbage
    collection by hand was asked for. ``userbuffers_path`` is where the job finds the file of userbuffers that
    --tp-comm-overlap-cfg of Megatron-LM names.
    """

    recipe: Recipe | None
    plan: Plan
    environment: Environment
    manual_gc_interval: int | None
    userbuffers_path: str

    @property
    def env(self) -> dict[str, str]:
        return self.environment.told


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """``words`` as the program has to get them, the text of ``userbuffers_path``, and in sentences what is left out."""

    words: tuple[str, ...] = ()
    userbuffers: str | None = None
    cannot_express: tuple[str, ...] = ()


def written(form: str | None, args: ScriptArgs, converter: Callable[[ScriptArgs], Any] | None) -> Written:
    """The arguments in a form of ``FORMS`` or, with None, none but those of garbage collection.

    Raises:
        RecipeError: an unknown form, one that needs the recipe, or a converter that returns no list of texts.
    """
    if form is not None and form not in FORMS:
        raise RecipeError(f"script_args is {shown(form)}", hint=f"use one of {', '.join(FORMS)}, or None")
    if converter is not None:
        if not callable(converter):
            raise RecipeError(f"script_args_converter_fn is {shown(converter)}", hint="give a function")
        words = converter(args)
        if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
            raise RecipeError(f"script_args_converter_fn returns {shown(words)}", hint="return a list of texts")
        return Written(words=tuple(words))
    megatron_lm = args.plan.target.framework == MEGATRON_LM if form in ("auto", None) else form == "megatron-lm"
    collection = _garbage_collection(args.manual_gc_interval, megatron_lm=megatron_lm)
    if form is None or (form == "auto" and args.recipe is None):
        return Written(words=collection)
    if args.recipe is None:
        raise RecipeError(f"script_args={form} needs a recipe, not a plan alone", hint="give the plugin the recipe")
    found = (_megatron_lm if megatron_lm else _bridge)(args.recipe, args)
    return replace(found, words=(*found.words, *collection))


def _garbage_collection(interval: int | None, *, megatron_lm: bool) -> tuple[str, ...]:
    """Bridge's are the texts of its PerfEnvPlugin (0.5.1, recipes/run_plugins.py)."""
    if interval is None:
        return ()
    if megatron_lm:
        return ("--manual-gc", "--manual-gc-interval", str(interval))
    return ("train.manual_gc=true", f"train.manual_gc_interval={interval}")


def _bridge(recipe: Recipe, args: ScriptArgs) -> Written:
    from overlapkit.render.bridge import bridge_overrides

    # Bridge's env_vars say what the process has, so that a value that the user set is not asked for otherwise.
    plan = replace(args.plan, env=args.env)
    words, said = bridge_overrides(replace(recipe, env_vars=None), plan, leaves=True)
    return Written(words=words, cannot_express=said)


def _megatron_lm(recipe: Recipe, args: ScriptArgs) -> Written:
    from overlapkit.render.data import to_yaml
    from overlapkit.render.megatron_lm import to_megatron_lm

    found = to_megatron_lm(recipe, args.plan, userbuffers_path=args.userbuffers_path)
    userbuffers = None if found.userbuffers is None else to_yaml(dict(found.userbuffers))
    return Written(words=found.arguments, userbuffers=userbuffers, cannot_express=found.cannot_express)
