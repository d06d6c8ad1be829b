"""Which layers each pipeline rank holds, in which chunks, and which of them have experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from overlapkit.facts import Facts
from overlapkit.parallelism import counted_layers


@dataclass(frozen=True, slots=True)
class Chunk:
    """Layers that follow one another on a stage.

    ``first`` is the number of the first, from 0; ``moe`` says of each whether it has experts. ``embedding`` and
    ``output`` say whether the chunk begins or ends the model.
    """

    first: int
    moe: tuple[bool, ...]
    embedding: bool
    output: bool


def moe_pattern(facts: Facts) -> tuple[bool, ...] | None:
    """Which layers are MoE, from the first; None where ``moe_layer_freq`` is text or a list of another length."""
    model = facts.recipe.model
    layers = model.num_layers or 0
    if not model.num_moe_experts:
        return (False,) * layers
    frequency = 1 if model.moe_layer_freq is None else model.moe_layer_freq
    if isinstance(frequency, int) and frequency > 0:
        return tuple(layer % frequency == 0 for layer in range(layers))
    if isinstance(frequency, list) and len(frequency) == layers:
        return tuple(bool(each) for each in frequency)
    return None


def stage_chunks(facts: Facts) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of every pipeline rank, in the order in which a microbatch runs through them.

    Source: megatron-core transformer/transformer_block.py get_num_layers_to_build and
    transformer/pipeline_parallel_layer_layout.py.
    """
    counts = layers_per_chunk(facts)
    pattern = moe_pattern(facts) or ()
    pp, last = facts.parallelism.pp, len(counts) - 1
    chunks, first = [], 0
    for index, count in enumerate(counts):
        chunks.append(Chunk(first, pattern[first : first + count], index == 0, index == last))
        first += count
    return tuple(tuple(chunks[rank::pp]) for rank in range(pp))


def with_prediction(facts: Facts, stages: tuple[tuple[Chunk, ...], ...]) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks with the layers of multi-token prediction, which are of the kind of the model's last layer.

    They stand last in the last chunk, or where an explicit layout has them.
    """
    number = facts.recipe.model.mtp_num_layers or 0
    if not number:
        return stages
    holders = [index for index, stage in enumerate(facts.stages or ()) if "m" in stage]
    index, rank = divmod(holders[0], len(stages)) if holders else (len(stages[-1]) - 1, len(stages) - 1)
    chunks = list(stages[rank])
    more = (moe_pattern(facts) or (False,))[-1:] * number
    chunks[index] = replace(chunks[index], moe=(*chunks[index].moe, *more))
    return (*stages[:rank], tuple(chunks), *stages[rank + 1 :])


def layers_per_chunk(facts: Facts) -> list[int]:
    """Layers of each chunk, over all stages and then all rounds through them."""
    model, pp = facts.recipe.model, facts.parallelism.pp
    if facts.stages is not None:
        return [stage.count("t") for stage in facts.stages]
    rounds = (facts.parallelism.vp or 1) if pp > 1 else 1
    first, last = model.num_layers_in_first_pipeline_stage, model.num_layers_in_last_pipeline_stage
    layers = counted_layers(facts.recipe) or 0
    given = (first, last)
    middle = pp - sum(size is not None for size in given)
    each = (layers - sum(size or 0 for size in given)) // middle if middle > 0 else 0
    per_stage = [each] * pp
    if last is not None:
        per_stage[-1] = last
    if first is not None:
        per_stage[0] = first
    counts = [stage // rounds for _ in range(rounds) for stage in per_stage]
    counts[0] -= bool(model.account_for_embedding_in_pipeline_split)
    counts[-1] -= bool(model.account_for_loss_in_pipeline_split)
    return counts
