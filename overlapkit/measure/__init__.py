"""What a job really moved and hid, per group, from its logs and traces.

``overlapkit.measure(paths)``: files -> recordings -> one :class:`Measured`, a row per group, operation and type for
every process. The package itself is the function, so that ``overlapkit.measure`` is both; its parts are imported when
it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlapkit.measure.measured import Measured
    from overlapkit.recipe import Recipe

__all__ = ["measure"]


def measure(
    paths: str | Path | Sequence[str | Path],
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    overrides: Sequence[str] = (),
    *,
    data_broadcast: bool = False,
    steps: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Measured:
    """What the logs and traces show that each process moved, per group, and what of it was hidden.

    ``paths`` are files, folders and globs of NCCL logs, PyTorch traces, Nsight Systems exports, NCCL Inspector dumps
    and recordings; the kind is recognised by content. ``recipe``, ``overrides`` and ``data_broadcast`` are those of
    ``overlapkit.volume``: the recipe's mesh and prediction tell groups apart that the source does not name. ``steps``
    says how many optimizer steps an input covers in which nothing marks them. ``progress`` is told the bytes that were
    read since it was told last, and those of all files.

    Raises:
        InputError: none of the paths can be read.
        RecipeError: the recipe cannot be used, lacks a size that a number needs, or asks for what is not modelled.
        ValueError: ``steps`` is below 1.
    """
    from overlapkit.measure.inputs import read_inputs, select_inputs
    from overlapkit.measure.measuring import measured
    from overlapkit.measure.mesh import mesh_of

    if steps is not None and steps < 1:
        raise ValueError(f"steps counts optimizer steps from 1, this is {steps}")
    mesh = None
    if recipe is not None:
        from overlapkit.volume import volume

        mesh = mesh_of(volume(recipe, overrides, data_broadcast=data_broadcast))
    inputs = select_inputs([paths] if isinstance(paths, (str, Path)) else paths)
    told = None if progress is None else lambda more: progress(more, inputs.total_bytes)
    return measured(read_inputs(inputs, told), mesh, steps=steps)


class _CallableModule(ModuleType):
    """A module that is called as the function of its own name."""

    def __call__(self, *args: Any, **options: Any) -> Measured:
        return measure(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
