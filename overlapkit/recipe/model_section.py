"""The recipe's section ``model``, written as the other sections are: see :mod:`overlapkit.recipe.sections`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from overlapkit.recipe.kinds import anything, choice, count, flag, integer, names, size, sizes, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes and parallelism of the model, and the raw overlap values that stand there."""

    tensor_model_parallel_size: int | None = size("GPUs that split each layer (TP)")
    sequence_parallel: bool | None = flag("split activations along the sequence in the TP group")
    pipeline_model_parallel_size: int | None = size("pipeline stages (PP)")
    virtual_pipeline_model_parallel_size: int | None = size("model chunks per pipeline stage (VP)")
    num_layers_per_virtual_pipeline_stage: int | None = size("layers per chunk: Megatron-LM's other way to say VP")
    context_parallel_size: int | None = size("GPUs that split the sequence (CP)")
    expert_model_parallel_size: int | None = size("GPUs that share the experts of a layer (EP)")
    expert_tensor_parallel_size: int | None = size("GPUs that split one expert (ETP)")
    pipeline_model_parallel_layout: Any = anything("explicit layers per stage and chunk, for example Ettt|tttt|tttL")
    pipeline_model_parallel_comm_backend: str | None = text("library of the pipeline's sends and receives: nccl or ucc")
    num_layers_in_first_pipeline_stage: int | None = count("layers of the first stage")
    num_layers_in_last_pipeline_stage: int | None = count("layers of the last stage")
    account_for_embedding_in_pipeline_split: bool | None = flag("count the embedding as a layer of the first stage")
    account_for_loss_in_pipeline_split: bool | None = flag("count the loss as a layer of the last stage")
    microbatch_group_size_per_vp_stage: int | None = count("contiguous microbatches per chunk; PP when absent")
    cp_comm_type: tuple[str, ...] | None = names(
        "how CP exchanges keys and values: p2p, all_gather, a2a or a2a+p2p; one for all layers or one per layer"
    )
    tensor_parallel_num_weight_shards: int | None = size("shards of each weight, a multiple of TP; TP when absent")
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = sizes("GPUs per level of a2a+p2p")

    num_layers: int | None = size("transformer layers")
    hidden_size: int | None = size("width of the residual stream, in elements")
    ffn_hidden_size: int | None = size("width inside the MLP, in elements; 4 x hidden_size when absent")
    num_attention_heads: int | None = size("attention heads")
    num_query_groups: int | None = size("key/value heads; num_attention_heads when absent")
    kv_channels: int | None = size("width of a head, in elements; hidden_size / heads when absent")
    gated_linear_unit: bool | None = flag("two input projections in the MLP (SwiGLU, GeGLU)")
    vocab_size: int | None = size("tokens of the vocabulary, before padding")
    make_vocab_size_divisible_by: int | None = size("the vocabulary is padded to a multiple of this times TP")
    should_pad_vocab: bool | None = flag("whether Bridge pads the vocabulary")
    share_embeddings_and_output_weights: bool | None = flag("one matrix for embedding and output layer")
    seq_length: int | None = size("tokens per sequence")
    variable_seq_lengths: bool | None = flag("sequences differ between microbatches")
    normalization: str | None = text("LayerNorm or RMSNorm")
    qk_layernorm: bool | None = flag("a norm on queries and keys, per head")
    position_embedding_type: str | None = text(
        "rope, or learned_absolute, which has a table of max_position_embeddings rows; rope when absent"
    )
    max_position_embeddings: int | None = size("rows of the table of learned positions; seq_length when absent")
    fp32_residual_connection: bool | None = flag("the residual stream in FP32")
    calculate_per_token_loss: bool | None = flag("the loss divided by the tokens of the whole batch")
    add_bias_linear: bool | None = flag("biases in the linear layers")
    add_qkv_bias: bool | None = flag("a bias in the QKV projection")
    multi_latent_attention: bool | None = flag("multi-latent attention (MLA)")
    mtp_num_layers: int | None = count("multi-token-prediction layers")
    heterogeneous_block_specs: bool | None = flag("layers differ in kind")
    is_hybrid_model: bool | None = flag("Mamba or other hybrid layers")

    num_moe_experts: int | None = count("routed experts per MoE layer")
    moe_ffn_hidden_size: int | None = size("width inside an expert, in elements")
    moe_layer_freq: Any = anything(
        "which layers are MoE: one in so many, or a list with 1 for MoE and 0 for dense per layer"
    )
    moe_router_topk: int | None = size("experts per token")
    moe_router_dtype: str | None = text("the router's probabilities: fp32 or fp64; as the model when absent")
    moe_router_load_balancing_type: tuple[str, ...] | None = names(
        "aux_loss, seq_aux_loss, global_aux_loss, sinkhorn, quantile_balancing or none; aux_loss when absent"
    )
    moe_aux_loss_coeff: Any = anything("weight of the auxiliary loss, or one per kind of it; 0 for none")
    moe_router_enable_expert_bias: bool | None = flag("a bias per expert that balances the load without a loss")
    moe_expert_capacity_factor: Any = anything("tokens that an expert takes, times the balanced share; null for all")
    moe_pad_expert_input_to_capacity: bool | None = flag("every expert's input padded to its capacity")
    moe_grouped_gemm: bool | None = flag("the experts of a rank in one grouped GEMM")
    moe_latent_size: int | None = size("width of the experts' own latent space, in elements")
    moe_token_dispatcher_type: str | None = choice(
        "how tokens reach their experts", "allgather", "alltoall", "alltoall_seq", "flex"
    )
    moe_flex_dispatcher_backend: str | None = choice(
        "library behind the flex dispatcher", "deepep", "hybridep", "ncclep"
    )
    moe_enable_deepep: bool | None = flag("DeepEP, before moe_flex_dispatcher_backend existed")
    moe_shared_expert_intermediate_size: int | None = size("width of the shared expert, in elements")
    moe_shared_expert_overlap: bool | None = flag("shared expert computed beside the dispatch")
    moe_shared_expert_gate: bool | None = flag("a gate on the shared expert's output")
    moe_use_legacy_grouped_gemm: bool | None = flag("grouped GEMM of old Megatron-Core")

    bf16: bool | None = flag("BF16 training")
    fp16: bool | None = flag("FP16 training")
    fp8: str | None = text("FP8 format, e4m3 or hybrid")
    fp8_recipe: str | None = choice("FP8 scaling", "delayed", "tensorwise", "mxfp8", "blockwise", "custom")
    fp4: str | None = text("FP4 format, e2m1")
    fp8_param: bool | None = flag("weights stay in FP8")
    first_last_layers_bf16: bool | None = flag("first and last layers in BF16 under FP8")
    num_layers_at_start_in_bf16: int | None = count("layers at the start in BF16, with first_last_layers_bf16")
    num_layers_at_end_in_bf16: int | None = count("layers at the end in BF16, with first_last_layers_bf16")
    gradient_accumulation_fusion: bool | None = flag("weight gradients add into the main gradient in the GEMM")
    cross_entropy_loss_fusion: bool | None = flag("cross-entropy in one kernel")
    cross_entropy_fusion_impl: str | None = text("whose fused cross-entropy: native or te")
    deterministic_mode: bool | None = flag("bit-exact reproducibility")
    recompute_granularity: str | None = choice("what of a layer's activations is recomputed", "selective", "full")
    recompute_method: str | None = choice("which layers are recomputed", "uniform", "block")
    recompute_num_layers: int | None = count("layers per recomputed block")
    recompute_modules: tuple[str, ...] | None = names("what selective recomputation redoes, for example core_attn")
    distribute_saved_activations: bool | None = flag("saved activations split over TP")
    cuda_graph_impl: str | None = choice("CUDA graphs", "none", "local", "transformer_engine", "full_iteration")
    cuda_graph_modules: tuple[str, ...] | None = names("parts of a layer in CUDA graphs, for example attn or mlp")
    cuda_graph_scope: tuple[str, ...] | None = names("the older name of cuda_graph_modules; also full_iteration")
    enable_cuda_graph: bool | None = flag("the older name of cuda_graph_impl=local")
    external_cuda_graph: bool | None = flag("the older name of cuda_graph_impl=transformer_engine")
    transformer_impl: str | None = text("whose layers: transformer_engine, local or inference_optimized")

    tp_comm_overlap: bool | None = flag("TP userbuffers, as it stands before the set-up")
    tp_comm_overlap_cfg: Any = anything("userbuffers configuration, as it stands before the set-up")
    tp_comm_bootstrap_backend: str | None = text(
        "userbuffers bootstrap (nccl, mpi or gloo), as it stands before the set-up"
    )
    tp_comm_overlap_ag: bool | None = flag("all-gather overlapped with the GEMM behind it")
    tp_comm_overlap_rs: bool | None = flag("reduce-scatter overlapped with the GEMM before it")
    tp_comm_overlap_rs_dgrad: bool | None = flag("reduce-scatter overlapped with the input gradient's GEMM")
    tp_comm_bulk_dgrad: bool | None = flag("bulk all-gather beside the input gradient")
    tp_comm_bulk_wgrad: bool | None = flag("bulk reduce-scatter beside the weight gradient")
    tp_comm_overlap_disable_qkv: bool | None = flag("no overlap in the QKV projection")
    tp_comm_overlap_disable_fc1: bool | None = flag("no overlap in the MLP's first projection")
    tp_comm_split_ag: bool | None = flag("the same for the all-gather, before Transformer Engine 1.5")
    tp_comm_split_rs: bool | None = flag("the same for the reduce-scatter, before Transformer Engine 1.5")
    use_ring_exchange_p2p: bool | None = flag("pipeline messages by ring exchange")
    overlap_p2p_comm: bool | None = flag("pipeline sends beside compute")
    batch_p2p_comm: bool | None = flag("pipeline sends and receives in one batch")
    overlap_p2p_comm_warmup_flush: bool | None = flag("overlap in warm-up and flush too")
    defer_embedding_wgrad_compute: bool | None = flag("embedding weight gradient in the pipeline's flush")
    wgrad_deferral_limit: int | None = integer("microbatches whose weight gradient may be deferred; 0 for all")
    overlap_moe_expert_parallel_comm: bool | None = flag("EP all-to-all beside another microbatch")
    delay_wgrad_compute: bool | None = flag("weight gradients apart from input gradients")
    ep_overlap_early_attn_memory_release: bool | None = flag("attention's memory freed early under EP overlap")
    overlap_dispatch_backward_with_experts_wgrad: bool | None = flag("experts' weight gradient beside the dispatch")
