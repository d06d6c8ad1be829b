"""Pipeline parallelism: activations and their gradients between stages, and the embedding that two stages share.

Source: megatron-core pipeline_parallel/schedules.py and p2p_communication.py, distributed/finalize_model_grads.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from overlapkit.volume.model import Model
from overlapkit.volume.placement import EMBEDDING, PP, WORLD
from overlapkit.volume.rows import Call

_SHAPE_BYTES = 3 * 8  # the three sizes of a tensor, in int64


def calls(model: Model, stage: int) -> Iterator[Call]:
    """PP's calls of one rank of a stage.

    A message is the hidden states of a microbatch, 1/TP of them with SP. Every chunk but the model's last hands its
    output on, every one but the first gets a gradient back from there.
    """
    pp, m = model.mesh.pp, model.microbatches
    if pp == 1:
        return
    chunks = len(model.stages[stage])
    to_next = m * chunks - (m if stage == pp - 1 else 0)  # outputs out, their gradients in
    to_previous = m * chunks - (m if stage == 0 else 0)  # inputs in, their gradients out
    size = model.activation_bytes // (model.mesh.tp if model.sequence_parallel else 1)
    sends, receives = _groups(model, stage)
    yield from _messages(model.dtype, size, to_next, to_previous, sends, receives)
    if model.variable_lengths:
        yield from _messages("int64", _SHAPE_BYTES, to_next, to_previous, PP, PP)
    if (model.tied or model.mtp_layers) and stage in (0, pp - 1):  # multi-token prediction embeds its inputs too
        matrix = model.vocabulary // model.mesh.tp * model.hidden
        yield Call("finalize", EMBEDDING, "all_reduce", model.grad_dtype, 1, matrix * model.grad_width)


def _messages(dtype: str, size: int, to_next: int, to_previous: int, sends: str, receives: str) -> Iterator[Call]:
    yield Call("p2p", sends, "send", dtype, to_next, size, onward=True)
    yield Call("p2p", sends, "send", dtype, to_previous, size)
    yield Call("p2p", receives, "recv", dtype, to_next + to_previous, size)


def _groups(model: Model, stage: int) -> tuple[str, str]:
    """Where sends and receives go: with two stages and single calls, one direction goes through the job's own group."""
    if model.mesh.pp != 2 or not model.p2p_in_pairs:
        return PP, PP
    return (PP, WORLD) if stage == 0 else (WORLD, PP)
