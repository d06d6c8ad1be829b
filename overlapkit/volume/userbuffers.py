"""The calls of a layer that userbuffers take over, so that NCCL does not see them.

Source: megatron-core extensions/transformer_engine.py; Transformer Engine pytorch/module/layernorm_linear.py, where
overlapping a reduce-scatter with the input gradient excludes both bulk overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from overlapkit.facts import Facts

_FPROP_AND_DGRAD = frozenset({"gather_input", "scatter_gradient"})
_NOTHING: frozenset[str] = frozenset()


class Userbuffers(NamedTuple):
    """Names of calls, as `Model` has them: of every layer, and of the projections that have a switch of their own."""

    layer: frozenset[str]
    qkv: frozenset[str]
    fc1: frozenset[str]


def userbuffers_of(facts: Facts, settings: Mapping[str, Any]) -> Userbuffers:
    """What is taken by the model's switches, which are on when absent."""
    if not settings["model.tp_comm_overlap"]:
        return Userbuffers(_NOTHING, _NOTHING, _NOTHING)
    model = facts.recipe.model
    gathers, scatters = model.tp_comm_overlap_ag is not False, model.tp_comm_overlap_rs is not False
    dgrad = bool(model.tp_comm_overlap_rs_dgrad)
    on = {
        "gather_input": gathers,
        "gather_gradient": gathers,
        "scatter_output": scatters,
        "regather_input": model.tp_comm_bulk_dgrad is not False and not dgrad,
        "scatter_gradient": dgrad or model.tp_comm_bulk_wgrad is not False,
    }
    taken = frozenset(name for name, is_on in on.items() if is_on)
    return Userbuffers(
        layer=taken,
        qkv=taken - (_FPROP_AND_DGRAD if model.tp_comm_overlap_disable_qkv else _NOTHING),
        fc1=taken - (_FPROP_AND_DGRAD if model.tp_comm_overlap_disable_fc1 else _NOTHING),
    )
