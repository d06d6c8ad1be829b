"""What holds for the estimate of any recipe: its sums, and that nothing which is faster makes a step slower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pytest import approx

from overlapkit.cost.estimate import estimate_of
from overlapkit.cost.result import Estimate
from overlapkit.facts import Facts, derive
from overlapkit.recipe import recipe_from_mapping
from overlapkit.resolver import plan, read_recipe

# Of one step over another, for what floating-point numbers lose.
ROUNDING = 1e-9
# And where data parallelism is cut into buckets, what their padding takes.
PADDING = 1e-4
OVERLAPS = (
    {"overlap_grad_reduce": False, "overlap_param_gather": False},
    {"overlap_param_gather": False},
    {"overlap_p2p_comm": False, "batch_p2p_comm": True},
)


GPUS = (
    ("a100", "bf16_mixed"),
    ("h100", "bf16_mixed"),
    ("h20", "bf16_mixed"),
    ("h100", "bf16_with_fp8_current_scaling_mixed"),
    ("b200", "bf16_with_mxfp8_mixed"),
)


@st.composite
def layouts(draw: Any) -> dict[str, Any]:
    """Recipes of GPT models that are estimated: dense or MoE, every axis, within a node and between nodes."""
    tp, cp, dp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from([1, 2, 4]))
    vp = draw(st.sampled_from([None, 2])) if pp > 1 else None
    moe = draw(st.booleans())
    model: dict[str, Any] = {
        "num_layers": pp * (vp or 1) * draw(st.integers(1, 3)),
        "hidden_size": draw(st.sampled_from([1024, 4096, 8192])),
        "ffn_hidden_size": draw(st.sampled_from([4096, 14336])),
        "num_attention_heads": 32,
        "num_query_groups": draw(st.sampled_from([None, 8])),
        "vocab_size": draw(st.sampled_from([32_000, 128_256])),
        "seq_length": draw(st.sampled_from([2048, 8192])),
        "gated_linear_unit": draw(st.booleans()),
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "share_embeddings_and_output_weights": False,
        "position_embedding_type": "rope",
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1 and (moe or draw(st.booleans())),
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vp,
        "context_parallel_size": cp,
        "cp_comm_type": draw(st.sampled_from(["p2p", "all_gather", "a2a"])),
    }
    comm_overlap: dict[str, Any] = {}
    recompute = draw(st.sampled_from([None, "full", "selective"]))
    if recompute == "selective":
        model |= {"recompute_granularity": recompute, "recompute_modules": ["core_attn"]}
    elif recompute:
        model |= {"recompute_granularity": recompute, "recompute_method": "uniform", "recompute_num_layers": 1}
    if moe:
        ep = draw(st.sampled_from([1, 2, 4]))
        assume((cp * dp * tp) % ep == 0)
        model |= {
            "num_moe_experts": 8,
            "moe_ffn_hidden_size": draw(st.sampled_from([768, 4096])),
            "moe_router_topk": 2,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": 1,
            "moe_token_dispatcher_type": draw(st.sampled_from(["alltoall", "flex"])) if ep > 1 else "alltoall",
        }
        if ep > 1 and recompute is None and (pp == 1 or vp) and draw(st.booleans()):
            comm_overlap["overlap_moe_expert_parallel_comm"] = True
    if draw(st.integers(0, 3)) == 0:
        model |= {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}
    if draw(st.integers(0, 3)) == 0:
        model |= {
            "multi_latent_attention": True,
            "q_lora_rank": draw(st.sampled_from([None, 512])),
            "kv_lora_rank": 512,
            "qk_head_dim": 128,
            "qk_pos_emb_head_dim": 64,
            "v_head_dim": 128,
        }
    if recompute != "full" and draw(st.booleans()):
        model |= {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]}
    gpu, precision = draw(st.sampled_from(GPUS))
    ddp = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": draw(st.booleans())}
    if tp * pp * cp == 1 and not moe and draw(st.booleans()):
        ddp |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    return {
        "cluster": {"gpu": gpu, "num_gpus": tp * cp * dp * pp},
        "software": {"container": "nemo:26.04"},
        "model": model,
        "train": {
            "micro_batch_size": draw(st.sampled_from([1, 2])),
            "global_batch_size": dp * pp * draw(st.sampled_from([2, 8])),
        },
        "optimizer": {"use_distributed_optimizer": True},
        "ddp": ddp,
        "mixed_precision": precision,
        "comm_overlap": comm_overlap,
    }


def facts_of(recipe: dict[str, Any], **changes: dict[str, Any]) -> Facts:
    changed = {name: {**recipe.get(name, {}), **values} for name, values in changes.items()}
    return derive(recipe_from_mapping({**recipe, **changed}))


def estimated(recipe: dict[str, Any], **changes: dict[str, Any]) -> Estimate:
    facts = facts_of(recipe, **changes)
    decided = plan(facts)
    assume(decided.ok)
    return estimate_of(facts, decided)


@given(layouts())
def test_what_is_hidden_and_what_is_exposed_add_up_to_the_total(recipe: dict[str, Any]) -> None:
    for axis, time in estimated(recipe).groups.items():
        assert time.hidden_s + time.exposed_s == approx(time.total_s), axis
        assert min(time.hidden_s, time.exposed_s) >= -ROUNDING * time.total_s, axis
        assert (time.total_s > 0) == (time.message_bytes > 0), axis


@given(layouts())
def test_the_parts_and_what_is_exposed_add_up_to_the_step(recipe: dict[str, Any]) -> None:
    found = estimated(recipe)
    parts = found.parts.to_dict()
    assert min(parts.values()) >= 0
    exposed = sum(time.exposed_s for time in found.groups.values())
    assert sum(parts.values()) + exposed == approx(found.step_time_s)


@given(layouts(), st.sampled_from(["bf16_tflops", "hbm_gb_per_s", "nvlink_gb_per_s", "nic_gbps"]), st.floats(1.01, 8))
def test_a_faster_gpu_or_network_makes_no_step_slower(recipe: dict[str, Any], rate: str, times: float) -> None:
    facts = facts_of(recipe)
    decided = plan(facts)
    assume(decided.ok)
    assert facts.gpu is not None
    faster = replace(facts.gpu, **{rate: getattr(facts.gpu, rate) * times})
    before = estimate_of(facts, decided).step_time_s
    assert estimate_of(replace(facts, gpu=faster), decided).step_time_s <= before * (1 + ROUNDING)


@pytest.mark.parametrize("rate", ["bf16_tflops", "fp8_tflops", "hbm_gb_per_s", "nvlink_gb_per_s", "nic_gbps"])
def test_a_faster_gpu_makes_no_step_slower_where_the_host_is_late_in_one_pass_alone(rate: str) -> None:
    """What hides of EP's communication is limited by compute; the host waits backward, not forward."""
    overrides = (
        "cluster.gpu=gb200",
        "cluster.nvlink_domain_size=1",
        "mixed_precision=fp16_with_fp8_subchannel_scaling_mixed",
        "train.global_batch_size=4096",
    )
    facts = derive(read_recipe("recipes/qwen3_235b_a22b_h100.yaml", overrides))
    assert facts.gpu is not None
    faster = replace(facts.gpu, **{rate: getattr(facts.gpu, rate) * 8})
    steps = [estimate_of(replace(facts, gpu=gpu), plan(facts)) for gpu in (facts.gpu, faster)]
    assert min(step.parts.host_s for step in steps) > 0
    assert steps[1].step_time_s <= steps[0].step_time_s


