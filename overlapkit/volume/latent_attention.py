"""Multi-latent attention: queries, keys and values through narrow latent widths.

Source: megatron-core transformer/multi_latent_attention.py, and MLATransformerConfig for the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from overlapkit.facts import Facts

_DEFAULTS = {"q_lora_rank": 512, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Widths in elements. ``q_lora_rank`` is None where queries come straight from the hidden states.

    A head's query and key have ``qk_head_dim`` channels and ``qk_pos_emb_head_dim`` for the position, its value
    ``v_head_dim``.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int

    @property
    def query(self) -> int:
        """Channels of a head's query."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


def latent_attention_of(facts: Facts) -> LatentAttention | None:
    """The widths that the recipe names, Megatron-Core's defaults for the others; None without latent attention."""
    if not facts.recipe.model.multi_latent_attention:
        return None
    given = {**_DEFAULTS, **facts.recipe.others.get("model", {})}
    widths: dict[str, Any] = {name: given[name] for name in _DEFAULTS}
    return LatentAttention(**widths)


def wrong_widths(facts: Facts) -> list[tuple[str, Any]]:
    """(field, value) of every width that is no positive number."""
    given = facts.recipe.others.get("model", {})
    found = []
    for name in _DEFAULTS:
        value = given.get(name, 1)
        absent = value is None and name == "q_lora_rank"
        if not absent and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31):
            found.append((f"model.{name}", value))
    return found
