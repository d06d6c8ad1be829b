"""What of TP's communication hides behind GEMMs, linear by linear, from the userbuffers configuration.

* ``bulk``: the collective runs beside a GEMM that does not need it, on SMs that the GEMM lacks.
* ``ring_exchange`` and ``pipeline``: GEMM and collective are cut into TP (or ``num_splits``) parts; the first part of
  one has nothing of the other beside it, and the GEMM in parts is slower.

A collective never costs more than without overlap. Shapes of the rules: Transformer Engine userbuffers; the share of
SMs is ``num_sm`` over the GPU's SMs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from overlapkit.cost.constants import Constants
from overlapkit.cost.gemm import Linear
from overlapkit.cost.hardware import Hardware
from overlapkit.userbuffers.layers import BULK, DEFAULT_METHODS


class Hidden(NamedTuple):
    """Seconds that hide, of one pair of linears and one microbatch."""

    forward: float
    backward: float


NOTHING = Hidden(0.0, 0.0)

# Call of a layer -> (linear: 0 column-parallel, 1 row-parallel; collective; pass; userbuffers layer).
_CALLS = (
    ("gather_input", 0, "gather", "forward", "fprop"),
    ("scatter_output", 1, "scatter", "forward", "fprop"),
    ("gather_gradient", 1, "gather", "dgrad", "dgrad"),
    ("regather_input", 0, "gather", "dgrad", "dgrad"),
    ("scatter_gradient", 0, "scatter", "wgrad", "wgrad"),
)


def hidden_of_pair(
    hardware: Hardware,
    constants: Constants,
    linears: tuple[Linear, ...],
    gather_s: float,
    scatter_s: float,
    *,
    tp: int,
    calls: Iterable[str],
    configuration: Mapping[str, Mapping[str, Any]],
) -> Hidden:
    """Of a column-parallel linear and the row-parallel one behind it; ``calls`` are those that userbuffers take.

    ``gather_s`` and ``scatter_s`` are seconds of one collective alone; ``configuration`` has options by layer.
    """
    if len(linears) < 2:
        return NOTHING
    taken = frozenset(calls)
    seconds = {"gather": gather_s, "scatter": scatter_s}
    forward = backward = 0.0
    for call, which, collective, passed, suffix in _CALLS:
        if call not in taken:
            continue
        each = linears[-1] if which else linears[0]
        layer = f"{each.name}_{suffix}"
        options = configuration.get(layer, {})
        method = options.get("method") or DEFAULT_METHODS.get(layer, BULK)
        gemm = getattr(each, passed)
        hides = seconds[collective] - _exposed(hardware, constants, method, options, seconds[collective], gemm, tp)
        if passed == "forward":
            forward += hides
        else:
            backward += hides
    return Hidden(forward, backward)


def _exposed(
    hardware: Hardware,
    constants: Constants,
    method: str,
    options: Mapping[str, Any],
    collective: float,
    gemm: float,
    tp: int,
) -> float:
    """Seconds that a GEMM and its collective take together beyond the GEMM alone."""
    sms = options.get("num_sm") or constants.userbuffers_sms
    lacking = min(float(sms) / hardware.sm_count, 0.5)
    if method == BULK:
        return min(collective, max(collective - gemm * (1 - lacking), 0.0) + gemm * lacking)
    parts = options.get("num_splits") or tp
    exposed = max(collective - gemm * (1 - lacking), 0.0) + collective / max(int(parts), 1)
    return min(collective, exposed + gemm * constants.userbuffers_slow_down)
