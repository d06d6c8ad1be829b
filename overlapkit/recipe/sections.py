"""The recipe's dataclasses: what the user wrote, typed, nothing derived.

Field names are Megatron-Bridge's and Megatron-Core's. ``None`` means "not set by the user"; the two
fields where null means something else say so. A docstring and a field's text are also what the JSON Schema
says of the section and the field, so that an editor shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from overlapkit.recipe.kinds import anything, choice, count, flag, integer, number, own_form, size, text, version
from overlapkit.recipe.model_section import Model as Model

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
class Train:
    """Batch sizes, in sequences."""

    micro_batch_size: int | None = size("sequences per microbatch and DP rank")
    global_batch_size: int | None = size("sequences per optimizer step")
    check_weight_hash_across_dp_replicas_interval: int | None = size("steps between comparisons of DP replicas")
    rampup_batch_size: Any = anything(
        "a batch that grows to global_batch_size: sequences at the start, sequences per step, samples in all"
    )
    step_batch_size_schedule: Any = anything("a batch that changes by a schedule, instead of rampup_batch_size")
    check_optimizer_step_success: bool | None = flag("model-parallel ranks agree on whether a step succeeded")
    skip_sync_grad_norm_across_mp: bool | None = flag("model-parallel ranks keep the gradient norms that each has")
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
    loss_scale: float | None = number("a constant scale of the loss; FP16 has one that adapts when absent")
    log_num_zeros_in_grad: bool | None = flag("zeros in the gradients counted in every step")
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
    reduce_scatter_with_fp32_accumulation: bool | None = flag("BF16 gradients exchanged all-to-all, summed in FP32")
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
    loss_scale: float | None = number("a constant scale of the loss, over the optimizer's own")


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
    create_attention_mask: bool | None = flag("the loader makes attention masks")


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
