"""The rules, one file per family; importing this package registers them in the order of evaluation."""

from __future__ import annotations

# ruff: noqa: F401  imported for their rules, in the frameworks' own order: set-up, validation, launch
from overlapkit.rules import (
    cfg,
    cfg_batch,
    cfg_precision,
    cfg_recompute,
    pp,
    pp_layers,
    pp_schedule,
    ep,
    ep_delay,
    ep_dispatch,
    ep_beside,
    ep_experts,
    cfg_graphs,
    cfg_layers,
    tp,
    ub,
    ub_layers,
    ub_contents,
    ub_tokens,
    ub_preset,
    ub_value,
    dp,
    dp_buckets,
    dp_optimizer,
    fsdp,
    cp,
    env,
    env_user,
    installed,
    estimated,
)
from overlapkit.rules.registry import Rule, documented, registered, run

__all__ = ["Rule", "documented", "registered", "run"]
