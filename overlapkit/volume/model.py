"""What decides the traffic of one recipe: sizes, precision, layers per stage, settings; from its facts and plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlapkit.facts import Facts
from overlapkit.plan import Parallelism, Plan
from overlapkit.rules.dp_buckets import default_bucket
from overlapkit.rules.dp_changes import BUCKET, GRAD_REDUCE, PARAM_GATHER, WITH_STEP
from overlapkit.volume.latent_attention import LatentAttention, latent_attention_of
from overlapkit.volume.stages import Chunk, stage_chunks, with_prediction
from overlapkit.volume.userbuffers import userbuffers_of

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8, "bool": 1, "uint8": 1}

# What versions of Megatron-Core do each in their own way: name -> (range of versions, value), the first that fits.
# Source: megatron-core optimizer/clip_grads.py, parallel_state.py and tensor_parallel/layers.py of 0.14 to 0.19.
CORE_DIFFERENCES: dict[str, tuple[tuple[str, Any], ...]] = {
    # Whether expert TP other than TP alone gives the experts' gradients a group of their own; EP always does.
    "expert_tp_parts_gradients": ((">=0.19.0rc0", True), ("<0.19.0rc0", False)),
    "zeros_dtype": ((">=0.17.0rc0", "int64"), ("<0.17.0rc0", "float32")),
    "expert_norm_group": (
        (">=0.19.0rc0", "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP"),
        ("<0.19.0rc0", "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The MoE layers: sizes in elements and experts.

    ``latent`` is the width of their own latent space, None where they take hidden states. ``capacity_factor`` times
    the balanced share is what an expert takes, None for all that comes.
    """

    number: int
    topk: int
    ffn: int
    latent: int | None
    shared_ffn: int | None
    shared_gate: bool
    shared_overlap: bool
    dispatcher: str
    flex_backend: str | None
    order: str  # of the rank's experts: one_by_one, by_projection, or merged into two tensors
    probs_dtype: str
    capacity_factor: float | None
    padded: bool
    aux_losses: tuple[str, ...]
    bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """What the backward pass computes again: ``layers`` per checkpoint (uniform) or from each chunk's start (block)."""

    full: str | None
    layers: int
    modules: frozenset[str]
    distributed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One training step as its communication sees it.

    Widths are in elements of the whole model, tokens and bytes are one rank's. ``stages`` holds the chunks of each
    pipeline rank. ``userbuffers`` names the calls of a layer that leave NCCL: gather_input, regather_input,
    scatter_gradient of a column-parallel layer; scatter_output, gather_gradient of a row-parallel one.
    """

    mesh: Parallelism
    expert_dp: int
    microbatches: int
    tokens: int  # of one microbatch on one CP rank, before SP splits them
    full_tokens: int  # of one microbatch before CP splits them
    sequences: int  # of one microbatch
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    latent_attention: LatentAttention | None
    gated_attention: bool  # the QKV projection makes a gate for attention's output too
    mtp_layers: int  # multi-token prediction's, which stand last in the last chunk
    vocabulary: int  # after padding
    positions: int  # rows of a table of learned positions, 0 without one
    gated: bool
    norm_tensors: int  # 2 with a bias (LayerNorm), else 1
    biases: bool
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    fused_norms: bool  # norms inside the linear layers, as Transformer Engine's
    experts: Experts | None
    expert_parameters_apart: bool  # experts' gradients have a group of their own
    recompute: Recompute
    stages: tuple[tuple[Chunk, ...], ...]
    dtype: str  # of activations and parameters
    grad_dtype: str
    narrow_inputs: bool  # what layers gather is in FP8 or FP4, and counted in dtype
    narrow_parameters: bool  # so are the parameters that DP gathers
    cross_entropy: str  # unfused, native, te
    per_token_loss: bool
    variable_lengths: bool
    p2p_in_pairs: bool  # sends and receives are single calls, which at PP 2 share the job's own group
    fsdp: bool  # parameters and gradients are sharded too
    dist_opt: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    gather_with_step: bool
    aligned_reduction: bool  # the schedule starts gradient reduction, on all stages at the same time
    bucket_size: int | None  # parameters; None: one bucket
    num_buckets: int | None
    high_busbw_buckets: bool
    instances: int
    count_zeros: bool
    zeros_dtype: str
    overflow_flags: bool  # every optimizer asks whether a gradient overflowed
    step_agreed: bool  # the training loop asks whether all ranks of the model have stepped
    norm_agreed: bool  # and for the largest norm that one of them has
    expert_norm_group: str
    cp_types: tuple[str, ...]  # one for all layers, or one per layer
    cp_levels: tuple[int, int]
    userbuffers: frozenset[str]
    fc1_userbuffers: frozenset[str]
    qkv_userbuffers: frozenset[str]

    @property
    def width(self) -> int:
        """Bytes of an activation or parameter."""
        return WIDTHS[self.dtype]

    @property
    def grad_width(self) -> int:
        return WIDTHS[self.grad_dtype]

    @property
    def sequence_parallel(self) -> bool:
        return self.mesh.sequence_parallel

    @property
    def activation_bytes(self) -> int:
        """One microbatch's hidden states on a CP rank: tokens · hidden · bytes."""
        return self.tokens * self.hidden * self.width

    @property
    def local_tokens(self) -> int:
        """Tokens that enter a layer's router on one rank."""
        return self.tokens // self.mesh.tp if self.sequence_parallel else self.tokens


