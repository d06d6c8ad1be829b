"""The batch that Megatron-LM's pretrain_gpt.py broadcasts from the first rank of a TP group to the others.

Source: Megatron-LM training/utils.py get_batch_on_this_tp_rank and pretrain_gpt.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from overlapkit.volume.model import Model
from overlapkit.volume.placement import TP
from overlapkit.volume.rows import Call


def calls(model: Model, stage: int, *, attention_mask: bool) -> Iterator[Call]:
    """Per microbatch, before CP splits the sequence: the first stage's tokens and positions, the last one's labels and
    loss mask, and on both the attention mask, which the loader makes unless told not to.
    """
    m, tokens = model.microbatches, model.full_tokens
    first, last = stage == 0, stage == model.mesh.pp - 1
    if first:
        yield _broadcast("int64", 2 * m, 8 * tokens)
    if last:
        yield _broadcast("int64", m, 8 * tokens)
        yield _broadcast("float32", m, 4 * tokens)
    if attention_mask and (first or last):
        length = tokens // model.sequences
        yield _broadcast("bool", m * (first + last if model.mesh.pp > 1 else 1), model.sequences * length * length)


def _broadcast(dtype: str, count: int, size: int) -> Call:
    return Call("forward", TP, "broadcast", dtype, count, size, evidence="source")
