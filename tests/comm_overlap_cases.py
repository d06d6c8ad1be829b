"""Objects that a CommOverlapConfig sets up, and the gating oracles, case by case, for its set-up on any objects."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import overlapkit.comm_overlap
from overlapkit.comm_overlap import CommOverlapConfig, SetupError

ORACLES = Path(__file__).resolve().parent / "oracles"
_SAME_NAME = (
    *("num_moe_experts", "bf16", "fp16", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("recompute_modules", "moe_shared_expert_overlap", "moe_shared_expert_intermediate_size", "mtp_num_layers"),
    *("gradient_accumulation_fusion", "cuda_graph_modules", "cuda_graph_impl", "add_bias_linear", "add_qkv_bias"),
)
# Input of the oracle -> field of the object.
MODEL = {
    "tp": "tensor_model_parallel_size",
    "sp": "sequence_parallel",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dispatcher": "moe_token_dispatcher_type",
    "model_tp_comm_overlap": "tp_comm_overlap",
    "model_overlap_moe": "overlap_moe_expert_parallel_comm",
    "model_delay_wgrad": "delay_wgrad_compute",
    "model_overlap_p2p": "overlap_p2p_comm",
    "model_batch_p2p": "batch_p2p_comm",
    **{name: name for name in _SAME_NAME},
}
DDP = {
    "ddp_dist_opt": "use_distributed_optimizer",
    "ddp_overlap_grad_reduce": "overlap_grad_reduce",
    "ddp_overlap_param_gather": "overlap_param_gather",
    "ddp_align_param_gather": "align_param_gather",
    "ddp_bucket_size": "bucket_size",
}
OPTIMIZER = {
    "opt_dist_opt": "use_distributed_optimizer",
    "opt_overlap_param_gather": "overlap_param_gather",
    "opt_overlap_pg_with_step": "overlap_param_gather_with_optimizer_step",
}
ASKED = {
    "dp": "data_parallel_size",
    "u_tp_comm_overlap": "tp_comm_overlap",
    "u_bootstrap": "tp_comm_bootstrap_backend",
    "u_overlap_p2p_comm": "overlap_p2p_comm",
    "u_batch_p2p_comm": "batch_p2p_comm",
    "u_overlap_grad_reduce": "overlap_grad_reduce",
    "u_overlap_param_gather": "overlap_param_gather",
    "u_overlap_pg_with_step": "overlap_param_gather_with_optimizer_step",
    "u_align_param_gather": "align_param_gather",
    "u_bucket_size": "bucket_size",
    "u_defer_embedding_wgrad": "defer_embedding_wgrad_compute",
    "u_wgrad_deferral_limit": "wgrad_deferral_limit",
    "u_overlap_moe": "overlap_moe_expert_parallel_comm",
    "u_delay_wgrad": "delay_wgrad_compute",
}
# The versions that the set-up is told.
SOFTWARE = {"megatron_bridge": "0.6.2", "transformer_engine": "2.18", "torch": "2.13.0"}
PRESET = "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"


def model(**values: Any) -> SimpleNamespace:
    """A dense model of TP 4 that overlaps nothing yet."""
    return SimpleNamespace(
        **{
            "tensor_model_parallel_size": 4,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": None,
            "context_parallel_size": 1,
            "tp_comm_overlap": False,
            "overlap_p2p_comm": False,
            "batch_p2p_comm": True,
            "defer_embedding_wgrad_compute": False,
            "wgrad_deferral_limit": 0,
            "overlap_moe_expert_parallel_comm": False,
            "delay_wgrad_compute": False,
            **values,
        }
    )


def optimizer() -> SimpleNamespace:
    return SimpleNamespace(overlap_param_gather=False, overlap_param_gather_with_optimizer_step=False)


def ddp(**values: Any) -> SimpleNamespace:
    start = {"use_distributed_optimizer": True, "overlap_grad_reduce": False, "overlap_param_gather": False}
    rest = {"align_param_gather": False, "bucket_size": None, "delay_wgrad_compute": False}
    return SimpleNamespace(**{**start, **rest, **values})


def config(**values: Any) -> CommOverlapConfig:
    return CommOverlapConfig(**{"tp_comm_overlap": True, "data_parallel_size": 2, **values})


def after(overlap: CommOverlapConfig, **values: Any) -> SimpleNamespace:
    """The model after the set-up."""
    found = model(**values)
    overlap.setup(found, optimizer(), ddp(), software=SOFTWARE)
    return found


@dataclass(frozen=True)
class GatingCase:
    """``given`` is every input, ``out`` the values after Bridge's set-up, None where it raised."""

    version: str
    number: int
    given: dict[str, Any]
    out: dict[str, Any] | None


def gating_cases(version: str, folder: Path = ORACLES) -> list[GatingCase]:
    """The cases of one version of Bridge.

    Left out are those in which the oracle's versions contradict each other: no Transformer Engine, but a version of it
    that the delayed weight gradient is checked against.
    """
    with gzip.open(folder / f"gating_bridge_v{version}.jsonl.gz", "rt", encoding="utf-8") as stream:
        header, *lines = map(json.loads, stream)
    found = []
    for line in lines:
        given = {**header["defaults"], **line["in"]}
        if given["u_delay_wgrad"] and not given["have_te"]:
            continue
        out = line["out"] and dict(zip(header["out_fields"], line["out"], strict=True))
        found.append(GatingCase(version, line["id"], given, out))
    return found


def set_up(case: GatingCase, model: Any, optimizer: Any, ddp: Any) -> str | None:
    """Runs the set-up on the objects, and says how it differs from Bridge's."""
    given, name = case.given, case.given["u_tp_comm_overlap_cfg"]
    preset = name and getattr(overlapkit.comm_overlap, name)
    config = CommOverlapConfig(**{field: given[key] for key, field in ASKED.items()}, tp_comm_overlap_cfg=preset)
    software = {
        "megatron_bridge": case.version,
        "transformer_engine": given["te_version"] if given["have_te"] else None,
    }
    config.finalize()
    before = [dict(vars(owner)) for owner in (model, optimizer, ddp)]
    try:
        config.setup(model, optimizer, ddp, software=software)
    except SetupError as error:
        if [dict(vars(owner)) for owner in (model, optimizer, ddp)] != before:
            return f"{case.number}: refused, but the objects have changed"
        return f"{case.number}: refused: {error}" if case.out is not None else None
    if case.out is None:
        return f"{case.number}: Bridge raises"
    owners = {"model": model, "optimizer": optimizer, "ddp": ddp}
    wrong = []
    for path, theirs in case.out.items():
        section, _, field = path.partition(".")
        if section == "env":
            continue
        ours = getattr(owners[section], field, None)
        expected = _userbuffers(theirs, preset) if field == "tp_comm_overlap_cfg" else theirs
        if ours != expected or type(ours) is not type(expected):
            wrong.append(f"{path} {ours} != {expected}")
    return f"{case.number}: {', '.join(wrong)}" if wrong else None


def _userbuffers(theirs: Any, preset: Any) -> Any:
    """What Transformer Engine gets; an object that Bridge merely leaves there, with the overlap off, counts as none."""
    if theirs is None or theirs[0] == "raw":
        return None
    return {layer: options for layer, options in asdict(preset).items() if options is not None}
