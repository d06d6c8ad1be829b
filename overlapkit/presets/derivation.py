"""Userbuffers presets for GPUs and shapes that nobody tuned: derived from how long GEMMs and collectives take.

A derivation, not a measurement: ``scripts/validate_presets.py`` prints how far it lies from NVIDIA's tuned presets.
Times at full speed are those of `overlapkit.presets.times`; what sharing the SMs makes of them:

* A collective on n SMs takes the part of one rank (M / TP bytes) over n times a rate (`Calibration`), and is never
  faster than the wire. Without CUDA multicast an all-gather stores its part TP - 1 times.
* A GEMM that leaves n of N SMs to communication takes ``1 / (1 - w * n / N)`` as long. w is 1 where SMs bound the GEMM
  and less where power does: on GPUs of over 4 dense BF16 TFLOPS per SM (H100 7.5, B200 15; but A100 2.9, H20 1.9).

Choices per layer:

* ``qkv_fprop``, ``fc1_fprop``, ``proj_dgrad``, ``fc2_dgrad``: ring exchange by the copy engines (``use_ce`` is
  Transformer Engine's default), which is all that they can do.
* bulk layers: the SM count with the shortest ``max(GEMM, collective)``.
* ``proj_fprop``, ``fc2_fprop`` in BF16: the pipeline, on the SM count with the shortest GEMM plus exposed rest (the
  last split's reduce-scatter, or what outlasts the GEMM); or a ring, where that takes less: a GEMM in TP parts, the
  send of the last part, and the sum of TP parts in HBM. In FP8 a ring, as in NVIDIA's newer FP8 presets: with current
  scaling and MXFP8 a pipeline has no FP8 output to reduce, and the shorter GEMM leaves less to hide behind.
* SM counts are even, so that clusters of 2 divide them, and 2 to 32, for which userbuffers have flags. A collective at
  wire speed gains nothing from more SMs, which keeps those of the H800 and A800 low.

`CALIBRATION` was fitted on the four BF16 presets that Megatron-Bridge has for the H100 (hidden 6144, 8192, 12288 and
16384), with ``scripts/validate_presets.py --fit``; what a ring costs more was chosen by the methods of all tuned BF16
presets. That the rates hold on other GPUs is an assumption. The methods of NVIDIA's presets follow from times only
loosely: ring exchange and pipeline are often a few percent apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlapkit.presets.times import LAYERS, Inputs, LayerTimes, layer_times, part_bytes

MAX_SMS = 32
_POWER_BOUND_TFLOPS_PER_SM = 4.0
_SM_COUNTS = tuple(range(2, MAX_SMS + 1, 2))
_SPLITS = (4, 2)

_BULK = ("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad")
_ROW_PARALLEL_FORWARD = ("proj_fprop", "fc2_fprop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The fitted figures.

    The first three: what an SM moves, in GB/s of one rank's part (M / TP). ``sm_cost`` is w of a GEMM that power
    bounds, ``ring_cost`` the share by which a GEMM in TP parts takes longer.
    """

    bulk_all_gather: float
    bulk_reduce_scatter: float
    pipeline_reduce_scatter: float
    sm_cost: float
    ring_cost: float


