"""What a volume needs from the recipe, and what it does not model: both are said by name, nothing is guessed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from overlapkit.errors import RecipeError, shown
from overlapkit.facts import Facts
from overlapkit.plan import Plan
from overlapkit.recipe.place import Place
from overlapkit.rules.dp_changes import ORDINARY
from overlapkit.volume.latent_attention import wrong_widths
from overlapkit.volume.model import ffn_width, number_of, padded_vocabulary
from overlapkit.volume.stages import moe_pattern, stage_chunks

_NEEDED = (
    ("model", "num_layers"),
    ("model", "hidden_size"),
    ("model", "num_attention_heads"),
    ("model", "vocab_size"),
    ("model", "seq_length"),
    ("train", "micro_batch_size"),
    ("train", "global_batch_size"),
)
_CP_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
_POSITIONS = ("rope", "learned_absolute", "mrope", "yarn", "none")
_NORMS = ("LayerNorm", "RMSNorm")
_LOSSES = ("native", "te")
_MOST_LAYERS = 10_000  # every layer is looked at
_AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
_FSDP = ("dist.use_megatron_fsdp", "ddp.use_megatron_fsdp", "ddp.use_custom_fsdp", "dist.use_torch_fsdp2")
# Rules whose errors leave no layout of layers, batches or ranks to count on.
_NO_LAYOUT = ("PP006", "PP016", "CP002")
_SHARDED = "weights that are sharded further than TP"
# Fields of the model that no rule reads and that change its traffic: name -> (what it is, the values that do not).
_WITHOUT_RULES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "attention_output_gate": ("a gate on attention's output", (False,)),
    "dynamic_context_parallel": ("CP that changes by sequence", (False,)),
    "enable_hyper_connections": ("several residual streams", (False,)),
    "encoder_num_layers": ("an encoder", ()),
    "experimental_attention_variant": ("another kind of attention", ()),
    "expert_gtp_weight_remat_size": (_SHARDED, (1,)),
    "gtp_weight_remat_size": (_SHARDED, (1,)),
    "heterogeneous_layers_config_encoded_json": ("layers of many kinds", ()),
    "heterogeneous_layers_config_path": ("layers of many kinds", ()),
    "hybrid_attention_ratio": ("hybrid models", (0,)),
    "hybrid_context_parallel": ("CP that changes by sequence", (False,)),
    "hybrid_layer_pattern": ("hybrid models", ()),
    "hybrid_override_pattern": ("hybrid models", ()),
    "linear_attention_freq": ("layers of linear attention", ()),
    "log_max_attention_logit": ("the largest attention logits", (False,)),
    "mlp_chunks_for_training": ("MLPs in chunks of the sequence", (0, 1)),
    "moe_layer_recompute": ("moe_layer_recompute, the older name of recompute_modules=[moe],", (False,)),
    "num_microbatches_with_partial_activation_checkpoints": ("recomputation in some microbatches", ()),
    "per_layer_embed_dim": ("embeddings per layer", (0,)),
    "qk_clip": ("the largest attention logits", (False,)),
    "qk_l2_norm": ("QK norms without weights", (False,)),
    "scatter_embedding_sequence_parallel": ("embeddings that SP does not scatter", (True,)),
    "softmax_type": ("a softmax with weights", ("vanilla", "off-by-one")),
    "symmetric_ar_type": ("all-reduces in symmetric memory", ()),
}


# What predict(approximate=True) counts although no run confirms it.
_COUNTED_NEARLY = {
    "attention_output_gate",
    "log_max_attention_logit",
    "moe_layer_recompute",
    "qk_clip",
    "qk_l2_norm",
    "softmax_type",
}


def check(facts: Facts, plan: Plan, *, approximate: bool = False) -> None:
    """Raises unless the recipe says all that its traffic needs, and nothing that is not modelled.

    ``approximate``: it is asked for an estimate of time, which counts more, and is what errors then speak of.

    Raises:
        RecipeError: sizes are missing (all are named), something is not modelled, or sizes do not divide.
    """
    recipe = facts.recipe
    place = Place(recipe.source, recipe.lines, recipe.overridden)
    answer = "estimate" if approximate else "volume"
    missing = [f"{section}.{name}" for section, name in _NEEDED if getattr(getattr(recipe, section), name) is None]
    if missing:
        raise needs(answer, missing, recipe.source)
    for name in ("num_layers", "mtp_num_layers"):
        layers = getattr(recipe.model, name) or 0
        if layers > _MOST_LAYERS:
            raise place.error(f"model.{name}", f"{layers} layers are more than the {_MOST_LAYERS} that {answer} counts")
    refuse_unmodelled(facts, approximate=approximate)
    for decision in plan.decisions:
        if decision.code in _NO_LAYOUT and decision.severity == "error":
            raise place.error(decision.subject, decision.because, decision.fix)
    for path, problem in _indivisible(facts):
        raise place.error(path, problem)


def needs(answer: str, missing: list[str], source: str) -> RecipeError:
    """What to raise where ``answer`` cannot do without these fields, of which there is at least one."""
    names = missing[0] if len(missing) == 1 else f"{', '.join(missing[:-1])} and {missing[-1]}"
    return RecipeError(f"{answer} needs {names}", source=source, hint=f"add {missing[0]}: …")


def refuse_unmodelled(facts: Facts, *, approximate: bool) -> None:
    """Raises where the recipe asks for what is not modelled, whatever its sizes are.

    Raises:
        RecipeError: all of it is named.
    """
    refusals = list(_refusals(facts, approximate=approximate))
    if refusals:
        (path, what, hint), *more = refusals
        also = "".join(f", nor is that of {other} ({where})" for where, other, _ in more)
        counted = "time" if approximate else "traffic"
        place = Place(facts.recipe.source, facts.recipe.lines, facts.recipe.overridden)
        raise place.error(path, f"the {counted} of {what} is not modelled{also}", hint)


def _refusals(facts: Facts, *, approximate: bool) -> Iterator[tuple[str, str, str | None]]:
    """(field, what is not modelled, what to do instead) of everything beyond GPT's layers in one precision."""
    recipe, model, precision = facts.recipe, facts.recipe.model, facts.precision
    answer = "estimate" if approximate else "volume"
    nearly = approximate and (facts.torch_fsdp2 or recipe.ddp.data_parallel_sharding_strategy != "optim_grads")
    if (facts.fsdp or facts.torch_fsdp2) and not nearly:
        said = [path for path in _FSDP if getattr(getattr(recipe, path.split(".")[0]), path.split(".")[1])]
        instead = " ".join(f"{path}=false" for path in said)
        yield said[0], "FSDP", f"{answer} answers for {instead} ddp.use_distributed_optimizer=true"
    if (precision.fp8 or precision.fp4) and not approximate:
        name = "fp4" if precision.fp4 else "fp8"
        path = f"model.{name}" if recipe.mixed_precision is None else "mixed_precision"
        yield path, name.upper(), "volume answers for mixed_precision=bf16_mixed"
    if recipe.peft is not None:
        yield "peft", "frozen parameters", f"{answer} answers for peft=null"
    optimizer = recipe.optimizer.optimizer or "adam"
    if optimizer not in ORDINARY:
        yield "optimizer.optimizer", f"optimizer {optimizer!r}", f"{answer} answers for optimizer.optimizer=adam"
    yield from _kinds_of_layers(facts, approximate=approximate)
    if model.num_moe_experts:
        yield from _moe(facts, approximate=approximate)
    if model.fp32_residual_connection:
        yield "model.fp32_residual_connection", "an FP32 residual stream", None
    if recipe.ddp.reduce_scatter_with_fp32_accumulation:
        yield "ddp.reduce_scatter_with_fp32_accumulation", "gradients exchanged all-to-all", None
    if model.use_ring_exchange_p2p:
        yield "model.use_ring_exchange_p2p", "ring exchange", "set model.use_ring_exchange_p2p=false"
    if model.pipeline_model_parallel_comm_backend not in (None, "nccl") and facts.parallelism.pp > 1:
        field = "model.pipeline_model_parallel_comm_backend"
        yield field, "a pipeline through another library than NCCL", f"set {field}=nccl"
    mesh = facts.parallelism
    if mesh.tp * mesh.cp * mesh.dp * mesh.pp != mesh.world_size:
        yield "model.tensor_parallel_num_weight_shards", _SHARDED, None
    if recipe.train.step_batch_size_schedule is not None:
        yield "train.step_batch_size_schedule", "a batch that changes by a schedule", None
    for kind in model.cp_comm_type or ():
        if kind not in _CP_TYPES and mesh.cp > 1:
            yield "model.cp_comm_type", f"{kind!r}", f"known are {', '.join(_CP_TYPES)}"


