"""PP: whether stages, virtual stages and microbatches fit the schedule."""

from __future__ import annotations

from overlapkit.facts import Facts
from overlapkit.pipeline_layout import layer_problem
from overlapkit.rules.registry import MEGATRON_CORE, MEGATRON_LM, Finding, State, error, rule

_SCHEDULES = "megatron-core pipeline_parallel/schedules.py"


@rule("PP005", source="megatron-core parallel_state.py initialize_model_parallel; Megatron-LM training/arguments.py")
def virtual_stages_without_pp(f: Facts, s: State) -> Finding:
    """Virtual stages need more than one pipeline stage.

    Why: Megatron-Core refuses any ``virtual_pipeline_model_parallel_size`` at PP 1, also 1.
    Fix: set it to null, or raise PP.
    """
    vp = f.recipe.model.virtual_pipeline_model_parallel_size
    if f.parallelism.pp > 1 or vp is None or (f.megatron_lm and vp == 1):
        return None
    return error(
        "model.virtual_pipeline_model_parallel_size",
        f"VP {vp} with PP 1: an interleaved schedule needs PP above 1",
        fix="set model.virtual_pipeline_model_parallel_size=null, or raise pipeline_model_parallel_size",
        by=MEGATRON_LM if f.megatron_lm else MEGATRON_CORE,
        at="validation" if f.megatron_lm else "initialize_model_parallel",
        requested=vp,
        value=vp,
    )


@rule("PP006", source="megatron-core transformer/transformer_block.py and transformer_config.py")
def layers_do_not_split(f: Facts, s: State) -> Finding:
    """The layers do not split evenly over PP and VP.

    ``num_layers`` must be a multiple of PP times VP, unless first or last stages, an account for
    embedding and loss, or an explicit layout say otherwise; these have to fit as well.

    Why: every stage and chunk builds the same number of layers; old versions dropped the rest and
    trained a smaller model.
    Fix: change PP or VP, or give a ``pipeline_model_parallel_layout``.
    """
    if f.recipe.model.is_hybrid_model:
        return None
    problem = layer_problem(f.recipe.model, f.stages, f.parallelism.pp, f.parallelism.vp)
    if problem is None:
        return None
    because, raised_at = problem
    in_parser = f.megatron_lm and f.stages is None and f.parallelism.vp is None
    return error(
        "model.num_layers",
        because,
        fix="change pipeline_model_parallel_size or virtual_pipeline_model_parallel_size, or give a layout",
        by=MEGATRON_LM if in_parser else MEGATRON_CORE,
        at="validation" if in_parser else raised_at,
        requested=f.recipe.model.num_layers,
        value=f.recipe.model.num_layers,
    )


@rule("PP007", source=_SCHEDULES)
def too_few_microbatches(f: Facts, s: State) -> Finding:
    """The interleaved schedule needs at least PP microbatches.

    The group of contiguous microbatches, ``microbatch_group_size_per_vp_stage`` or PP, must lie between
    PP and the number of microbatches.

    Why: the schedule raises otherwise, in the first step.
    Fix: raise ``global_batch_size``, or lower PP or DP.
    """
    count, pp = f.parallelism.num_microbatches, f.parallelism.pp
    if not f.interleaved or count is None:
        return None
    group = _group(f)
    if pp <= group <= count:
        return None
    what = (
        f"at least {group} microbatches are needed" if group > count else f"the group {group} is smaller than PP {pp}"
    )
    return error(
        "train.global_batch_size" if group > count else "model.microbatch_group_size_per_vp_stage",
        f"{what}, there are {count} per step",
        fix=f"raise train.global_batch_size to {max(group, pp) * _batch_of_one(f)} or more",
        by=MEGATRON_CORE,
        at="first_forward",
        requested=f.recipe.train.global_batch_size,
        value=f.recipe.train.global_batch_size,
    )


def _group(f: Facts) -> int:
    said: int | None = f.recipe.model.microbatch_group_size_per_vp_stage
    return f.parallelism.pp if said is None else said


def _batch_of_one(f: Facts) -> int:
    """Sequences of one microbatch on all data-parallel ranks."""
    return (f.recipe.train.micro_batch_size or 1) * f.parallelism.dp


@rule("PP008", source=_SCHEDULES)
def microbatch_remainder(f: Facts, s: State) -> Finding:
    """The last group of microbatches of an interleaved schedule is shorter than PP.

    The number of microbatches, divided by the group (PP unless set), must leave 0 or at least PP.

    Why: a shorter group leaves bubbles in the pipeline, and the schedule raises.
    Fix: make the number of microbatches a multiple of the group.
    """
    count, group = f.parallelism.num_microbatches, _group(f)
    if not f.interleaved or count is None or not f.parallelism.pp <= group <= count:
        return None
    rest = count % group
    if not 0 < rest < f.parallelism.pp:
        return None
    return error(
        "train.global_batch_size",
        f"{count} microbatches in groups of {group} leave {rest}, fewer than PP {f.parallelism.pp}",
        fix=f"make train.global_batch_size a multiple of {group * _batch_of_one(f)}",
        by=MEGATRON_CORE,
        at="first_forward",
        requested=f.recipe.train.global_batch_size,
        value=f.recipe.train.global_batch_size,
    )
