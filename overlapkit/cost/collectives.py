"""Time of one collective: measured curves inside an NVLink domain, latency and bandwidth between nodes.

The curves are bus bandwidths of NCCL by GPU family, operation and group size (``data/collectives.json``, written by
``scripts/build_collective_curves.py``), with a factor for each GPU that was measured itself. A GPU that was not has its
family's curve with the part above latency stretched by the ratio of NVLink bandwidths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import exp, log, log2
from typing import Any, NamedTuple

from overlapkit.data import load_json

# Operations of a volume, and whose curve each has. A list is one NCCL group; nobody measured broadcasts.
_MEASURED_AS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_list": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_list": "reduce_scatter",
    "all_to_all": "all_to_all",
    "broadcast": "all_gather",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How the GPUs of a job reach each other. Bandwidths are bytes/s in one direction, efficiencies shares of them."""

    curves: str  # a family of data/collectives.json: ampere, hopper or blackwell
    gpu: str  # by the name of data/gpus.yaml
    nvlink_bytes_per_s: float  # per GPU
    nic_bytes_per_s: float  # per GPU
    ring_efficiency: float  # of the NICs, of rings between nodes
    all_to_all_efficiency: float  # of the NICs
    point_to_point_efficiency: float  # of NVLink
    latency_s: float  # between nodes


def collective_seconds(link: Link, op: str, message_bytes: float, ranks: int, ranks_per_node: int) -> float:
    """Seconds of one collective of ``ranks``, ``ranks_per_node`` of which share an NVLink domain.

    ``message_bytes`` is a volume row's for one call: the tensor of an all_reduce or broadcast, the gathered output, the
    full input of a reduce_scatter, the local input of an all_to_all.

    Between nodes, a ring crosses each boundary once, over the NICs of all members in the node; the data of an
    all_to_all that leaves the node goes through the rank's own NIC. Either takes no less than its part over NVLink (a
    ring's bytes pass every NVLink hop too), plus a latency per doubling of the nodes: the alpha-beta model.

    Raises:
        ValueError: no times are known of the operation or of the link's curves.
    """
    if op not in _MEASURED_AS:
        raise ValueError(f"no times are known of the operation {op!r}")
    if ranks <= 1 or message_bytes <= 0:
        return 0.0
    if ranks_per_node >= ranks:
        return _seconds_at(_curve(link.curves, link.gpu, link.nvlink_bytes_per_s, op, ranks), message_bytes)
    if op == "all_to_all":
        near = message_bytes * ranks_per_node / ranks
        inside = 0.0
        if ranks_per_node > 1:
            inside = _seconds_at(_curve(link.curves, link.gpu, link.nvlink_bytes_per_s, op, ranks_per_node), near)
        between = (message_bytes - near) / (link.nic_bytes_per_s * link.all_to_all_efficiency)
    else:
        curve = _curve(link.curves, link.gpu, link.nvlink_bytes_per_s, op, ranks)
        inside = _seconds_at(curve, message_bytes)
        between = message_bytes * curve.wire / (link.nic_bytes_per_s * ranks_per_node * link.ring_efficiency)
    latency = link.latency_s * log2(ranks / ranks_per_node + 1)
    return (inside if inside > between else between) + latency


def point_to_point_seconds(link: Link, message_bytes: float, *, between_nodes: bool) -> float:
    """Seconds of sending a tensor of ``message_bytes`` to one other rank, over its NIC or over NVLink."""
    if message_bytes <= 0:
        return 0.0
    if between_nodes:
        return message_bytes / (link.nic_bytes_per_s * link.ring_efficiency) + link.latency_s
    return message_bytes / (link.nvlink_bytes_per_s * link.point_to_point_efficiency) + link.latency_s


