"""Bridge's set-up on live objects: they become a recipe, and the plan's settings are written onto them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from overlapkit.comm_overlap.userbuffers import userbuffers_of
from overlapkit.errors import RecipeError, SetupError, printable, shown
from overlapkit.plan import Decision, reason

if TYPE_CHECKING:
    from overlapkit.comm_overlap.config import CommOverlapConfig

LOGGER = logging.getLogger("overlapkit.comm_overlap")
BRIDGE = "megatron-bridge"
# What Bridge's set-up reads of a model, and nothing else: a plan of the whole would judge what it does not look at.
# Source: megatron-bridge training/comm_overlap.py, utils/cuda_graph.py.
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_NEEDED = (
    *_SIZES,
    *("sequence_parallel", "virtual_pipeline_model_parallel_size", "overlap_moe_expert_parallel_comm"),
)
_ALSO_READ = ("context_parallel_size", "delay_wgrad_compute")
_READ_FOR_EP = (
    *("expert_model_parallel_size", "num_moe_experts", "moe_token_dispatcher_type", "bf16", "fp16"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("moe_shared_expert_overlap", "moe_shared_expert_intermediate_size", "mtp_num_layers"),
    *("gradient_accumulation_fusion", "moe_use_legacy_grouped_gemm", "cuda_graph_modules", "cuda_graph_scope"),
    *("add_bias_linear", "add_qkv_bias"),
)
_READ_OF_DDP = ("use_distributed_optimizer", "overlap_grad_reduce")


def set_up(config: CommOverlapConfig, model: Any, optimizer: Any, ddp: Any, software: Mapping[str, Any] | None) -> None:
    """See ``CommOverlapConfig.setup``; the configuration is finalized."""
    from overlapkit.live_objects import SECTIONS, write_settings
    from overlapkit.recipe import recipe_from_mapping
    from overlapkit.resolver import resolve

    lacking = [name for name in _NEEDED if not hasattr(model, name)]
    lacking += [name for name in _SIZES if getattr(model, name, 1) is None]
    if lacking:
        raise SetupError(f"the model has no {', '.join(lacking)}, which the set-up of communication overlap reads")
    dist_opt = None not in (optimizer, ddp) and bool(getattr(ddp, "use_distributed_optimizer", False))
    if dist_opt and config.data_parallel_size is None:
        raise SetupError(
            "comm_overlap.data_parallel_size is None, and the set-up of the distributed optimizer needs it; → set it "
            "to the number of GPUs / (TP · PP · CP)"
        )
    mapping = _mapping(config, model, ddp, software)
    plan = resolve(recipe_from_mapping(mapping, source="CommOverlapConfig.setup"))
    # What other parts of Bridge would say of the plan is theirs to say, about the whole configuration.
    decisions = [each for each in plan.decisions if f"{BRIDGE} training/comm_overlap.py" in each.source]
    refused = [each for each in decisions if each.severity == "error" and each.raised_by == BRIDGE]
    if refused:
        raise SetupError(printable(f"communication overlap: {'; '.join(map(sentence, refused))}", limit=2_000))
    log(decisions)
    write_settings(plan.settings, model=model, optimizer=optimizer, ddp=ddp, only=SECTIONS if dist_opt else ("model",))


def _mapping(config: CommOverlapConfig, model: Any, ddp: Any, software: Mapping[str, Any] | None) -> dict[str, Any]:
    from overlapkit.live_objects import plain, recipe_mapping

    asked = vars(config.user_comm_overlap_cfg)
    for_ep = asked["overlap_moe_expert_parallel_comm"] or asked["delay_wgrad_compute"]
    model = _part(model, (*_NEEDED, *_ALSO_READ, *(_READ_FOR_EP if for_ep else ())))
    for name in ("sequence_parallel", "gradient_accumulation_fusion"):  # which Bridge tests for truth
        setattr(model, name, bool(plain(getattr(model, name, False))))
    if asked["tp_comm_overlap"] not in (True, False, None):
        hint = "CommOverlapConfig.decide and from_recipe choose"
        raise RecipeError("expected true or false", path="comm_overlap.tp_comm_overlap", hint=hint)
    userbuffers = userbuffers_of(asked["tp_comm_overlap_cfg"])
    # A value without a plain form stays, and is refused with its name.
    overlap = {name: value if plain(value) is None else plain(value) for name, value in asked.items()}
    # As a dump of Bridge has its dataclass.
    overlap["tp_comm_overlap_cfg"] = None if userbuffers is None else {"_target_": "", **userbuffers}
    mapping = recipe_mapping(
        model=model, ddp=_part(ddp, _READ_OF_DDP), comm_overlap=overlap, software=_software(software)
    )
    num_gpus = _data_parallel_size(config)
    for name in (*_SIZES, "context_parallel_size"):
        size = mapping["model"].get(name, 1)
        num_gpus *= size if isinstance(size, int) and size > 0 else 1  # what is no size is refused with its name
    return {**mapping, "cluster": {"num_gpus": num_gpus}}


def _data_parallel_size(config: CommOverlapConfig) -> int:
    from overlapkit.live_objects import plain

    given = config.data_parallel_size
    size = plain(given)
    if given is not None and not (isinstance(size, int) and size >= 0):
        text = f"expected a whole number of at least 0, got {shown(given)}"
        raise RecipeError(text, path="comm_overlap.data_parallel_size")
    return size or 1


def _part(owner: Any, names: Iterable[str]) -> SimpleNamespace:
    return SimpleNamespace(**{name: getattr(owner, name) for name in names if hasattr(owner, name)})


def _software(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """As given, else what is loaded or installed here, as its metadata say it: nothing is imported for it."""
    from overlapkit.integrations.megatron.packages import versions_here

    if given is None:
        return {**versions_here(), "transformer_engine": "detect"}
    if not isinstance(given, Mapping):
        raise RecipeError(f"expected a mapping, got {shown(given)}", path="software")
    if given.get("framework", BRIDGE) != BRIDGE:
        hint = "overlapkit.integrations.megatron.apply sets a plan for Megatron-LM on its objects"
        raise RecipeError("this set-up is Megatron-Bridge's", path="software.framework", hint=hint)
    return dict(given)


def log(decisions: Iterable[Decision]) -> None:
    """Warns of what is lost or wrong; what was asked for when legal, and is not, is told."""
    for decision in decisions:
        if decision.severity != "info":
            LOGGER.warning("%s", sentence(decision))
        elif decision.requested and decision.value is False:
            LOGGER.info("%s", sentence(decision))


def sentence(decision: Decision) -> str:
    """Code, subject, what became of it and why, and the way out, in one line."""
    off = "off, because " if decision.requested and decision.value is False else ""
    fix = f"; → {decision.fix}" if decision.fix else ""
    return printable(f"{decision.code} {decision.subject}: {off}{reason(decision)}{fix}", limit=600)
