"""Rows of a volume -> seconds by axis, and whether a microbatch's forward or backward pass has them, or the step."""

from __future__ import annotations

from dataclasses import dataclass

from overlapkit.cost.collectives import collective_seconds, point_to_point_seconds
from overlapkit.cost.dispatch import dispatch_seconds
from overlapkit.cost.hardware import Hardware
from overlapkit.volume.model import Model
from overlapkit.volume.placement import RankLayout, ranks_per_node
from overlapkit.volume.rows import Row

_BACKWARD = ("backward", "recompute")  # phases of the backward pass
DATA_AXES = ("dp", "expert_dp")  # whose forward and backward calls are of the step, not of each microbatch


@dataclass(slots=True)
class Axis:
    """Seconds of one step on one axis: calls of all forward passes, of all backward passes, and the others.

    ``ring_forward`` and ``ring_backward`` are the parts that are sends, which CP has beside attention;
    ``gathers`` the all-gathers among the data-parallel calls, the rest of which reduces gradients; ``sends`` the
    messages between pipeline stages.
    """

    message_bytes: int = 0
    forward: float = 0.0
    backward: float = 0.0
    step: float = 0.0
    ring_forward: float = 0.0
    ring_backward: float = 0.0
    gathers: float = 0.0
    sends: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.step


def axes_of(
    hardware: Hardware,
    model: Model,
    layout: RankLayout,
    rows: tuple[Row, ...],
    gather_width: float,
    known: dict[tuple[str, str, bool, float], float],
    *,
    split_messages: bool,
) -> dict[str, Axis]:
    """The seconds of one stage's rows by axis.

    ``split_messages`` as in `Kernels`. ``gather_width``: bytes of DP's all-gathers over those counted. ``known`` has
    the seconds of calls that another stage makes too, and takes those that are new.
    """
    found: dict[str, Axis] = {}
    for row in rows:
        name, op, group, observable = row.axis, row.op, row.group, row.observable
        axis = found.get(name)
        if axis is None:
            axis = found[name] = Axis()
        axis.message_bytes += row.message_bytes
        if op == "recv":
            continue  # the other side's send
        width = 1.0
        if op == "all_gather" and row.dtype == model.dtype:
            width = hardware.gather_width if name == "tp" else gather_width if name in DATA_AXES else 1.0
        for share in row.phases:
            count = share.count
            each = share.message_bytes * width / count
            key = (group, op, observable, each)
            seconds = known.get(key)
            if seconds is None:
                per_node, split = ranks_per_node(layout, group), split_messages and name == "pp"
                seconds = known[key] = _call_seconds(hardware, model, row, each, per_node, split=split)
            _add(axis, name, op, share.phase, count * seconds)
    return found


def _call_seconds(
    hardware: Hardware, model: Model, row: Row, message_bytes: float, per_node: int, *, split: bool
) -> float:
    if row.op == "send":
        # A ring through several nodes waits in each of its steps for the slowest hop.
        between_nodes, tp = per_node < row.size, model.mesh.tp
        if not split or model.sequence_parallel:
            return point_to_point_seconds(hardware.link, message_bytes, between_nodes=between_nodes)
        part = point_to_point_seconds(hardware.link, message_bytes / tp, between_nodes=between_nodes)
        return part + collective_seconds(hardware.link, "all_gather", message_bytes, tp, tp)
    if row.axis == "ep" and not row.observable and model.experts is not None:
        return dispatch_seconds(hardware.link, message_bytes, model.experts.topk, row.size, per_node)
    return collective_seconds(hardware.link, row.op, message_bytes, row.size, per_node)


def _add(axis: Axis, name: str, op: str, phase: str, seconds: float) -> None:
    if name in DATA_AXES:
        axis.step += seconds
        axis.gathers += seconds if op == "all_gather" else 0.0
    elif phase == "forward":
        axis.forward += seconds
        axis.ring_forward += seconds if op == "send" else 0.0
    elif phase in _BACKWARD:
        axis.backward += seconds
        axis.ring_backward += seconds if op == "send" else 0.0
    else:
        axis.step += seconds
        axis.sends += seconds if op == "send" else 0.0
