"""A plan's settings on live objects, after a look at whether the plan was made for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from copy import copy
from typing import Any, Literal

from overlapkit.errors import PlanError, RecipeError, printable, shown
from overlapkit.integrations.megatron.environment import world_size
from overlapkit.integrations.megatron.packages import quietly, said_by
from overlapkit.live_objects import SECTIONS, write_settings
from overlapkit.plan import Decision, Plan, reason, refuse_errors

_LOG = logging.getLogger("overlapkit.megatron")
# Sizes of the plan by the field of the model that must agree.
_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
}
# Written whether or not the class has the field, or without meaning while what they belong to is off.
_NEED_NO_FIELD = ("tp_comm_overlap_cfg", "tp_comm_bootstrap_backend", "wgrad_deferral_limit")
_WAYS_TO_SHARD = (
    ("ddp", "use_distributed_optimizer"),
    ("optimizer", "use_distributed_optimizer"),
    ("optimizer", "use_layer_wise_distributed_optimizer"),
    ("ddp", "use_megatron_fsdp"),
    ("ddp", "use_custom_fsdp"),
)


def apply(
    plan: Plan,
    model_config: Any,
    optimizer_config: Any,
    ddp_config: Any,
    *,
    on_error: Literal["refuse", "warn"] = "refuse",
) -> tuple[Decision, ...]:
    """Writes the plan's settings on TransformerConfig, OptimizerConfig and DistributedDataParallelConfig.

    Anything that has their attributes will do; None for an object that the script does not have. The objects' own
    checks (``__post_init__``) are run on copies with the settings first, as if the constructors had been given them.
    Where it raises, no object has changed. ``on_error="warn"`` logs the plan's errors, and what the objects' checks
    say, and goes on. Call it before the model is built, on every rank. It returns the plan's decisions.

    Raises:
        PlanError: the plan has errors, or an object's own check refuses a setting.
        RecipeError: the plan was made for other sizes than the objects', or sets what they do not have.
    """
    if not isinstance(plan, Plan):
        hint = "overlapkit.resolve(recipe) returns one"
        raise RecipeError(f"{shown(plan)} is no plan", source="apply", hint=hint)
    if on_error not in ("refuse", "warn"):
        raise RecipeError(f"on_error is refuse or warn, not {shown(on_error)}", source="apply")
    if on_error == "refuse":
        refuse_errors(plan)
    objects = dict(zip(SECTIONS, (model_config, optimizer_config, ddp_config), strict=True))
    differences = [*_contradictions(plan, objects), *_missing_fields(plan, objects)]
    if differences:
        hint = "resolve the recipe of these objects, or build them from the plan's recipe"
        raise RecipeError("; ".join(differences), source=plan.recipe, hint=hint)
    changed = {section: _changed(section, owner, plan) for section, owner in objects.items()}
    refused = [line for section in SECTIONS for line in _refusals(objects[section], changed[section])]
    if refused and on_error == "refuse":
        raise PlanError(printable(f"{plan.recipe}: {'; '.join(refused)}", limit=2_000))
    write_settings(plan.settings, **objects)
    found = (f"{d.code} {d.subject}: {reason(d)}" for d in plan.decisions if d.severity == "error")
    for line in (*found, *refused):
        _LOG.error("%s", printable(line, limit=600))
    return plan.decisions


def _contradictions(plan: Plan, objects: dict[str, Any]) -> Iterator[str]:
    """Where plan and objects cannot both be right, with the field, the plan's value and the object's."""
    model, sizes = objects["model"], plan.parallelism
    for name, axis in _SIZES.items():
        planned, found = getattr(sizes, axis), getattr(model, name, None)
        if axis == "vp":  # not set and one chunk are the same pipeline
            planned, found = planned or 1, found or 1
        if found is not None and found != planned:
            yield f"model.{name} is {planned} in the plan and {shown(found)} in the object"
    etp = getattr(model, "expert_tensor_parallel_size", None)
    if getattr(model, "num_moe_experts", None) and etp is not None and etp != sizes.etp:
        yield f"model.expert_tensor_parallel_size is {sizes.etp} in the plan and {shown(etp)} in the object"
    sequence_parallel = getattr(model, "sequence_parallel", None)
    if sizes.tp > 1 and sequence_parallel is not None and bool(sequence_parallel) != sizes.sequence_parallel:
        planned = shown(sizes.sequence_parallel)
        yield f"model.sequence_parallel is {planned} in the plan and {shown(sequence_parallel)} in the object"
    if _gathers_shards(plan) and not _shards(objects):
        yield "ddp.use_distributed_optimizer is true in the plan, which gathers parameters, and false in the object"
    world = world_size()
    if world is not None and world != sizes.world_size:
        yield f"the plan is for {sizes.world_size} GPUs, and this job has {world} processes"


def _gathers_shards(plan: Plan) -> bool:
    """The plan overlaps the gathering of parameters, and found that something shards them (else DP008 speaks)."""
    if not plan.settings["ddp.overlap_param_gather"] or plan.parallelism.dp * plan.parallelism.cp == 1:
        return False
    return all(decision.code != "DP008" for decision in plan.decisions)


def _shards(objects: dict[str, Any]) -> bool:
    """Whether an object says so, or none that could is there."""
    optimizer, ddp = objects["optimizer"], objects["ddp"]
    if ddp is None:
        return True
    layer_wise = str(getattr(optimizer, "optimizer", "")).startswith("dist_")
    return layer_wise or any(getattr(objects[section], name, False) for section, name in _WAYS_TO_SHARD)


def _missing_fields(plan: Plan, objects: dict[str, Any]) -> Iterator[str]:
    """Settings that are on and that an object of this version has no field for: they would be lost in silence."""
    for path, value in plan.settings.items():
        section, _, name = path.partition(".")
        owner = objects[section]
        if owner is not None and value and name not in _NEED_NO_FIELD and not hasattr(owner, name):
            yield f"{path} is {shown(value)} in the plan, and {type(owner).__name__} has no such field"


def _changed(section: str, owner: Any, plan: Plan) -> Any:
    """A copy of an object with the settings."""
    duplicate = _copied(owner)
    write_settings(plan.settings, only=(section,), **{"model": None, section: duplicate})
    return duplicate


def _refusals(owner: Any, changed: Any) -> Iterator[str]:
    """What an object's class says to the settings, where its check accepts the object as it is."""
    check = getattr(type(owner), "__post_init__", None)
    if check is None or _says(check, _copied(owner)) is not None:
        return
    said = _says(check, changed)
    if said is not None:
        yield f"{type(owner).__name__} refuses the plan's settings: {said}"


def _copied(owner: Any) -> Any:
    """A copy that its check may change: Megatron-Core's checks append to lists."""
    try:
        duplicate = copy(owner)
    except Exception as error:
        text = f"a {type(owner).__name__} cannot be copied, to try the settings on: {said_by(error)}"
        raise RecipeError(text, source="apply") from None
    for name, value in getattr(duplicate, "__dict__", {}).items():
        if isinstance(value, list):
            object.__setattr__(duplicate, name, list(value))
    return duplicate


def _says(check: Any, owner: Any) -> str | None:
    """What a class's own check raises, in one line."""
    try:
        with quietly():
            check(owner)
    except Exception as error:
        return said_by(error)
    return None
