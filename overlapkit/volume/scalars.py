"""What the optimizer and the training loop exchange once per step: norms, flags, losses and counts.

What is exchanged at logging or evaluation only is not counted, nor what happens in the first step alone.
Source: megatron-core optimizer/clip_grads.py, optimizer.py and distributed/finalize_model_grads.py; train_step of
Megatron-LM training/training.py and megatron-bridge training/train.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from overlapkit.volume.model import WIDTHS, Model
from overlapkit.volume.placement import DP_CP, INSTANCE, MODEL, PP
from overlapkit.volume.rows import Call


def calls(model: Model, stage: int) -> Iterator[Call]:
    """Once-per-step scalars of one rank of a stage."""
    yield from _optimizer(model, stage)
    yield Call("train_loop", MODEL, "all_reduce", "int32", int(model.step_agreed), 4)
    yield Call("train_loop", MODEL, "all_reduce", "float32", model.norm_agreed + model.count_zeros, 4)
    if stage == model.mesh.pp - 1:
        yield Call("train_loop", DP_CP, "all_reduce", "float32", 1, 8)  # the loss, and what it is divided by
    if model.per_token_loss:
        yield Call("finalize", PP, "broadcast", "int32", 1, 4)
        yield Call("finalize", DP_CP, "all_reduce", "int32", 1, 4)


def _optimizer(model: Model, stage: int) -> Iterator[Call]:
    """Gradient norm (also where nothing is clipped), overflow flags of scaled losses, and zeros where they are counted.

    With the distributed optimizer over all ranks of an instance, else over the model's, the experts' apart. Each of the
    optimizers that make up the whole has an overflow flag of its own.
    """
    experts = model.expert_parameters_apart and any(any(chunk.moe) for chunk in model.stages[stage])
    if model.dist_opt:
        optimizers = 1 + experts + (model.gather_with_step and len(model.stages[stage]) > 1)
        flags = {INSTANCE: optimizers}
    else:
        flags = {MODEL: 1, model.expert_norm_group: 1} if experts else {MODEL: 1}
    for group, count in flags.items():
        yield Call("optimizer", group, "all_reduce", "float32", 1, 4)
        if model.overflow_flags:
            yield Call("optimizer", group, "all_reduce", "float32", count, 4)
        if model.count_zeros:
            yield Call("optimizer", group, "all_reduce", model.zeros_dtype, 1, WIDTHS[model.zeros_dtype])
