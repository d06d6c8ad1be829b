"""Likely reasons: for a run that differs by one change from its recipe, that change is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from overlapkit.measure.reasons import Reason, likely_reasons, score
from overlapkit.measure.row_comparison import RowComparison, Seen, compare_rows
from overlapkit.volume.configuration import Configuration, configure

ROOT = Path(__file__).parents[2]
MEGATRON_LM = str(ROOT / "recipes/llama2_7b_32xh20.yaml")
BRIDGE = str(ROOT / "recipes/llama31_405b_h100.yaml")
NO_OVERLAP = ("comm_overlap=null",)
FULL = ("model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1")


def measured(job: Configuration) -> Callable[[Configuration], Sequence[RowComparison]]:
    """Compares a configuration with what NCCL would have shown of a job."""
    seen = [
        [Seen(r.group, r.size, r.op, r.dtype, r.count, r.message_bytes) for r in stage.rows if r.observable]
        for stage in job.volume.stages
    ]
    return lambda found: [
        row
        for stage, rows in zip(found.volume.stages, seen, strict=True)
        for row in compare_rows(stage.rows, rows, kind="nccl_log")
    ]


def reasons(recipe: str, overrides: Sequence[str], ran: Sequence[str], *, broadcast: bool = False) -> list[Reason]:
    """The reasons found where ``recipe`` was to run with ``overrides`` and ran with ``ran`` as well."""
    base = configure(recipe, overrides)
    job = configure(recipe, [*overrides, *ran], data_broadcast=broadcast)
    return list(likely_reasons(recipe, base, measured(job)))


@pytest.mark.parametrize(
    ("recipe", "overrides", "ran", "what"),
    [
        (MEGATRON_LM, NO_OVERLAP, FULL, "full recomputation"),
        (MEGATRON_LM, (*NO_OVERLAP, *FULL), ("model.recompute_granularity=null",), "no recomputation"),
        (MEGATRON_LM, NO_OVERLAP, ("model.sequence_parallel=false",), "sequence parallelism off"),
        (MEGATRON_LM, (*NO_OVERLAP, "model.sequence_parallel=false"), ("model.sequence_parallel=true",),
         "sequence parallelism on"),
        (MEGATRON_LM, NO_OVERLAP, ("ddp.use_distributed_optimizer=false",), "no distributed optimizer"),
        (MEGATRON_LM, (), ("model.should_pad_vocab=false",), "a vocabulary of 32000, not padded to 32768"),
        (MEGATRON_LM, ("model.should_pad_vocab=false",), ("model.should_pad_vocab=true",),
         "a vocabulary padded to 32768, not 32000"),
        (MEGATRON_LM, (), ("train.global_batch_size=32",), "16 microbatches, not 64"),
        (MEGATRON_LM, (), ("train.micro_batch_size=2",), "2 sequences per microbatch, not 1"),
        (MEGATRON_LM, (), ("comm_overlap.tp_comm_overlap=false",), "TP traffic did not go through userbuffers"),
        (MEGATRON_LM, NO_OVERLAP, ("comm_overlap.tp_comm_overlap=true",), "TP traffic went through userbuffers"),
        (MEGATRON_LM, (), ("comm_overlap.overlap_grad_reduce=false", "comm_overlap.overlap_param_gather=false"),
         "gradient reduction does not overlap"),
        (MEGATRON_LM, (), ("ddp.grad_reduce_in_fp32=false",), "gradients reduced in BF16"),
        (BRIDGE, (), ("mixed_precision.grad_reduce_in_fp32=true",), "gradients reduced in FP32"),
        (BRIDGE, (), ("model.cross_entropy_loss_fusion=false",), "the cross entropy is not fused"),
        (BRIDGE, (), ("model.virtual_pipeline_model_parallel_size=null",), "no virtual stages"),
        (MEGATRON_LM, NO_OVERLAP, ("model.virtual_pipeline_model_parallel_size=2",),
         "2 virtual stages per rank, not 1"),
        (MEGATRON_LM, NO_OVERLAP, ("mixed_precision=fp16_mixed",), "activations in FP16"),
    ],
)  # fmt: skip
def test_the_change_that_a_job_ran_with_is_the_first_reason(
    recipe: str, overrides: Sequence[str], ran: Sequence[str], what: str
) -> None:
    first, *others = reasons(recipe, overrides, ran)
    assert (first.what, first.after, others) == (what, 0, [])
    assert first.before > 0


@pytest.mark.parametrize(("masks", "words"), [("true", ", attention masks with it"), ("false", "")])
def test_the_batch_that_megatron_lm_broadcasts(masks: str, words: str) -> None:
    ran = (f"dataset.create_attention_mask={masks}",)
    [reason] = reasons(MEGATRON_LM, NO_OVERLAP, ran, broadcast=True)
    assert (reason.what, reason.data_broadcast) == (f"the batch is broadcast over TP{words}", True)
    assert reason.after == 0


def test_several_changes_stand_on_one_another() -> None:
    ran = (*FULL, "train.global_batch_size=64", "model.should_pad_vocab=false")
    found = reasons(MEGATRON_LM, NO_OVERLAP, ran)
    assert {reason.what for reason in found} == {
        "full recomputation",
        "32 microbatches, not 64",
        "a vocabulary of 32000, not padded to 32768",
    }
    assert found[-1].after == 0
    for before, after in pairwise(found):
        assert before.after == after.before


def test_the_overrides_of_a_reason_make_the_prediction_that_was_measured() -> None:
    ran = ("model.sequence_parallel=false", "model.should_pad_vocab=false")
    found = reasons(MEGATRON_LM, NO_OVERLAP, ran)
    changes = [change for reason in found for change in reason.overrides]
    assert configure(MEGATRON_LM, [*NO_OVERLAP, *changes]).volume.stages == (
        configure(MEGATRON_LM, [*NO_OVERLAP, *ran]).volume.stages
    )


def test_a_job_as_its_recipe_has_no_reasons() -> None:
    assert reasons(MEGATRON_LM, (), ()) == []


def test_what_no_change_explains_has_no_reasons() -> None:
    base = configure(MEGATRON_LM, NO_OVERLAP)

    def compared(found: Configuration) -> Sequence[RowComparison]:
        odd = Seen("MODEL_PARALLEL_GROUP", 16, "all_to_all", "float32", 17, 4711)
        return [*measured(base)(found), *compare_rows((), [odd], kind="nccl_log")]

    assert score(compared(base)).rows == 1
    assert likely_reasons(MEGATRON_LM, base, compared) == ()


@pytest.mark.parametrize("ran", ["model.tensor_model_parallel_size=4", "model.pipeline_model_parallel_size=1"])
def test_another_layout_is_no_reason_to_look_for_others(ran: str) -> None:
    base = configure(MEGATRON_LM, NO_OVERLAP)
    job = configure(MEGATRON_LM, [*NO_OVERLAP, ran])
    seen = [Seen(r.group, r.size, r.op, r.dtype, r.count, r.message_bytes) for r in job.volume.stages[0].rows]
    rows = compare_rows(base.volume.stages[0].rows, seen, kind="nccl_log")
    assert any(row.other_layout for row in rows)
    assert likely_reasons(MEGATRON_LM, base, lambda _: rows) == ()


def test_fewer_predicted_rows_are_no_explanation() -> None:
    base = configure(MEGATRON_LM, NO_OVERLAP)
    odd = [
        Seen("TENSOR_MODEL_PARALLEL_GROUP", 8, op, "float8_e4m3fn", 7, 56) for op in ("all_gather", "reduce_scatter")
    ]
    found = likely_reasons(MEGATRON_LM, base, lambda job: compare_rows(job.volume.stages[0].rows, odd, kind="nccl_log"))
    assert "sequence parallelism off" not in [reason.what for reason in found]


def test_a_reason_as_plain_values() -> None:
    [reason] = reasons(MEGATRON_LM, NO_OVERLAP, ("model.sequence_parallel=false",))
    assert reason.to_dict() == {
        "what": "sequence parallelism off",
        "overrides": ["model.sequence_parallel=false"],
        "data_broadcast": False,
        "rows_before": reason.before,
        "rows_after": 0,
        "or_else": [],
    }