def log_seconds(
    table: Mapping[str, Any], curves: str, gpu: str, nvlink_bytes_per_s: float, op: str, ranks: int
) -> tuple[float, ...]:
    """An operation's curve among ``ranks`` GPUs of one NVLink domain: natural logarithms of seconds, by message size.

    ``table`` is what ``data/collectives.json`` holds; its ``log2_bytes`` are the sizes. The curve never falls: where a
    larger message was measured to be faster, it takes the smaller one's time.

    Raises:
        ValueError: the table has no such family.
    """
    if curves not in table["families"]:
        raise ValueError(f"no curves of the GPU family {curves!r}")
    family, measured = table["families"][curves], _MEASURED_AS[op]
    bandwidths = _bus_bandwidths(table, family, gpu, measured, ranks)
    wire = _wire_factor(measured, ranks) / 1e9
    seconds = [wire * 2.0**size / bandwidth for size, bandwidth in zip(table["log2_bytes"], bandwidths, strict=True)]
    stretch = family["nvlink_bytes_per_s"] / nvlink_bytes_per_s * _wire_factor(op, ranks) / (wire * 1e9)
    latency = seconds[0]
    return tuple(log(time) for time in accumulate((latency + max(0.0, t - latency) * stretch for t in seconds), max))


def _bus_bandwidths(
    table: Mapping[str, Any], family: Mapping[str, Any], gpu: str, op: str, ranks: int
) -> tuple[float, ...]:
    """GB/s at each size. A group between two measured ones lies between them; a larger one is like the largest."""
    curves = family["bus_gb_per_s"][op]
    sizes = sorted(map(int, curves))
    smaller = max((size for size in sizes if size <= ranks), default=sizes[0])
    larger = min((size for size in sizes if size >= ranks), default=sizes[-1])
    low = _of_gpu(table, curves, gpu, op, smaller)
    if smaller == larger:
        return low
    high = _of_gpu(table, curves, gpu, op, larger)
    share = log2(ranks / smaller) / log2(larger / smaller)
    return tuple(a ** (1 - share) * b**share for a, b in zip(low, high, strict=True))


def _of_gpu(
    table: Mapping[str, Any], curves: Mapping[str, list[float]], gpu: str, op: str, ranks: int
) -> tuple[float, ...]:
    """The family's curve times the GPU's factors, if it has any: of its own largest group where it lacks this one."""
    curve = curves[str(ranks)]
    factors = table["factors"].get(gpu, {}).get(op)
    if factors is None:
        return tuple(curve)
    own = factors.get(str(ranks)) or factors[max(factors, key=int)]
    return tuple(
        bandwidth * linear(table["factor_log2_bytes"], own, size)
        for bandwidth, size in zip(curve, table["log2_bytes"], strict=True)
    )


def linear(places: Sequence[int], values: Sequence[float], place: int) -> float:
    """The value at ``place``: on straight lines between ``places``, level beyond them."""
    if place <= places[0]:
        return values[0]
    for index in range(1, len(places)):
        if place <= places[index]:
            share = (place - places[index - 1]) / (places[index] - places[index - 1])
            return values[index - 1] + share * (values[index] - values[index - 1])
    return values[-1]


def _wire_factor(op: str, ranks: int) -> float:
    """Bytes that each rank sends per message byte; source: the busBW factors of nccl-tests."""
    if op == "broadcast":
        return 1.0
    return (2.0 if op == "all_reduce" else 1.0) * (ranks - 1) / ranks


class _Curve(NamedTuple):
    first: int  # log2 bytes
    last: int
    logarithms: tuple[float, ...]  # of seconds, at every power of two from the first to the last
    wire: float


@lru_cache(maxsize=1024)
def _curve(curves: str, gpu: str, nvlink_bytes_per_s: float, op: str, ranks: int) -> _Curve:
    table = load_json("collectives.json")
    logarithms = log_seconds(table, curves, gpu, nvlink_bytes_per_s, op, ranks)
    sizes = table["log2_bytes"]
    return _Curve(first=sizes[0], last=sizes[-1], logarithms=logarithms, wire=_wire_factor(op, ranks))


def _seconds_at(curve: _Curve, message_bytes: float) -> float:
    """Between the sizes of the curve a straight line in the logarithms; beyond the last at its bandwidth."""
    first, last, logarithms, _ = curve
    size = log2(message_bytes)
    if size <= first:
        return exp(logarithms[0])
    if size >= last:
        return exp(logarithms[-1]) * message_bytes / 2.0**last
    index = int(size)
    low = logarithms[index - first]
    return exp(low + (logarithms[index - first + 1] - low) * (size - index))
