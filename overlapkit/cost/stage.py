"""One pipeline stage's work: compute, host and communication of a microbatch, and what comes once per step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from overlapkit.cost.collectives import collective_seconds
from overlapkit.cost.communication import DATA_AXES, Axis, axes_of
from overlapkit.cost.constants import Constants
from overlapkit.cost.hardware import Hardware
from overlapkit.cost.host import Host, host_of
from overlapkit.cost.kernels import Kernels
from overlapkit.cost.layers import (
    Seconds,
    Sublayer,
    attention_sublayer,
    embedding,
    mlp_sublayer,
    moe_sublayer,
    output_layer,
    prediction_layer,
)
from overlapkit.cost.optimizer import held_parameters, optimizer_seconds
from overlapkit.cost.userbuffers import Hidden, hidden_of_pair
from overlapkit.volume.model import Model
from overlapkit.volume.parameters import Parameters
from overlapkit.volume.placement import TP, RankLayout, ranks_per_node
from overlapkit.volume.rows import Row
from overlapkit.volume.tp import layers_of, recomputed


class StageWork(NamedTuple):
    """Seconds of one stage. Of one microbatch: all but ``axes`` and what follows it, which are of the step.

    ``layers_*`` are the layers' compute, ``ends_*`` the embedding's and output layer's. ``forward`` and ``backward``
    are the layers with all their communication but EP's exposed, except rings beside attention (``ring_hides``);
    ``tp_hides`` is what userbuffers take off. ``expert`` is EP's communication. ``reduces``, ``gathers`` and ``sends``
    are data-parallel and pipeline communication of the step, ``others`` what else comes once.
    """

    layers_forward: Seconds
    layers_backward: Seconds
    ends_forward: Seconds
    ends_backward: Seconds
    host: Host
    forward: float
    backward: float
    tp_hides: Hidden
    ring_hides: Hidden
    expert: Hidden
    axes: Mapping[str, Axis]
    reduces: float
    gathers: float
    sends: float
    others: float
    optimizer: float


class Sublayers(NamedTuple):
    """One of each kind that the model has, and what userbuffers hide of its TP communication."""

    attention: tuple[Sublayer, Hidden]
    mlp: tuple[Sublayer, Hidden]
    moe: tuple[Sublayer, Hidden] | None


def sublayers_of(
    hardware: Hardware,
    constants: Constants,
    model: Model,
    kernels: Kernels,
    layout: RankLayout,
    configuration: Mapping[str, Mapping[str, Any]],
) -> Sublayers:
    """``configuration`` holds the userbuffers' options by layer."""

    def with_hidden(sublayer: Sublayer) -> tuple[Sublayer, Hidden]:
        return sublayer, _hidden(hardware, constants, model, layout, sublayer, configuration)

    moe = None
    if model.experts is not None:
        moe = with_hidden(moe_sublayer(hardware, constants, model, model.experts, kernels))
    return Sublayers(
        with_hidden(attention_sublayer(hardware, constants, model, kernels)),
        with_hidden(mlp_sublayer(hardware, constants, model, kernels)),
        moe,
    )


def stage_work(
    hardware: Hardware,
    constants: Constants,
    model: Model,
    kernels: Kernels,
    sublayers: Sublayers,
    found: Parameters,
    layout: RankLayout,
    stage: int,
    rows: tuple[Row, ...],
    *,
    gather_width: float,
    known: dict[tuple[str, str, bool, float], float],
) -> StageWork:
    """The work of ``stage``, whose volume is ``rows``; ``gather_width`` and ``known`` as in `axes_of`."""
    chunks = model.stages[stage]
    layers, again = layers_of(chunks), recomputed(model, chunks)
    predicted = model.mtp_layers if chunks[-1].output else 0
    counts = (
        (sublayers.attention, layers.total, again.total),
        (sublayers.mlp, layers.dense, again.dense),
        (sublayers.moe, layers.moe, again.moe),
    )
    forward, backward, hides = Seconds(), Seconds(), Hidden(0.0, 0.0)
    for kind, count, redone in counts:
        if kind is None or not count:
            continue
        sublayer, pair = kind
        forward = forward.plus(sublayer.forward, count)
        backward = backward.plus(sublayer.backward, count).plus(sublayer.forward, redone)
        backward = backward.plus(sublayer.again, count - redone)
        hides = Hidden(
            hides.forward + count * pair.forward, hides.backward + count * pair.backward + redone * pair.forward
        )
    ends_forward, ends_backward = _ends(hardware, model, stage, predicted)
    dense, expert = held_parameters(model, found, stage)
    axes = axes_of(hardware, model, layout, rows, gather_width, known, split_messages=kernels.split_messages)
    return StageWork(
        layers_forward=forward,
        layers_backward=backward,
        ends_forward=ends_forward,
        ends_backward=ends_backward,
        host=host_of(constants, model, kernels, layers=layers.total, moe_layers=layers.moe),
        optimizer=optimizer_seconds(hardware, constants, model, dense, expert),
        **_communication(model, axes, forward, backward, hides),
    )


