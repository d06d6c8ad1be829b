"""Bandwidths as nccl-tests gives them: of the algorithm, bytes over time; of the bus, what each link carried.

Source: nccl-tests doc/PERFORMANCE.md. In gigabytes (10^9 bytes) per second.
"""

from __future__ import annotations

from overlapkit.volume.rows import wire_numerator


def algorithm_bandwidth(message_bytes: int, time_us: float | None) -> float | None:
    """Message bytes over the time that they took; None where the time is unknown or nothing moved."""
    if not time_us or not message_bytes:
        return None
    return message_bytes / time_us / 1e3


def bus_bandwidth(op: str, size: int, message_bytes: int, time_us: float | None) -> float | None:
    """The same times the share of the message that each of ``size`` ranks sends; a recv carries what the send sent.

    None where the size is unknown, which is 0.
    """
    algorithm = algorithm_bandwidth(message_bytes, time_us)
    if algorithm is None or not size:
        return None
    return algorithm * wire_numerator("send" if op == "recv" else op, size, message_bytes) / (size * message_bytes)
