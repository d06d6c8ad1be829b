"""DP: the settings' names, the section in which a value takes effect, and what fixes change."""

from __future__ import annotations

from dataclasses import replace

from overlapkit.facts import Facts
from overlapkit.rules.registry import State, passes

BUCKET = "ddp.bucket_size"
GRAD_REDUCE = "ddp.overlap_grad_reduce"
PARAM_GATHER = "ddp.overlap_param_gather"
ALIGN = "ddp.align_param_gather"
OPT_PARAM_GATHER = "optimizer.overlap_param_gather"
WITH_STEP = "optimizer.overlap_param_gather_with_optimizer_step"
DELAY = "ddp.delay_wgrad_compute"
DIST_OPT = "ddp.use_distributed_optimizer"
ORDINARY = ("adam", "sgd")  # optimizers that step every parameter by itself
REUSE = "reuse_grad_buf_for_mxfp8_param_ag"
_STEP = WITH_STEP.partition(".")[2]


def home(f: Facts, name: str, other: str = "ddp") -> str:
    """The section in which a data-parallel value takes effect.

    Bridge reads ``comm_overlap`` or passes it over. Megatron-LM has one flag for both sections; a value
    of ``comm_overlap`` counts first, a null there leaves the other's.
    """
    overlap = f.recipe.comm_overlap
    if f.bridge:
        counts = f.overlap_setup and f.dist_opt_at_setup
    else:
        only_there = getattr(getattr(f.recipe, other), name) is not None
        counts = overlap is not None and (getattr(overlap, name) is not None or not only_there)
    return "comm_overlap" if counts else other


def layer_wise(f: Facts) -> bool:
    """Muon and its like with every layer's state on one data-parallel rank.

    Asked for by the name; from core 0.18 also by the distributed optimizer in Megatron-LM, behind Bridge by
    a field of the optimizer.
    """
    name = f.recipe.optimizer.optimizer or "adam"
    if name in ORDINARY or name.startswith("dist_") or f.core_in("<0.18.0rc0"):
        return name.startswith("dist_")
    return f.dist_opt if f.megatron_lm else bool(f.recipe.optimizer.use_layer_wise_distributed_optimizer)


def muon_shards_nothing(f: Facts) -> bool:
    """Whether the optimizer is a Muon that excludes the distributed one (DP022)."""
    return "muon" in (f.recipe.optimizer.optimizer or "") and f.core_in("<0.18.0rc0")


def no_dist_opt(f: Facts) -> bool:
    """Whether the distributed optimizer is refused beside the rest (DP022, FSDP005, FSDP008)."""
    return muon_shards_nothing(f) or (f.torch_fsdp2 and not f.fsdp)


def dist_opt_on(f: Facts) -> str:
    """What turns the distributed optimizer on, and takes away what Bridge's set-up would then bring in."""
    changes = [f"{DIST_OPT}=true"]
    section = "comm_overlap" if f.overlap_setup else "optimizer"
    if f.bridge and getattr(getattr(f.recipe, section), _STEP):  # DP009
        changes.append(f"{section}.{_STEP}=false")
    writes_size = f.overlap_setup and (f.parallelism.dp > 1 or f.asked.bucket_size is not None)
    if writes_size and f.recipe.ddp.num_buckets is not None:  # DP014
        changes.append("ddp.num_buckets=null")
    if f.recipe.mixed_precision is None and not passes(replace(f, dist_opt=True), f.start, "DP020"):
        changes.append(f"ddp.{REUSE}=true")
    return " and ".join(changes)


def reduce_on(f: Facts, s: State) -> str | None:
    """What overlaps gradient reduction; None where Muon or delayed weight gradients exclude it."""
    would = replace(f, asked=replace(f.asked, overlap_grad_reduce=True))
    excluded_by = ("DP017", "DP022", "EP014", "EP018", "EP019", "EP020")
    if not passes(would, {**s, GRAD_REDUCE: True}, *excluded_by):
        return None
    return f"{home(f, 'overlap_grad_reduce')}.overlap_grad_reduce=true"


def gather_off(f: Facts, s: State) -> str:
    """What turns the overlapped parameter gather off, and with it the overlap with the step that needs it."""
    name = "overlap_param_gather"
    sections = [home(f, name)]
    if f.bridge and sections == ["ddp"]:  # one true makes both true (DP006)
        sections = [each for each in ("ddp", "optimizer") if getattr(getattr(f.recipe, each), name)]
    changes = [f"{section}.{name}=false" for section in sections]
    return " and ".join([*changes, step_off(f)] if s[WITH_STEP] else changes)


def reuse_off(f: Facts) -> list[str]:
    """What keeps MXFP8 parameters out of the gradient buffer where ``ddp`` and ``optimizer`` say it.

    Both give Megatron-LM's one flag; under Bridge each says its own, unless the precision section overwrites both.
    """
    sections = {"ddp": f.recipe.ddp, "optimizer": f.recipe.optimizer}
    count = f.megatron_lm or f.recipe.mixed_precision is None
    return [f"{name}.{REUSE}=false" for name, values in sections.items() if count and getattr(values, REUSE)]


def step_off(f: Facts) -> str:
    return f"{home(f, _STEP, 'optimizer')}.{_STEP}=false"
