"""Changes of a configuration, each for one refusal of Megatron-Core's constructors, and what is just beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from overlapkit.recipe.schema import specs_of
from overlapkit.versions import parse_range, parse_version

Config = dict[str, Any]
Change = Callable[[random.Random, Config], None]
_PRECISION = frozenset(specs_of("mixed_precision"))


def _change(values: Config, *, moe: bool = False) -> Change:
    """Sets fields, of the model unless the name has a section; of a tuple one value is drawn.

    Precision goes where the configuration has it, be it a section or the model. ``moe``: a model with experts.
    """

    def change(r: random.Random, config: Config) -> None:
        if moe and not config["model"].get("num_moe_experts"):
            config["model"]["num_moe_experts"] = 8 * (config["model"].get("expert_model_parallel_size") or 1)
        for path, value in values.items():
            section, _, name = path.rpartition(".")
            if not section:
                section = "mixed_precision" if name in _PRECISION and "mixed_precision" in config else "model"
            config.setdefault(section, {})[name] = r.choice(value) if isinstance(value, tuple) else value

    return change


def _stage_sizes(r: random.Random, config: Config) -> None:
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if r.random() < 0.6:
            config["model"][name] = r.choice((0, 1, 2, 3, 6))


_NO_SPLIT: Config = {
    "pipeline_model_parallel_layout": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "cp_comm_type": "p2p",
}


def _four_stages(r: random.Random, config: Config) -> None:
    """Four stages in two chunks each, of which the first, the last or the middle ones do not fit."""
    first, last, middle = r.choice(((3, 4, 4), (2, 3, 4), (2, 4, 5), (2, 2, 6), (4, 2, 4)))
    sizes = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    stages = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
    config["model"] |= {**_NO_SPLIT, **stages, **sizes, "num_layers": first + last + middle * r.choice((1, 2))}


def _odd_layout(r: random.Random, config: Config) -> None:
    """Two stages in two chunks each, laid out with one thing wrong, or none."""
    layout = r.choice(
        (
            *("Et|t|t|tmL", "Et|t|tm|L", "Et|t|tt|L", "Ett|t|t|L", "Et|Et|t|tL", "Et|t|tL|tL", "t|t|t|tL", "Et|t|t|t"),
            *("Ett|m|t|tL", "Etttt|m||L", "Ett|t|tm|mL", "Et|t|mt|tL", "Ett|tt|mm|L", "|||"),
        )
    )
    config["model"] |= {**_NO_SPLIT, "pipeline_model_parallel_size": 2, "num_layers": 4, "is_hybrid_model": False}
    config["model"] |= {"mtp_num_layers": layout.count("m") or None, "pipeline_model_parallel_layout": layout}
    config["model"]["virtual_pipeline_model_parallel_size"] = r.choice((None, 2, 2, 1))


def _other_layout(r: random.Random, config: Config) -> None:
    model = config["model"]
    stages = [r.choice(("t", "tt", "", "ttm", "m")) for _ in range(r.choice((1, 2, 4, 6)))]
    stages[0], stages[-1] = r.choice(("E", "Et", "t", "EE")) + stages[0], stages[-1] + r.choice(("L", "L", "", "LL"))
    everything = "".join(stages)
    if r.random() < 0.8:
        model["num_layers"] = max(1, everything.count("t"))
        model["mtp_num_layers"] = everything.count("m") or None
    model["pipeline_model_parallel_layout"] = "|".join(stages)


_OVERLAP: Config = {
    "overlap_moe_expert_parallel_comm": True,
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 2,
    "moe_shared_expert_overlap": False,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "mtp_num_layers": None,
    "add_bias_linear": False,
    "overlap_p2p_comm_warmup_flush": False,
    "defer_embedding_wgrad_compute": False,
}


def _overlap_and(**values: Any) -> Change:
    """EP overlap, and something beside it."""
    return _change({**_OVERLAP, **values}, moe=True)


def _graphs_of(impl: Any, *parts: list[str], **values: Any) -> Change:
    def change(r: random.Random, config: Config) -> None:
        model = config["model"]
        for name in ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_scope", "cuda_graph_modules"):
            model.pop(name, None)
        newer = parse_version(config["software"]["megatron_core"]) in parse_range(">=0.18.0")
        field = r.choice(("cuda_graph_scope", "cuda_graph_modules")) if newer else "cuda_graph_scope"
        _change({**values, "cuda_graph_impl": impl, field: tuple(parts)})(r, config)

    return change


CHANGES: tuple[Change, ...] = (
    _change({"sequence_parallel": True, "tensor_model_parallel_size": 1}),
    _change({"tensor_model_parallel_size": (3, 6)}),
    _change({"num_query_groups": (3, 5, 6)}),
    _change({"tensor_parallel_num_weight_shards": (1, 2, 3, 6)}),
    # Pipeline
    _change({"defer_embedding_wgrad_compute": True, "gradient_accumulation_fusion": (True, False)}),
    _change({"defer_embedding_wgrad_compute": True, "pipeline_model_parallel_size": 2, "wgrad_deferral_limit": -1}),
    _change(
        {"overlap_p2p_comm_warmup_flush": True, "overlap_p2p_comm": (True, False), "batch_p2p_comm": (True, False)}
    ),
    _change({"num_layers": (5, 7, 9)}),
    _change({"virtual_pipeline_model_parallel_size": (1, 2, 3, 4)}),
    _change({"pipeline_model_parallel_size": (2, 3, 4)}),
    _change({"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": (True, False)}),
    _stage_sizes,
    _four_stages,
    _four_stages,
    _other_layout,
    _odd_layout,
    _odd_layout,
    _odd_layout,
    _change({"mtp_num_layers": (0, 1, 2)}),
    # Precision
    _change({"bf16": True, "fp16": True}),
    _change({"fp8": "e4m3", "fp8_recipe": ("delayed", "mxfp8"), "first_last_layers_bf16": True}),
    _change(
        {
            "fp8": "e4m3",
            "fp8_recipe": "tensorwise",
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": (0, 1, 3, 9),
            "num_layers_at_end_in_bf16": (0, 1, 3, 9),
        }
    ),
    _change({"fp8_param": True, "fp8": (None, "hybrid")}),
    _change({"fp4": "e2m1", "fp8": ("e4m3", None)}),
    _change({"reuse_grad_buf_for_mxfp8_param_ag": True, "fp8_param": False}),
    _change({"ddp.reuse_grad_buf_for_mxfp8_param_ag": True, "ddp.fp8_param_gather": (False, None)}),
    # Experts
    _change({"expert_model_parallel_size": (2, 4), "num_moe_experts": (None, 0, 8)}),
    _change({"num_moe_experts": 0}),
    _change({"num_moe_experts": (None, 1), "moe_ffn_hidden_size": 512, "moe_layer_freq": (1, 2, [1, 0])}),
    _change({"add_bias_linear": True, "expert_tensor_parallel_size": (None, 1, 2)}, moe=True),
    _change({"software.transformer_engine": (None, "1.6.0"), "model.fp8": "e4m3"}, moe=True),
    _change(
        {
            "moe_enable_deepep": True,
            "moe_token_dispatcher_type": "flex",
            "moe_flex_dispatcher_backend": ("deepep", "hybridep"),
            "overlap_moe_expert_parallel_comm": False,
            "delay_wgrad_compute": False,
            "moe_shared_expert_overlap": False,
        }
    ),
    _change({"moe_enable_deepep": True, "moe_flex_dispatcher_backend": (None, "deepep", "hybridep", "ncclep")}),
    _change({"moe_token_dispatcher_type": ("alltoall", "flex"), "moe_flex_dispatcher_backend": "ncclep"}),
    _change(
        {
            "moe_shared_expert_overlap": True,
            "moe_shared_expert_intermediate_size": 512,
            "moe_token_dispatcher_type": ("allgather", "alltoall_seq", "flex"),
        }
    ),
    _change({"variable_seq_lengths": True, "moe_token_dispatcher_type": ("allgather", None, "alltoall")}),
    _change({"variable_seq_lengths": (True, False), "moe_token_dispatcher_type": "allgather"}, moe=True),
    # Expert-parallel overlap
    _overlap_and(expert_model_parallel_size=1),
    _overlap_and(num_moe_experts=(None, 0)),
    _overlap_and(moe_token_dispatcher_type=("allgather", "alltoall_seq", "flex")),
    _overlap_and(bf16=False, fp16=False),
    _overlap_and(**{"software.torch": "2.5.1"}),
    _overlap_and(pipeline_model_parallel_size=2, num_layers=8, virtual_pipeline_model_parallel_size=(None, 1, 2)),
    _overlap_and(recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
    _overlap_and(recompute_granularity=(None, "selective"), recompute_method="block"),
    _overlap_and(recompute_granularity=None, recompute_num_layers=1),
    _overlap_and(recompute_modules=(["moe"], ["moe", "mlp"])),
    _overlap_and(moe_shared_expert_overlap=True),
    _overlap_and(mtp_num_layers=(0, 1, 2, 2, 2)),
    _graphs_of("transformer_engine", ["mlp"], ["attn", "mlp"], **_OVERLAP, moe_layer_freq=2),
    _graphs_of("local", ["moe_router"], ["attn"], **_OVERLAP),
    _change({"delay_wgrad_compute": True}),
    _overlap_and(delay_wgrad_compute=True, moe_use_legacy_grouped_gemm=True),
    _graphs_of(
        "transformer_engine",
        ["attn"],
        **_OVERLAP,
        **{"delay_wgrad_compute": True, "software.transformer_engine": ("2.9.0", "2.12.0", None)},
    ),
    _change({"ep_overlap_early_attn_memory_release": True}),
    _change({"overlap_dispatch_backward_with_experts_wgrad": True, "software.transformer_engine": ("2.2.0", "2.6.0")}),
    _overlap_and(overlap_dispatch_backward_with_experts_wgrad=True, delay_wgrad_compute=(True, False)),
    # Recomputation
    _change({"recompute_granularity": "full", "recompute_method": (None, "block"), "recompute_num_layers": (None, 1)}),
    _change({"recompute_granularity": "selective", "recompute_num_layers": (1, None)}),
    _change({"recompute_granularity": "selective", "recompute_modules": (["attn"], ["core_attn", "mhc"])}),
    _change({"recompute_granularity": "selective", "recompute_modules": (["mla_up_proj"], ["mla_up_proj", "mlp"])}),
    _change(
        {
            "recompute_granularity": "selective",
            "recompute_modules": ["shared_experts"],
            "moe_shared_expert_overlap": (True, False),
            "moe_shared_expert_intermediate_size": (None, 512, 512),
            "moe_token_dispatcher_type": "alltoall",
        },
        moe=True,
    ),
    _change(
        {
            "software.transformer_engine": (None, "2.2.0", "2.5.0", "2.6.0"),
            "recompute_granularity": "selective",
            "recompute_modules": ["layernorm"],
            "fp8": "hybrid",
            "fp8_recipe": ("delayed", "tensorwise"),
        }
    ),
    # CUDA graphs
    _graphs_of("local", ["attn"], enable_cuda_graph=True),
    _graphs_of("none", ["attn"], enable_cuda_graph=True, external_cuda_graph=True),
    _graphs_of("none", ["attn"], external_cuda_graph=True),
    _graphs_of(("none", "local"), ["full", "attn"], ["full"]),
    _graphs_of("local", ["attention"], ["attn", "attention"]),
    _graphs_of("full_iteration", ["attn"], [], recompute_granularity=None),
    _graphs_of(
        ("transformer_engine", "full_iteration", "none", "local"), ["full_iteration"], ["full_iteration", "attn"]
    ),
    _graphs_of(
        ("transformer_engine", "full_iteration", "none", "local"),
        ["full_iteration_inference"],
        ["full_iteration_inference", "full_iteration"],
    ),
    _graphs_of(("local", "transformer_engine"), ["moe", "moe_router"], ["moe_router", "attn"], num_moe_experts=8),
    _graphs_of(("local", "transformer_engine"), ["moe_preprocess"], ["moe_preprocess", "moe_router"]),
    _graphs_of(("local", "transformer_engine"), ["moe_router"], num_moe_experts=(None, 1), recompute_granularity=None),
    _graphs_of(
        ("local", "transformer_engine"), ["mlp"], num_moe_experts=8, moe_layer_freq=(1, 2, [1, 1], [0, 1], None)
    ),
    _graphs_of(
        ("local", "transformer_engine"),
        ["attn"],
        ["full_iteration"],
        [],
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=1,
    ),
    _graphs_of(
        ("local", "transformer_engine"),
        ["moe_router"],
        recompute_granularity="selective",
        recompute_modules=(["moe"], ["moe", "layernorm"]),
        num_moe_experts=8,
    ),
    _change({"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"], "cuda_graph_modules": (["attn"], [])}),
    _graphs_of(
        "local",
        ["moe_router"],
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        tensor_parallel_num_weight_shards=2,
        num_moe_experts=8,
        moe_shared_expert_intermediate_size=512,
        moe_shared_expert_overlap=False,
        recompute_granularity="selective",
        recompute_modules=(["shared_experts"], ["mlp"]),
        fp8="e4m3",
        fp8_recipe="tensorwise",
    ),
    # Data parallelism
    _change({"ddp.num_buckets": (0, 3), "ddp.bucket_size": (None, 40)}),
    _change(
        {
            "ddp.nccl_ub": True,
            "env_vars.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "software.torch": ("2.10.0", "2.10.0", "2.10.0", "2.13.0"),
        }
    ),
    _change(
        {
            "optimizer.overlap_param_gather_with_optimizer_step": True,
            "optimizer.reuse_grad_buf_for_mxfp8_param_ag": True,
            "ddp.fp8_param_gather": True,
        }
    ),
    # The rest
    _change({"cp_comm_type": (["p2p", "a2a"], ["p2p"]), "context_parallel_size": 2}),
    _change(
        {
            "transformer_impl": "inference_optimized",
            "normalization": ("RMSNorm", "LayerNorm"),
            "add_bias_linear": (True, False),
            "add_qkv_bias": (True, False),
        }
    ),
)
