"""A small recipe that tests of volumes lay changes over."""

from __future__ import annotations

from typing import Any

from overlapkit.recipe import Recipe, recipe_from_mapping

MOE = {
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 96,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.01,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "moe_token_dispatcher_type": "alltoall",
}


def small(**sections: Any) -> Recipe:
    """A dense GPT of four layers on eight GPUs, DP 2, two microbatches; ``sections`` are laid over it."""
    model = {
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 8,
        "vocab_size": 512,
        "should_pad_vocab": False,
        "seq_length": 32,
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "share_embeddings_and_output_weights": False,
        "cross_entropy_loss_fusion": False,
        "position_embedding_type": "rope",
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "bf16": True,
    }
    base: dict[str, Any] = {
        "cluster": {"gpu": "h100", "num_gpus": 4},
        "software": {"megatron_core": "0.16.1", "transformer_engine": "2.12"},
        "model": model,
        "train": {"micro_batch_size": 1, "global_batch_size": 4},
        "ddp": {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True},
        "comm_overlap": None,
    }
    for name, values in sections.items():
        base[name] = {**base[name], **values} if isinstance(base.get(name), dict) else values
    return recipe_from_mapping(base)
