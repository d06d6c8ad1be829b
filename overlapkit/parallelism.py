"""How the recipe splits its GPUs: the sizes of every group."""

from __future__ import annotations

from overlapkit.plan import Parallelism
from overlapkit.recipe.place import Place
from overlapkit.recipe.sections import Recipe
from overlapkit.software import Versions
from overlapkit.versions import parse_range


def derive_parallelism(recipe: Recipe, versions: Versions, stages: tuple[str, ...] | None, place: Place) -> Parallelism:
    """The groups' sizes after the framework's validation; ``stages`` is an explicit pipeline layout.

    Raises:
        RecipeError: the number of GPUs is missing, or TP, PP and CP do not divide it.
    """
    model = recipe.model
    tp, pp = model.tensor_model_parallel_size or 1, model.pipeline_model_parallel_size or 1
    cp, ep = model.context_parallel_size or 1, model.expert_model_parallel_size or 1
    world = recipe.cluster.num_gpus
    if world is None:
        hint = "add cluster: {gpu: h100, num_gpus: 8}, or the override cluster.num_gpus=8"
        raise place.error("cluster.num_gpus", "the number of GPUs is missing", hint)
    remat = _weight_remat(recipe, versions, tp)
    if world % (tp * pp * cp * remat):
        shards = f" · {remat} shards of each TP rank's weights" if remat > 1 else ""
        hint = f"TP {tp} · PP {pp} · CP {cp}{shards} = {tp * pp * cp * remat} must divide it"
        raise place.error("cluster.num_gpus", f"{world} GPUs cannot be split", hint)
    dp = world // (tp * pp * cp * remat)
    etp = _expert_tensor_parallel(recipe, versions, tp, ep)
    return Parallelism(
        world_size=world,
        tp=tp,
        sequence_parallel=bool(model.sequence_parallel) and (tp > 1 or _keeps_sequence_parallel(versions)),
        pp=pp,
        vp=_virtual_stages(recipe, versions, stages, pp),
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        expert_dp=world // (etp * ep * pp) if world % (etp * ep * pp) == 0 else None,
        num_microbatches=_num_microbatches(recipe, dp),
    )


def _weight_remat(recipe: Recipe, versions: Versions, tp: int) -> int:
    """Ranks that share one TP rank's weights: an axis beside DP in Megatron-LM from core 0.19 (its validate_args)."""
    shards = recipe.model.tensor_parallel_num_weight_shards
    if shards is None or versions.megatron_bridge is not None or versions.megatron_core in parse_range("<0.19.0rc0"):
        return 1
    return max(shards // tp, 1)  # what TP does not divide, CFG017 refuses


def _keeps_sequence_parallel(versions: Versions) -> bool:
    """Bridge before 0.4 leaves it on at TP 1; from 0.4 its models clear it, as Megatron-LM's parser does."""
    return versions.megatron_bridge is not None and versions.megatron_bridge in parse_range("<0.4.0")


def _expert_tensor_parallel(recipe: Recipe, versions: Versions, tp: int, ep: int) -> int:
    """As written; else 1 from Bridge 0.6 (models/transformer_config.py), Megatron-Core's default TP before."""
    said: int | None = recipe.model.expert_tensor_parallel_size
    if said is not None:
        return said
    bridge = versions.megatron_bridge
    return 1 if bridge is not None and bridge in parse_range(">=0.6.0") and ep > 1 else tp


def _virtual_stages(recipe: Recipe, versions: Versions, stages: tuple[str, ...] | None, pp: int) -> int | None:
    """VP after validation: an explicit layout implies it; Megatron-LM's parser drops a VP of 1.

    Megatron-LM counts it from the layers of a chunk too (PP016 says where these do not fit).
    """
    model = recipe.model
    vp: int | None = model.virtual_pipeline_model_parallel_size
    each, layers = model.num_layers_per_virtual_pipeline_stage, counted_layers(recipe)
    if vp is None and each is not None and layers is not None and versions.megatron_bridge is None:
        vp = layers // (pp * each) if layers % (pp * each) == 0 else None
    if vp is None and stages is not None and len(stages) % pp == 0 and len(stages) > pp:
        vp = len(stages) // pp
    return None if vp == 1 and versions.megatron_bridge is None else vp


def counted_layers(recipe: Recipe) -> int | None:
    """The layers that split over the stages, embedding and loss among them where they count as layers."""
    model = recipe.model
    if model.num_layers is None:
        return None
    extra = (model.account_for_embedding_in_pipeline_split, model.account_for_loss_in_pipeline_split)
    return model.num_layers + sum(map(bool, extra))


def _num_microbatches(recipe: Recipe, dp: int) -> int | None:
    micro, batch = recipe.train.micro_batch_size, recipe.train.global_batch_size
    if micro is None or batch is None or batch % (micro * dp):
        return None
    return batch // (micro * dp)