CALIBRATION = Calibration(
    bulk_all_gather=8.0, bulk_reduce_scatter=3.0, pipeline_reduce_scatter=5.0, sm_cost=0.3, ring_cost=0.08
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedLayer:
    """One layer's options as Transformer Engine reads them, its times, and the rule that chose."""

    options: Mapping[str, Any]
    times: LayerTimes
    because: str


def derive(inputs: Inputs, calibration: Calibration = CALIBRATION) -> dict[str, DerivedLayer]:
    """Layer -> what was chosen for it and why, for the ten layers.

    Raises:
        RecipeError: as `layer_times`.
    """
    derived = {}
    for layer, times in layer_times(inputs).items():
        if layer in _BULK:
            derived[layer] = _bulk(inputs, calibration, layer, times)
        elif layer in _ROW_PARALLEL_FORWARD:
            derived[layer] = _row_parallel_forward(inputs, calibration, times)
        else:
            because = "ring exchange by the copy engines; it is all that this layer can do"
            derived[layer] = DerivedLayer(options=_ring_options(margin=False), times=times, because=because)
    return derived


def _slowed(inputs: Inputs, calibration: Calibration, gemm: float, num_sm: int) -> float:
    """The GEMM's time where ``num_sm`` SMs communicate."""
    sms = inputs.gpu.sm_count or 1
    power_bound = (inputs.gpu.bf16_tflops or 0.0) / sms > _POWER_BOUND_TFLOPS_PER_SM
    return gemm / (1 - (calibration.sm_cost if power_bound else 1.0) * num_sm / sms)


def _bulk(inputs: Inputs, calibration: Calibration, layer: str, times: LayerTimes) -> DerivedLayer:
    collective = LAYERS[layer][1]
    part = part_bytes(inputs, collective)
    rate = calibration.bulk_reduce_scatter
    if collective == "all-gather":
        rate = calibration.bulk_all_gather
        if not inputs.gpu.cuda_multicast:
            part *= inputs.tensor_model_parallel_size - 1

    def transfer(num_sm: int) -> float:
        return max(part / (num_sm * rate * 1e9), times.collective)

    def slowed(num_sm: int) -> float:
        return _slowed(inputs, calibration, times.gemm, num_sm)

    num_sm = min(_SM_COUNTS, key=lambda n: (max(slowed(n), transfer(n)), n))
    if transfer(num_sm) <= slowed(num_sm):
        because = f"the fewest SMs that hide the {collective}"
    elif transfer(num_sm) == times.collective:
        because = f"NVLink can use no more, and the {collective} outlasts the GEMM all the same"
    elif num_sm == MAX_SMS:
        because = f"as many as userbuffers can use, and the {collective} outlasts the GEMM all the same"
    else:
        because = f"two more SMs would cost the GEMM more than they save of the {collective}"
    options = {"method": "bulk", "num_sm": num_sm, "cga_size": _cga_size(inputs), "set_sm_margin": False}
    return DerivedLayer(options=options, times=times, because=because)


def _row_parallel_forward(inputs: Inputs, calibration: Calibration, times: LayerTimes) -> DerivedLayer:
    if inputs.precision == "fp8":
        because = "ring exchange by the copy engines, as in NVIDIA's FP8 presets"
        return DerivedLayer(options=_ring_options(margin=True), times=times, because=because)
    splits = next((count for count in _SPLITS if inputs.hidden_size % (8 * count) == 0), 1)
    ring = _ring_seconds(inputs, calibration, times)
    pipeline = {n: _pipeline_seconds(inputs, calibration, times, n, splits) for n in _SM_COUNTS}
    num_sm = min(pipeline, key=lambda n: (pipeline[n], n))
    compared = [f"ring exchange {_us(ring)}", f"pipeline on {num_sm} SMs {_us(pipeline[num_sm])}"]
    if ring < pipeline[num_sm]:
        because = f"the shorter computed time: {compared[0]}, {compared[1]}"
        return DerivedLayer(options=_ring_options(margin=True), times=times, because=because)
    because = f"the shorter computed time: {compared[1]}, {compared[0]}"
    options = {
        "method": "pipeline",
        "num_sm": num_sm,
        "cga_size": _cga_size(inputs),
        "num_splits": splits,
        "set_sm_margin": True,
        "atomic_gemm": False,
        "fp8_buf": False,
    }
    return DerivedLayer(options=options, times=times, because=because)


def _pipeline_seconds(inputs: Inputs, calibration: Calibration, times: LayerTimes, num_sm: int, splits: int) -> float:
    """The GEMM in splits, each reduced while the next is computed."""
    rate = calibration.pipeline_reduce_scatter * 1e9
    transfer = max(part_bytes(inputs, "reduce-scatter") / (num_sm * rate), times.collective)
    slowed = _slowed(inputs, calibration, times.gemm, num_sm)
    return slowed + max(transfer / splits, transfer - slowed * (splits - 1) / splits)


def _ring_seconds(inputs: Inputs, calibration: Calibration, times: LayerTimes) -> float:
    """TP small GEMMs, each result sent while the next is computed; then the parts are added up."""
    tp = inputs.tensor_model_parallel_size
    send = times.collective / (tp - 1)
    traffic = (tp + 1) * part_bytes(inputs, "reduce-scatter")
    add_up = traffic / ((inputs.gpu.hbm_gb_per_s or 0.0) * 1e9)
    gemm = times.gemm * (1 + calibration.ring_cost) / tp
    return gemm + (tp - 1) * max(gemm, send) + send + add_up


def _ring_options(*, margin: bool) -> dict[str, Any]:
    return {
        "method": "ring_exchange",
        "num_sm": 1,
        "cga_size": 1,
        "set_sm_margin": margin,
        "aggregate": False,
        "atomic_gemm": False,
        "fp8_buf": False,
    }


def _cga_size(inputs: Inputs) -> int:
    """Clusters of two SMs, which came with compute capability 9."""
    return 1 if inputs.gpu.generation == "ampere" else 2


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"
