"""Volumes for estimates of time: what is refused where every byte must be right is counted nearly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from volume_recipes import MOE, small

from overlapkit import RecipeError, load_recipe
from overlapkit.facts import derive
from overlapkit.recipe import Recipe, recipe_from_mapping
from overlapkit.resolver import plan
from overlapkit.volume import Volume, predict
from overlapkit.volume.parameters import blocks_of, parameters_of
from overlapkit.volume.placement import DP_CP, EMBEDDING, EP, TP, ranks_per_node

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


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


FP8 = {"fp8": "hybrid", "fp8_recipe": "delayed"}


def moved(volume: Volume) -> list[tuple[str, str, int, int]]:
    return [(row.group, row.op, row.count, row.message_bytes) for stage in volume.stages for row in stage.rows]


def test_fp8_is_counted_in_the_compute_type() -> None:
    assert moved(counted(small(model=FP8))) == moved(counted(small()))


@pytest.mark.parametrize(
    ("model", "inexact"),
    [
        ({}, set()),
        (FP8, {(TP, "all_gather")}),
        ({**FP8, "fp8_param": True}, {(TP, "all_gather"), (DP_CP, "all_gather")}),
    ],
    ids=["bf16", "fp8", "fp8_parameters"],
)
def test_gathers_in_fp8_are_not_exact(model: dict[str, Any], inexact: set[tuple[str, str]]) -> None:
    rows = counted(small(model=model)).stages[0].rows
    assert {(row.group, row.op) for row in rows if not row.exact} == inexact


def test_llama_70b_in_fp8_moves_what_it_moves_in_bf16() -> None:
    recipe = RECIPES / "llama3_70b_64xh100.yaml"
    fp8 = load_recipe(recipe, ["mixed_precision=bf16_with_fp8_current_scaling_mixed"])
    bf16 = load_recipe(recipe, ["mixed_precision=bf16_mixed"])
    assert moved(counted(fp8)) == moved(counted(bf16))


def test_what_is_exact_stays_so() -> None:
    assert counted(small()) == counted(small(), approximate=False)


def test_multi_token_prediction_repeats_the_output_layer_and_its_loss() -> None:
    def losses(volume: Volume) -> int:
        return next(row.count for row in volume.stages[0].rows if row.group == TP and row.dtype == "float32")

    base, more = counted(small()), counted(small(model={"mtp_num_layers": 1}))
    assert losses(more) > losses(base)
    assert more.stages[0].wire_bytes(TP) > base.stages[0].wire_bytes(TP)


def test_multi_token_prediction_embeds_its_inputs_on_the_last_stage() -> None:
    """Its copy of an embedding that is not tied to the output layer is reduced with the first stage's."""
    split = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}

    def last(**model: Any) -> tuple[int, int]:
        volume = counted(small(model={**split, **model}, train={"global_batch_size": 2}))
        found = parameters_of(volume.model)
        (chunk,) = volume.model.stages[-1]
        rows = [row for row in volume.stages[-1].rows if row.group == EMBEDDING]
        return sum(count * sum(block.plain) for count, block in blocks_of(found, chunk)), len(rows)

    hidden, matrix = 64, 512 * 64 // 2
    (one_more, exchanged), (base, before) = last(mtp_num_layers=1), last()
    layer = (4 * hidden * hidden + 3 * 128 * hidden) // 2 + 2 * hidden
    assert one_more - base == layer + 2 * hidden * hidden // 2 + 3 * hidden + matrix
    assert (exchanged, before) == (1, 0)


@pytest.mark.parametrize(
    ("layout", "layers"), [(None, [2, 4]), ("Ettt|tmmL", [3, 3]), ("Et|tt|tmm|L", [4, 2])], ids=["even", "end", "own"]
)
def test_multi_token_prediction_stands_last_or_where_the_layout_has_it(layout: str | None, layers: list[int]) -> None:
    """A layout's stages go around the pipeline: its third is the first rank's second chunk."""
    model = {"pipeline_model_parallel_size": 2, "mtp_num_layers": 2, "pipeline_model_parallel_layout": layout}
    volume = counted(small(model=model, train={"global_batch_size": 2}))
    assert [sum(len(chunk.moe) for chunk in chunks) for chunks in volume.model.stages] == layers


def test_multi_token_prediction_is_of_the_kind_of_the_last_layer() -> None:
    model = {**MOE, "expert_model_parallel_size": 1, "mtp_num_layers": 1, "moe_layer_freq": [1, 1, 1, 0]}
    (chunks,) = counted(small(model=model)).model.stages
    assert chunks[0].moe == (True, True, True, False, False)


def test_a_gate_on_attentions_output_is_as_wide_as_the_queries() -> None:
    gated = {**GPT_OSS, "attention_output_gate": True}
    one = 64 * 64 * (2880 + 1)
    assert parameters(gated) - parameters(GPT_OSS) == 36 * one


def test_the_older_name_of_recomputing_moe_layers() -> None:
    def sent(**model: Any) -> int:
        return counted(small(model={**MOE, **model}, cluster={"num_gpus": 8})).stages[0].wire_bytes(EP)

    newer = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    assert sent(moe_layer_recompute=True) == sent(**newer) > sent()


def test_stages_that_hold_the_same_move_the_same() -> None:
    """Only the ends of the pipeline, and stages with other layers, are counted on their own."""
    split = {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 1, "sequence_parallel": False}
    pattern = {**MOE, "expert_model_parallel_size": 1, "moe_layer_freq": [0, 0, 1, 1]}

    def of(**model: Any) -> Volume:
        return counted(small(model={**split, **model}, cluster={"num_gpus": 8}))

    dense, mixed = of(), of(**pattern)
    assert dense.stages[1].rows == dense.stages[2].rows
    assert mixed.stages[1].rows != mixed.stages[2].rows


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
        rows = (
            counted(small(model={**MOE, "moe_router_dtype": "fp32", **model}, cluster={"num_gpus": 8})).stages[0].rows
        )
        return max(row.message_bytes for row in rows if row.group == EP)

    assert sent(moe_latent_size=16) * 4 == sent()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"vocab_size": None}}, "estimate needs model.vocab_size"),
        ({"model": {"is_hybrid_model": True}}, "the time of hybrid models is not modelled"),
        ({"model": {"experimental_attention_variant": "dsa"}}, "the time of another kind of attention is not modelled"),
        ({"peft": {"_target_": "LoRA"}}, "the time of frozen parameters is not modelled"),
        ({"model": {"fp32_residual_connection": True}}, "the time of an FP32 residual stream is not modelled"),
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
