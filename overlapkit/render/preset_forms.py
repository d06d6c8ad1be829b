"""A preset in the form that each framework reads."""

from __future__ import annotations

import json
from typing import Any

from overlapkit.presets import Preset
from overlapkit.presets.derived_file import flow
from overlapkit.render.bridge_userbuffers import (
    COMM_OVERLAP,
    classes_of,
    complete_layers,
    preset_call,
    preset_tree,
    what_was_completed,
)
from overlapkit.render.data import to_yaml
from overlapkit.render.python_source import assignment, import_from


def to_te(preset: Preset) -> str:
    """The dict for ``ub_cfgs`` of initialize_ub, which both Python and JSON read.

    Flags are 0 and 1: Transformer Engine tests them for truth, and neither language has the other's words for it.
    """
    layers = [
        f"  {json.dumps(layer)}: {json.dumps({name: _number(value) for name, value in options.items()})}"
        for layer, options in preset.userbuffers.items()
    ]
    return "{\n" + ",\n".join(layers) + "\n}\n"


def to_megatron_lm(preset: Preset) -> str:
    """The file of ``--tp-comm-overlap-cfg``: a line per layer, and where it comes from."""
    lines = [f"# {line}" for line in _origin(preset)]
    return "\n".join([*lines, *(f"{layer}: {flow(options)}" for layer, options in preset.userbuffers.items())]) + "\n"


def to_bridge(preset: Preset) -> tuple[str, tuple[str, ...]]:
    """The section that Bridge merges over a recipe and builds its classes of, and what was completed for these."""
    complete, _ = complete_layers(preset.userbuffers)
    section = {
        "_target_": f"{COMM_OVERLAP}.CommOverlapConfig",
        "tp_comm_overlap": True,
        "tp_comm_overlap_cfg": preset_tree(complete),
    }
    origin = "".join(f"# {line}\n" for line in _origin(preset))
    return origin + to_yaml({"comm_overlap": section}), tuple(what_was_completed(preset.userbuffers))


def to_python(preset: Preset) -> tuple[str, tuple[str, ...]]:
    """The same as source for a Python recipe of Bridge's: imports and one name."""
    complete, _ = complete_layers(preset.userbuffers)
    layers = complete or {}
    origin = "".join(f"# {line}\n" for line in _origin(preset))
    source = assignment(preset.name, preset_call(layers))
    text = f"{import_from(COMM_OVERLAP, classes_of(layers))}\n{origin}{source}"
    return text, tuple(what_was_completed(preset.userbuffers))


def _origin(preset: Preset) -> list[str]:
    derived = ": computed, neither tuned nor measured" if preset.derived else ""
    return [f"{preset.name} ({preset.provenance}{derived})", preset.source]


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value
