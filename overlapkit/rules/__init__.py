"""The rules, one file per family; importing this package registers them in the order of evaluation."""

from __future__ import annotations

from overlapkit.rules import (  # in the order of evaluation, the frameworks' own: set-up, validation, launch
    cfg,
    pp,
    pp_schedule,
    ep,
    ep_delay,
    ep_dispatch,
    tp,
    ub,
    ub_tokens,
    ub_preset,
    dp,
    dp_buckets,
    fsdp,
    cp,
    env,
    env_user,
)
from overlapkit.rules.registry import Rule, registered, run

__all__ = ["Rule", "registered", "run"]

_FAMILIES = (
    cfg,
    pp,
    pp_schedule,
    ep,
    ep_delay,
    ep_dispatch,
    tp,
    ub,
    ub_tokens,
    ub_preset,
    dp,
    dp_buckets,
    fsdp,
    cp,
    env,
    env_user,
)
