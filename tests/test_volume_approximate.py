"""Volumes for estimates of time: what is refused where every byte must be right is counted nearly."""

from __future__ import annotations

from typing import Any

import pytest
from volume_recipes import MOE, small

from overlapkit import RecipeError
from overlapkit.facts import derive
from overlapkit.recipe import Recipe, recipe_from_mapping
from overlapkit.resolver import plan
from overlapkit.volume import Volume, predict
from overlapkit.volume.parameters import blocks_of, parameters_of
from overlapkit.volume.placement import DP_CP, EP, TP, ranks_per_node


def counted(recipe: Recipe, *, approximate: bool = True) -> Volume:
    facts = derive(recipe)
    return predict(facts, plan(facts), approximate=approximate)


def parameters(sizes: dict[str, Any]) -> int:
    """Elements of a whole model, on one GPU, without the padding of its vocabulary."""
    recipe = {
        "cluster": {"gpu": "h100", "num_gpus": 1},
        "model": {
            "seq_length": 4096,
            "gated_linear_unit": True,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "share_embeddings_and_output_weights": False,
            "moe_grouped_gemm": True,
            **sizes,
        },
        "train": {"micro_batch_size": 1, "global_batch_size": 1},
    }
    model = counted(recipe_from_mapping(recipe)).model
    found = parameters_of(model)
    (chunks,) = model.stages
    return sum(count * sum(block.plain) for chunk in chunks for count, block in blocks_of(found, chunk))


DEEPSEEK = {
    "num_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "ffn_hidden_size": 18432,
    "vocab_size": 129280,
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "num_moe_experts": 256,
    "moe_ffn_hidden_size": 2048,
    "moe_router_topk": 8,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_layer_freq": [0] * 3 + [1] * 58,
}
KIMI = {**DEEPSEEK, "num_attention_heads": 64, "vocab_size": 163840, "num_moe_experts": 384}
KIMI |= {"moe_layer_freq": [0] + [1] * 60}
GPT_OSS = {
    "num_layers": 36,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "kv_channels": 64,
    "ffn_hidden_size": 2880,
    "vocab_size": 201088,
    "num_moe_experts": 128,
    "moe_ffn_hidden_size": 2880,
    "moe_router_topk": 4,
    "add_bias_linear": True,
}


@pytest.mark.parametrize(
    ("sizes", "billions"), [(DEEPSEEK, 671.0), (KIMI, 1026.0), (GPT_OSS, 116.8)], ids=["deepseek", "kimi", "gpt_oss"]
)
def test_parameters_of_known_models(sizes: dict[str, Any], billions: float) -> None:
    """The counts that their authors publish."""
    assert parameters(sizes) / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_layer_of_multi_token_prediction_is_one_more_layer_and_its_projection() -> None:
    """DeepSeek-V3's report counts 14 B for it, 2.6 B of them shared with the model."""
    one_more = parameters({**DEEPSEEK, "mtp_num_layers": 1}) - parameters(DEEPSEEK)
    assert one_more / 1e9 == pytest.approx(11.5, rel=0.02)


def test_fp8_is_counted_in_the_compute_type() -> None:
    fp8 = {"fp8": "hybrid", "fp8_recipe": "delayed"}
    assert counted(small(model=fp8)).stages == counted(small()).stages


def test_what_is_exact_stays_so() -> None:
    assert counted(small()) == counted(small(), approximate=False)


def test_multi_token_prediction_repeats_the_output_layer_and_its_loss() -> None:
    def losses(volume: Volume) -> int:
        return next(row.count for row in volume.stages[0].rows if row.group == TP and row.dtype == "float32")

    base, more = counted(small()), counted(small(model={"mtp_num_layers": 1}))
    assert losses(more) > losses(base)
    assert more.stages[0].wire_bytes(TP) > base.stages[0].wire_bytes(TP)


def test_fsdp_gathers_twice_and_scatters_once_per_microbatch() -> None:
    sharded = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    volume = counted(small(ddp=sharded))
    held = sum(
        count * sum(block.plain)
        for chunk in volume.model.stages[0]
        for count, block in blocks_of(parameters_of(volume.model), chunk)
    )
    rows = {row.op: row.message_bytes for row in volume.stages[0].rows if row.group == DP_CP and row.count > 1}
    assert rows["all_gather"] == 2 * volume.num_microbatches * held * 2
    assert rows["reduce_scatter"] == volume.num_microbatches * held * 4


def test_experts_in_a_latent_space_send_its_width() -> None:
    def sent(**model: Any) -> int:
        rows = counted(small(model={**MOE, "moe_router_dtype": "fp32", **model}, cluster={"num_gpus": 8})).stages[0].rows
        return max(row.message_bytes for row in rows if row.group == EP)

    assert sent(moe_latent_size=16) * 4 == sent()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"vocab_size": None}}, "estimate needs model.vocab_size"),
        ({"model": {"is_hybrid_model": True}}, "the time of hybrid models is not modelled"),
        ({"model": {"num_layers": 20_000}}, "that estimate counts"),
        ({"model": {"multi_latent_attention": True, "kv_lora_rank": "wide"}}, "model.kv_lora_rank: expected a width"),
        ({"model": {"multi_latent_attention": True, "v_head_dim": 0}}, "model.v_head_dim: expected a width"),
    ],
)
def test_refusals_speak_of_the_estimate(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        counted(small(**changes))


@pytest.mark.parametrize(
    ("tp", "dp", "node", "expected"),
    [(4, 4, 8, {TP: 4, DP_CP: 2}), (8, 2, 8, {TP: 8, DP_CP: 1}), (16, 1, 8, {TP: 8}), (2, 3, 8, {DP_CP: 3})],
)
def test_how_many_of_a_group_share_a_node(tp: int, dp: int, node: int, expected: dict[str, int]) -> None:
    model = {"tensor_model_parallel_size": tp, "num_attention_heads": 16}
    cluster = {"num_gpus": tp * dp, "gpus_per_node": node, "nvlink_domain_size": node}
    layout = counted(small(model=model, cluster=cluster, train={"global_batch_size": 2 * dp})).layout
    assert {group: ranks_per_node(layout, group) for group in expected} == expected
