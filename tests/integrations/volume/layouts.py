"""Small GPTs in many layouts, as recipes by the names of Megatron-Core's own fields.

Sizes are odd enough that two numbers that must differ do: padding, uneven heads, several buckets.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

_MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 160,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "vocab_size": 512,
    "seq_length": 32,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
    "should_pad_vocab": False,
    "cross_entropy_loss_fusion": False,
    "transformer_impl": "local",
    "bf16": True,
}
_EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 96,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
}
_GPT2 = {
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "add_bias_linear": True,
    "position_embedding_type": "learned_absolute",
    "qk_layernorm": True,
}
_BUCKETS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 30_000}
_PLAIN_DDP = {"use_distributed_optimizer": False}
# Every expert takes equally many tokens, so that no byte depends on the routing.
_CAPACITY = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


def layout(
    *,
    tp: int = 1,
    sp: bool = False,
    pp: int = 1,
    vp: int | None = None,
    dp: int = 1,
    cp: int = 1,
    ddp: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **model: Any,
) -> dict[str, Any]:
    """A recipe of 4 microbatches of 2 sequences, on as many GPUs as the sizes ask for."""
    wrapper = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, **(ddp or {})}
    shared = {"use_distributed_optimizer": wrapper["use_distributed_optimizer"]}
    shared["overlap_param_gather"] = wrapper.get("overlap_param_gather", False)
    overlap_p2p = model.pop("overlap_p2p_comm", False)
    parallel = {
        "tensor_model_parallel_size": tp,
        "sequence_parallel": sp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "expert_tensor_parallel_size": tp,  # Megatron-Core's own default
        "overlap_p2p_comm": overlap_p2p,
        "batch_p2p_comm": not overlap_p2p,
    }
    if vp is not None:
        parallel["virtual_pipeline_model_parallel_size"] = vp
    return {
        "cluster": {"gpu": "h100", "num_gpus": tp * pp * dp * cp},
        "software": {"megatron_core": version("megatron-core")},
        "model": {**_MODEL, **parallel, **model},
        "train": {"micro_batch_size": 2, "global_batch_size": 8 * dp},
        "ddp": wrapper,
        "optimizer": {**shared, **(optimizer or {})},
        "dist": {"align_grad_reduce": True},
        "comm_overlap": None,  # these are the values that the model is built with
    }


def moe(*, ep: int = 1, etp: int | None = None, **others: Any) -> dict[str, Any]:
    """The same with experts."""
    sizes = {"expert_model_parallel_size": ep}
    if etp is not None:
        sizes["expert_tensor_parallel_size"] = etp
    return layout(**{**_EXPERTS, **sizes, **others})


# One process stands for one rank of each pipeline stage.
LAYOUTS = {
    "tp 4": layout(tp=4),
    "tp 4 with sp": layout(tp=4, sp=True),
    "tp 2 with sp, biases, learned positions": layout(tp=2, sp=True, dp=2, **_GPT2),
    "tp 2, biases, learned positions, fused loss": layout(tp=2, cross_entropy_loss_fusion=True, **_GPT2),
    "fewer key heads than tp": layout(tp=4, sp=True, num_query_groups=2),
    "pp 4 with tp and sp": layout(pp=4, tp=2, sp=True),
    "pp 4 in 2 virtual stages": layout(pp=4, vp=2, num_layers=8),
    "pp 2 on WORLD": layout(pp=2, vp=2, overlap_p2p_comm=True),
    "pp 4 with overlap": layout(pp=4, vp=2, num_layers=8, overlap_p2p_comm=True),
    "pp 2 with sequences of variable length": layout(pp=2, tp=2, variable_seq_lengths=True),
    "uneven stages": layout(
        pp=4, num_layers=8, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=3, dp=2
    ),
    "a pipeline layout": layout(pp=2, vp=2, num_layers=5, pipeline_model_parallel_layout="Et|tt|t|tL"),
    "dp 4": layout(dp=4),
    "dp 3": layout(dp=3, hidden_size=48, num_attention_heads=6, num_query_groups=3),
    "dp 2 without the distributed optimizer": layout(dp=2, ddp=_PLAIN_DDP),
    "dp 2 with gradients in bf16": layout(dp=2, ddp={"grad_reduce_in_fp32": False}),
    "buckets": layout(dp=2, pp=2, ddp=_BUCKETS),
    "buckets of a virtual pipeline": layout(dp=2, pp=2, vp=2, ddp={**_BUCKETS, "align_param_gather": True}),
    "buckets without the distributed optimizer": layout(
        dp=2, ddp={**_PLAIN_DDP, "overlap_grad_reduce": True, "bucket_size": 30_000}
    ),
    "buckets padded for NCCL": layout(dp=6, ddp={**_BUCKETS, "pad_buckets_for_high_nccl_busbw": True}),
    "2 optimizer instances": layout(dp=4, tp=2, ddp={"num_distributed_optimizer_instances": 2}),
    "2 optimizer instances with buckets": layout(
        dp=4, pp=2, ddp={**_BUCKETS, "num_distributed_optimizer_instances": 2}
    ),
    "tied embeddings over pp": layout(pp=2, dp=2, tp=2, share_embeddings_and_output_weights=True),
    "tied embeddings in buckets": layout(pp=2, dp=2, ddp=_BUCKETS, share_embeddings_and_output_weights=True),
    "full recompute, uniform": layout(
        tp=2, sp=True, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2
    ),
    "full recompute, block of each chunk": layout(
        tp=2, pp=2, vp=2, num_layers=8, recompute_granularity="full", recompute_method="block", recompute_num_layers=1
    ),
    "full recompute, distributed activations": layout(
        tp=2,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        distribute_saved_activations=True,
    ),
    "selective recompute of mlp": layout(
        tp=2, sp=True, recompute_granularity="selective", recompute_modules=["core_attn", "mlp"]
    ),
    "cp 2": layout(cp=2, tp=2, sp=True, dp=2),
    "fp16": layout(tp=2, dp=2, bf16=False, fp16=True, optimizer={"log_num_zeros_in_grad": True}),
    "bf16 with a scaled loss": layout(tp=2, dp=2, optimizer={"loss_scale": 128.0}),
    "fp32 with a loss per token": layout(pp=2, dp=2, bf16=False, calculate_per_token_loss=True),
    "experts, all-to-all": moe(ep=2, dp=4),
    "experts, all-to-all, of equal load": moe(ep=2, dp=2, tp=2, sp=True, **_CAPACITY),
    "experts, all-gather": moe(ep=2, dp=2, moe_token_dispatcher_type="allgather"),
    "experts, all-gather with tp": moe(ep=2, tp=2, sp=True, dp=2, moe_token_dispatcher_type="allgather"),
    "expert tp": moe(ep=2, etp=2, tp=2, sp=True, dp=2),
    "expert tp without tp": moe(ep=2, etp=2, dp=4),
    "no expert tp beside tp": moe(ep=4, etp=1, tp=2, sp=True, dp=2),
    "shared experts in a pipeline": moe(
        ep=2, pp=2, dp=2, tp=2, sp=True, moe_shared_expert_intermediate_size=64, moe_layer_freq=[0, 1, 1, 0]
    ),
    "experts recomputed": moe(
        ep=2, dp=2, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ),
    "expert biases": moe(ep=2, dp=4, moe_router_enable_expert_bias=True, moe_router_load_balancing_type="none"),
    "experts of 2 optimizer instances": moe(ep=2, dp=8, ddp={"num_distributed_optimizer_instances": 2}),
}
# As many processes as the layout has ranks, over gloo.
PROCESSES = {
    "tp 2 with sp and pp 2": layout(tp=2, sp=True, pp=2),
    "tp 2, recomputed": layout(
        tp=2, dp=2, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ),
    "pp 2 on WORLD": LAYOUTS["pp 2 on WORLD"],
    "pp 3": layout(pp=3, num_layers=6, share_embeddings_and_output_weights=True),
    "buckets and pp 2": LAYOUTS["buckets"],
    "2 optimizer instances": layout(dp=4, ddp={"num_distributed_optimizer_instances": 2}),
    "experts, all-to-all": moe(ep=2, dp=2, **_CAPACITY),
    "experts, all-gather with tp": moe(ep=2, tp=2, sp=True, dp=2, moe_token_dispatcher_type="allgather"),
}
