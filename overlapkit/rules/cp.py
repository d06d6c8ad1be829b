"""CP: context parallelism, as far as its communication depends on the recipe."""

from __future__ import annotations

from math import prod

from overlapkit.facts import Facts
from overlapkit.rules.registry import BRIDGE, MEGATRON_LM, Finding, State, error, rule


@rule(
    "CP001",
    source="megatron-bridge training/config.py validate; Megatron-LM training/utils.py get_batch_on_this_cp_rank",
)
def sequence_does_not_split(f: Facts, s: State) -> Finding:
    """The sequence does not split into 2 x CP chunks.

    Why: each CP rank takes one chunk from the front and one from the back, so that causal attention is
    balanced.
    Fix: make ``model.seq_length`` a multiple of 2 x CP.
    """
    cp, tokens = f.parallelism.cp, f.recipe.model.seq_length
    if cp == 1 or tokens is None or tokens % (2 * cp) == 0:
        return None
    return error(
        "model.seq_length",
        f"{tokens} is not a multiple of 2 x CP {cp}",
        fix=f"set model.seq_length to a multiple of {2 * cp}",
        by=MEGATRON_LM if f.megatron_lm else BRIDGE,
        at="first_forward" if f.megatron_lm else "validation",
        requested=tokens,
        value=tokens,
    )


@rule("CP002", source="megatron-bridge training/config.py _validate_cp_comm_type (0.6)")
def hierarchical_sizes(f: Facts, s: State) -> Finding:
    """``cp_comm_type`` a2a+p2p needs ``hierarchical_context_parallel_sizes``, and their product is CP.

    Bridge checks it from 0.6.

    Why: without them CP does not communicate at all: each rank attends to its own chunk only, fast and wrong.
    Fix: set ``model.hierarchical_context_parallel_sizes``, for example [8, 2] for CP 16.
    """
    model, cp = f.recipe.model, f.parallelism.cp
    hierarchical = "a2a+p2p" in (model.cp_comm_type or ())
    sizes = model.hierarchical_context_parallel_sizes
    if cp == 1 or (sizes is None and not hierarchical) or (sizes is not None and prod(sizes) == cp):
        return None
    if sizes is None:
        because = "cp_comm_type is a2a+p2p without sizes: CP would not communicate, and results would be wrong"
    else:
        because = f"the product of {list(sizes)} is {prod(sizes)}, CP is {cp}"
    checked = BRIDGE if f.bridge_in(">=0.6.0") else None
    return error(
        "model.hierarchical_context_parallel_sizes",
        because,
        fix=f"set it to sizes whose product is {cp}",
        by=checked,
        at="validation" if checked else None,
        requested=sizes,
        value=sizes,
    )
