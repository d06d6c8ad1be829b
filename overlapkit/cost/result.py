"""What an estimate is: the time of one optimizer step and what it is made of.

All times are seconds of one step on a rank of one pipeline stage, the one that ends last, so that
``gemm + attention + memory_bound + host + bubble + optimizer + the groups' exposed = step``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTime:
    """One axis's communication of a step: hidden behind compute, or exposed, which adds up to total."""

    message_bytes: int
    total_s: float
    hidden_s: float
    exposed_s: float

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Where the rest of the step goes. ``host`` is what the GPU waits for kernel launches and host synchronisation."""

    gemm_s: float
    attention_s: float
    memory_bound_s: float
    host_s: float
    bubble_s: float
    optimizer_s: float

    def to_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What one overlap that is on saves: the step without it minus the step, and that over the step.

    ``low_share`` and ``high_share`` are its interval.
    """

    seconds: float
    share: float
    low_share: float
    high_share: float

    def to_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """One pipeline stage: seconds of one microbatch's forward and backward pass, all chunks together, waits included.

    ``forward_by`` and ``backward_by`` say what they are made of: gemm, attention, memory_bound, host, and for each axis
    its exposed communication (tp, cp, ep).
    """

    forward_s: float
    backward_s: float
    forward_by: Mapping[str, float]
    backward_by: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a picture of the step needs beyond the sums."""

    num_microbatches: int
    vp: int  # chunks per stage
    stages: tuple[StageTime, ...]
    slowest: int  # the stage whose times the estimate gives
    p2p_s: float  # one message between stages
    dp_exposed_s: float  # after the last backward pass
    optimizer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One step's time. ``interval_s`` holds 80 % of held-out cases of its kind; ``notes`` say why it is wider.

    ``model_tflops_per_gpu`` counts what the model needs (recomputation is not counted, causal attention is half);
    ``mfu`` is its share of the GPU's dense rate in the precision of its GEMMs, None where that is unknown.
    ``groups`` are the axes of the volume, ``saves`` the overlaps that are on, by their setting's last name.
    ``assumed`` names what was taken for granted; ``kind`` is the kind of case that the interval was measured on.
    """

    recipe: str
    gpu: str
    step_time_s: float
    interval_s: tuple[float, float]
    kind: str
    tokens_per_step: int
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float | None
    groups: Mapping[str, GroupTime]
    parts: Parts
    saves: Mapping[str, Saving]
    assumed: tuple[str, ...]
    notes: tuple[str, ...]
    timeline: Timeline

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain values, the form of ``--format json``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "recipe": self.recipe,
            "gpu": self.gpu,
            "step_time_s": self.step_time_s,
            "interval_s": list(self.interval_s),
            "kind": self.kind,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "model_tflops_per_gpu": self.model_tflops_per_gpu,
            "mfu": self.mfu,
            "groups": {axis: time.to_dict() for axis, time in self.groups.items()},
            "parts": self.parts.to_dict(),
            "saves": {name: saving.to_dict() for name, saving in self.saves.items()},
            "assumed": list(self.assumed),
            "notes": list(self.notes),
        }
