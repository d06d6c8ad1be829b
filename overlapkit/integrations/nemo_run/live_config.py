"""A plan set on the Bridge-like configuration that a run.Partial carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import nemo_run as run

from overlapkit.errors import MissingPackageError, RecipeError, shown
from overlapkit.integrations.bridge import comm_overlap_module
from overlapkit.integrations.nemo_run.script_args import ScriptArgs
from overlapkit.live_objects import SECTIONS, write_settings
from overlapkit.render.bridge_userbuffers import preset_tree
from overlapkit.render.bridge_values import bridge_values

# What Bridge's own functions call it (pretrain and finetune: config), and what scripts call it.
ARGUMENTS = ("config", "cfg", "recipe")
_USERBUFFERS = ("model.tp_comm_overlap_cfg", "model.tp_comm_bootstrap_backend")
_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
}


def carried_config(task: Any) -> tuple[str, Any] | None:
    """The argument of a run.Partial that is such a configuration, and its name.

    It is one of ``ARGUMENTS``, an object or a run.Config, that has a section ``model`` and beside it ``ddp``,
    ``optimizer`` or ``comm_overlap``.
    """
    for name in ARGUMENTS:
        config = task.__arguments__.get(name)
        beside = [section for section in ("ddp", "optimizer", "comm_overlap") if _takes(config, section)]
        if beside and getattr(config, "model", None) is not None:
            return name, config
    return None


def _takes(config: Any, section: str) -> bool:
    try:
        return hasattr(config, section)
    except ValueError:  # of a run.Config: a default that the class makes when it is built
        return True


def set_on_config(config: Any, args: ScriptArgs) -> tuple[str, ...]:
    """Sets the plan's overlap on a configuration, so that Bridge's set-up ends at the plan's settings.

    With a ``comm_overlap`` there: its requests. Without, or where no request could say it: the settings themselves on
    model, optimizer and ddp, and ``comm_overlap`` becomes None. Also ``env_vars``, where the class has it, and
    ``train.manual_gc``. Nothing else changes: sizes, batches and precision are the configuration's own.

    Returns:
        What was set, in words.
    """
    for section in (*SECTIONS, "train", "env_vars"):
        _make_default(config, section)
    done = [_set_overlap(config, args)]
    if hasattr(config, "env_vars"):
        config.env_vars = {**(config.env_vars or {}), **args.env}
        done.append("env_vars")
    train = getattr(config, "train", None)
    if args.manual_gc_interval is not None and train is not None:
        train.manual_gc, train.manual_gc_interval = True, args.manual_gc_interval
        done.append("train.manual_gc")
    return tuple(done)


def _make_default(config: Any, section: str) -> None:
    """Gives a run.Config the section that its class would make by default: until then there is nothing to set."""
    if not isinstance(config, run.Config) or section in config.__arguments__ or not is_dataclass(config.__fn_or_cls__):
        return
    made = {each.name: each.default_factory for each in fields(config.__fn_or_cls__)}.get(section, MISSING)
    if is_dataclass(made):
        setattr(config, section, run.Config(made))
    elif made is dict:
        setattr(config, section, {})


def check_config(name: str, config: Any, args: ScriptArgs) -> None:
    """Raises where the plan cannot be put on a configuration.

    Raises:
        RecipeError: the configuration's sizes are not those of the plan, its env_vars are no mapping, or its class has
            no place for userbuffers.
    """
    source = f"the task's {name}"
    for field, short in _SIZES.items():
        size = getattr(config.model, field, None)
        planned = getattr(args.plan.parallelism, short)
        if isinstance(size, int) and size != planned:
            raise RecipeError(f"{size}, but the plan is for {planned}", source=source, path=f"model.{field}")
    named = config.__arguments__ if isinstance(config, run.Config) else {"env_vars": getattr(config, "env_vars", None)}
    variables = named.get("env_vars")
    if variables is not None and not isinstance(variables, Mapping):
        raise RecipeError(f"a mapping of names to values, not {shown(variables)}", source=source, path="env_vars")
    fitting = _fitting(config, args)
    lost = [path for path, value in args.plan.settings.items() if value is not None and path not in fitting]
    if lost and _requests(config, args) is None:
        problem = f"a run.Config of {config.model.__fn_or_cls__.__name__} does not take it"
        hint = "give the configuration a comm_overlap, or the task the configuration itself"
        raise RecipeError(problem, source=source, path=lost[0], hint=hint)


def _fitting(config: Any, args: ScriptArgs) -> dict[str, Any]:
    """The settings without userbuffers that a run.Config has no field for, where an object would get the attribute."""
    lacks = [path for path in _USERBUFFERS if not hasattr(config.model, path.partition(".")[2])]
    dropped = lacks if isinstance(config.model, run.Config) else []
    return {path: value for path, value in args.plan.settings.items() if path not in dropped}


def _set_overlap(config: Any, args: ScriptArgs) -> str:
    model, optimizer, ddp = (getattr(config, section, None) for section in SECTIONS)
    requests = _requests(config, args)
    if requests is not None:
        for field, value in requests.items():
            try:
                setattr(config.comm_overlap, field, value)
            except Exception as error:  # a frozen class, a run.Config of a class without the field
                text = f"a {type(config.comm_overlap).__name__} does not take the plan's requests: {error}"
                raise RecipeError(text, path=f"comm_overlap.{field}") from None
        # Bridge's set-up writes these only with the distributed optimizer.
        write_settings(args.plan.settings, model=None, optimizer=optimizer, ddp=ddp)
        return "comm_overlap"
    write_settings(_fitting(config, args), model=model, optimizer=optimizer, ddp=ddp)
    if hasattr(config, "comm_overlap"):
        config.comm_overlap = None
    return f"the settings of {', '.join(SECTIONS)}"


def _requests(config: Any, args: ScriptArgs) -> dict[str, Any] | None:
    """What to ask of the ``comm_overlap`` that is there; None where the settings have to stand instead."""
    owner = getattr(config, "comm_overlap", None)
    if owner is None or args.recipe is None:
        return None
    values = bridge_values(args.recipe, args.plan)
    if values.comm_overlap is None:
        return None
    userbuffers = preset_tree(values.userbuffers)
    if userbuffers is not None:
        try:
            module = comm_overlap_module()
        except MissingPackageError:  # Bridge is in the job's container only
            return None
        userbuffers = _built(userbuffers, module, as_config=isinstance(owner, run.Config))
    return {**values.comm_overlap, "tp_comm_overlap_cfg": userbuffers}


def _built(tree: Any, module: Any, *, as_config: bool) -> Any:
    """Bridge's objects for the tree of its classes that preset_tree wrote, or run.Configs of them."""
    if not isinstance(tree, Mapping):
        return tree
    kind = getattr(module, tree["_target_"].rpartition(".")[2])
    values = {name: _built(value, module, as_config=as_config) for name, value in tree.items() if name != "_target_"}
    return run.Config(kind, **values) if as_config else kind(**values)
