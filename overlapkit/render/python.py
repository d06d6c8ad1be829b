"""Python source that builds the configuration of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlapkit.facts import MEGATRON_LM
from overlapkit.megatron_lm.fields import pairs
from overlapkit.megatron_lm.flags import flags_of
from overlapkit.plan import Plan
from overlapkit.presets import load_preset
from overlapkit.recipe.sections import Recipe
from overlapkit.render.bridge_userbuffers import COMM_OVERLAP, classes_of, listed, preset_call
from overlapkit.render.bridge_values import (
    BridgeValues,
    MixedPrecisionValues,
    bridge_values,
    environment_elsewhere,
    only_known,
    unread,
)
from overlapkit.render.core_values import core_values
from overlapkit.render.python_source import Call, Name, assignment, import_from
from overlapkit.versions import parse_version

_FUTURE = "from __future__ import annotations\n\n"
_CORE = {"model": "TRANSFORMER_CONFIG", "optimizer": "OPTIMIZER_CONFIG", "ddp": "DDP_CONFIG"}


def to_python(recipe: Recipe, plan: Plan) -> tuple[str, tuple[str, ...]]:
    """A module for Python 3.10 or newer, and what it does not say, as sentences.

    For Megatron-Bridge ``configure(cfg)`` sets the fields of a ConfigContainer. For Megatron-LM there are the keyword
    arguments of Megatron-Core's dataclasses. ``ENV`` is the environment in both. Text stands in literals only.
    """
    return _for_core(recipe, plan) if plan.target.framework == MEGATRON_LM else _for_bridge(recipe, plan)


# --- Megatron-Bridge ----------------------------------------------------------------------------


def _for_bridge(recipe: Recipe, plan: Plan) -> tuple[str, tuple[str, ...]]:
    values = bridge_values(recipe, plan)
    body = [
        assignment(f"cfg.{section}.{name}", value, depth=1)
        for section, fields in values.sections.items()
        for name, value in fields.items()
    ]
    precision = values.mixed_precision
    if precision is not None:
        value = _mixed_precision(precision) if isinstance(precision, MixedPrecisionValues) else precision
        body.append(assignment("cfg.mixed_precision", value, depth=1))
    preset = _bridge_preset(plan)
    body.append(assignment("cfg.comm_overlap", _comm_overlap(values, preset), depth=1))
    if values.has_env_vars:
        body.append("    cfg.env_vars.update(ENV)\n")
    text = (
        f'"""Sets up communication overlap in a configuration of Megatron-Bridge {values.version}."""\n\n'
        f"{_FUTURE}from typing import Any\n\n{_imports(values, preset)}"
        f"{assignment('ENV', dict(values.env))}\n\n"
        'def configure(cfg: Any) -> Any:\n    """Set the fields of a ConfigContainer, and return it."""\n'
        f"{''.join(body)}    return cfg\n"
    )
    return text, (*values.not_carried, *environment_elsewhere(values))


def _bridge_preset(plan: Plan) -> str | None:
    """Bridge's name of the plan's userbuffers, where it has one."""
    userbuffers = plan.settings["model.tp_comm_overlap_cfg"]
    for name in filter(None, (plan.preset.name, *plan.preset.aliases)):
        preset = load_preset(name)
        if preset.provenance == "bridge" and preset.userbuffers == userbuffers:
            return name
    return None


def _imports(values: BridgeValues, preset: str | None) -> str:
    names = {"CommOverlapConfig"} if values.comm_overlap is not None else set()
    if values.userbuffers is not None:
        names |= {preset} if preset else classes_of(values.userbuffers)
    lines = [import_from(COMM_OVERLAP, names)] if names else []
    if isinstance(values.mixed_precision, MixedPrecisionValues):
        lines.append(import_from("megatron.bridge.training.mixed_precision", ["MixedPrecisionConfig"]))
        lines.insert(0, "import torch\n")
    return "".join(lines) + "\n" if lines else ""


def _mixed_precision(precision: MixedPrecisionValues) -> Call:
    dtype = Name(f"torch.{precision.dtype}")
    return Call("MixedPrecisionConfig", {**precision.fields, "params_dtype": dtype, "pipeline_dtype": dtype})


def _comm_overlap(values: BridgeValues, preset: str | None) -> Call | None:
    if values.comm_overlap is None:
        return None
    return Call("CommOverlapConfig", {**values.comm_overlap, "tp_comm_overlap_cfg": _userbuffers(values, preset)})


def _userbuffers(values: BridgeValues, preset: str | None) -> Call | Name | None:
    if values.userbuffers is None:
        return None
    if preset is not None:
        return Name(preset)
    return preset_call(values.userbuffers)


# --- Megatron-LM --------------------------------------------------------------------------------


def _for_core(recipe: Recipe, plan: Plan) -> tuple[str, tuple[str, ...]]:
    values, version = core_values(recipe, plan), plan.target.megatron_core
    said = list(values.left_out)
    kept = _that_its_parser_has(only_known(values.sections, "megatron-core", version, said), version, said)
    if values.elsewhere:
        said.append(f"Megatron-Core's configurations have no place for {listed(values.elsewhere)}")
    dtype = Name(f"torch.{values.dtype}")
    arguments: dict[str, Mapping[str, Any]] = {name: kept[name] for name in _CORE}
    arguments["model"] = {**kept["model"], "params_dtype": dtype, "pipeline_dtype": dtype}
    arguments["optimizer"] = {**kept["optimizer"], "params_dtype": dtype}
    text = (
        f'"""Keyword arguments for Megatron-Core {version}: TransformerConfig(**TRANSFORMER_CONFIG),\n'
        "OptimizerConfig(**OPTIMIZER_CONFIG), DistributedDataParallelConfig(**DDP_CONFIG). USERBUFFERS is for the\n"
        'ub_cfgs of Transformer Engine\'s initialize_ub, or the path of such a file; None: its defaults.\n"""\n\n'
        f"{_FUTURE}import torch\n\n"
    )
    text += "".join(assignment(_CORE[name], body) for name, body in arguments.items())
    text += assignment("USERBUFFERS", values.userbuffers)
    text += assignment("ENV", {**(recipe.env_vars or {}), **plan.env})
    return text, (*said, *unread(recipe))


def _that_its_parser_has(
    sections: Mapping[str, Mapping[str, Any]], version: str, said: list[str]
) -> dict[str, dict[str, Any]]:
    """Without fields that have a flag, but not in this version: Megatron-LM's flags come and go with the fields."""
    flags, every = (flags_of(core, doubtful=False) for core in (parse_version(version), None))
    found: dict[str, dict[str, Any]] = {}
    lacking = []
    for section, body in sections.items():
        found[section] = {}
        for name, value in body.items():
            pair = pairs().get(f"{section}.{name}")
            named = [flag for flag, _ in pair.flags if flag in every] if pair else []
            if named and not any(flag in flags for flag in named):
                lacking += [f"{section}.{name}"] if value else []
            else:
                found[section][name] = value
    if lacking:
        said.append(f"Megatron-Core {version} has no {listed(lacking)}")
    return found
