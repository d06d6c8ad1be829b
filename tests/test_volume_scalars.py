"""What a volume says of the scalars of a step: which switches add or take a call, and which are passed over."""

from __future__ import annotations

from typing import Any

import pytest
from test_volume import AR, table
from volume_recipes import MOE, small

import overlapkit
from overlapkit import RecipeError

MODEL, INSTANCE = "MODEL_PARALLEL_GROUP", "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"
PLAIN_DDP = {"use_distributed_optimizer": False, "grad_reduce_in_fp32": True}
LOSS_SCALE = {"loss_scale": 128.0}


def calls(group: str, dtype: str, **sections: Any) -> int:
    """Calls of a group's all-reduce in a type, on the only stage."""
    return table(overlapkit.volume(small(**sections)), 0).get((group, AR, dtype), (0, 0))[0]


@pytest.mark.parametrize(
    ("sections", "count"),
    [
        ({}, 1),
        ({"optimizer": LOSS_SCALE}, 2),
        ({"optimizer": LOSS_SCALE, "model": {"bf16": False}}, 2),
        ({"model": {"bf16": False, "fp16": True}}, 2),
        ({"optimizer": LOSS_SCALE, "model": {"bf16": False, "fp16": True}}, 2),
        ({"mixed_precision": {"bf16": True, "loss_scale": 128}}, 2),
        ({"mixed_precision": "bf16_mixed", "optimizer": LOSS_SCALE}, 1),  # Bridge lays its section over the optimizer's
    ],
)
def test_scaled_losses_have_an_overflow_flag(sections: dict[str, Any], count: int) -> None:
    assert calls(INSTANCE, "float32", **sections) == count


def test_optimizers_of_fp32_alone_have_no_overflow_flag() -> None:
    """The norm of the gradients and the largest norm share a group there."""
    assert calls(MODEL, "float32", ddp=PLAIN_DDP, optimizer=LOSS_SCALE) == 3
    assert calls(MODEL, "float32", ddp=PLAIN_DDP, optimizer=LOSS_SCALE, model={"bf16": False}) == 2


def test_bridge_leaves_out_what_its_loop_is_told_not_to_share() -> None:
    assert (calls(MODEL, "int32"), calls(MODEL, "float32")) == (1, 1)
    assert calls(MODEL, "int32", train={"check_optimizer_step_success": False}) == 0
    assert calls(MODEL, "float32", train={"skip_sync_grad_norm_across_mp": True}) == 0
    zeros = {"log_num_zeros_in_grad": True}
    assert calls(MODEL, "float32", train={"skip_sync_grad_norm_across_mp": True}, optimizer=zeros) == 1


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"mlp_chunks_for_training": 2}}, "model.mlp_chunks_for_training: the traffic of MLPs in chunks"),
        (
            {"model": {"symmetric_ar_type": "one_shot"}},
            "model.symmetric_ar_type: the traffic of all-reduces in symmetric",
        ),
        ({"model": {"gtp_weight_remat_size": 2}}, "the traffic of weights that are sharded further than TP"),
        ({"model": {"expert_gtp_weight_remat_size": 2}}, "the traffic of weights that are sharded further than TP"),
        (
            {"model": {**MOE, "expert_tensor_parallel_num_weight_shards": 4}},
            "model.expert_tensor_parallel_num_weight_shards: the traffic of weights that are sharded further than TP",
        ),
        (
            {"model": {"num_microbatches_with_partial_activation_checkpoints": 1}},
            "the traffic of recomputation in some microbatches",
        ),
        ({"model": {"encoder_num_layers": 4}}, "model.encoder_num_layers: the traffic of an encoder"),
        ({"train": {"step_batch_size_schedule": ["0:4", "9:8"]}}, "the traffic of a batch that changes by a schedule"),
    ],
)
def test_what_else_changes_the_traffic_is_refused_by_name(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        overlapkit.volume(small(**sections))
    assert said in str(caught.value) and "is not modelled" in str(caught.value)


def test_values_that_change_nothing_are_taken() -> None:
    model = {
        "mlp_chunks_for_training": 1,
        "gtp_weight_remat_size": 1,
        "expert_gtp_weight_remat_size": 1,
        "expert_tensor_parallel_num_weight_shards": 4,  # without experts
        "symmetric_ar_type": None,
    }
    assert overlapkit.volume(small(model=model)).stages == overlapkit.volume(small()).stages


def test_a_batch_that_grows_is_taken_at_its_end() -> None:
    found = overlapkit.volume(small(train={"rampup_batch_size": [2, 2, 100]}))
    assert "train.rampup_batch_size=null" in found.assumed
    assert found.stages == overlapkit.volume(small()).stages


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {**MOE, "moe_aux_loss_coeff": "abc"}}, "model.moe_aux_loss_coeff: expected a number, got 'abc'"),
        ({"model": {**MOE, "moe_aux_loss_coeff": [0.1, "x"]}}, "model.moe_aux_loss_coeff: expected a number, got 'x'"),
    ],
)
def test_what_is_no_number_is_not_taken_for_none(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        overlapkit.volume(small(**sections))
    assert said in str(caught.value)