def model_of(facts: Facts, plan: Plan) -> Model:
    """The model of a recipe that ``requirements.check`` has passed."""
    recipe, mesh = facts.recipe, facts.parallelism
    model, precision, settings = recipe.model, facts.precision, plan.settings
    hidden, heads = model.hidden_size or 0, model.num_attention_heads or 0
    sequences, length = recipe.train.micro_batch_size or 0, model.seq_length or 0
    learned = model.position_embedding_type == "learned_absolute"
    reduces = bool(settings[GRAD_REDUCE])
    dtype = DTYPES[precision.compute]
    counted = facts.megatron_lm or facts.bridge_in(">=0.5.0")  # who makes a bucket size of num_buckets
    taken = userbuffers_of(facts, settings)
    return Model(
        mesh=mesh,
        expert_dp=mesh.expert_dp or 1,
        microbatches=mesh.num_microbatches or 0,
        tokens=length // mesh.cp * sequences,
        full_tokens=length * sequences,
        sequences=sequences,
        hidden=hidden,
        ffn=ffn_width(facts),
        heads=heads,
        kv_heads=model.num_query_groups or heads,
        head_dim=model.kv_channels or hidden // heads,
        latent_attention=latent_attention_of(facts),
        gated_attention=bool(facts.recipe.others.get("model", {}).get("attention_output_gate")),
        mtp_layers=model.mtp_num_layers or 0,
        vocabulary=padded_vocabulary(facts),
        positions=(model.max_position_embeddings or length) if learned else 0,
        gated=bool(model.gated_linear_unit),
        norm_tensors=1 if model.normalization == "RMSNorm" else 2,
        biases=model.add_bias_linear is not False,
        qkv_bias=bool(model.add_qkv_bias),
        qk_norm=bool(model.qk_layernorm),
        tied=model.share_embeddings_and_output_weights is not False,
        fused_norms=_fused_norms(facts),
        experts=_experts(facts, dtype),
        expert_parameters_apart=bool(model.num_moe_experts)
        and (mesh.ep > 1 or (mesh.etp != mesh.tp and _of_core(facts, "expert_tp_parts_gradients"))),
        recompute=_recompute(facts),
        stages=with_prediction(facts, stage_chunks(facts)),
        dtype=dtype,
        narrow_inputs=bool(precision.fp8 or precision.fp4),
        narrow_parameters=bool(precision.fp8 or precision.fp4) and precision.fp8_param_gather,
        grad_dtype="float32" if precision.grad_reduce_in_fp32 else dtype,
        cross_entropy=_cross_entropy(facts),
        per_token_loss=bool(model.calculate_per_token_loss),
        variable_lengths=bool(model.variable_seq_lengths),
        p2p_in_pairs=not settings["model.batch_p2p_comm"] and model.pipeline_model_parallel_comm_backend != "ucc",
        fsdp=shards_parameters(facts),
        dist_opt=facts.dist_opt,
        overlap_grad_reduce=reduces,
        overlap_param_gather=bool(settings[PARAM_GATHER]),
        gather_with_step=bool(settings[WITH_STEP]),
        aligned_reduction=reduces and recipe.dist.align_grad_reduce is not False,
        bucket_size=_bucket_size(facts, settings) if reduces else None,
        num_buckets=recipe.ddp.num_buckets if reduces and counted and settings[BUCKET] is None else None,
        high_busbw_buckets=bool(recipe.ddp.pad_buckets_for_high_nccl_busbw),
        instances=recipe.ddp.num_distributed_optimizer_instances or 1,
        count_zeros=bool(recipe.optimizer.log_num_zeros_in_grad),
        zeros_dtype=_of_core(facts, "zeros_dtype"),
        overflow_flags=precision.scaled_loss and (dtype != "float32" or facts.dist_opt),
        step_agreed=not facts.bridge or recipe.train.check_optimizer_step_success is not False,
        norm_agreed=not (facts.bridge and recipe.train.skip_sync_grad_norm_across_mp),
        expert_norm_group=_of_core(facts, "expert_norm_group"),
        cp_types=tuple(model.cp_comm_type or ("p2p",)),
        cp_levels=_cp_levels(facts),
        userbuffers=taken.layer,
        qkv_userbuffers=taken.qkv,
        fc1_userbuffers=taken.fc1,
    )


def shards_parameters(facts: Facts) -> bool:
    """Whether FSDP keeps parameters in parts, as PyTorch's does and Megatron's when it is told to."""
    sharded = facts.recipe.ddp.data_parallel_sharding_strategy == "optim_grads_params"
    return facts.torch_fsdp2 or (facts.fsdp and sharded)


