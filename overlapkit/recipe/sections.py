"""The recipe's dataclasses: what the user wrote, typed, nothing derived.

Field names are Megatron-Bridge's and Megatron-Core's. ``None`` means "not set by the user"; the two
fields where null means something else say so. A docstring and a field's text are also what the JSON Schema
says of the section and the field, so that an editor shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from overlapkit.recipe.kinds import (
    anything,
    choice,
    count,
    flag,
    integer,
    names,
    number,
    own_form,
    size,
    sizes,
    text,
    version,
)

AUTO: Literal["auto"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machine the job will run on."""

    gpu: str | None = text("GPU model, for example h100, h20 or gb200; other spellings such as H100-SXM are known too")
    num_gpus: int | None = size("GPUs of the whole job, on all its nodes")
    gpus_per_node: int | None = size("GPUs per host; the GPU's usual number when absent")
    nvlink_domain_size: int | None = size("GPUs that reach each other over NVLink; the GPU's own when absent")
    driver_version: str | None = version("version of the nodes' NVIDIA driver, for example 550.54.15")
    cuda_multicast: bool | None = flag("whether CUDA multicast works on the nodes; derived when absent")
    nic_gbps: float | None = number("network bandwidth per GPU in Gbit/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The training container, not this machine: what it does not name follows from the rest, or is the newest."""

    framework: str | None = choice("what trains; megatron-bridge when absent", "megatron-bridge", "megatron-lm")
    container: str | None = text("NGC container, for example nemo:26.04; its versions hold where none is named")
    megatron_bridge: str | None = version("Megatron-Bridge's version, for example 0.4.0")
    megatron_core: str | None = version("Megatron-Core's version, for example 0.17.0")
    transformer_engine: str | None = version(
        "Transformer Engine's version, for example 2.14; null: not installed; detect: as on this machine"
    )
    transformer_engine_absent: bool = False  # written as null: the container has none
    torch: str | None = version("PyTorch's version, for example 2.11.0")


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
    moe_token_dispatcher_type: str | None = choice(
        "how tokens reach their experts", "allgather", "alltoall", "alltoall_seq", "flex"
    )
    moe_flex_dispatcher_backend: str | None = choice(
        "library behind the flex dispatcher", "deepep", "hybridep", "ncclep"
    )
    moe_enable_deepep: bool | None = flag("DeepEP, before moe_flex_dispatcher_backend existed")
    moe_shared_expert_intermediate_size: int | None = size("width of the shared expert, in elements")
    moe_shared_expert_overlap: bool | None = flag("shared expert computed beside the dispatch")
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
    deterministic_mode: bool | None = flag("bit-exact reproducibility")
    recompute_granularity: str | None = choice("what of a layer's activations is recomputed", "selective", "full")
    recompute_method: str | None = choice("which layers are recomputed", "uniform", "block")
    recompute_num_layers: int | None = count("layers per recomputed block")
    recompute_modules: tuple[str, ...] | None = names("what selective recomputation redoes, for example core_attn")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Batch sizes, in sequences."""

    micro_batch_size: int | None = size("sequences per microbatch and DP rank")
    global_batch_size: int | None = size("sequences per optimizer step")
    check_weight_hash_across_dp_replicas_interval: int | None = size("steps between comparisons of DP replicas")
    rampup_batch_size: Any = anything(
        "a batch that grows to global_batch_size: sequences at the start, sequences per step, samples in all"
    )
    decrease_batch_size_if_needed: bool | None = flag("round the global batch down to what the GPUs divide")


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Batches and steps of evaluation."""

    eval_iters: int | None = count("evaluation steps; 0 for no evaluation")
    eval_global_batch_size: int | None = size("sequences per evaluation step; global_batch_size when absent")
    eval_micro_batch_size: int | None = size("sequences per microbatch in evaluation; micro_batch_size when absent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The optimizer, and its part in gathering parameters, as it stands before the set-up."""

    optimizer: str | None = text("kind of optimizer: adam, sgd, muon, ...")
    use_distributed_optimizer: bool | None = flag("optimizer state sharded over DP")
    overlap_param_gather: bool | None = flag("parameter all-gather beside the forward pass")
    overlap_param_gather_with_optimizer_step: bool | None = flag("first all-gather beside the step")
    use_layer_wise_distributed_optimizer: bool | None = flag("whole layers' states shared over DP, as Muon needs")
    reuse_grad_buf_for_mxfp8_param_ag: bool | None = flag("MXFP8 parameters gathered in the gradient buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Whether and how checkpoints are read and written."""

    ckpt_format: str | None = text("format of checkpoints: torch, torch_dist, fsdp_dtensor, ...")
    save: str | None = text("folder that checkpoints go to; none are written when absent")
    load: str | None = text("folder that a checkpoint comes from")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp:
    """Data-parallel buckets, as they stand before the set-up."""

    use_distributed_optimizer: bool | None = flag("gradients reduce-scattered, parameters gathered")
    overlap_grad_reduce: bool | None = flag("gradient reduction beside the backward pass")
    overlap_param_gather: bool | None = flag("parameter all-gather beside the forward pass")
    align_param_gather: bool | None = flag("all stages gather at the same time")
    bucket_size: int | None = count("parameters (not bytes) per bucket")
    num_buckets: int | None = count("buckets, instead of bucket_size")
    delay_wgrad_compute: bool | None = flag("gradients arrive later than DDP's hooks expect")
    grad_reduce_in_fp32: bool | None = flag("gradients reduced in FP32")
    fp8_param_gather: bool | None = flag("parameters gathered in FP8")
    pad_buckets_for_high_nccl_busbw: bool | None = flag("buckets padded to sizes at which NCCL is fast")
    average_in_collective: bool | None = flag("the collective averages gradients, instead of a scaling before it")
    nccl_ub: bool | None = flag("NCCL user buffers for DP")
    use_megatron_fsdp: bool | None = flag("Megatron-FSDP")
    use_custom_fsdp: bool | None = flag("the older name of use_megatron_fsdp")
    data_parallel_sharding_strategy: str | None = text(
        "what FSDP shards: no_shard, optim, optim_grads or optim_grads_params"
    )
    fsdp_manual_registration: bool | None = flag("FSDP registers its buffers with NCCL itself")
    fsdp_double_buffer: bool | None = flag("FSDP's communication buffers allocated once")
    reuse_grad_buf_for_mxfp8_param_ag: bool | None = flag("MXFP8 parameters gathered in the gradient buffer")
    num_distributed_optimizer_instances: int | None = size(
        "instances of the distributed optimizer, which each hold its whole state"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dist:
    """Which kind of FSDP shards the model, if any."""

    use_megatron_fsdp: bool | None = flag("Megatron-FSDP")
    use_torch_fsdp2: bool | None = flag("PyTorch's FSDP2")
    align_grad_reduce: bool | None = flag("all stages reduce gradients at the same time")
    use_tp_pp_dp_mapping: bool | None = flag("ranks in the order TP, PP, DP instead of TP, DP, PP")
    eval_context_parallel_size: int | None = size("CP in evaluation; context_parallel_size when absent")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """A named precision recipe of Bridge such as ``bf16_mixed``, or its fields."""

    name: str | None = None
    bf16: bool | None = flag("BF16 training")
    fp16: bool | None = flag("FP16 training")
    fp8: str | None = text("FP8 format, e4m3 or hybrid")
    fp8_recipe: str | None = choice("FP8 scaling", "delayed", "tensorwise", "mxfp8", "blockwise", "custom")
    fp4: str | None = text("FP4 format, e2m1")
    grad_reduce_in_fp32: bool | None = flag("gradients reduced in FP32")
    first_last_layers_bf16: bool | None = flag("first and last layers in BF16 under FP8")
    num_layers_at_start_in_bf16: int | None = count("layers at the start in BF16, with first_last_layers_bf16")
    num_layers_at_end_in_bf16: int | None = count("layers at the end in BF16, with first_last_layers_bf16")
    fp8_param_gather: bool | None = flag("parameters gathered in FP8")
    fp8_param: bool | None = flag("weights stay in FP8")
    reuse_grad_buf_for_mxfp8_param_ag: bool | None = flag("MXFP8 parameters gathered in the gradient buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommOverlap:
    """What overlaps, as the user wrote it: Bridge's CommOverlapConfig. null: Bridge's set-up is not run."""

    tp_comm_overlap: bool | Literal["auto"] | None = own_form("TP userbuffers; auto: on when legal; null: off", AUTO)
    tp_comm_overlap_cfg: str | Mapping[str, Any] | None = own_form(
        "userbuffers configuration: auto (choose a preset), null (Transformer Engine's defaults), a preset's name, "
        "a path, or a mapping of layers to options",
        AUTO,
    )
    tp_comm_overlap_cfg_is_dataclass: bool = False  # a dump's expanded preset, which Bridge accepts
    tp_comm_bootstrap_backend: str | None = own_form("userbuffers bootstrap: nccl, mpi or gloo; null is None", "nccl")
    overlap_p2p_comm: bool | None = flag("pipeline sends beside compute; by PP and VP when absent")
    batch_p2p_comm: bool | None = flag("pipeline sends in one batch; by PP and VP when absent")
    overlap_grad_reduce: bool | None = flag("gradient reduction beside the backward pass")
    overlap_param_gather: bool | None = flag("parameter all-gather beside the forward pass")
    overlap_param_gather_with_optimizer_step: bool | None = flag("first all-gather beside the step")
    align_param_gather: bool | None = flag("all stages gather at the same time")
    bucket_size: int | None = count("parameters (not bytes) per bucket")
    defer_embedding_wgrad_compute: bool | None = flag("embedding weight gradient in the pipeline's flush")
    wgrad_deferral_limit: int | None = integer("microbatches whose weight gradient may be deferred; 0 for all")
    data_parallel_size: int | None = size("data-parallel ranks; Bridge overwrites it")
    overlap_moe_expert_parallel_comm: bool | None = flag("EP all-to-all beside another microbatch")
    delay_wgrad_compute: bool | None = flag("weight gradients apart from input gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """What decides whether all microbatches have as many tokens."""

    kind: str | None = None  # the class named by a dump's _target_
    seq_length: int | None = size("tokens per sequence")
    sequence_length: int | None = size("another name of seq_length, which Bridge's own datasets take")
    pad_to_max_length: bool | None = flag("every sequence padded to seq_length")
    pack_sequences_in_batch: bool | None = flag("sequences packed per microbatch, as Bridge 0.3 names it")
    enable_in_batch_packing: bool | None = flag("sequences packed per microbatch, as Bridge 0.6 names it")
    enable_offline_packing: bool | None = flag("sequences packed beforehand, as Bridge 0.6 names it")
    packed_sequence_specs: Any = anything("sequences packed beforehand, as Bridge 0.3 names it")
    offline_packing_specs: Any = anything("how sequences were packed beforehand")
    dataset_kwargs: Any = anything("options of the dataset, pad_to_max_length among them")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One training configuration, as written.

    ``written`` holds the dotted paths whose values are the user's: all of a hand-written recipe's, in a
    Bridge dump the overrides. ``overridden`` are those that came from the command line. ``foreign_keys``
    are keys that only some versions know, with the indices of these. ``others`` are the plain values of model,
    optimizer and ddp that no rule reads, by section: Megatron-Core's constructors do. ``lines`` gives the 1-based line
    of a path where a file has it.
    """

    source: str
    is_dump: bool
    cluster: Cluster
    software: Software
    model: Model
    train: Train
    validation: Validation
    optimizer: Optimizer
    ddp: Ddp
    dist: Dist
    checkpoint: Checkpoint
    mixed_precision: MixedPrecision | None
    comm_overlap: CommOverlap | None
    dataset: Dataset
    peft: str | None = None
    env_vars: Mapping[str, str] | None = None
    written: frozenset[str] = frozenset()
    overridden: frozenset[str] = frozenset()
    foreign_keys: tuple[tuple[str, str], ...] = ()
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
