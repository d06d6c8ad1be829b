"""What Megatron-Core's constructors say when they refuse, and the rules that say it before them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """A text that a constructor's message contains, the rules of which one says it, and the versions that have it."""

    text: str
    codes: tuple[str, ...]
    core: str = "any"


def _of(codes: str, *texts: str, core: str = "any") -> tuple[Refusal, ...]:
    return tuple(Refusal(text, tuple(codes.split()), core) for text in texts)


# The first text that a message contains counts.
REFUSALS: tuple[Refusal, ...] = (
    # model_parallel_config.py
    # From 0.4, which came with core 0.17, Bridge clears it before.
    *_of("TP008", "Cannot use sequence parallelism without", core="<0.17.0"),
    *_of("CFG017", "tensor_parallel_num_weight_shards (", core=">=0.19.0"),
    *_of(
        "PP010", "Cannot defer embedding wgrad compute when pipeline", "Cannot defer embedding wgrad compute when grad"
    ),
    *_of("PP011", "Wgrad deferral limit should be"),
    *_of("PP014", "Pipeline parallel communication overlapping in warmup and flush"),
    # transformer_config.py
    *_of("CFG008", "Only one of self.fp16"),
    *_of("CFG006", "num_attention_heads (", "num_query_groups ("),
    *_of(
        "CFG022", "Delayed scaling does not support first", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"
    ),
    *_of("CFG023", "fp8_param must be used together"),
    *_of("CFG020", "fp4 and fp8 cannot be used"),
    *_of("EP024", "num_moe_experts must be non None"),
    *_of("EP036 EP024", "num_moe_experts must be non-negative"),
    *_of("EP036", "moe_ffn_hidden_size must be None", core="<0.18.0"),
    *_of("EP036", "moe_ffn_hidden_size is set but", core=">=0.18.0"),
    *_of("EP035", "DeepEP backend is only supported", "Only one backend is supported"),
    *_of("EP035", "moe_flex_dispatcher_backend='ncclep' requires", core=">=0.19.0"),
    *_of("EP029", "moe_shared_expert_overlap only works"),
    *_of("CFG024 EP007", "so recompute_method must be", "recompute_num_layers must be between"),
    *_of("CFG024 EP009", "selective recompute_num_layers must be None"),
    *_of("CFG025", "Invalid choices for recompute_modules", "mla_up_proj in recompute_modules"),
    *_of("CFG025", "shared_experts recompute cannot work", "Delayed scaling does not support moe_act"),
    *_of("CFG025", "recompute for fp8 needs", "moe recompute is not supported with moe_router"),
    *_of("CFG025", "GTP + local CUDA graphs", core=">=0.19.0"),
    *_of(
        "PP006", "num_layers_in_first_pipeline_stage and num_layers_in_last", "cannot be set with other pipeline layout"
    ),
    *_of("PP006", "virtual_pipeline_model_parallel_size conflicts", "stage must be larger than 0"),
    *_of("PP006", "number of layers at first stage", "number of layers at last stage"),
    *_of("PP006", "middle layers remaining but", "number of layers at middle stage", "on each middle pipeline rank"),
    *_of("PP006", "number of middle layers", "number of layers on each pipeline rank", "after enableaccount_for_embed"),
    *_of(
        "PP006", "pipeline_model_parallel_layout must be divisible", "The first layer must be", "The last layer must be"
    ),
    *_of("PP006", "Embedding must be specified exactly once", "Loss must be specified exactly once"),
    *_of("PP006", "must match num_layers", "must match mtp_num_layers", "placed before MTP layers"),
    *_of("PP006", "MTP should be always in the last", "All of the MTP layers must be in the same"),
    *_of("PP006", "list index out of range"),  # a layout without a layer
    *_of("EP037", "Bias in Moe is only supported"),
    *_of("EP039", "supports MoE FP8 training"),
    *_of("CFG026", "Do not use enable_cuda_graph", "enable_cuda_graph and external_cuda_graph cannot"),
    *_of("CFG026", "Invalid cuda graph implementation", core="<0.18.0"),
    *_of("CFG026", "cuda_graph_scope and cuda_graph_modules cannot be set together", core=">=0.18.0"),
    *_of("CFG027", "full scope cannot be used", "must not contain both moe and moe_router", "'attention'"),
    *_of("CFG027", "moe_preprocess cuda graph is only", "moe cuda graph is only supported for MoE"),
    *_of("CFG027", "mlp cuda graph is only supported"),
    *_of("CFG027", "'full_iteration_inference'", core="<0.17.0"),
    *_of("CFG027", "To use full iteration cuda graph", core="<0.18.0"),
    *_of("CFG027", "='full_iteration' cannot be combined", "_inference' cannot be combined", core=">=0.18.0"),
    *_of("CFG027", "cannot contain multiple deprecated values", "cuda_graph_modules must be empty", core=">=0.18.0"),
    *_of("CFG028", "full recompute is only supported"),
    *_of("EP038", "does not support variable sequence length"),
    *_of("EP005", "A2A Overlap encounters hang"),
    *_of("EP006", "If enabling EP A2A overlap"),
    *_of("EP001", "only supported with expert model parallelism"),
    *_of("EP003", "supported with alltoall/flex token dispatcher"),
    *_of("EP007", "disable full recomputation"),
    *_of("EP008", "disable recomputation method"),
    *_of("EP009", "recompute_num_layers must be None when"),
    *_of("EP010", "disable moe in recompute_modules", core=">=0.17.0"),
    *_of("EP004", "only supported with bf16 or fp16 model"),
    *_of("EP011", "disable moe_shared_expert_overlap"),
    *_of("EP012", "MTP layernum only supports 1", core="<0.19.0"),
    *_of("EP012", "Pipeline model parallel size must be larger than 1", core="<0.18.0"),
    *_of("EP012", "MTP supports at most one layer", core=">=0.19.0"),
    *_of("EP013", "CUDA graph scope on moe and mlp"),
    *_of("EP016", "must be enabled when enabling delay_wgrad_compute"),
    *_of("EP017", "delay_wgrad_compute is not supported with legacy", core="<0.17.0"),
    *_of("EP021", "TE version >= 2.10.0 is required for delay_wgrad"),
    *_of("EP032", "must be disabled when enabling overlap_dispatch", "required for overlap_dispatch", core=">=0.18.0"),
    *_of("EP033", "must be enabled when enabling ep_overlap_early"),
    *_of("CP003", "Length of cp_comm_type"),
    *_of("CFG029", "MoE layers does not support expert tensor parallelism", core=">=0.17.0"),
    # optimizer_config.py and distributed_data_parallel_config.py
    *_of("DP019", "overlap_param_gather_with_optimizer_step is not supported", core=">=0.19.0"),
    *_of("DP021", "Reuse grad buffer only when"),
    *_of("DP011", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments"),
    *_of("DP014", "Cannot specify both num_buckets", "num_buckets must be greater", core=">=0.18.0"),
)
# An assertion without a text: the layers for inference.
WITHOUT_TEXT = Refusal("", ("CFG029",))

# What depends on fields that no recipe is read for.
OUT_OF_SCOPE = {
    "attention dropout is not supported with graphed": "attention_dropout",
    "hidden dropout is not supported with graphed": "hidden_dropout",
    "only supported with drop-padding MoE": "moe_expert_capacity_factor, moe_pad_expert_input_to_capacity",
    "requires --moe-router-dtype=fp32": "moe_router_dtype",
}
# EP002 has no message of its own: a model without experts is refused for want of them (EP024) before.
SAID_BY_ANOTHER = {
    "EP002": "EP without experts is refused before the overlap is looked at (EP024)",
}
# Rules that name megatron-core and validation, and that no constructor can reach.
ELSEWHERE = {"CFG005": "the microbatch calculator, when training starts"}
# Bridge says it of its own section first; the constructors would refuse it too.
SAID_BEFORE = frozenset({"CFG020"})
