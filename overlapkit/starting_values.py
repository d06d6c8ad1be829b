"""The settings before any rule has spoken: what the recipe says, else the framework's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

from overlapkit.recipe.sections import AUTO, CommOverlap, Model, Recipe

_NOTHING_ASKED = CommOverlap(tp_comm_overlap=False, tp_comm_overlap_cfg=None, tp_comm_bootstrap_backend=None)
# Where Megatron-LM's single flag stands in a recipe, beside comm_overlap.
_FLAG_HOMES = {
    "overlap_p2p_comm": ("model",),
    "batch_p2p_comm": ("model",),
    "defer_embedding_wgrad_compute": ("model",),
    "wgrad_deferral_limit": ("model",),
    "overlap_moe_expert_parallel_comm": ("model",),
    "delay_wgrad_compute": ("model", "ddp"),
    "overlap_grad_reduce": ("ddp",),
    "overlap_param_gather": ("ddp", "optimizer"),
    "overlap_param_gather_with_optimizer_step": ("optimizer",),
    "align_param_gather": ("ddp",),
    "bucket_size": ("ddp",),
}


def asked_overlap(recipe: Recipe, *, megatron_lm: bool) -> CommOverlap:
    """What the user asks of communication overlap.

    For Bridge this is ``comm_overlap`` (nothing when it is null). Megatron-LM has one flag for what a
    recipe may write under comm_overlap, model, ddp or optimizer; comm_overlap counts first.
    """
    asked = recipe.comm_overlap
    if not megatron_lm:
        return asked or _NOTHING_ASKED
    asked = asked or _NOTHING_ASKED
    found: dict[str, Any] = {}
    for name, homes in _FLAG_HOMES.items():
        if getattr(asked, name) is None:
            values = [getattr(getattr(recipe, home), name) for home in homes]
            found[name] = next((value for value in values if value is not None), None)
    if not _said(recipe, "tp_comm_overlap_cfg"):
        found["tp_comm_overlap_cfg"] = recipe.model.tp_comm_overlap_cfg
    if not _said(recipe, "tp_comm_bootstrap_backend"):
        found["tp_comm_bootstrap_backend"] = recipe.model.tp_comm_bootstrap_backend or "nccl"
    return replace(asked, **found)


def tp_overlap_request(recipe: Recipe, *, megatron_lm: bool) -> bool | Literal["auto"]:
    """Whether TP overlap is asked for: true, false, or ``auto`` for on when legal.

    A hand-written Bridge recipe that says nothing means auto; Megatron-LM's flag is off unless given.
    """
    asked = recipe.comm_overlap
    if asked is None or (megatron_lm and not _said(recipe, "tp_comm_overlap")):
        return bool(recipe.model.tp_comm_overlap)
    return AUTO if asked.tp_comm_overlap == AUTO else bool(asked.tp_comm_overlap)


def _said(recipe: Recipe, name: str) -> bool:
    """Whether ``comm_overlap`` says this, be it in a dump that is resolved for Megatron-LM."""
    in_dump = recipe.is_dump and recipe.comm_overlap is not None and getattr(recipe.comm_overlap, name) is not None
    return in_dump or f"comm_overlap.{name}" in recipe.written


def starting_values(
    recipe: Recipe,
    asked: CommOverlap,
    request: bool | Literal["auto"],
    userbuffers: Mapping[str, Any] | str | None,
    *,
    megatron_lm: bool,
) -> dict[str, Any]:
    """Every setting of a plan, before the framework's set-up."""
    values = _parser_values(asked) if megatron_lm else _raw_values(recipe, asked)
    values["model.tp_comm_overlap"] = request is not False
    values["model.tp_comm_overlap_cfg"] = userbuffers if request is not False else None
    return values


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _raw_values(recipe: Recipe, asked: CommOverlap) -> dict[str, Any]:
    """Bridge: what stands in model, optimizer and ddp. Defaults: megatron-core's dataclasses."""
    optimizer, ddp = recipe.optimizer, recipe.ddp
    model: Model | CommOverlap = recipe.model
    no_limit = 0
    backend = asked.tp_comm_bootstrap_backend
    if recipe.comm_overlap is None:
        backend = _or(model.tp_comm_bootstrap_backend, "nccl")
    if recipe.comm_overlap is not None:
        # What the set-up writes over the model whatever stood there (comm_overlap.py: -1 replaces the 0).
        model, no_limit = asked, -1
    return {
        "model.tp_comm_bootstrap_backend": backend,
        "model.overlap_p2p_comm": _or(recipe.model.overlap_p2p_comm, False),
        "model.batch_p2p_comm": _or(recipe.model.batch_p2p_comm, True),
        "model.defer_embedding_wgrad_compute": _or(model.defer_embedding_wgrad_compute, False),
        "model.wgrad_deferral_limit": _or(model.wgrad_deferral_limit, no_limit),
        "model.overlap_moe_expert_parallel_comm": _or(model.overlap_moe_expert_parallel_comm, False),
        "model.delay_wgrad_compute": _or(model.delay_wgrad_compute, False),
        "optimizer.overlap_param_gather": _or(optimizer.overlap_param_gather, False),
        "optimizer.overlap_param_gather_with_optimizer_step": _or(
            optimizer.overlap_param_gather_with_optimizer_step, False
        ),
        "ddp.overlap_grad_reduce": _or(ddp.overlap_grad_reduce, False),
        "ddp.overlap_param_gather": _or(ddp.overlap_param_gather, False),
        "ddp.align_param_gather": _or(ddp.align_param_gather, False),
        "ddp.bucket_size": ddp.bucket_size,
        "ddp.delay_wgrad_compute": _or(ddp.delay_wgrad_compute, False),
    }


def _parser_values(asked: CommOverlap) -> dict[str, Any]:
    """Megatron-LM: flags as given, else the parser's defaults (training/arguments.py)."""
    param_gather = _or(asked.overlap_param_gather, False)
    overlap_p2p = _or(asked.overlap_p2p_comm, True)
    return {
        "model.tp_comm_bootstrap_backend": asked.tp_comm_bootstrap_backend,
        "model.overlap_p2p_comm": overlap_p2p,
        "model.batch_p2p_comm": not overlap_p2p,
        "model.defer_embedding_wgrad_compute": _or(asked.defer_embedding_wgrad_compute, False),
        "model.wgrad_deferral_limit": _or(asked.wgrad_deferral_limit, 0),
        "model.overlap_moe_expert_parallel_comm": _or(asked.overlap_moe_expert_parallel_comm, False),
        "model.delay_wgrad_compute": _or(asked.delay_wgrad_compute, False),
        "optimizer.overlap_param_gather": param_gather,
        "optimizer.overlap_param_gather_with_optimizer_step": _or(
            asked.overlap_param_gather_with_optimizer_step, False
        ),
        "ddp.overlap_grad_reduce": _or(asked.overlap_grad_reduce, False),
        "ddp.overlap_param_gather": param_gather,
        "ddp.align_param_gather": _or(asked.align_param_gather, True),
        "ddp.bucket_size": asked.bucket_size,
        "ddp.delay_wgrad_compute": _or(asked.delay_wgrad_compute, False),
    }


assert set(_FLAG_HOMES) <= {field.name for field in fields(CommOverlap)}
