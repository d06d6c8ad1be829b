"""An estimate: what it is made of, what it refuses by name, and where it says that it knows less."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

import overlapkit
from overlapkit import RecipeError
from overlapkit.cost.estimate import estimate
from overlapkit.cost.result import Estimate

DENSE: dict[str, Any] = {
    "cluster": {"gpu": "h100", "num_gpus": 64},
    "model": {
        "num_layers": 80,
        "hidden_size": 8192,
        "ffn_hidden_size": 28672,
        "num_attention_heads": 64,
        "num_query_groups": 8,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "share_embeddings_and_output_weights": False,
        "vocab_size": 128256,
        "seq_length": 8192,
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 5,
        "context_parallel_size": 2,
    },
    "train": {"micro_batch_size": 1, "global_batch_size": 128},
    "optimizer": {"use_distributed_optimizer": True},
    "ddp": {"use_distributed_optimizer": True},
    "comm_overlap": {"tp_comm_overlap": True},
}
MOE: dict[str, Any] = {
    "cluster": {"gpu": "h100", "num_gpus": 16},
    "model": {
        "num_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_query_groups": 4,
        "kv_channels": 128,
        "ffn_hidden_size": 6144,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "vocab_size": 151936,
        "seq_length": 4096,
        "num_moe_experts": 128,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 768,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": 16,
        "expert_tensor_parallel_size": 1,
    },
    "train": {"micro_batch_size": 1, "global_batch_size": 512},
    "ddp": {"use_distributed_optimizer": True},
    "optimizer": {"use_distributed_optimizer": True},
    "comm_overlap": {"tp_comm_overlap": False},
}


def of(recipe: Mapping[str, Any], *overrides: str) -> Estimate:
    return estimate(overlapkit.recipe.recipe_from_mapping(recipe, overrides))


def test_parts_and_exposed_communication_add_up_to_the_step() -> None:
    for recipe in (DENSE, MOE):
        found = of(recipe)
        parts = sum(found.parts.to_dict().values())
        exposed = sum(group.exposed_s for group in found.groups.values())
        assert parts + exposed == pytest.approx(found.step_time_s)


def test_groups_are_the_axes_of_the_volume() -> None:
    assert {"tp", "cp", "pp", "dp"} <= set(of(DENSE).groups)
    assert {"ep", "dp"} <= set(of(MOE).groups)
    slowest = of(DENSE).timeline.slowest
    rows = overlapkit.volume(DENSE).stages[slowest].rows
    for axis, group in of(DENSE).groups.items():
        assert group.message_bytes == sum(row.message_bytes for row in rows if row.axis == axis)


def test_what_overlaps_is_what_is_said_to_save() -> None:
    on, off = of(DENSE), of(DENSE, "comm_overlap.tp_comm_overlap=false")
    assert "tp_comm_overlap" in on.saves and "tp_comm_overlap" not in off.saves
    assert on.groups["tp"].hidden_s > 0 == off.groups["tp"].hidden_s
    assert off.step_time_s - on.step_time_s == pytest.approx(on.saves["tp_comm_overlap"].seconds, rel=0.02)


def test_rates_follow_from_the_step() -> None:
    found = of(DENSE)
    assert found.tokens_per_step == 128 * 8192
    assert found.tokens_per_s_per_gpu == pytest.approx(128 * 8192 / 64 / found.step_time_s)
    # Llama 3 70B: 6 times 69.5e9 parameters that a token meets, and causal attention over 8,192 tokens.
    per_token = 6 * 69.5e9 + 6 * 80 * 8192 * 8192
    assert found.model_tflops_per_gpu == pytest.approx(found.tokens_per_s_per_gpu * per_token / 1e12, rel=0.01)
    assert found.mfu == pytest.approx(found.model_tflops_per_gpu / 989.4)
    assert 0.3 < (found.mfu or 0) < 0.7


def test_the_interval_holds_the_estimate_and_is_wider_where_less_is_known() -> None:
    def width(found: Estimate) -> float:
        low, high = found.interval_s
        assert low < found.step_time_s < high
        return (high - low) / found.step_time_s

    known, unknown = of(DENSE), of(DENSE, "cluster.gpu=h20")
    assert (known.kind, unknown.kind) == ("dense", "not_measured")
    assert width(unknown) > width(known)
    assert any("h20" in note for note in unknown.notes)
    eager = of(MOE)
    assert eager.kind == "moe_eager" and width(eager) > width(known)
    assert any("kernel by kernel" in note for note in eager.notes)


def test_nvlink_that_joins_only_part_of_a_host_is_told() -> None:
    boards = ("cluster.gpu=h100_pcie", "cluster.gpus_per_node=8")
    assert any("NVLink joins 2 GPUs of a host of 8" in note for note in of(DENSE, *boards).notes)
    assert not any("NVLink" in note for note in of(DENSE).notes)


def test_what_is_assumed_is_named() -> None:
    assert "cluster.nic_gbps=400" in of(DENSE).assumed
    assert not any("nic" in each for each in of(DENSE, "cluster.nic_gbps=200").assumed)
    one_node = of(MOE, "cluster.num_gpus=8", "model.expert_model_parallel_size=8")
    assert not any("nic" in each for each in one_node.assumed)


def test_a_plan_with_errors_is_estimated_and_says_so() -> None:
    found = of(DENSE, "comm_overlap.overlap_param_gather_with_optimizer_step=true", "env_vars={}")
    assert found.step_time_s > 0


def test_the_whole_estimate_is_plain_json() -> None:
    found = json.loads(json.dumps(of(MOE).to_dict()))
    assert found["schema_version"] == 1
    assert set(found["groups"]["ep"]) == {"message_bytes", "total_s", "hidden_s", "exposed_s"}
    assert set(found["saves"]["overlap_grad_reduce"]) == {"seconds", "share", "low_share", "high_share"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.gpu=null"], "cluster.gpu: estimate needs the GPU"),
        (["cluster.gpu=h100_pcie"], "cluster.gpus_per_node: estimate needs the GPUs of a host"),
        (["cluster.gpu=vr200"], "cluster.gpu: the time on vr200 is not modelled"),
        (["cluster.gpu=a100", "mixed_precision=bf16_with_fp8_delayed_scaling_mixed"], "the time of FP8 GEMMs on a100"),
        (["mixed_precision=bf16_with_nvfp4_mixed"], "the time of FP4 GEMMs on h100"),
        (["model.bf16=false"], "the time of FP32 GEMMs is not modelled"),
        (["model.vocab_size=null"], "estimate needs model.vocab_size"),
        (["train.global_batch_size=null"], "estimate needs train.global_batch_size"),
        (["model.is_hybrid_model=true"], "the time of hybrid models is not modelled"),
        (["peft={_target_: x.LoRA}"], "is not modelled"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(overrides: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        of(DENSE, *overrides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_that_recomputes_takes_longer_and_has_the_same_model_flops() -> None:
    once = of(DENSE)
    again = of(
        DENSE, "model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"
    )
    assert again.step_time_s > 1.15 * once.step_time_s
    flops = [found.model_tflops_per_gpu * found.step_time_s for found in (once, again)]
    assert flops[0] == pytest.approx(flops[1])


def test_latent_attention_fp8_and_multi_token_prediction_are_estimated() -> None:
    deepseek = "recipes/deepseek_v3_gb200.yaml"
    found = estimate(deepseek)
    assert found.kind in ("moe", "moe_eager")
    assert 0.05 < (found.mfu or 0) < 0.6


def test_a_window_costs_what_it_sees() -> None:
    whole, none, *windows = [
        of(DENSE, f"model.window_size={size}") for size in ("null", "[-1,-1]", "[128,0]", "[2048,0]", "[8192,0]")
    ]
    seconds = [each.parts.attention_s for each in windows]
    assert none.parts.attention_s == seconds[-1] == whole.parts.attention_s
    assert seconds[1] == pytest.approx(seconds[-1] * 2 * (2048 + 128) / 8192)
    assert seconds == sorted(seconds)
    counted = [each.model_tflops_per_gpu * each.step_time_s for each in windows]
    assert counted[0] < counted[1] < counted[2] == pytest.approx(whole.model_tflops_per_gpu * whole.step_time_s)
