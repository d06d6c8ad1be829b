"""GEMM, attention and userbuffers times, against the formulas worked out by hand and against what must hold."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapkit.catalogue import find_gpu
from overlapkit.cost import hardware as hardware_module
from overlapkit.cost.attention import fused_attention, unfused_attention
from overlapkit.cost.constants import load
from overlapkit.cost.gemm import Linear, gemm_seconds, grouped_gemm_seconds, linear
from overlapkit.cost.hardware import GemmRate, Hardware
from overlapkit.cost.userbuffers import hidden_of_pair

ROUND = GemmRate(flops_per_s=1e15, bytes_per_s=1e12, fixed_s=1e-5, input_bytes=2.0, quantize_s=0.0)
CALLS = frozenset({"gather_input", "scatter_output", "gather_gradient", "regather_input", "scatter_gradient"})


def hardware(gpu: str = "h100", precision: str = "bf16") -> Hardware:
    found = find_gpu(gpu)
    assert found is not None
    return hardware_module._hardware(found, precision, 400.0, load())


def test_a_gemm_is_its_compute_and_its_traffic_and_a_fixed_part() -> None:
    compute, traffic = 2 * 1000**3 / 1e15, 3 * 2 * 1000**2 / 1e12
    assert gemm_seconds(ROUND, 1000, 1000, 1000) == pytest.approx(1e-5 + math.hypot(compute, traffic))


def test_quantization_reads_the_input_and_writes_it_again() -> None:
    quantized = replace(ROUND, quantize_s=1e-12)
    extra = gemm_seconds(quantized, 1000, 50, 200) - gemm_seconds(ROUND, 1000, 50, 200)
    assert extra == pytest.approx(1000 * 200 * 1e-12)


def test_a_gemm_without_rows_takes_nothing() -> None:
    assert gemm_seconds(ROUND, 0, 8, 8) == grouped_gemm_seconds(ROUND, 0, 8, 8, 4, load()) == 0


def test_the_backward_pass_of_a_linear_is_two_gemms_of_its_size() -> None:
    found = linear(ROUND, "fc1", 4096, 2048, 8192, 4)
    assert found.dgrad == pytest.approx(found.forward, rel=0.1)
    assert found.backward == found.dgrad + found.wgrad


def test_narrow_experts_are_slower_than_wide_ones() -> None:
    def per_flop(width: int) -> float:
        return grouped_gemm_seconds(ROUND, 4096, width, 4096, 8, load()) / (2 * 4096 * width * 4096 * 8)

    assert per_flop(512) > 1.5 * per_flop(8192)


def test_fused_attention_at_its_half_length_reaches_half_its_efficiency() -> None:
    h100 = hardware()
    found = fused_attention(h100, load(), sequences=1, length=900, heads=32, channels=128, short_windows=0, window=0)
    flops = 2 * 32 * 128 * 900**2
    assert found.forward == pytest.approx(flops / (989.4e12 * 0.65 / 2))
    assert found.backward == pytest.approx(found.forward * 2.5 / 0.85)


def test_narrow_heads_and_long_sequences_and_windows() -> None:
    shape: dict[str, Any] = {"sequences": 1, "length": 8192.0, "heads": 32.0}
    wide = fused_attention(hardware(), load(), **shape, channels=128, short_windows=0, window=0).forward
    narrow = fused_attention(hardware(), load(), **shape, channels=64, short_windows=0, window=0).forward
    assert narrow == pytest.approx(wide / 2 / 0.78)
    for window, left in ((128, 512 / 8192), (2048, 4352 / 8192), (8192, 1)):
        found = fused_attention(hardware(), load(), **shape, channels=128, short_windows=0.5, window=window).forward
        assert found == pytest.approx(wide * (0.5 + 0.5 * left))


def test_unfused_attention_is_slower_than_fused() -> None:
    shape: dict[str, Any] = {"sequences": 1, "length": 2048.0, "heads": 32.0, "channels": 128.0}
    fused = fused_attention(hardware(), load(), **shape, short_windows=0, window=0)
    assert unfused_attention(hardware(), load(), **shape).forward > 2 * fused.forward


@pytest.mark.parametrize(("precision", "faster"), [("fp8", 1.4), ("mxfp8", 1.4), ("fp4", 2.0)])
def test_large_quantized_gemms_are_faster(precision: str, faster: float) -> None:
    b200 = hardware("b200", precision)
    assert gemm_seconds(b200.plain, 16384, 16384, 16384) > faster * gemm_seconds(b200.rate, 16384, 16384, 16384)


times = st.floats(min_value=1e-7, max_value=1.0)


@given(times, times, times, st.sampled_from([2, 4, 8]), st.sets(st.sampled_from(sorted(CALLS))))
def test_what_hides_is_no_more_than_what_is_communicated(
    gemm: float, gather: float, scatter: float, tp: int, calls: set[str]
) -> None:
    pair = (Linear("fc1", gemm, gemm, gemm), Linear("fc2", gemm, gemm, gemm))
    found = hidden_of_pair(hardware(), load(), pair, gather, scatter, tp=tp, calls=calls, configuration={})
    assert 0 <= found.forward <= gather + scatter + 1e-12
    assert 0 <= found.backward <= 2 * gather + scatter + 1e-12


@given(times, times, times, st.sampled_from([2, 4, 8]))
def test_a_slower_gemm_never_makes_gemm_and_communication_faster(
    gemm: float, collective: float, slower: float, tp: int
) -> None:
    def together(each: float) -> float:
        pair = (Linear("qkv", each, each, each), Linear("proj", each, each, each))
        hidden = hidden_of_pair(hardware(), load(), pair, collective, collective, tp=tp, calls=CALLS, configuration={})
        return 6 * each + 5 * collective - hidden.forward - hidden.backward

    assert together(gemm + slower) >= together(gemm) * (1 - 1e-9)


def test_a_long_gemm_hides_all_but_the_first_part_of_a_ring() -> None:
    pair = (Linear("fc1", 1e-2, 1e-2, 1e-2), Linear("fc2", 1e-2, 1e-2, 1e-2))
    ring = {"fc1_fprop": {"method": "ring_exchange", "num_sm": 1}}
    found = hidden_of_pair(hardware(), load(), pair, 8e-3, 8e-3, tp=8, calls={"gather_input"}, configuration=ring)
    exposed = 8e-3 / 8 + 1e-2 * load().userbuffers_slow_down
    assert found.forward == pytest.approx(8e-3 - exposed)


def test_more_sms_for_a_bulk_collective_slow_the_gemm_beside_it() -> None:
    pair = (Linear("fc1", 1e-2, 1e-2, 1e-2), Linear("fc2", 1e-2, 1e-2, 1e-2))

    def hides(sms: int) -> float:
        bulk = {"fc1_wgrad": {"method": "bulk", "num_sm": sms}}
        found = hidden_of_pair(
            hardware(), load(), pair, 1e-3, 4e-3, tp=8, calls={"scatter_gradient"}, configuration=bulk
        )
        return found.backward

    assert hides(8) > hides(16) > hides(32) > 0
