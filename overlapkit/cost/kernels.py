"""What a recipe says about kernels that no volume depends on: fused or not, captured in CUDA graphs or launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from overlapkit.facts import Facts

_UNFUSED_BACKENDS = ("unfused", "local")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """``short_windows`` is the share of layers whose attention looks back no further than ``window`` tokens.

    ``captured``: CUDA graphs hold parts of the layers, or the whole iteration. ``split_messages``: the TP ranks of a
    pipeline stage each send a part of what all of them hold, and gather it on the other side.
    """

    unfused_attention: bool
    short_windows: float
    window: int
    fused_experts: bool
    captured: Literal["none", "parts", "all"]
    split_messages: bool


def kernels_of(facts: Facts) -> Kernels:
    """Source: megatron-core transformer/transformer_config.py, whose defaults hold for what the recipe leaves out.

    Layers without fused attention under Megatron-LM stand for its releases of 2021, which split messages
    (``scatter_gather_tensors_in_pipeline``).
    """
    model, others = facts.recipe.model, facts.recipe.others.get("model", {})
    backend = str(others.get("attention_backend") or "auto").lower().rpartition(".")[2]
    local = model.transformer_impl == "local" or facts.versions.transformer_engine is None
    unfused = backend in _UNFUSED_BACKENDS or (local and backend == "auto")
    window = _window(others.get("window_size"))
    parts = facts.graph_impl != "none" and not facts.full_iteration_graph
    return Kernels(
        unfused_attention=unfused,
        short_windows=_short_windows(others) if window is not None else 0.0,
        window=window or 0,
        fused_experts=bool(others.get("use_transformer_engine_op_fuser")),
        captured="all" if facts.full_iteration_graph else "parts" if parts else "none",
        split_messages=unfused and facts.megatron_lm,
    )


def _window(size: Any) -> int | None:
    """The first of the two sizes, how far back a token sees; None without, or where it is -1, which sees everything."""
    back = size[0] if isinstance(size, (list, tuple)) and size else size
    return back if isinstance(back, int) and not isinstance(back, bool) and back >= 0 else None


def _short_windows(others: Mapping[str, Any]) -> float:
    """With ``window_attn_skip_freq`` n every n-th layer attends to all tokens; a list has 1 for a window per layer."""
    skips = others.get("window_attn_skip_freq")
    if isinstance(skips, list) and skips:
        return sum(bool(each) for each in skips) / len(skips)
    if isinstance(skips, int) and not isinstance(skips, bool) and skips > 1:
        return 1 - 1 / skips
    return 1.0