def _kinds_of_layers(facts: Facts, *, approximate: bool) -> Iterator[tuple[str, str, str | None]]:
    model = facts.recipe.model
    if model.multi_latent_attention and not approximate:
        yield "model.multi_latent_attention", "multi-latent attention", None
    if model.mtp_num_layers and not approximate:
        yield "model.mtp_num_layers", "multi-token prediction", "volume answers for model.mtp_num_layers=null"
    if model.is_hybrid_model:
        yield "model.is_hybrid_model", "hybrid models", None
    if model.heterogeneous_block_specs:
        yield "model.heterogeneous_block_specs", "layers of many kinds", None
    for name, value in facts.recipe.others.get("model", {}).items():
        what, harmless = _WITHOUT_RULES.get(name, ("", (value,)))
        if value not in harmless and not (approximate and name in _COUNTED_NEARLY):
            yield f"model.{name}", what, None
    norm, positions, loss = model.normalization, model.position_embedding_type, model.cross_entropy_fusion_impl
    if norm is not None and norm not in _NORMS:
        yield "model.normalization", f"{norm!r}", f"known are {', '.join(_NORMS)}"
    if positions is not None and positions not in _POSITIONS:
        yield "model.position_embedding_type", f"{positions!r}", f"known are {', '.join(_POSITIONS)}"
    if model.cross_entropy_loss_fusion and loss is not None and loss not in _LOSSES:
        yield "model.cross_entropy_fusion_impl", f"{loss!r}", f"known are {', '.join(_LOSSES)}"