def _communication(
    model: Model, axes: Mapping[str, Axis], forward: Seconds, backward: Seconds, hides: Hidden
) -> dict[str, Any]:
    """The fields of `StageWork` from ``forward`` to ``others``."""
    m = model.microbatches
    there, back = forward.total, backward.total
    tp_hides = rings = expert = Hidden(0.0, 0.0)
    reduces = gathers = sends = others = 0.0
    for name, axis in axes.items():
        if name in DATA_AXES:
            reduces += axis.step - axis.gathers
            gathers += axis.gathers
            continue
        sends += axis.sends
        others += axis.step - axis.sends
        each = Hidden(axis.forward / m, axis.backward / m)
        if name == "ep":
            expert = each
            continue
        if name == "tp":
            tp_hides = Hidden(min(hides.forward, each.forward), min(hides.backward, each.backward))
        elif name == "cp":
            rings = Hidden(
                min(axis.ring_forward / m, forward.attention), min(axis.ring_backward / m, backward.attention)
            )
        there += each.forward
        back += each.backward
    return {
        "forward": there - rings.forward,
        "backward": back - rings.backward,
        "tp_hides": tp_hides,
        "ring_hides": rings,
        "expert": expert,
        "axes": axes,
        "reduces": reduces,
        "gathers": gathers,
        "sends": sends,
        "others": others,
    }


def _ends(hardware: Hardware, model: Model, stage: int, predicted: int) -> tuple[Seconds, Seconds]:
    forward, backward = Seconds(), Seconds()
    chunks = model.stages[stage]
    if chunks[0].embedding:
        there, back = embedding(hardware, model)
        forward, backward = forward.plus(there), backward.plus(back)
    if chunks[-1].output:
        there, back = output_layer(hardware, model)
        forward, backward = forward.plus(there, 1 + predicted), backward.plus(back, 1 + predicted)
    if predicted:
        projection = prediction_layer(hardware, model)
        forward = forward.plus(Seconds(projection.forward), predicted)
        backward = backward.plus(Seconds(projection.backward), predicted)
    return forward, backward


# What userbuffers take where the plan has them off, for the question what they would save.
_USUAL = frozenset({"gather_input", "scatter_output", "gather_gradient", "regather_input", "scatter_gradient"})


def _hidden(
    hardware: Hardware,
    constants: Constants,
    model: Model,
    layout: RankLayout,
    sublayer: Sublayer,
    configuration: Mapping[str, Mapping[str, Any]],
) -> Hidden:
    tp = model.mesh.tp
    if tp == 1 or not model.sequence_parallel or len(sublayer.linears) < 2:
        return Hidden(0.0, 0.0)
    per_node, size = ranks_per_node(layout, TP), model.activation_bytes
    gather = collective_seconds(hardware.link, "all_gather", size * hardware.gather_width, tp, per_node)
    scatter = collective_seconds(hardware.link, "reduce_scatter", size, tp, per_node)
    calls = _USUAL
    if model.userbuffers:
        first = sublayer.linears[0].name
        column = model.fc1_userbuffers if first == "fc1" else model.qkv_userbuffers
        calls = (column - {"scatter_output", "gather_gradient"}) | (
            model.userbuffers & {"scatter_output", "gather_gradient"}
        )
    return hidden_of_pair(
        hardware, constants, sublayer.linears, gather, scatter, tp=tp, calls=calls, configuration=configuration
    )
