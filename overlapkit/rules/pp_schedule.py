"""PP: whether virtual stages and microbatches fit the schedule."""

from __future__ import annotations

from overlapkit.facts import Facts
from overlapkit.rules.dp_changes import WITH_STEP, step_off
from overlapkit.rules.registry import MEGATRON_CORE, MEGATRON_LM, Finding, State, error, rule

_SCHEDULES = "megatron-core pipeline_parallel/schedules.py"


@rule("PP005", source="megatron-core parallel_state.py initialize_model_parallel; Megatron-LM training/arguments.py")
def virtual_stages_without_pp(f: Facts, s: State) -> Finding:
    """Virtual stages need more than one pipeline stage.

    They come from ``virtual_pipeline_model_parallel_size`` or from a layout with more stages than PP.

    Why: an interleaved schedule interleaves pipeline stages. Megatron-Core refuses any number of virtual
    stages at PP 1, also 1; Megatron-LM takes 1 for none.
    Fix: set it to null, or raise PP.
    """
    vp = f.parallelism.vp
    if f.parallelism.pp > 1 or vp is None:
        return None
    from_layout = f.recipe.model.virtual_pipeline_model_parallel_size is None
    name = "pipeline_model_parallel_layout" if from_layout else "virtual_pipeline_model_parallel_size"
    said = getattr(f.recipe.model, name)
    return error(
        f"model.{name}",
        f"VP {vp} with PP 1: an interleaved schedule needs PP above 1",
        fix=f"set {' and '.join([f'model.{name}=null', *_need_virtual_stages(f)])}, "
        "or raise model.pipeline_model_parallel_size",
        by=MEGATRON_LM if f.megatron_lm else MEGATRON_CORE,
        at="validation" if f.megatron_lm else "initialize_model_parallel",
        requested=said,
        value=said,
    )


def _need_virtual_stages(f: Facts) -> list[str]:
    """What turns off that needs virtual stages (PP014, DP009)."""
    model = f.recipe.model
    changes = ["model.overlap_p2p_comm_warmup_flush=false"] if model.overlap_p2p_comm_warmup_flush else []
    if model.virtual_pipeline_model_parallel_size and f.stages is not None and len(f.stages) > 1:
        changes.insert(0, "model.pipeline_model_parallel_layout=null")
    asked = f.asked.overlap_param_gather_with_optimizer_step or f.start[WITH_STEP]
    return [*changes, step_off(f)] if asked else changes


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
    group = f.microbatch_group
    if pp <= group <= count:
        return None
    value: int | None
    if group < pp:
        subject, value = "model.microbatch_group_size_per_vp_stage", group
        because = f"groups of {group} microbatches are smaller than PP {pp}"
        fix = "set model.microbatch_group_size_per_vp_stage=null"
        if count % pp:
            fix = f"{fix} and make train.global_batch_size a multiple of {pp * _batch_of_one(f)}"
    else:
        subject, value = "train.global_batch_size", f.recipe.train.global_batch_size
        because = f"at least {group} microbatches are needed, there are {count} per step"
        fix = f"raise train.global_batch_size to {group * _batch_of_one(f)} or more"
    return error(subject, because, fix=fix, by=MEGATRON_CORE, at="first_forward", requested=value, value=value)


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
    count, group = f.parallelism.num_microbatches, f.microbatch_group
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
