"""Memory of a rank: parameters, gradients and optimizer states to the byte, activations by what is kept of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx
from volume_recipes import MOE, small

from overlapkit.cost.activations import Kept, kept_of, widths_of
from overlapkit.cost.kernels import kernels_of
from overlapkit.cost.memory import (
    Memory,
    capacity_of,
    held_of,
    memory_constants,
    memory_of,
    microbatches_in_flight,
    most_allowed,
)
from overlapkit.facts import derive
from overlapkit.recipe import Recipe, load_recipe
from overlapkit.resolver import plan
from overlapkit.volume.parameters import parameters_of
from overlapkit.volume.predict import predict

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))
# A model as in Korthikanti et al. 2022: MLP of 4 h without gate, as many key heads as heads, dropout, unfused layers.
S, B, H, A = 32, 2, 64, 8
PAPER: dict[str, Any] = {
    "ffn_hidden_size": 4 * H,
    "gated_linear_unit": False,
    "transformer_impl": "local",
    "hidden_dropout": 0.1,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
}


def memory(recipe: Recipe) -> Memory:
    facts = derive(recipe)
    decided = plan(facts)
    return memory_of(facts, decided, predict(facts, decided, approximate=True))


def kept(**model: Any) -> Kept:
    facts = derive(small(model=model, train={"micro_batch_size": B, "global_batch_size": 4 * B}))
    found = predict(facts, plan(facts), approximate=True).model
    return kept_of(found, kernels_of(facts), widths_of(facts, found))


# --- parameters, gradients, optimizer ------------------------------------------------------------


def parameters_of_a_rank(recipe: Recipe) -> int:
    facts = derive(recipe)
    model = predict(facts, plan(facts)).model
    (held,) = held_of(model, parameters_of(model))
    return held.dense + held.expert


def test_the_distributed_optimizer_shards_12_bytes_per_parameter_over_dp() -> None:
    recipe = small()  # TP 2, DP 2
    count, found = parameters_of_a_rank(recipe), memory(recipe)
    assert (found.parameters, found.gradients, found.optimizer_states) == (2 * count, 4 * count, 12 * count // 2)


def test_without_it_a_parameter_takes_18_bytes() -> None:
    recipe = small(ddp={"use_distributed_optimizer": False})
    found = memory(recipe)
    assert found.parameters + found.gradients + found.optimizer_states == 18 * parameters_of_a_rank(recipe)


def test_gradients_in_bf16_take_2_bytes() -> None:
    recipe = small(ddp={"grad_reduce_in_fp32": False})
    assert memory(recipe).gradients == 2 * parameters_of_a_rank(recipe)


def test_experts_are_sharded_over_expert_dp_alone() -> None:
    """16 GPUs, TP 2, EP 4: dense parameters have 8 data-parallel ranks, experts 4."""
    recipe = small(
        cluster={"num_gpus": 16},
        model={**MOE, "expert_model_parallel_size": 4},
        train={"micro_batch_size": 1, "global_batch_size": 8},
    )
    facts = derive(recipe)
    model = predict(facts, plan(facts)).model
    (held,) = held_of(model, parameters_of(model))
    assert held.expert == 4 * 2 * 3 * 96 * 64  # layers, experts of a rank, matrices
    assert memory(recipe).optimizer_states == 12 * held.dense // 8 + 12 * held.expert // 4


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 8),
        ({"optimizer_cpu_offload": True}, 0),
        ({"optimizer": "sgd"}, 8),
    ],
    ids=["moments in BF16", "on the host", "one moment"],
)
def test_optimizer_states_are_those_of_the_optimizer(optimizer: dict[str, Any], states: int) -> None:
    recipe = small(optimizer=optimizer)
    assert memory(recipe).optimizer_states == states * parameters_of_a_rank(recipe) // 2


# --- activations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_layer_of_korthikanti_without_sequence_parallelism(tp: int) -> None:
    found = kept(**PAPER, tensor_model_parallel_size=tp, sequence_parallel=False)
    assert found.dense == S * B * H * (10 + 24 / tp + 5 * A * S / (H * tp))


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallelism_divides_all_of_it(tp: int) -> None:
    found = kept(**PAPER, tensor_model_parallel_size=tp)
    assert found.dense == S * B * H / tp * (34 + 5 * A * S / H)


def test_selective_recomputation_leaves_34_sbh_and_full_2_sbh() -> None:
    selective = kept(**PAPER, recompute_granularity="selective", recompute_modules=["core_attn"])
    assert selective.dense == S * B * H / 2 * 34
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert kept(**PAPER, **full).dense == S * B * H / 2 * 2


def test_rotary_embeddings_keep_queries_and_keys_twice() -> None:
    rotary = kept(**{**PAPER, "position_embedding_type": "rope"})
    assert rotary.dense - kept(**PAPER).dense == 2 * 2 * S * B * H / 2


def test_fused_attention_keeps_no_scores() -> None:
    fused = kept(**{**PAPER, "transformer_impl": "transformer_engine"})
    assert fused.dense == S * B * H / 2 * 34 + 4 * S * B * A / 2


def test_block_recomputation_covers_the_first_layers_of_a_chunk() -> None:
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}
    whole, some = kept(), kept(**block)
    assert some.dense == whole.dense and some.checkpoint == S * B * H * 2 / 2
    train = {"micro_batch_size": B, "global_batch_size": 2 * B}
    plain, checked = memory(small(train=train)), memory(small(model=block, train=train))
    saved = 3 * (whole.dense - some.checkpoint) - some.again
    assert plain.activations - checked.activations == approx(saved)


def test_logits_stand_once_in_16_bits_and_once_in_fp32() -> None:
    assert memory(small()).logits == S * 512 // 2 * (2 + 4)


@given(
    st.sampled_from(["none", "core_attn", "moe_act", "shared_experts", "moe"]),
    st.sampled_from([1, 2, 4]),
)
def test_recomputing_more_keeps_less(modules: str, ep: int) -> None:
    model = {**MOE, "moe_shared_expert_intermediate_size": 64, "expert_model_parallel_size": ep}
    asked = {} if modules == "none" else {"recompute_granularity": "selective", "recompute_modules": [modules]}
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert kept(**model, **full).moe < kept(**model, **asked).moe <= kept(**model).moe


# --- schedules -----------------------------------------------------------------------------------


def test_1f1b_holds_a_microbatch_per_stage_behind() -> None:
    assert [microbatches_in_flight(4, 1, 64, stage, 4, ep_overlap=False) for stage in range(4)] == [4, 3, 2, 1]
    assert microbatches_in_flight(4, 1, 2, 0, 4, ep_overlap=False) == 2  # there are no more


@given(st.integers(2, 16), st.integers(2, 12))
def test_the_interleaved_schedule_holds_megatrons_penalty_more(pp: int, vp: int) -> None:
    """Korthikanti et al. 2022: 1 + (p - 1) / (p m) times as much on the first stage."""
    assert microbatches_in_flight(pp, vp, 10**6, 0, pp, ep_overlap=False) == approx(pp * (1 + (pp - 1) / (pp * vp)))


def test_the_first_stage_is_the_fullest_of_equal_ones() -> None:
    recipe = small(
        cluster={"num_gpus": 8},
        model={"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 2, "num_layers": 8},
        train={"micro_batch_size": 1, "global_batch_size": 16},
    )
    assert memory(recipe).stage == 0


# --- what it adds up to --------------------------------------------------------------------------


def test_total_is_the_sum_of_the_parts() -> None:
    found = memory(small())
    parts = {name: value for name, value in found.to_dict().items() if name not in ("stage", "total")}
    assert found.to_dict()["total"] == found.total == sum(parts.values())


def test_userbuffers_count_only_while_they_are_on() -> None:
    path = next(path for path in RECIPES if path.stem == "llama31_405b_h100")
    assert memory(load_recipe(path)).userbuffers > 2**30
    assert memory(load_recipe(path, ["comm_overlap.tp_comm_overlap=false"])).userbuffers == 0


@pytest.mark.parametrize("path", [path for path in RECIPES if "lora" not in path.stem], ids=lambda path: path.stem)
def test_recipes_that_run_fit_their_gpu(path: Path) -> None:
    """Layouts that NVIDIA publishes times of, and ours: none needs more than the GPU has by more than the error."""
    recipe = load_recipe(path)
    capacity = capacity_of(derive(recipe))
    assert capacity is not None
    assert memory(recipe).total * (1 - memory_constants().error) <= capacity


def test_what_is_allowed_leaves_room_for_the_stated_error() -> None:
    assert most_allowed(110.0) * (1 + memory_constants().error) == approx(110.0)


def test_an_80_gb_gpu_has_80_times_2_to_the_30_bytes() -> None:
    assert capacity_of(derive(small())) == 80 * 2**30