@given(layouts())
def test_recomputation_makes_no_step_faster(recipe: dict[str, Any]) -> None:
    without = {"recompute_granularity": None, "recompute_modules": None, "recompute_method": None}
    once = estimated(recipe, model={**without, "recompute_num_layers": None})
    assert estimated(recipe).step_time_s >= once.step_time_s * (1 - ROUNDING)


@given(layouts())
def test_an_overlap_that_is_switched_off_makes_no_step_faster(recipe: dict[str, Any]) -> None:
    """But EP's, for which the host launches more kernels, where the GPU waits for them."""
    found = estimated(recipe)
    for name, saving in found.saves.items():
        waits = name == "overlap_moe_expert_parallel_comm" and found.parts.host_s > 0
        assert waits or saving.share >= -ROUNDING, name


@given(layouts())
def test_userbuffers_asked_off_save_what_was_said(recipe: dict[str, Any]) -> None:
    """The estimate of the recipe without an overlap is the estimate with it and what it saves."""
    on = estimated(recipe)
    assume("tp_comm_overlap" in on.saves)
    off = estimated(recipe, comm_overlap={"tp_comm_overlap": False})
    assert off.step_time_s == approx(on.step_time_s + on.saves["tp_comm_overlap"].seconds)


@given(layouts(), st.sampled_from(OVERLAPS))
def test_an_overlap_that_is_asked_off_makes_no_step_faster(recipe: dict[str, Any], off: dict[str, bool]) -> None:
    assert estimated(recipe, comm_overlap=off).step_time_s >= estimated(recipe).step_time_s * (1 - PADDING)


@given(layouts())
def test_every_further_microbatch_takes_as_long(recipe: dict[str, Any]) -> None:
    batch = recipe["train"]["global_batch_size"]
    steps = [estimated(recipe, train={"global_batch_size": times * batch}) for times in (1, 2, 3)]
    assume(len({step.timeline.slowest for step in steps}) == 1)
    one, two, three = (step.step_time_s for step in steps)
    assert three - two == approx(two - one)


@given(layouts())
def test_the_interval_holds_the_estimate(recipe: dict[str, Any]) -> None:
    found = estimated(recipe)
    low, high = found.interval_s
    assert 0 < low < found.step_time_s < high
