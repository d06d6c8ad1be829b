"""The constants of the step-time model, from ``data/cost.yaml``, which says what each was fitted on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from overlapkit.data import load_yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """GEMMs of one GPU in one precision: see ``data/cost.yaml``. ``fixed_s`` is in seconds, the others are shares."""

    efficiency: float
    hbm_efficiency: float
    fixed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Fused attention of one GPU: ``efficiency`` of the BF16 peak, half of it at ``half_length`` tokens."""

    efficiency: float
    half_length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What a step takes over its estimate, in 80 % of the held-out cases; ``cases`` were counted, 0 is assumed."""

    low: float
    high: float
    cases: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Every constant by its name in ``data/cost.yaml``, where unit and meaning stand. Mappings are by GPU or kind."""

    gemm_in_situ_fp4: float
    grouped_gemm_efficiency: float
    grouped_gemm_short_width: float
    quantize_fp8: float
    quantize_mxfp8: float
    quantize_fp4: float
    attention_backward_efficiency: float
    attention_narrow_head_ampere: float
    attention_narrow_head_hopper: float
    attention_narrow_head_blackwell: float
    batched_gemm_efficiency: float
    hbm_efficiency: float
    kernel_s: float
    memory_bound_backward: float
    permute_passes: float
    fused_permute: float
    host_unfused_s: float
    host_s: float
    host_tp_s: float
    host_moe_all_to_all: float
    host_moe_flex: float
    host_backward: float
    host_backward_recompute: float
    host_captured: float
    host_expert_overlap: float
    sync_all_to_all_s: float
    sync_flex_s: float
    nic_ring_efficiency: float
    nic_all_to_all_efficiency: float
    nvlink_point_to_point_efficiency: float
    node_latency_s: float
    gather_fp8: float
    gather_mxfp8: float
    gather_fp4: float
    userbuffers_sms: float
    userbuffers_slow_down: float
    data_parallel_hidden: float
    pipeline_hidden: float
    expert_hidden: float
    optimizer_bytes: float
    step_s: float
    saving_low: float
    saving_high: float
    gemm: Mapping[str, Mapping[str, Gemm]]
    gemm_in_situ: Mapping[str, float]
    attention: Mapping[str, Attention]
    intervals: Mapping[str, Interval]
    measured_gpus: frozenset[str]  # whose step times the model was fitted on


_MAPPINGS = ("gemm", "gemm_in_situ", "attention", "intervals", "measured_gpus")


@lru_cache(maxsize=1)
def load() -> Constants:
    """The constants that ship with the package."""
    data: dict[str, Any] = load_yaml("cost.yaml")
    names = [field.name for field in fields(Constants) if field.name not in _MAPPINGS]
    rates = data["gemm_in_situ"]
    return Constants(
        **{name: float(data["constants"][name]["value"]) for name in names},
        gemm={gpu: _gemm(data["gemm"], gpu) for gpu in data["gemm"]},
        gemm_in_situ={gpu: float(entry["value"]) for gpu, entry in rates.items()},
        attention={gpu: Attention(**_own(data["attention"], gpu)) for gpu in data["attention"]},
        intervals={kind: _interval(entry) for kind, entry in data["intervals"].items()},
        measured_gpus=frozenset(gpu for gpu, entry in rates.items() if "fitted_on" in entry),
    )


def _gemm(table: Mapping[str, Any], gpu: str) -> dict[str, Gemm]:
    return {precision: Gemm(**values) for precision, values in _own(table, gpu).items()}


def _own(table: Mapping[str, Any], gpu: str) -> Mapping[str, Any]:
    """A GPU's entry, or that of its sibling."""
    entry: Mapping[str, Any] = table[gpu]
    return table[entry["as"]] if "as" in entry else entry


def _interval(entry: Mapping[str, Any]) -> Interval:
    return Interval(low=float(entry["low"]), high=float(entry["high"]), cases=int(entry.get("cases", 0)))
