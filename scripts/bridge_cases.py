"""Rows of Megatron-Bridge's performance summaries as recipes, with the switches that each release ran them with.

A row says the model, the GPUs, the layout and the batch. What else it ran with (recomputation, CUDA graphs, dispatcher,
EP overlap) stands in the performance recipes of its release: scripts/performance/configs/*/*_workload_base_configs.py
up to 0.5, megatron/bridge/perf_recipes from 0.6, matched by model, GPU, precision and layout. Which release a row's
container has is inferred: 25.09 has 0.1 and its token-dropping recipes, 25.11 0.2.1, 26.02 0.3, 26.04 0.4, 26.06 0.5,
26.08 0.6. Sizes are those of the models' config.json; they are checked against the row's FLOPs per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False, "vocab_size": 128256}
_QWEN = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "vocab_size": 151936,
    "kv_channels": 128,
    "num_query_groups": 4,
    "num_moe_experts": 128,
    "moe_router_topk": 8,
}
_DEEPSEEK = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "num_layers": 61,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_topk": 8,
}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama3_8b": {
        **_LLAMA,
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
    },
    "llama3_70b": {
        **_LLAMA,
        "num_layers": 80,
        "hidden_size": 8192,
        "ffn_hidden_size": 28672,
        "num_attention_heads": 64,
        "num_query_groups": 8,
    },
    "llama31_405b": {
        **_LLAMA,
        "num_layers": 126,
        "hidden_size": 16384,
        "ffn_hidden_size": 53248,
        "num_attention_heads": 128,
        "num_query_groups": 8,
    },
    "qwen3_30b_a3b": {
        **_QWEN,
        "num_layers": 48,
        "hidden_size": 2048,
        "ffn_hidden_size": 6144,
        "num_attention_heads": 32,
        "moe_ffn_hidden_size": 768,
    },
    "qwen3_235b_a22b": {
        **_QWEN,
        "num_layers": 94,
        "hidden_size": 4096,
        "ffn_hidden_size": 12288,
        "num_attention_heads": 64,
        "moe_ffn_hidden_size": 1536,
    },
    "deepseek_v3": {
        **_DEEPSEEK,
        "num_attention_heads": 128,
        "vocab_size": 129280,
        "num_moe_experts": 256,
        "moe_layer_freq": [0] * 3 + [1] * 58,
        "mtp_num_layers": 1,
    },
    "kimi_k2": {
        **_DEEPSEEK,
        "num_attention_heads": 64,
        "vocab_size": 163840,
        "num_moe_experts": 384,
        "moe_layer_freq": [0] + [1] * 60,
    },
    "gpt_oss_120b": {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": True,
        "num_layers": 36,
        "hidden_size": 2880,
        "ffn_hidden_size": 2880,
        "num_attention_heads": 64,
        "num_query_groups": 8,
        "kv_channels": 64,
        "vocab_size": 201088,
        "num_moe_experts": 128,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": 2880,
        "window_size": [128, 0],
        "window_attn_skip_freq": 2,
    },
}
_NAMES = {
    "llama3_8b": "llama3_8b",
    "llama3_70b": "llama3_70b",
    "llama3.1_405b": "llama31_405b",
    "qwen3_30b_a3b": "qwen3_30b_a3b",
    "qwen3_235b_a22b": "qwen3_235b_a22b",
    "deepseekv3": "deepseek_v3",
    "kimi_k2": "kimi_k2",
    "gpt oss 120b": "gpt_oss_120b",
}


def sizes_named(label: str) -> str | None:
    """The key of SIZES of a row's model, such as ``DeepSeekV3 (w/ MTP)``; None for models not described here."""
    return _NAMES.get(label.partition("(")[0].strip().lower())


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How rows of some releases ran; the first of RUNS that fits a row holds. Empty tuples fit all.

    ``graphs`` are none, parts of a layer, or all of the iteration; ``blocks`` layers per chunk are recomputed whole.
    """

    model: str
    gpus: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    since: str = ""
    until: str = "99"
    pp_vp: tuple[int, int] | None = None
    task: str = ""
    drop: bool | None = None
    graphs: str = "none"
    dispatcher: str = "alltoall"
    ep_overlap: bool = False
    recompute: tuple[str, ...] = ()
    blocks: int = 0
    fused: bool = False

    def fits(self, row: Mapping[str, Any]) -> bool:
        dropped = "tokendrop" in row["model"]
        return (
            (not self.gpus or row["gpu"].lower() in self.gpus)
            and (not self.precisions or _short(row["precision"]) in self.precisions)
            and self.since <= row["release"][:5] <= self.until
            and (self.pp_vp is None or self.pp_vp == (row["pp"], row["vp"] or 1))
            and self.task in row["task"]
            and self.drop in (None, dropped)
        )


_HYBRID = "hybridep"
_GRACE, _X86 = ("gb200", "gb300"), ("b200", "b300")
_MLA = ("mla_up_proj",)
_NORM_ACT = ("layernorm", "moe_act")
# Graphs of whole iterations, fused expert GEMMs and EP overlap: MXFP8 since 26.06.
_FULL: Mapping[str, Any] = {"graphs": "all", "dispatcher": _HYBRID, "ep_overlap": True, "fused": True}
RUNS = (
    Run(model="llama3_8b", gpus=("h100",), since="26.02", blocks=5),
    Run(model="llama3_8b", gpus=("h100",)),
    Run(model="llama3_8b", gpus=("gb200",), precisions=("cs",), until="25.09"),
    Run(model="llama3_8b", graphs="all"),
    Run(model="llama3_70b", task="SFT", graphs="parts"),
    Run(model="llama3_70b"),
    Run(model="llama31_405b"),
    Run(model="qwen3_30b_a3b", drop=True, gpus=(*_GRACE, *_X86), graphs="all"),
    Run(model="qwen3_30b_a3b", gpus=(*_GRACE, *_X86), precisions=("mx",), since="26.06", **_FULL),
    Run(model="qwen3_30b_a3b", gpus=("h100",), pp_vp=(2, 12), ep_overlap=True),
    Run(model="qwen3_30b_a3b", gpus=("h100",), precisions=("bf16",), graphs="parts", dispatcher=_HYBRID),
    Run(model="qwen3_30b_a3b", gpus=("h100",), dispatcher=_HYBRID),
    Run(model="qwen3_30b_a3b", gpus=("b200",), until="26.02"),
    Run(model="qwen3_30b_a3b", graphs="parts", dispatcher=_HYBRID),
    Run(model="qwen3_235b_a22b", drop=True, gpus=_GRACE, graphs="all"),
    Run(model="qwen3_235b_a22b", gpus=("h100",), ep_overlap=True),
    Run(model="qwen3_235b_a22b", gpus=_GRACE, precisions=("mx",), since="26.06", **_FULL),
    Run(model="qwen3_235b_a22b", gpus=_GRACE, graphs="parts", dispatcher=_HYBRID),
    Run(model="qwen3_235b_a22b", gpus=("b300",), since="26.06", dispatcher=_HYBRID),
    Run(model="qwen3_235b_a22b", gpus=_X86, pp_vp=(8, 2), ep_overlap=True),
    Run(model="qwen3_235b_a22b", gpus=_X86, pp_vp=(8, 4), ep_overlap=True),
    Run(model="qwen3_235b_a22b"),
    Run(model="deepseek_v3", gpus=("gb300",), precisions=("mx",), since="26.06", **_FULL),
    Run(model="deepseek_v3", gpus=("gb200",), precisions=("mx",), since="26.06", **_FULL, recompute=_MLA),
    Run(model="deepseek_v3", gpus=("h100",), dispatcher="deepep", ep_overlap=True, recompute=("mla_up_proj", "mlp")),
    Run(model="deepseek_v3", gpus=_GRACE, since="26.02", graphs="parts", dispatcher=_HYBRID, recompute=_MLA),
    Run(model="deepseek_v3", since="26.02", dispatcher=_HYBRID, recompute=_MLA),
    Run(model="deepseek_v3", recompute=_MLA),
    Run(model="kimi_k2", gpus=("gb300",), dispatcher=_HYBRID, recompute=_MLA),
    Run(model="kimi_k2", gpus=("gb200",), graphs="parts", dispatcher=_HYBRID, recompute=_MLA),
    Run(model="kimi_k2", gpus=("h100",), recompute=("mla_up_proj", "mlp")),
    Run(model="kimi_k2", recompute=_MLA),
    Run(model="gpt_oss_120b", gpus=_GRACE, precisions=("mx",), since="26.06", **_FULL),
    Run(model="gpt_oss_120b", gpus=("b300",), since="26.02", graphs="parts", dispatcher=_HYBRID),
    Run(model="gpt_oss_120b", gpus=("gb300", "b300"), graphs="parts"),
    Run(model="gpt_oss_120b", gpus=("gb200",), since="26.04", ep_overlap=True, recompute=_NORM_ACT),
    Run(model="gpt_oss_120b", recompute=_NORM_ACT),
)


def run_of(row: Mapping[str, Any]) -> Run:
    model = sizes_named(row["model"])
    return next(run for run in RUNS if run.model == model and run.fits(row))


def _short(precision: str) -> str:
    return {"FP8": "cs", "FP8-CS": "cs", "FP8-MX": "mx", "MXFP8": "mx", "NVFP4": "fp4"}.get(precision, "bf16")


# Bridge's mixed precision of the performance recipes: gradients reduced in BF16, FP8 parameters gathered as such.
_SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {},
    "cs": {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True},
    "mx": {
        "fp8": "e4m3",
        "fp8_recipe": "mxfp8",
        "fp8_param_gather": True,
        "reuse_grad_buf_for_mxfp8_param_ag": True,
    },
    "fp4": {"fp4": "e2m1"},
}
# Layouts that the recipes of DeepSeek-V3 and Kimi-K2 choose by PP and VP: 61 layers in 4, 8 or 16 parts.
_PARTS = {4: "Et*16|(t*16|)*2t*13", 8: "Et*8|(t*8|)*6t*5", 16: "Et*4|(t*4|)*14t"}


def recipe_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as a recipe."""
    name = sizes_named(row["model"])
    assert name is not None
    run, precision = run_of(row), _short(row["precision"])
    tp_overlap = row["tp"] > 1 and precision != "fp4"
    fsdp = (row.get("fsdp") or 0) > 0
    model = {**SIZES[name], **_model(name, row, run)}
    recipe: dict[str, Any] = {
        "cluster": {"gpu": row["gpu"].lower(), "num_gpus": row["n_gpus"]},
        "software": {"container": f"nemo:{min(row['release'][:5], '26.06')}"},
        "model": model,
        "train": {"micro_batch_size": row["mbs"], "global_batch_size": row["gbs"]},
        "optimizer": {"use_distributed_optimizer": True},
        "ddp": {"use_distributed_optimizer": True},
        "mixed_precision": {"bf16": True, "grad_reduce_in_fp32": False, **_SECTIONS[precision]},
        "comm_overlap": {"tp_comm_overlap": tp_overlap},
    }
    if fsdp:
        recipe["ddp"] |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    if run.ep_overlap:
        recipe["comm_overlap"] |= {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
    if "LoRA" in row["task"]:
        recipe["peft"] = {}
    return recipe


def _model(name: str, row: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """The model's fields beyond its sizes."""
    model: dict[str, Any] = {
        "seq_length": row["seq"],
        "share_embeddings_and_output_weights": False,
        "tensor_model_parallel_size": row["tp"],
        "sequence_parallel": row["tp"] > 1,
        "pipeline_model_parallel_size": row["pp"],
        "virtual_pipeline_model_parallel_size": row["vp"] if (row["vp"] or 1) > 1 else None,
        "context_parallel_size": row["cp"],
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
    }
    if "num_moe_experts" in SIZES[name]:
        model |= _experts(row, run)
    if run.graphs != "none":
        model["cuda_graph_impl"] = "transformer_engine" if run.graphs == "parts" else "local"
        model["cuda_graph_scope"] = ["attn"] if run.graphs == "parts" else ["full_iteration"]
    if run.recompute:
        model |= {"recompute_granularity": "selective", "recompute_modules": list(run.recompute)}
    if run.blocks:
        model |= {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": run.blocks}
    return model | _pipeline(name, row)


def _experts(row: Mapping[str, Any], run: Run) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "expert_model_parallel_size": row["ep"] or 1,
        "expert_tensor_parallel_size": 1,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall" if run.dispatcher == "alltoall" else "flex",
        "use_transformer_engine_op_fuser": run.fused,
    }
    if run.dispatcher != "alltoall":
        fields["moe_flex_dispatcher_backend"] = run.dispatcher
    if "tokendrop" in row["model"]:
        fields |= {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    return fields


def _pipeline(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """How layers that do not divide are laid out: an explicit layout, or embedding and loss counted as layers."""
    chunks = row["pp"] * (row["vp"] or 1)
    if name in ("deepseek_v3", "kimi_k2") and row["pp"] > 1:
        end = "mL" if name == "deepseek_v3" else "L"
        return {"pipeline_model_parallel_layout": _PARTS.get(chunks, "Et|(tt|)*30") + end}
    if SIZES[name]["num_layers"] % chunks:
        return {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    return {}
