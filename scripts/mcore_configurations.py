"""Random configurations over the fields that the rules about Megatron-Core's constructors read.

A configuration begins as one that the constructors accept, drawn over all its parts, and gets up to two changes, of
which most are refused. The same index always gives the same configuration.
"""

from __future__ import annotations

import random
from typing import Any

from mcore_changes import CHANGES

from overlapkit.versions import Version, parse_range

Config = dict[str, Any]
# Versions with which a configuration can be accepted; the changes draw older ones too.
_TE = ("2.2.0", "2.5.0", "2.6.0", "2.9.0", "2.12.0", "2.18.0")
_TORCH = ("2.6.0", "2.10.0", "2.13.0")


def configuration(index: int, seed: int, core: Version, bridge: str) -> Config:
    """The configuration of this index, as a dump: what it does not say has Megatron-Core's default."""
    r = random.Random(f"{seed}:{index}")
    megatron_lm = r.random() < 0.2
    software = {"megatron_core": core.text, "torch": r.choice(_TORCH), "transformer_engine": r.choice(_TE)}
    software |= {"framework": "megatron-lm"} if megatron_lm else {"megatron_bridge": bridge}
    config: Config = {"_target_": "parity", "comm_overlap": None, "software": software}
    for name in ("model", "optimizer", "ddp"):
        config[name] = {}
    for draw in (_sizes, _layers, _experts, _precision, _recompute, _graphs, _pipeline, _data_parallel, _rest):
        draw(r, config, core)
    # One change by turns, so that all are met equally often; some configurations stay as they are.
    turn = index % (len(CHANGES) * 4 // 3)
    if turn < len(CHANGES):
        CHANGES[turn](r, config)
        for _ in range(r.choice((0, 0, 0, 0, 1))):
            r.choice(CHANGES)(r, config)
    model = config["model"]
    ranks = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        ranks *= model.get(name) or 1
    shards = model.get("tensor_parallel_num_weight_shards") or 1
    config["cluster"] = {"gpu": r.choice(("h100", "b200")), "num_gpus": ranks * max(1, shards) * 8}
    return config


# --- a configuration that is accepted -----------------------------------------------------------


def _sizes(r: random.Random, config: Config, core: Version) -> None:
    model = config["model"]
    tp, cp = r.choice((1, 1, 2, 4, 8)), r.choice((1, 1, 1, 2, 4))
    groups = tp * r.choice((1, 2))
    model |= {"tensor_model_parallel_size": tp, "context_parallel_size": cp, "hidden_size": 1024}
    model |= {"num_attention_heads": groups * r.choice((1, 2, 4)), "sequence_parallel": tp > 1 and r.random() < 0.6}
    if r.random() < 0.5:
        model["num_query_groups"] = r.choice(
            [groups, *([tp // 2] if tp > 2 and core in parse_range(">=0.16.0") else [])]
        )
    if r.random() < 0.2:
        model |= {"multi_latent_attention": True, "transformer_impl": "transformer_engine"}
    if r.random() < 0.15:
        model["is_hybrid_model"] = True
    if cp > 1 and r.random() < 0.5:
        model["cp_comm_type"] = r.choice(("p2p", "a2a", "all_gather"))
    if r.random() < 0.2 and core in parse_range(">=0.19.0"):
        model["tensor_parallel_num_weight_shards"] = tp * r.choice((1, 2))


def _layers(r: random.Random, config: Config, core: Version) -> None:
    """Layers that split over the stages, in one of the four ways to say how."""
    model = config["model"]
    pp = r.choice((1, 1, 2, 2, 4))
    vp = r.choice((None, 1, 2, 3)) if pp > 1 else None
    each = (vp or 1) * 4
    model |= {"pipeline_model_parallel_size": pp, "num_layers": pp * each}
    if vp is not None:
        model["virtual_pipeline_model_parallel_size"] = vp
    way = r.random()
    if way < 0.2:
        _layout(r, model, pp, vp or 1, each)
    elif way < 0.35 and pp > 1:
        name = r.choice(("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"))
        model[name] = (vp or 1) * r.choice((1, 3))
        model["num_layers"] = (pp - 1) * each + model[name]
        if pp > 2 and r.random() < 0.4:
            other = ({"num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"} - {name}).pop()
            model[other] = (vp or 1) * 2
            model["num_layers"] += model[other] - each
    elif way < 0.5:
        model["account_for_embedding_in_pipeline_split"] = True
        model["num_layers"] -= 1
        if r.random() < 0.5:
            model["account_for_loss_in_pipeline_split"] = True
            model["num_layers"] -= 1
    if model["context_parallel_size"] > 1 and r.random() < 0.3:
        model["cp_comm_type"] = [r.choice(("p2p", "a2a")) for _ in range(model["num_layers"])]


def _layout(r: random.Random, model: Config, pp: int, vp: int, each: int) -> None:
    stages = ["t" * (each // vp) for _ in range(pp * vp)]
    mtp = r.choice((0, 0, 1, 2))
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}{'m' * mtp}L"
    if mtp:
        model["mtp_num_layers"] = mtp
    if r.random() < 0.5:
        model.pop("virtual_pipeline_model_parallel_size", None)
    names = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
    as_list = [[f"LayerType.{names[layer]}" for layer in stage] for stage in stages]
    model["pipeline_model_parallel_layout"] = r.choice(("|".join(stages), as_list))


def _experts(r: random.Random, config: Config, core: Version) -> None:
    model = config["model"]
    model["add_bias_linear"] = r.random() < 0.3
    if r.random() < 0.5:
        return
    ep = r.choice((1, 2, 4))
    model |= {"expert_model_parallel_size": ep, "num_moe_experts": ep * r.choice((1, 2, 4)), "add_bias_linear": False}
    if r.random() < 0.4:
        model |= {"expert_tensor_parallel_size": 1, "add_bias_linear": r.random() < 0.5}
    model["moe_token_dispatcher_type"] = r.choice(("allgather", "alltoall", "alltoall", "flex", "flex"))
    if r.random() < 0.5:
        model["moe_ffn_hidden_size"] = 512
    if r.random() < 0.4:
        model["moe_shared_expert_intermediate_size"] = 512
        overlaps = ("alltoall", "flex") if core in parse_range(">=0.18.0") else ("alltoall",)
        model["moe_shared_expert_overlap"] = model["moe_token_dispatcher_type"] in overlaps and r.random() < 0.4
    if model["moe_token_dispatcher_type"] == "flex":
        model["moe_flex_dispatcher_backend"] = r.choice(("deepep", "hybridep"))
    model["moe_layer_freq"] = r.choice((1, 2, [1] * model["num_layers"], [0] + [1] * (model["num_layers"] - 1)))
    _ep_overlap(r, config, core)


def _ep_overlap(r: random.Random, config: Config, core: Version) -> None:
    model = config["model"]
    interleaved = model["pipeline_model_parallel_size"] == 1 or "virtual_pipeline_model_parallel_size" in model
    if model["expert_model_parallel_size"] == 1 or model["moe_token_dispatcher_type"] == "allgather" or not interleaved:
        return
    if r.random() < 0.6:
        model |= {"overlap_moe_expert_parallel_comm": True, "moe_shared_expert_overlap": False}
        model["delay_wgrad_compute"] = r.random() < 0.5
        model["ep_overlap_early_attn_memory_release"] = r.random() < 0.3
        if (model.get("mtp_num_layers") or 0) > 1:
            model["delay_wgrad_compute"] = model["overlap_moe_expert_parallel_comm"] = False
            model["ep_overlap_early_attn_memory_release"] = False


def _precision(r: random.Random, config: Config, core: Version) -> None:
    kind = r.choice(("bf16", "bf16", "bf16", "fp16", "fp32"))
    if config["model"].get("overlap_moe_expert_parallel_comm"):
        kind = r.choice(("bf16", "fp16"))
    values: Config = {} if kind == "fp32" else {kind: True}
    number = r.random()
    if number < 0.35:
        recipe = r.choice(("delayed", "tensorwise", "mxfp8", "blockwise"))
        values |= {"fp8": r.choice(("e4m3", "hybrid")), "fp8_recipe": recipe}
        if recipe != "delayed" and r.random() < 0.5:
            values |= {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0}
        values["fp8_param"] = r.random() < 0.3
    elif number < 0.45:
        values["fp4"] = "e2m1"
    in_section = r.random() < 0.5
    if values.get("fp8_param") and r.random() < 0.6:
        if in_section:
            values["reuse_grad_buf_for_mxfp8_param_ag"] = True
        else:
            config["ddp"] |= {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}
            config["optimizer"]["reuse_grad_buf_for_mxfp8_param_ag"] = True
    if in_section:
        config["mixed_precision"] = values
    else:
        config["model"] |= values


def _recompute(r: random.Random, config: Config, core: Version) -> None:
    model, way = config["model"], r.random()
    if way < 0.2 and not model.get("overlap_moe_expert_parallel_comm"):
        model |= {"recompute_granularity": "full", "recompute_method": r.choice(("uniform", "block"))}
        model["recompute_num_layers"] = 1
    elif way < 0.5:
        model["recompute_granularity"] = "selective"
        modules = ["core_attn", "mlp"]
        modules += ["mla_up_proj"] if model.get("multi_latent_attention") else []
        modules += [] if model.get("overlap_moe_expert_parallel_comm") else ["moe"]
        modules += [] if model.get("moe_shared_expert_overlap") else ["shared_experts"]
        model["recompute_modules"] = r.sample(modules, r.randint(1, 2))


def _graphs(r: random.Random, config: Config, core: Version) -> None:
    """Graphs of what the layers have, and no recomputation in them: it would need dropout to be off."""
    model = config["model"]
    if r.random() < 0.6 or model.get("recompute_granularity"):
        return
    new = core in parse_range(">=0.18.0")
    name = r.choice(("cuda_graph_modules", "cuda_graph_scope")) if new else "cuda_graph_scope"
    moe = (model.get("num_moe_experts") or 0) > 1
    parts = ["attn", *(["moe_router"] if moe else ["mlp"])]
    impl = r.choice(("local", "transformer_engine"))
    if model.get("overlap_moe_expert_parallel_comm"):
        impl, parts = "transformer_engine", [part for part in parts if part != "mlp"]
        if model.get("delay_wgrad_compute"):
            config["software"]["transformer_engine"] = "2.18.0"
    elif new and r.random() < 0.2:
        model["cuda_graph_impl"] = "full_iteration"
        return
    model |= {"cuda_graph_impl": impl, name: r.sample(parts, r.randint(1, len(parts)))}
    if r.random() < 0.2 and model[name] and "moe_router" in model[name]:
        model[name] = [*model[name], "moe_preprocess"]
    if r.random() < 0.15 and impl == "local":
        model[name] = ["full_iteration"] if r.random() < 0.5 else ["full"]
    if r.random() < 0.15:
        old = {"local": "enable_cuda_graph", "transformer_engine": "external_cuda_graph"}[model.pop("cuda_graph_impl")]
        model[old] = True


def _pipeline(r: random.Random, config: Config, core: Version) -> None:
    model = config["model"]
    if r.random() < 0.3:
        model |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        model["overlap_p2p_comm_warmup_flush"] = r.random() < 0.5
        if model["pipeline_model_parallel_size"] == 1 or "virtual_pipeline_model_parallel_size" not in model:
            model["overlap_p2p_comm_warmup_flush"] &= config["software"].get("framework") is None
    if r.random() < 0.2 and model["pipeline_model_parallel_size"] > 1:
        model |= {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": r.choice((0, 3))}
    model["gradient_accumulation_fusion"] = bool(model.get("defer_embedding_wgrad_compute")) or r.random() < 0.6
    if r.random() < 0.2:
        model["microbatch_group_size_per_vp_stage"] = model["pipeline_model_parallel_size"] + r.choice((0, 2))


def _data_parallel(r: random.Random, config: Config, core: Version) -> None:
    ddp, optimizer = config["ddp"], config["optimizer"]
    on = r.random() < 0.6
    ddp |= {"use_distributed_optimizer": on, "overlap_grad_reduce": r.random() < 0.5}
    ddp["overlap_param_gather"] = on and ddp["overlap_grad_reduce"] and r.random() < 0.5
    optimizer |= {"use_distributed_optimizer": on, "overlap_param_gather": ddp["overlap_param_gather"]}
    if r.random() < 0.3:
        ddp[r.choice(("bucket_size", "num_buckets"))] = 40
    if r.random() < 0.2:
        ddp["nccl_ub"] = True
    if r.random() < 0.1:
        ddp |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    if r.random() < 0.2:
        config["env_vars"] = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}


def _rest(r: random.Random, config: Config, core: Version) -> None:
    model = config["model"]
    if r.random() < 0.1 and model.get("moe_token_dispatcher_type") == "alltoall":
        model["variable_seq_lengths"] = True
    if r.random() < 0.1 and not model["add_bias_linear"] and "num_moe_experts" not in model:
        model |= {"transformer_impl": "inference_optimized", "normalization": "RMSNorm", "add_qkv_bias": False}
    if r.random() < 0.1 and core in parse_range(">=0.18.0") and not model.get("overlap_moe_expert_parallel_comm"):
        model["overlap_dispatch_backward_with_experts_wgrad"] = True
