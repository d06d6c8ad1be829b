"""What two userbuffers configurations do differently, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlapkit.presets.configurations import Configuration
from overlapkit.presets.files import Preset, tuned_presets
from overlapkit.userbuffers.check import check_userbuffers

MADE_FOR = (
    *("gpu", "precision", "hidden_size", "tensor_model_parallel_size", "context_parallel_size"),
    *("micro_batch_size", "seq_length", "lora", "provenance"),
)
_ABSENT = "not set"
Pair = tuple[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """``layers``: layer -> option -> both values, for what is written differently; ``made_for`` likewise.

    ``same_buffers``: whether Transformer Engine builds the same of both all the same, for one left-out option may be
    its default. None where it refuses one of them.
    """

    layers: Mapping[str, Mapping[str, Pair]]
    made_for: Mapping[str, Pair]
    same_buffers: bool | None
    aliases: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def equal(self) -> bool:
        return not self.layers


def difference(one: Configuration, other: Configuration, *, transformer_engine: str) -> Difference:
    first, second = one.layers, other.layers
    layers = {}
    for layer in dict.fromkeys([*first, *second]):
        pairs = _pairs(first.get(layer), second.get(layer))
        if pairs:
            layers[layer] = pairs
    return Difference(
        layers=layers,
        made_for=_made_for(one.preset, other.preset),
        same_buffers=_same_buffers(one, other, transformer_engine),
        aliases=(aliases(one), aliases(other)),
    )


def aliases(configuration: Configuration) -> tuple[str, ...]:
    """The tuned presets of the same content, but the one that it is itself; of a derived preset none."""
    own = configuration.preset
    if own is not None and own.derived:
        return ()
    return tuple(
        preset.name for preset in tuned_presets() if preset != own and preset.userbuffers == configuration.layers
    )


def _pairs(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> dict[str, Pair]:
    if first is None or second is None:
        first_method = _ABSENT if first is None else first.get("method", _ABSENT)
        second_method = _ABSENT if second is None else second.get("method", _ABSENT)
        return {} if first is second else {"entry": (first_method, second_method)}
    names = dict.fromkeys([*first, *second])
    pairs = {name: (first.get(name, _ABSENT), second.get(name, _ABSENT)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _made_for(first: Preset | None, second: Preset | None) -> dict[str, Pair]:
    if first is None or second is None:
        return {}
    pairs = {name: (getattr(first, name), getattr(second, name)) for name in MADE_FOR}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _same_buffers(one: Configuration, other: Configuration, transformer_engine: str) -> bool | None:
    """At one TP size and in one precision, those of the first that has any."""
    tp = one.tensor_model_parallel_size or other.tensor_model_parallel_size or 8
    mode = "fp8" if "fp8" in (one.precision, other.precision) else "none"
    reports = [
        check_userbuffers(
            configuration.layers,
            transformer_engine=transformer_engine,
            tensor_model_parallel_size=tp,
            tokens=None,
            hidden_size=None,
            quantization_modes=(mode,),
        )
        for configuration in (one, other)
    ]
    if not all(report.buffers for report in reports):
        return None
    return reports[0].buffers == reports[1].buffers
