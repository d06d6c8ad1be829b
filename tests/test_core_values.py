"""What Megatron-Core's classes are constructed from, where the recipe says a thing twice or by a name."""

from __future__ import annotations

from typing import Any

import pytest

from overlapkit.recipe import recipe_from_mapping
from overlapkit.render.core_values import CoreValues, core_values
from overlapkit.resolver import resolve


def values_of(framework: str, **sections: Any) -> CoreValues:
    mapping = {"cluster": {"num_gpus": 8}, "software": {"framework": framework}, **sections}
    recipe = recipe_from_mapping(mapping)
    return core_values(recipe, resolve(recipe))


@pytest.mark.parametrize("framework", ["megatron-bridge", "megatron-lm"])
def test_a_precision_section_counts_before_the_model(framework: str) -> None:
    found = values_of(framework, mixed_precision={"fp16": True}, model={"fp8": "hybrid", "bf16": True})
    model = found.sections["model"]
    assert (model["fp16"], model["bf16"], "fp8" in model, found.dtype) == (True, False, False, "float16")


def test_a_named_precision_brings_its_layers_in_bf16() -> None:
    found = values_of("megatron-bridge", mixed_precision="nemotron_h_bf16_with_fp8_current_scaling_mixed")
    model = found.sections["model"]
    ends = (model["num_layers_at_start_in_bf16"], model["num_layers_at_end_in_bf16"])
    assert (model["first_last_layers_bf16"], ends) == (True, (2, 2))


def test_two_precisions_stay_two() -> None:
    """Megatron-Core refuses them, and is not to be spared."""
    model = values_of("megatron-bridge", mixed_precision={"bf16": True, "fp16": True}).sections["model"]
    assert model["bf16"] and model["fp16"]


def test_megatron_lm_has_one_flag_for_the_gradient_buffer() -> None:
    name = "reuse_grad_buf_for_mxfp8_param_ag"
    found = values_of("megatron-lm", optimizer={name: True}).sections
    assert found["ddp"][name] and found["optimizer"][name]


def test_the_distributed_optimizer_is_the_same_for_both() -> None:
    found = values_of("megatron-bridge", ddp={"use_distributed_optimizer": True}).sections
    assert found["optimizer"]["use_distributed_optimizer"]


def test_what_has_no_place_is_named() -> None:
    found = values_of("megatron-lm", model={"seq_length": 64}, train={"micro_batch_size": 1})
    assert found.elsewhere == ("train.micro_batch_size", "model.seq_length")


@pytest.mark.parametrize(("coefficient", "kept"), [(0.01, "aux_loss"), ([0.01], ["aux_loss"])])
def test_one_kind_of_auxiliary_loss_is_a_list_where_its_coefficient_is(coefficient: Any, kept: Any) -> None:
    """Megatron-Core refuses a list of kinds without a list of coefficients."""
    model = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": coefficient}
    found = values_of("megatron-bridge", model=model).sections["model"]
    assert (found["moe_router_load_balancing_type"], found["moe_aux_loss_coeff"]) == (kept, coefficient)
