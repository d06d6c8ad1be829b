"""Times of collectives: against NCCL's measured latencies, between nodes, and what must hold of any."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from math import isfinite, log2
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapkit.catalogue import find_gpu, gpu_names
from overlapkit.cost.collectives import Link, collective_seconds, point_to_point_seconds
from overlapkit.data import load_json

ROOT = Path(__file__).resolve().parent.parent
MICROSECONDS = json.loads((ROOT / "tests" / "data" / "collectives_sample.json").read_text())["microseconds"]
SIZES = [2**power for power in range(9, 30)]
MIB, GIB = 2**20, 2**30
MEASURED = {"a100": "ampere", "h100": "hopper", "h200": "hopper"} | dict.fromkeys(
    ("b200", "b300", "gb200", "gb300"), "blackwell"
)
RINGS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
OPS = (*RINGS, "all_to_all", "all_gather_list", "reduce_scatter_list")


def link(gpu: str = "h100", **changes: Any) -> Link:
    found = find_gpu(gpu)
    assert found is not None and found.nvlink_gb_per_s is not None
    made = Link(
        curves=found.generation if found.generation in ("ampere", "hopper") else "blackwell",
        gpu=gpu,
        nvlink_bytes_per_s=found.nvlink_gb_per_s / 2 * 1e9,
        nic_bytes_per_s=50e9,
        ring_efficiency=0.9,
        all_to_all_efficiency=0.8,
        point_to_point_efficiency=0.7,
        latency_s=10e-6,
    )
    return replace(made, **changes)


def errors(gpu: str, at_least: int = 1) -> list[float]:
    """Relative errors at every point that was measured on the GPU, for messages of ``at_least`` bytes."""
    return [
        abs(collective_seconds(link(gpu), op, size, int(ranks), 8) / (measured * 1e-6) - 1)
        for op, groups in MICROSECONDS[gpu].items()
        for ranks, latencies in groups.items()
        for size, measured in zip(SIZES, latencies, strict=True)
        if size >= at_least
    ]


# --- inside one NVLink domain, against what was measured --------------------------------------------


@pytest.mark.parametrize("gpu", MEASURED)
def test_a_measured_gpu_is_met_within_one_and_a_half_percent_from_one_mebibyte(gpu: str) -> None:
    assert fmean(errors(gpu, at_least=MIB)) < 0.015
    assert fmean(errors(gpu)) < 0.03


def test_a_point_between_two_measured_ones_lies_between_their_times() -> None:
    low, between, high = (collective_seconds(link(), "all_gather", size, 8, 8) for size in (2**24, 2**24 * 1.5, 2**25))
    assert low < between < high


def test_the_bandwidth_of_the_largest_measured_message_holds_for_larger_ones() -> None:
    at_end = collective_seconds(link(), "all_reduce", GIB / 2, 8, 8)
    assert collective_seconds(link(), "all_reduce", 8 * GIB, 8, 8) == pytest.approx(16 * at_end)


def test_messages_below_the_smallest_measured_one_take_its_time() -> None:
    assert collective_seconds(link(), "all_reduce", 1, 8, 8) == collective_seconds(link(), "all_reduce", 512, 8, 8)


def test_larger_groups_than_measured_send_more_at_the_same_bus_bandwidth() -> None:
    eight, many = (collective_seconds(link("gb200"), "all_gather", GIB, ranks, 72) for ranks in (8, 64))
    assert many / eight == pytest.approx((63 / 64) / (7 / 8))


def test_a_group_between_two_measured_ones_has_a_bus_bandwidth_between_theirs() -> None:
    four, six, eight = (
        (ranks - 1) / ranks / collective_seconds(link("a100"), "all_gather", GIB, ranks, 8) for ranks in (4, 6, 8)
    )
    assert min(four, eight) < six < max(four, eight)


@pytest.mark.parametrize(("gpu", "sibling", "ratio"), [("h800", "h100", 200 / 450), ("a800", "a100", 200 / 300)])
def test_a_gpu_that_nobody_measured_has_its_family_curve_at_its_own_nvlink_bandwidth(
    gpu: str, sibling: str, ratio: float
) -> None:
    large = collective_seconds(link(sibling), "reduce_scatter", 4 * GIB, 8, 8)
    assert collective_seconds(link(gpu), "reduce_scatter", 4 * GIB, 8, 8) == pytest.approx(large / ratio, rel=0.05)
    # latency has nothing to do with bandwidth
    small = collective_seconds(link(sibling), "reduce_scatter", 512, 8, 8)
    assert collective_seconds(link(gpu), "reduce_scatter", 512, 8, 8) == pytest.approx(small, rel=0.05)


def test_h20_with_the_nvlink_of_h100_takes_as_long() -> None:
    assert collective_seconds(link("h20"), "all_gather", GIB, 8, 8) == pytest.approx(
        collective_seconds(link("h100"), "all_gather", GIB, 8, 8), rel=0.03
    )


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_a_list_takes_as_long_as_its_plain_twin(op: str) -> None:
    assert collective_seconds(link(), f"{op}_list", GIB, 8, 8) == collective_seconds(link(), op, GIB, 8, 8)


def test_a_broadcast_sends_the_whole_tensor_at_the_bandwidth_of_an_all_gather() -> None:
    gather, broadcast = (collective_seconds(link(), op, GIB, 4, 8) for op in ("all_gather", "broadcast"))
    assert broadcast == pytest.approx(gather * 4 / 3, rel=0.01)


# --- between nodes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "factor"), [("all_reduce", 2 * 31 / 32), ("all_gather", 31 / 32), ("broadcast", 1)])
def test_a_ring_between_nodes_is_bound_by_the_nics_of_a_node(op: str, factor: float) -> None:
    expected = factor * GIB / (50e9 * 2 * 0.9) + 10e-6 * log2(16 + 1)
    assert collective_seconds(link(), op, GIB, ranks=32, ranks_per_node=2) == pytest.approx(expected)


def test_what_leaves_the_node_in_an_all_to_all_goes_through_the_ranks_own_nic() -> None:
    expected = GIB * (32 - 8) / 32 / (50e9 * 0.8) + 10e-6 * log2(4 + 1)
    assert collective_seconds(link(), "all_to_all", GIB, ranks=32, ranks_per_node=8) == pytest.approx(expected)


def test_fast_nics_leave_a_ring_bound_by_nvlink() -> None:
    fast = link(nic_bytes_per_s=1e15, latency_s=0.0)
    assert collective_seconds(fast, "all_gather", GIB, 16, 8) == collective_seconds(fast, "all_gather", GIB, 16, 16)


def test_fast_nics_leave_an_all_to_all_bound_by_its_part_inside_the_node() -> None:
    fast = link(nic_bytes_per_s=1e15, latency_s=0.0)
    inside = collective_seconds(fast, "all_to_all", GIB / 2, 8, 8)
    assert collective_seconds(fast, "all_to_all", GIB, 16, 8) == pytest.approx(inside)


def test_a_message_between_two_ranks() -> None:
    assert point_to_point_seconds(link(), 1e9, between_nodes=True) == pytest.approx(1e9 / (50e9 * 0.9) + 10e-6)
    assert point_to_point_seconds(link(), 1e9, between_nodes=False) == pytest.approx(1e9 / (450e9 * 0.7) + 10e-6)


# --- what is refused, and what takes no time --------------------------------------------------------


def test_nothing_to_move_takes_no_time() -> None:
    assert collective_seconds(link(), "all_reduce", 0, 8, 8) == 0
    assert collective_seconds(link(), "all_reduce", GIB, 1, 8) == 0
    assert collective_seconds(link(), "all_reduce", GIB, 0, 8) == 0
    assert point_to_point_seconds(link(), 0, between_nodes=True) == 0


def test_an_unknown_operation_or_family_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'gossip'"):
        collective_seconds(link(), "gossip", GIB, 8, 8)
    with pytest.raises(ValueError, match="'volta'"):
        collective_seconds(link(curves="volta"), "all_reduce", GIB, 8, 8)


@pytest.mark.parametrize("name", [name for name in gpu_names() if getattr(find_gpu(name), "nvlink_gb_per_s", None)])
def test_every_gpu_with_nvlink_has_times(name: str) -> None:
    for op in OPS:
        assert 0 < collective_seconds(link(name), op, GIB, 8, 8) < 1


# --- properties -------------------------------------------------------------------------------------

GPUS = st.sampled_from(sorted({*MEASURED, "h20", "h800", "a800", "h100_pcie"}))
LINKS = st.builds(
    lambda gpu, nic, nvlink: link(gpu, nic_bytes_per_s=nic, nvlink_bytes_per_s=nvlink),
    gpu=GPUS,
    nic=st.floats(1e9, 1e13),
    nvlink=st.floats(1e9, 1e13),
)
BYTES = st.one_of(st.integers(1, 10**12), st.floats(1, 1e12), st.sampled_from([float(size) for size in SIZES]))
PLACES = st.integers(2, 4096).flatmap(lambda ranks: st.tuples(st.just(ranks), st.integers(1, ranks)))
ROUNDING = 1 + 1e-9  # of floating point


@given(link=LINKS, op=st.sampled_from(OPS), size=BYTES, place=PLACES)
def test_times_are_positive_and_finite(link: Link, op: str, size: float, place: tuple[int, int]) -> None:
    seconds = collective_seconds(link, op, size, *place)
    assert isfinite(seconds) and seconds > 0


@given(link=LINKS, op=st.sampled_from(OPS), sizes=st.tuples(BYTES, BYTES), place=PLACES)
def test_more_bytes_never_take_less_time(
    link: Link, op: str, sizes: tuple[float, float], place: tuple[int, int]
) -> None:
    fewer, more = (collective_seconds(link, op, size, *place) for size in sorted(sizes))
    assert fewer <= more * ROUNDING


@given(link=LINKS, op=st.sampled_from(OPS), size=BYTES, place=PLACES, times=st.floats(1, 100))
def test_more_bandwidth_never_takes_more_time(
    link: Link, op: str, size: float, place: tuple[int, int], times: float
) -> None:
    seconds = collective_seconds(link, op, size, *place)
    faster_nvlink = replace(link, nvlink_bytes_per_s=link.nvlink_bytes_per_s * times)
    faster_nic = replace(link, nic_bytes_per_s=link.nic_bytes_per_s * times)
    assert collective_seconds(faster_nvlink, op, size, *place) <= seconds * ROUNDING
    assert collective_seconds(faster_nic, op, size, *place) <= seconds * ROUNDING


@given(link=LINKS, op=st.sampled_from(RINGS), size=BYTES, place=PLACES, more=st.integers(0, 4096))
def test_more_ranks_in_a_node_never_slow_a_ring(
    link: Link, op: str, size: float, place: tuple[int, int], more: int
) -> None:
    ranks, per_node = place
    fuller = collective_seconds(link, op, size, ranks, min(ranks, per_node + more))
    assert fuller <= collective_seconds(link, op, size, ranks, per_node) * ROUNDING


# --- the script that writes the curves --------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "build_collective_curves", ROOT / "scripts" / "build_collective_curves.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def points() -> dict[tuple[str, str, int], dict[int, float]]:
    return {
        (gpu, op, int(ranks)): {9 + index: log2(time * 1e-6) for index, time in enumerate(latencies)}
        for gpu, operations in MICROSECONDS.items()
        for op, groups in operations.items()
        for ranks, latencies in groups.items()
    }


def test_the_curves_that_ship_are_those_of_the_measured_points(script: ModuleType, points: Any) -> None:
    made = script.fit(points)
    shipped = load_json("collectives.json")
    assert made.keys() == shipped.keys()
    for family, entry in shipped["families"].items():
        for op, groups in entry["bus_gb_per_s"].items():
            for ranks, curve in groups.items():
                assert made["families"][family]["bus_gb_per_s"][op][ranks] == pytest.approx(curve, rel=1e-3)
    for gpu, operations in shipped["factors"].items():
        for op, groups in operations.items():
            for ranks, factors in groups.items():
                assert made["factors"][gpu][op][ranks] == pytest.approx(factors, rel=1e-3)


def test_a_point_left_out_is_predicted_within_three_percent_from_one_mebibyte(script: ModuleType, points: Any) -> None:
    large = {key: {size: time for size, time in values.items() if size >= 20} for key, values in points.items()}
    found = [abs(error.relative) for error in script.leaving_one_out(points, large)]
    assert len(found) == 684
    assert fmean(found) < 0.03


def test_a_gpu_left_out_is_predicted_within_three_percent_by_its_siblings(script: ModuleType, points: Any) -> None:
    found = [error for error in script.leaving_gpus_out(points) if error.log2_bytes >= 20]
    for gpu in MEASURED:
        if gpu != "a100":  # the only one of its family
            assert fmean(abs(error.relative) for error in found if error.gpu == gpu) < 0.03


def test_two_gpus_that_differ_by_a_factor_share_one_curve(script: ModuleType) -> None:
    curve = {size: -17.0 + max(0, size - 16) for size in range(9, 30)}
    slower = {size: time + log2(1.1) for size, time in curve.items()}
    table = script.fit({("h100", "all_gather", 8): curve, ("h200", "all_gather", 8): slower})
    assert table["factors"]["h100"]["all_gather"]["8"] == pytest.approx([1.1**0.5] * 6, rel=1e-3)
    for gpu, expected in (("h100", curve), ("h200", slower)):
        assert script.predicted(table, (gpu, "all_gather", 8)) == pytest.approx(expected, rel=1e-3)


def test_a_dip_of_the_measurement_is_levelled(script: ModuleType) -> None:
    curve = {size: -17.0 + max(0, size - 16) for size in range(9, 30)} | {20: -15.0}
    made = script.predicted(script.fit({("a100", "all_gather", 8): curve}), ("a100", "all_gather", 8))
    assert sorted(made.values()) == list(made.values())