def padded_vocabulary(facts: Facts) -> int:
    """Tokens of the vocabulary after padding to a multiple of ``make_vocab_size_divisible_by`` times TP.

    Megatron-LM pads unless told that the size is the final one, Bridge only with ``should_pad_vocab``.
    """
    model = facts.recipe.model
    size = model.vocab_size or 0
    pads = facts.megatron_lm if model.should_pad_vocab is None else model.should_pad_vocab
    multiple = (model.make_vocab_size_divisible_by or 128) * facts.parallelism.tp
    return -(-size // multiple) * multiple if pads else size


def ffn_width(facts: Facts) -> int:
    """The dense MLP's width; absent, 4 times hidden, with SwiGLU in Megatron-LM two thirds of it in steps of 64."""
    model = facts.recipe.model
    hidden = model.hidden_size or 0
    if model.ffn_hidden_size is not None:
        return int(model.ffn_hidden_size)
    return int(4 * hidden * 2 / 3) // 64 * 64 if facts.megatron_lm and model.gated_linear_unit else 4 * hidden


def _of_core(facts: Facts, name: str) -> Any:
    return next(value for versions, value in CORE_DIFFERENCES[name] if facts.core_in(versions))


def _cross_entropy(facts: Facts) -> str:
    """Bridge's models fuse the loss unless told otherwise (models/gpt_provider.py); Megatron-LM's do not."""
    model = facts.recipe.model
    fused = model.cross_entropy_loss_fusion
    if not (facts.bridge if fused is None else fused):
        return "unfused"
    return "te" if model.cross_entropy_fusion_impl == "te" else "native"


def _bucket_size(facts: Facts, settings: Mapping[str, Any]) -> int:
    size = settings[BUCKET]
    return default_bucket(facts) if size is None else int(size)


def _cp_levels(facts: Facts) -> tuple[int, int]:
    """CP's inner (all-to-all) and outer (ring) groups of a2a+p2p."""
    sizes = facts.recipe.model.hierarchical_context_parallel_sizes
    return (sizes[0], sizes[1]) if sizes is not None and len(sizes) == 2 else (1, facts.parallelism.cp)


def _recompute(facts: Facts) -> Recompute:
    model = facts.recipe.model
    granularity = model.recompute_granularity
    modules = frozenset(model.recompute_modules or ("core_attn",)) if granularity == "selective" else frozenset()
    if facts.recipe.others.get("model", {}).get("moe_layer_recompute"):  # the older way to say it
        modules |= {"moe"}
    return Recompute(
        full=(model.recompute_method or "uniform") if granularity == "full" else None,
        layers=model.recompute_num_layers or 1,
        modules=modules,
        distributed=bool(model.distribute_saved_activations) and granularity == "full",
    )


def _experts(facts: Facts, dtype: str) -> Experts | None:
    model = facts.recipe.model
    if not model.num_moe_experts:
        return None
    factor = number_of(model.moe_expert_capacity_factor)
    return Experts(
        number=model.num_moe_experts,
        topk=model.moe_router_topk or 2,
        ffn=model.moe_ffn_hidden_size or ffn_width(facts),
        latent=model.moe_latent_size or None,
        shared_ffn=model.moe_shared_expert_intermediate_size,
        shared_gate=bool(model.moe_shared_expert_gate),
        shared_overlap=bool(model.moe_shared_expert_overlap),
        dispatcher=facts.dispatcher,
        flex_backend=facts.flex_backend,
        order=_order_of_experts(facts),
        probs_dtype=DTYPES.get(model.moe_router_dtype or "", dtype),
        capacity_factor=None if factor is None or factor < 0 else factor,  # below 0 is Megatron-Core's own null
        padded=bool(model.moe_pad_expert_input_to_capacity),
        aux_losses=_aux_losses(facts),
        bias=bool(model.moe_router_enable_expert_bias),
    )


def _order_of_experts(facts: Facts) -> str:
    """Source: megatron-core models/backends.py and transformer/moe/experts.py."""
    model = facts.recipe.model
    if not model.moe_grouped_gemm:
        return "one_by_one"
    merged = model.moe_use_legacy_grouped_gemm or not _fused_norms(facts)
    return "merged" if merged else "by_projection"


def _fused_norms(facts: Facts) -> bool:
    """Whether the layers are Transformer Engine's, with norms as part of the linear layers behind them."""
    return facts.recipe.model.transformer_impl != "local" and facts.versions.transformer_engine is not None


def _aux_losses(facts: Facts) -> tuple[str, ...]:
    """The auxiliary losses with a weight: a coefficient of 0 turns one off, as does Megatron-Core's default of 0."""
    model = facts.recipe.model
    kinds = model.moe_router_load_balancing_type or ("aux_loss",)
    given = model.moe_aux_loss_coeff
    weights = given if isinstance(given, list) and len(given) > 1 else [given] * len(kinds)
    pairs = zip(kinds, weights, strict=False)
    return tuple(kind for kind, weight in pairs if number_of(weight) and kind.endswith("aux_loss"))


def number_of(value: Any) -> float | None:
    """A number, also one that came as text or alone in a list from a command line; None for anything else."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