def _moe(facts: Facts, *, approximate: bool) -> Iterator[tuple[str, str, str | None]]:
    model = facts.recipe.model
    if model.add_bias_linear is not False and not approximate:
        yield "model.add_bias_linear", "experts with biases", "set model.add_bias_linear=false"
    if model.moe_latent_size and not approximate:
        yield "model.moe_latent_size", "experts in a latent space", None
    if facts.dispatcher not in ("allgather", "alltoall", "flex"):
        yield "model.moe_token_dispatcher_type", facts.dispatcher, "known are allgather, alltoall and flex"
    for kind in model.moe_router_load_balancing_type or ():
        if kind not in _AUX_LOSSES:
            yield "model.moe_router_load_balancing_type", f"{kind!r}", f"known are {', '.join(_AUX_LOSSES)}"
    etp = facts.parallelism.etp
    if facts.recipe.others.get("model", {}).get("expert_tensor_parallel_num_weight_shards", etp) != etp:
        yield "model.expert_tensor_parallel_num_weight_shards", _SHARDED, None
    if moe_pattern(facts) is None:
        known = "a number, or a list with one 0 or 1 per layer"
        yield "model.moe_layer_freq", "this pattern of MoE layers", f"write it as {known}"


def _indivisible(facts: Facts) -> Iterator[tuple[str, str]]:
    """Sizes that no rank could hold its part of."""
    recipe, model, mesh = facts.recipe, facts.recipe.model, facts.parallelism
    tp, hidden, heads = mesh.tp, model.hidden_size or 0, model.num_attention_heads or 1
    batch = (recipe.train.micro_batch_size or 0) * mesh.dp
    if recipe.ddp.num_buckets == 0:
        yield "ddp.num_buckets", "0 buckets hold no parameters"
    kinds = model.cp_comm_type or ()
    if mesh.cp > 1 and len(kinds) > 1 and len(kinds) != model.num_layers:
        yield "model.cp_comm_type", f"{len(kinds)} entries for {model.num_layers} layers"
    if not mesh.num_microbatches:
        because = f"{recipe.train.global_batch_size} is not a multiple of micro_batch_size times DP = {batch}"
        yield "train.global_batch_size", because
    if model.kv_channels is None and hidden % heads:
        yield "model.num_attention_heads", f"{hidden} of hidden_size do not divide by {heads} heads"
    if model.multi_latent_attention:
        for path, value in wrong_widths(facts):
            yield path, f"expected a width, a number above 0, got {shown(value)}"
    kv_heads = model.num_query_groups or heads
    widths = {"vocab_size": padded_vocabulary(facts), "num_attention_heads": heads}
    if not all(moe_pattern(facts) or ()):
        widths["ffn_hidden_size"] = ffn_width(facts)
    shares = tp % kv_heads == 0 and facts.core_in(">=0.16.0rc0")  # several ranks take their part of one head
    if (kv_heads >= tp or not shares) and not model.multi_latent_attention:
        widths["num_query_groups"] = kv_heads
    for name, size in widths.items():
        if size % tp:
            yield f"model.{name}", f"{size} do not divide by {tp} TP ranks"
    length, split = model.seq_length or 0, mesh.cp * (tp if mesh.sequence_parallel else 1)
    if length % split:
        yield "model.seq_length", f"{length} tokens do not divide by {split} ranks of CP and SP"
    instances = recipe.ddp.num_distributed_optimizer_instances or 1
    if instances > 1 and not facts.dist_opt:
        yield "ddp.num_distributed_optimizer_instances", "several instances need the distributed optimizer"
    if mesh.dp * mesh.cp % instances or (mesh.expert_dp or instances) % instances:
        yield "ddp.num_distributed_optimizer_instances", f"DP does not divide by {instances} instances"
    if sum(len(chunk.moe) for chunks in stage_chunks(facts) for chunk in chunks) != model.num_layers:
        yield "model.num_layers", f"{model.num_layers} layers do not split over PP {mesh.pp} and VP {mesh.vp or 1}"
    if mesh.expert_dp is None:
        yield "model.expert_model_parallel_size", f"EP {mesh.ep} times expert TP {mesh.etp} does not fit the GPUs"
    if model.num_moe_experts:
        yield from _indivisible_experts(facts, model.num_moe_experts)


