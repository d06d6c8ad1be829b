"""What ``overlapkit.volume`` does not answer: recipes that lack a size, ask for what is not modelled, or do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from volume_recipes import MOE, small

import overlapkit
from overlapkit import RecipeError
from overlapkit.volume import total_wire_bytes

ROOT = Path(__file__).resolve().parent.parent


def test_what_is_missing_is_named_in_one_line() -> None:
    recipe = small(model={"num_layers": None, "vocab_size": None}, train={"global_batch_size": None})
    with pytest.raises(RecipeError) as caught:
        overlapkit.volume(recipe)
    assert str(caught.value) == (
        "mapping: volume needs model.num_layers, model.vocab_size and train.global_batch_size; add model.num_layers: …"
    )
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"ddp": {"use_megatron_fsdp": True}}, "ddp.use_megatron_fsdp: the traffic of FSDP is not modelled"),
        ({"dist": {"use_torch_fsdp2": True}}, "dist.use_torch_fsdp2: the traffic of FSDP is not modelled"),
        (
            {"ddp": {"use_custom_fsdp": True}, "software": {"megatron_core": "0.13.0"}},
            "FSDP is not modelled; volume answers for ddp.use_custom_fsdp=false ddp.use_distributed_optimizer=true",
        ),
        (
            {"mixed_precision": "bf16_with_fp8_current_scaling_mixed", "peft": "lora"},
            "mixed_precision: the traffic of FP8 is not modelled, nor is that of frozen parameters (peft)",
        ),
        ({"mixed_precision": "bf16_with_fp8_current_scaling_mixed"}, "mixed_precision: the traffic of FP8 is not"),
        ({"model": {"fp4": "e2m1"}}, "model.fp4: the traffic of FP4 is not modelled"),
        ({"peft": "lora"}, "peft: the traffic of frozen parameters is not modelled"),
        ({"optimizer": {"optimizer": "dist_muon"}}, "optimizer.optimizer: the traffic of optimizer 'dist_muon' is"),
        ({"model": {"multi_latent_attention": True}}, "the traffic of multi-latent attention is not modelled"),
        ({"model": {"mtp_num_layers": 1}}, "the traffic of multi-token prediction is not modelled"),
        ({"model": {"is_hybrid_model": True}}, "the traffic of hybrid models is not modelled"),
        ({"model": {"heterogeneous_block_specs": True}}, "the traffic of layers of many kinds is not modelled"),
        ({"model": {**MOE, "add_bias_linear": True}}, "the traffic of experts with biases is not modelled"),
        ({"model": {**MOE, "moe_latent_size": 16}}, "the traffic of experts in a latent space is not modelled"),
        ({"model": {**MOE, "moe_token_dispatcher_type": "alltoall_seq"}}, "the traffic of alltoall_seq is not"),
        (
            {"model": {**MOE, "moe_router_load_balancing_type": "quantile_balancing"}},
            "the traffic of 'quantile_balancing' is not modelled",
        ),
        ({"model": {**MOE, "moe_layer_freq": "([0]*1+[1]*3)"}}, "the traffic of this pattern of MoE layers is not"),
        ({"model": {"fp32_residual_connection": True}}, "the traffic of an FP32 residual stream is not modelled"),
        ({"model": {"attention_output_gate": True}}, "model.attention_output_gate: the traffic of a gate on"),
        ({"model": {"softmax_type": "learnable"}}, "model.softmax_type: the traffic of a softmax with weights"),
        ({"model": {"qk_clip": True}}, "model.qk_clip: the traffic of the largest attention logits"),
        ({"model": {"hybrid_layer_pattern": "M*M*"}}, "model.hybrid_layer_pattern: the traffic of hybrid models"),
        ({"model": {"experimental_attention_variant": "dsa"}}, "the traffic of another kind of attention"),
        ({"model": {"linear_attention_freq": [1, 1, 1, 0]}}, "the traffic of layers of linear attention"),
        ({"model": {"scatter_embedding_sequence_parallel": False}}, "embeddings that SP does not scatter"),
        ({"model": {**MOE, "moe_layer_recompute": True}}, "the traffic of moe_layer_recompute, the older name of"),
        ({"model": {"normalization": "L2Norm"}}, "model.normalization: the traffic of 'L2Norm' is not modelled; known"),
        (
            {"model": {"position_embedding_type": "relative"}},
            "the traffic of 'relative' is not modelled; known are rope",
        ),
        (
            {"model": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}},
            "model.cross_entropy_fusion_impl: the traffic of 'linear' is not modelled",
        ),
        ({"model": {"use_ring_exchange_p2p": True}}, "the traffic of ring exchange is not modelled"),
        (
            {"model": {"pipeline_model_parallel_comm_backend": "ucc", "pipeline_model_parallel_size": 2}},
            "the traffic of a pipeline through another library than NCCL is not modelled",
        ),
        ({"ddp": {"reduce_scatter_with_fp32_accumulation": True}}, "gradients exchanged all-to-all is not modelled"),
        (
            {"cluster": {"num_gpus": 8}, "model": {"context_parallel_size": 2, "cp_comm_type": ["ulysses"]}},
            "model.cp_comm_type: the traffic of 'ulysses' is not modelled",
        ),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_what_is_not_modelled_is_refused_by_name(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        overlapkit.volume(small(**sections))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": {"global_batch_size": 3}}, "train.global_batch_size: 3 is not a multiple of"),
        ({"model": {"vocab_size": 511}}, "model.vocab_size: 511 do not divide by 2 TP ranks"),
        ({"model": {"ffn_hidden_size": 127}}, "model.ffn_hidden_size: 127 do not divide by 2 TP ranks"),
        ({"model": {"num_attention_heads": 7}}, "model.num_attention_heads: 64 of hidden_size do not divide"),
        ({"model": {"seq_length": 31}}, "model.seq_length: 31 tokens do not divide by 2 ranks of CP and SP"),
        ({"model": {**MOE, "num_moe_experts": 7}}, "model.num_moe_experts: 7 experts do not divide by EP 2"),
        ({"model": {**MOE, "expert_model_parallel_size": 3}}, "EP 3 times expert TP 1 does not fit the GPUs"),
        ({"model": {"pipeline_model_parallel_size": 2, "num_layers": 3}}, "model.num_layers: 3 layers are not"),
        ({"ddp": {"num_distributed_optimizer_instances": 3}}, "DP does not divide by 3 instances"),
        ({"ddp": {"num_buckets": 0, "overlap_grad_reduce": True}}, "ddp.num_buckets: 0 buckets hold no parameters"),
        ({"model": {"expert_tensor_parallel_size": 3}}, "EP 1 times expert TP 3 does not fit the GPUs"),
        ({"model": {**MOE, "moe_router_topk": 9}}, "model.moe_router_topk: 9 experts per token are more than the 8"),
        (
            {"model": {**MOE, "moe_expert_capacity_factor": "full"}},
            "model.moe_expert_capacity_factor: expected a number, got 'full'",
        ),
        (
            {"cluster": {"num_gpus": 8}, "model": {"context_parallel_size": 2, "cp_comm_type": ["p2p", "a2a"]}},
            "model.cp_comm_type: 2 entries for 4 layers",
        ),
        (
            {"cluster": {"num_gpus": 8}, "model": {"context_parallel_size": 2, "cp_comm_type": "a2a+p2p"}},
            "model.hierarchical_context_parallel_sizes: cp_comm_type is a2a+p2p without sizes",
        ),
        ({"model": {"num_layers": 10**9}}, "model.num_layers: 1000000000 layers are more than"),
        ({"model": {"mtp_num_layers": 10**9}}, "model.mtp_num_layers: 1000000000 layers are more than"),
        (
            {"ddp": {"num_distributed_optimizer_instances": 2, "use_distributed_optimizer": False}},
            "several instances need the distributed optimizer",
        ),
    ],
    ids=lambda item: item.partition(":")[0] if isinstance(item, str) else "",
)
def test_sizes_that_do_not_fit_are_one_line(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        overlapkit.volume(small(**sections))
    assert said in str(caught.value)


def test_every_recipe_has_an_answer_or_a_reason() -> None:
    answered = []
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        try:
            found = overlapkit.volume(path)
        except RecipeError as error:
            assert "is not modelled" in str(error), path.name
            continue
        answered.append(path.stem)
        assert total_wire_bytes(row for stage in found.stages for row in stage.rows) > 0
    assert {"llama2_7b_32xh20", "llama31_405b_h100", "mixtral_8x7b_h100", "qwen3_235b_a22b_h100"} <= set(answered)
