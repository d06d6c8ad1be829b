"""A userbuffers configuration as Bridge's dataclasses hold it.

Source: megatron-bridge training/comm_overlap.py, the same in every version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from overlapkit.errors import printable
from overlapkit.render.python_source import Call
from overlapkit.userbuffers import DEFAULT_METHODS, Userbuffers

COMM_OVERLAP = "megatron.bridge.training.comm_overlap"
MAX_NAMED = 12
# Method -> Bridge's class, and the value of each option that a layer leaves out: the class's default, where it has
# none Transformer Engine's own (pytorch/module/base.py initialize_ub).
_PIPELINE_ALSO = {"num_splits": 4, "fp8_buf": False, "atomic_gemm": False}
_RING_ALSO = {"aggregate": False, "fp8_buf": False, "atomic_gemm": False}
LAYER_CLASSES: dict[Any, tuple[str, dict[str, Any]]] = {
    "bulk": ("BulkOverlapCfg", {"num_sm": 16, "cga_size": 2, "set_sm_margin": True}),
    "pipeline": ("PipelineOverlapCfg", {"num_sm": 16, "cga_size": 2, "set_sm_margin": True, **_PIPELINE_ALSO}),
    "ring_exchange": ("RingExchangeOverlapCfg", {"num_sm": 1, "cga_size": 1, "set_sm_margin": False, **_RING_ALSO}),
}


def complete_layers(userbuffers: Userbuffers | str | None) -> tuple[Userbuffers | None, list[str]]:
    """The configuration with every option of Bridge's classes, and what these cannot hold."""
    if userbuffers is None:
        return None, []
    if isinstance(userbuffers, str):
        return None, [userbuffers]
    foreign = []
    complete = {}
    for layer, options in userbuffers.items():
        method = options.get("method", DEFAULT_METHODS.get(layer))
        if layer not in DEFAULT_METHODS or method not in LAYER_CLASSES:
            foreign.append(layer)
            continue
        defaults = LAYER_CLASSES[method][1]
        foreign += [f"{layer}.{name}" for name in options if name != "method" and name not in defaults]
        complete[layer] = {"method": method, **defaults, **options}
    return complete, foreign


def what_was_completed(userbuffers: Userbuffers) -> list[str]:
    complete, _ = complete_layers(userbuffers)
    partial = [layer for layer, options in userbuffers.items() if complete and len(complete[layer]) > len(options)]
    if not partial:
        return []
    return [f"Bridge's classes have every option, so {listed(partial)} got Transformer Engine's defaults for the rest"]


def layer_class(options: Mapping[str, Any]) -> str:
    """The name of Bridge's class for a layer of ``BridgeValues.userbuffers``."""
    return LAYER_CLASSES[options["method"]][0]


def preset_tree(userbuffers: Userbuffers | None) -> dict[str, Any] | None:
    """All ten layers, as the class has no defaults; Bridge drops those that are null."""
    if userbuffers is None:
        return None
    tree: dict[str, Any] = {"_target_": f"{COMM_OVERLAP}.TransformerLayerTPOverlapCfg"}
    for layer in DEFAULT_METHODS:
        options = userbuffers.get(layer)
        tree[layer] = None
        if options is not None:
            tree[layer] = {"_target_": f"{COMM_OVERLAP}.{layer_class(options)}", **options}
    return tree


def preset_call(userbuffers: Userbuffers) -> Call:
    """The same as Python: of a configuration with every option, the call that builds it."""
    layers: dict[str, Call | None] = {}
    for layer in DEFAULT_METHODS:
        options = userbuffers.get(layer)
        layers[layer] = None
        if options is not None:
            given = {name: value for name, value in options.items() if name != "method"}
            layers[layer] = Call(layer_class(options), given)
    return Call("TransformerLayerTPOverlapCfg", layers)


def classes_of(userbuffers: Userbuffers) -> set[str]:
    """The classes of `preset_call`."""
    return {"TransformerLayerTPOverlapCfg", *map(layer_class, userbuffers.values())}


def listed(names: Iterable[str]) -> str:
    ordered = list(names)
    more = f" and {len(ordered) - MAX_NAMED} more" if len(ordered) > MAX_NAMED else ""
    return ", ".join(printable(name) for name in ordered[:MAX_NAMED]) + more