def _indivisible_experts(facts: Facts, experts: int) -> Iterator[tuple[str, str]]:
    model, mesh = facts.recipe.model, facts.parallelism
    topk, factor = model.moe_router_topk or 2, model.moe_expert_capacity_factor
    if topk > experts:
        yield "model.moe_router_topk", f"{topk} experts per token are more than the {experts} that there are"
    weights = model.moe_aux_loss_coeff
    for weight in weights if isinstance(weights, list) else [weights]:
        if weight is not None and number_of(weight) is None:
            yield "model.moe_aux_loss_coeff", f"expected a number, got {shown(weight)}"
    if factor is not None and number_of(factor) is None:
        yield "model.moe_expert_capacity_factor", f"expected a number, got {shown(factor)}"
    if experts % mesh.ep:
        yield "model.num_moe_experts", f"{experts} experts do not divide by EP {mesh.ep}"
    width = model.moe_ffn_hidden_size or ffn_width(facts)
    if width % mesh.etp:
        yield "model.moe_ffn_hidden_size", f"{width} do not divide by expert TP {mesh.etp}"
    shared = model.moe_shared_expert_intermediate_size
    if shared and shared % mesh.tp:
        yield "model.moe_shared_expert_intermediate_size", f"{shared} do not divide by {mesh.tp} TP ranks"
