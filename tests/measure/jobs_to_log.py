"""Jobs on 32 GPUs whose logs are written, and the spellings of releases that they are written in."""

from __future__ import annotations

from typing import Any

import overlapkit
from overlapkit.volume import Volume

STEPS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 8, PP 2, DP 2": {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    "TP 4, PP 4, DP 2, interleaved": {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
    },
    "PP 2, DP 16, tied": {"pipeline_model_parallel_size": 2, "share_embeddings_and_output_weights": True},
    "DP 32": {},
    "TP 2, CP 2, PP 2, DP 4": {
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
    },
    "TP 2, EP 4, PP 2, DP 8": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "num_moe_experts": 8,
        "expert_model_parallel_size": 4,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_ffn_hidden_size": 128,
    },
    "TP 4, ETP 2, EP 4, DP 8": {
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
        "num_moe_experts": 8,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 2,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_ffn_hidden_size": 128,
    },
}
SPELLINGS: list[dict[str, Any]] = [
    {"version": (2, 18), "split": False, "one_file": False},
    {"version": (2, 20), "split": False, "one_file": True},
    {"version": (2, 21), "split": True, "one_file": False},
    {"version": (2, 23), "split": True, "one_file": True, "prefix": "[default{rank}]:"},
    {"version": (2, 25), "split": True, "one_file": False},
    {"version": (2, 27), "split": False, "one_file": True, "prefix": "[2026-11-30 12:00:0{rank}] "},
    {"version": (2, 29), "split": True, "one_file": True, "suffix": " task 0 globalrank {rank}"},
]


def predicted(layout: str) -> Volume:
    """A GPT of eight layers on 32 GPUs, four microbatches."""
    model = {
        "num_layers": 8,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 8,
        "vocab_size": 1024,
        "seq_length": 64,
        "share_embeddings_and_output_weights": False,
        "cross_entropy_loss_fusion": False,
        "bf16": True,
        "add_bias_linear": False,
        **LAYOUTS[layout],
    }
    ranks = model.get("tensor_model_parallel_size", 1) * model.get("pipeline_model_parallel_size", 1)
    data = 32 // (ranks * model.get("context_parallel_size", 1))
    return overlapkit.volume(
        {
            "cluster": {"gpu": "h100", "num_gpus": 32},
            "software": {"megatron_core": "0.16.1", "transformer_engine": "2.12"},
            "model": model,
            "train": {"micro_batch_size": 1, "global_batch_size": 4 * data},
            "ddp": {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True},
            "comm_overlap": None,
        }
    )
