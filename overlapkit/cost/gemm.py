"""GEMM times: ``fixed + sqrt(compute² + traffic²)``, and for quantized inputs the pass that quantizes them.

The form and its constants are a fit to open micro-benchmarks (``data/cost.yaml``); rounding up to whole waves of tiles
over the SMs made that fit worse and is left out.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

from overlapkit.cost.constants import Constants
from overlapkit.cost.hardware import GemmRate


class Linear(NamedTuple):
    """Seconds of one linear layer for one microbatch: output, input gradient, weight gradient."""

    name: str
    forward: float
    dgrad: float
    wgrad: float

    @property
    def backward(self) -> float:
        return self.dgrad + self.wgrad


def gemm_seconds(rate: GemmRate, m: float, n: float, k: float, *, output_bytes: float = 2.0) -> float:
    """One GEMM of [m, k] by [k, n], in elements; ``output_bytes`` per element written, and read too where it adds."""
    if m <= 0 or n <= 0 or k <= 0:
        return 0.0
    compute = 2.0 * m * n * k / rate.flops_per_s
    traffic = (rate.input_bytes * (m * k + n * k) + output_bytes * m * n) / rate.bytes_per_s
    return rate.fixed_s + sqrt(compute * compute + traffic * traffic) + rate.quantize_s * m * k


def grouped_gemm_seconds(
    rate: GemmRate, m: float, n: float, k: float, groups: int, constants: Constants, *, output_bytes: float = 2.0
) -> float:
    """``groups`` GEMMs of these sizes in one kernel, as a rank's experts: slower where the tiles are narrow."""
    if m <= 0 or n <= 0 or k <= 0:
        return 0.0
    compute = 2.0 * m * n * k * groups / rate.flops_per_s
    if groups > 1:
        compute *= (1 + constants.grouped_gemm_short_width / min(n, k)) / constants.grouped_gemm_efficiency
    traffic = groups * (rate.input_bytes * (m * k + n * k) + output_bytes * m * n) / rate.bytes_per_s
    return rate.fixed_s + sqrt(compute * compute + traffic * traffic) + rate.quantize_s * m * k * groups


def linear(rate: GemmRate, name: str, tokens: float, inputs: float, outputs: float, grad_width: float) -> Linear:
    """A linear layer of ``tokens`` rows; its weight gradient adds to one of ``grad_width`` bytes per element."""
    return Linear(
        name,
        gemm_seconds(rate, tokens, outputs, inputs),
        gemm_seconds(rate, tokens, inputs, outputs),
        gemm_seconds(rate, outputs, inputs, tokens, output_bytes=2 * grad_width),
    )


def experts_linear(
    rate: GemmRate, name: str, rows: float, inputs: float, outputs: float, groups: int, grad_width: float, c: Constants
) -> Linear:
    """A linear layer of each of ``groups`` experts, ``rows`` tokens each."""
    return Linear(
        name,
        grouped_gemm_seconds(rate, rows, outputs, inputs, groups, c),
        grouped_gemm_seconds(rate, rows, inputs, outputs, groups, c),
        grouped_gemm_seconds(rate, outputs, inputs, rows, groups, c, output_bytes=2 * grad_width),
    )
