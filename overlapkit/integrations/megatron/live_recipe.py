"""Live objects as a recipe, so that a training script can ask for its own plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from overlapkit.errors import RecipeError, shown
from overlapkit.integrations.megatron.environment import loaded, world_size
from overlapkit.integrations.megatron.packages import versions_here
from overlapkit.live_objects import SECTIONS, recipe_mapping
from overlapkit.recipe import Recipe, recipe_from_mapping
from overlapkit.rules.registry import BRIDGE, MEGATRON_LM
from overlapkit.software import installed_transformer_engine

SOURCE = "live objects"
# What rules read in ``env_vars`` or write into a plan's env. Nothing else of a process goes into its recipe.
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_ALGO",
    "NCCL_GRAPH_REGISTER",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN",
    "NUM_OF_TOKENS_PER_CHUNK_COMBINE_API",
    "NVLINK_DOMAIN_SIZE",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_BWD_LAYERNORM_SM_MARGIN",
    "NVTE_FWD_LAYERNORM_SM_MARGIN",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "TORCH_NCCL_HIGH_PRIORITY",
    "UB_SKIPMC",
    "USE_MNNVL",
)


def from_megatron(
    model_config: Any,
    optimizer_config: Any = None,
    ddp_config: Any = None,
    *,
    gpu: str | None,
    num_gpus: int | None = None,
    framework: str | None = None,
    micro_batch_size: int | None = None,
    global_batch_size: int | None = None,
    seq_length: int | None = None,
    comm_overlap: Mapping[str, Any] | None = None,
    software: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
    **sections: Mapping[str, Any],
) -> Recipe:
    """A recipe of TransformerConfig, OptimizerConfig and DistributedDataParallelConfig, for ``overlapkit.resolve``.

    ``gpu`` is its model, such as h100, and ``num_gpus`` the whole job's: without it the size of torch.distributed's
    group, else ``WORLD_SIZE``. ``framework`` says whose checks count: megatron-bridge where it is installed, else
    megatron-lm. Versions are those that are loaded or installed, or those of ``software``, a recipe's section, alone.
    Batch sizes count sequences, ``seq_length`` tokens. The environment is this process's, as far as rules read it.

    The objects' own values are what is asked for. ``comm_overlap`` (Megatron-Bridge's fields, and auto) asks for
    something else. ``sections`` are further ones of a recipe, as plain values, for what no object says:
    ``dist={"use_torch_fsdp2": True}``, ``cluster={"driver_version": "550.54.15"}``.

    Raises:
        RecipeError: no number of GPUs, or a value that no recipe takes; the text names the field.
    """
    _check(model_config, sections)
    batch = {"micro_batch_size": micro_batch_size, "global_batch_size": global_batch_size}
    versions = _software(framework) if software is None else {"framework": framework or _framework()}
    machine = {"gpu": gpu, "num_gpus": _num_gpus(environ) if num_gpus is None else num_gpus}
    tree = recipe_mapping(
        model=model_config,
        optimizer=optimizer_config,
        ddp=ddp_config,
        cluster=_section(machine, sections.pop("cluster", None)),
        software=_section(versions, software),
        train=_section(batch, sections.pop("train", None)),
        comm_overlap=comm_overlap,
        env_vars={name: environ[name] for name in VARIABLES if name in environ},
        **sections,
    )
    model = tree["model"]
    if seq_length is not None:
        model["seq_length"] = seq_length
    if model.get("cuda_graph_impl", "none") != "none":
        # Megatron-Core leaves the older names on beside what it has made of them.
        for older in ("enable_cuda_graph", "external_cuda_graph"):
            model.pop(older, None)
    if model.get("moe_token_dispatcher_type") != "flex":
        # Megatron-Core's default names a backend in every model; only the flex dispatcher has one.
        model.pop("moe_flex_dispatcher_backend", None)
    return recipe_from_mapping(tree, source=SOURCE)


def _check(model: Any, sections: Mapping[str, Any]) -> None:
    if not hasattr(model, "tensor_model_parallel_size"):
        text, hint = f"{shown(model)} has no tensor_model_parallel_size", "give a TransformerConfig, or what is like it"
        raise RecipeError(text, path="model", source=SOURCE, hint=hint)
    for name in (*SECTIONS, "env_vars"):
        if name in sections:
            raise RecipeError("the objects and environ say it", path=name, source=SOURCE)


def _section(values: dict[str, Any], given: Mapping[str, Any] | None) -> Any:
    """A section of a recipe; what is given for it, which wins, is refused with the recipe where it is no mapping."""
    if given is None:
        return values
    return {**values, **given} if isinstance(given, Mapping) else given


def _num_gpus(environ: Mapping[str, str]) -> int:
    size = world_size()
    if size is not None:
        return size
    said = environ.get("WORLD_SIZE", "")
    if said.isdecimal() and 0 < len(said) < 10 and int(said):
        return int(said)
    hint = "give num_gpus, or start torch.distributed first"
    raise RecipeError("the number of GPUs is not known", path="cluster.num_gpus", source=SOURCE, hint=hint)


def _framework() -> str:
    return BRIDGE if "megatron_bridge" in versions_here() else MEGATRON_LM


def _software(framework: str | None) -> dict[str, Any]:
    """What is loaded, else installed. Transformer Engine is null where it cannot be used."""
    framework = framework or _framework()
    engine = getattr(loaded("transformer_engine"), "__version__", None) or installed_transformer_engine()
    found = versions_here()
    if framework != BRIDGE:
        found.pop("megatron_bridge", None)
    return {"framework": framework, **found, "transformer_engine": None if engine is None else str(engine)}
