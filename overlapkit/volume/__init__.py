"""How many bytes each group of ranks moves per optimizer step, exactly, before the run.

``overlapkit.volume(recipe)``: Facts + Plan -> one :class:`Volume`, a :class:`~overlapkit.volume.rows.Row` per group,
operation and type for every pipeline stage. The package itself is the function, so that ``overlapkit.volume`` is both.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from overlapkit.recipe import Recipe
from overlapkit.volume.predict import Stage, Volume, predict
from overlapkit.volume.rows import Row, Share, total_wire_bytes

__all__ = ["Row", "Share", "Stage", "Volume", "predict", "total_wire_bytes", "volume"]


def volume(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    overrides: Sequence[str] = (),
    *,
    data_broadcast: bool = False,
) -> Volume:
    """What every rank of each pipeline stage sends and receives per optimizer step, from the second step on.

    ``recipe`` and ``overrides`` are those of ``overlapkit.resolve``. ``data_broadcast`` adds the batch that
    Megatron-LM's pretrain_gpt.py broadcasts over TP; Megatron-Bridge's ranks read their own.

    Raises:
        RecipeError: the recipe cannot be used, lacks a size that a number needs, or asks for what is not modelled.
        TypeError: overrides with a recipe that is already loaded.
    """
    from overlapkit.facts import derive
    from overlapkit.resolver import plan, read_recipe

    facts = derive(read_recipe(recipe, overrides))
    return predict(facts, plan(facts), data_broadcast=data_broadcast)


class _CallableModule(ModuleType):
    """A module that is called as the function of its own name."""

    def __call__(self, *args: Any, **options: Any) -> Volume:
        return volume(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
