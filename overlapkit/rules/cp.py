"""CP: context parallelism, as far as its communication depends on the recipe."""

from __future__ import annotations

from math import prod

from overlapkit.facts import Facts
from overlapkit.rules.registry import BRIDGE, MEGATRON_CORE, MEGATRON_LM, Finding, State, error, rule


@rule(
    "CP001",
    source="megatron-bridge training/config.py validate; Megatron-LM training/arguments.py validate_args",
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
        at="validation",
        requested=tokens,
        value=tokens,
    )


@rule(
    "CP002",
    source="megatron-bridge training/config.py _validate_cp_comm_type (0.4); Megatron-LM training/arguments.py "
    "validate_args; megatron-core parallel_state.py",
)
def hierarchical_sizes(f: Facts, s: State) -> Finding:
    """``cp_comm_type`` a2a+p2p needs ``hierarchical_context_parallel_sizes``, and their product is CP.

    Bridge checks both from 0.4, Megatron-LM always, at CP 1 too. For older Bridge Megatron-Core checks the
    product when it builds the groups.

    Why: without sizes CP does not communicate at all: each rank attends to its own chunk only, fast and wrong.
    Fix: set ``model.hierarchical_context_parallel_sizes``, for example [8, 2] for CP 16, or do without a2a+p2p.
    """
    model, cp = f.recipe.model, f.parallelism.cp
    sizes = model.hierarchical_context_parallel_sizes
    by: str | None = MEGATRON_LM if f.megatron_lm else BRIDGE if f.bridge_in(">=0.4.0") else None
    at: str | None = "validation" if by else None
    wants_sizes = "a2a+p2p" in (model.cp_comm_type or ())
    subject = "model.hierarchical_context_parallel_sizes"
    changes = ["model.cp_comm_type=p2p"] if wants_sizes else []
    if sizes is None:
        if not wants_sizes or (cp == 1 and by is None):
            return None
        because = "cp_comm_type is a2a+p2p without sizes"
        if cp > 1:
            because = f"{because}: CP would not communicate, and results would be wrong"
    else:
        if prod(sizes) == cp:
            return None
        because = f"the product of {list(sizes)} is {prod(sizes)}, CP is {cp}"
        changes.append(f"{subject}=null")
        if by is None:
            by, at = MEGATRON_CORE, "initialize_model_parallel"
    fix = f"set {' and '.join(changes)}"
    if cp > 1:
        fix = f"set {subject} to sizes whose product is {cp}, or {' and '.join(changes)}"
    return error(subject, because, fix=fix, by=by, at=at, requested=sizes, value=sizes)


@rule("CP003", source="megatron-core transformer/transformer_config.py")
def comm_types_per_layer(f: Facts, s: State) -> Finding:
    """A list in ``cp_comm_type`` has one entry per layer.

    Why: each layer takes its own entry; Megatron-Core asserts that there are as many as layers. A single entry is
    taken for all layers here.
    Fix: give one name for all layers, or one per layer.
    """
    kinds, layers = f.recipe.model.cp_comm_type, f.recipe.model.num_layers
    if f.parallelism.cp == 1 or kinds is None or layers is None or len(kinds) in (1, layers):
        return None
    return error(
        "model.cp_comm_type",
        f"{len(kinds)} entries for {layers} layers",
        fix=f"set model.cp_comm_type={kinds[0]}"
        if len(set(kinds)) == 1
        else f"give {layers} entries in model.cp_comm_type, or one name",
        by=MEGATRON_CORE,
        at="validation",
        requested=list(kinds),
        value=list(kinds),
    )
