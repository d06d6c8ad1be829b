"""Time of moving tokens to their experts with DeepEP or HybridEP, which send no token twice to the same place."""

from __future__ import annotations

from math import ceil

from overlapkit.cost.collectives import Link, collective_seconds


def copies(places: int, topk: int) -> float:
    """How many of ``places`` a token goes to, when its ``topk`` experts are spread evenly at random over them."""
    return places * (1 - (1 - 1 / places) ** topk)


def dispatch_seconds(link: Link, payload_bytes: float, topk: int, ranks: int, ranks_per_node: int) -> float:
    """One dispatch or combine of ``payload_bytes``, a copy of each token per expert that it goes to.

    A token crosses the network once per other node that it goes to, and NVLink once per rank: both at the same time.
    Seconds. Source: DeepEP's internode dispatch, which sends to a node and forwards inside it.
    """
    if ranks <= 1 or payload_bytes <= 0:
        return 0.0
    each = payload_bytes / topk
    near = collective_seconds(link, "all_to_all", each * copies(ranks, topk), ranks_per_node, ranks_per_node)
    nodes = ceil(ranks / ranks_per_node)
    if nodes == 1:
        return near
    far = each * (nodes - 1) / nodes * copies(nodes, topk)
    return max(near, far / (link.nic_bytes_per_s * link.all_to_all_efficiency)) + link.latency_s
