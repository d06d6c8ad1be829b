"""The userbuffers configuration as dataclasses with the names, order and defaults of Megatron-Bridge's.

Presets are locked: they are shared by every recipe of the process, so whoever is given one holds a copy.
Source: megatron-bridge training/comm_overlap.py, the same in every version.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from overlapkit.errors import RecipeError, nearest, shown

_LOCK = "_locked"
_FIELD = "comm_overlap.tp_comm_overlap_cfg"


class Lockable:
    """Objects that a preset can be made of: locked they do not change, and every copy of them is unlocked."""

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse_when_locked(name)
        object.__setattr__(self, name, copy.deepcopy(value) if is_locked(value) else value)

    def __delattr__(self, name: str) -> None:
        self._refuse_when_locked(name)
        object.__delattr__(self, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != _LOCK}

    def _refuse_when_locked(self, name: str) -> None:
        if is_locked(self):
            raise AttributeError(
                f"cannot set {name}: this belongs to a preset; change what copy.deepcopy(preset) returns"
            )


def is_locked(value: Any) -> bool:
    return isinstance(value, Lockable) and _LOCK in value.__dict__


@dataclass
class TPOverlapCfg(Lockable):
    """How one layer's GEMM overlaps its collective."""


@dataclass
class PipelineOverlapCfg(TPOverlapCfg):
    """The collective in ``num_splits`` pieces between those of the GEMM. SMs and CTAs count per kernel."""

    num_sm: int
    cga_size: int
    num_splits: int
    set_sm_margin: bool
    # Bridge writes the default (False,), a tuple, which Transformer Engine tests for truth: initialize_ub of its
    # pytorch/module/base.py. So this is what Bridge's class does; rule UB028 says where it matters.
    fp8_buf: bool = True
    atomic_gemm: bool = False
    method: str = "pipeline"


@dataclass
class RingExchangeOverlapCfg(TPOverlapCfg):
    """The collective as sends and receives around the ring, one piece of the GEMM each."""

    aggregate: bool = False
    method: str = "ring_exchange"
    num_sm: int = 1
    cga_size: int = 1
    set_sm_margin: bool = False
    fp8_buf: bool = False
    atomic_gemm: bool = False


@dataclass
class BulkOverlapCfg(TPOverlapCfg):
    """The whole collective beside a GEMM that does not depend on it."""

    num_sm: int
    cga_size: int
    set_sm_margin: bool
    method: str = "bulk"


@dataclass
class TransformerLayerTPOverlapCfg(Lockable):
    """The layers of a transformer block, forward, input gradient and weight gradient; None gets no entry."""

    qkv_dgrad: TPOverlapCfg | None
    qkv_wgrad: TPOverlapCfg | None
    fc1_dgrad: TPOverlapCfg | None
    fc1_wgrad: TPOverlapCfg | None
    qkv_fprop: TPOverlapCfg | None
    proj_dgrad: TPOverlapCfg | None
    fc1_fprop: TPOverlapCfg | None
    fc2_dgrad: TPOverlapCfg | None
    proj_fprop: TPOverlapCfg | None
    fc2_fprop: TPOverlapCfg | None


_CLASSES: dict[str, type[TPOverlapCfg]] = {
    "bulk": BulkOverlapCfg,
    "pipeline": PipelineOverlapCfg,
    "ring_exchange": RingExchangeOverlapCfg,
}


@lru_cache(maxsize=128)
def preset(name: str) -> TransformerLayerTPOverlapCfg:
    """A preset of ``presets/userbuffers``, locked.

    Raises:
        RecipeError: there is none of that name.
    """
    from overlapkit.presets import load_preset

    found = layers_of(load_preset(name).userbuffers)
    for owner in (*vars(found).values(), found):
        if owner is not None:
            object.__setattr__(owner, _LOCK, True)
    return found


def layers_of(userbuffers: Mapping[str, Mapping[str, Any]]) -> TransformerLayerTPOverlapCfg:
    """Transformer Engine's mapping as dataclasses; an option that it leaves out has Transformer Engine's default.

    Raises:
        RecipeError: a layer or an option that the classes do not have.
    """
    from overlapkit.render.bridge_userbuffers import complete_layers, listed
    from overlapkit.userbuffers import DEFAULT_METHODS

    complete, foreign = complete_layers(userbuffers)
    if complete is None or foreign:
        raise RecipeError(f"Bridge's classes for userbuffers cannot hold {listed(foreign)}", path=_FIELD)
    layers = {layer: complete.get(layer) for layer in DEFAULT_METHODS}
    made = {layer: options and _CLASSES[options["method"]](**options) for layer, options in layers.items()}
    return TransformerLayerTPOverlapCfg(**made)  # type: ignore[arg-type]


def userbuffers_of(value: Any) -> dict[str, dict[str, Any]] | None:
    """What Transformer Engine gets: of dataclasses (ours or Bridge's), a mapping, a preset's name or a YAML file.

    Raises:
        RecipeError: none of these, a name that is no preset, or a file that holds no configuration.
    """
    from overlapkit.recipe.userbuffers import clean_userbuffers, named_layers

    if value is None:
        return None
    if isinstance(value, (str, Path)):
        value = _named_or_file(str(value))
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if not isinstance(value, Mapping):
        hint = "give a TransformerLayerTPOverlapCfg, a preset's name, a YAML file or a mapping of layers"
        raise _error(_FIELD, f"{shown(value)} is no userbuffers configuration", hint)
    layers = {layer: dict(entry) if isinstance(entry, Mapping) else entry for layer, entry in value.items()}
    return named_layers(clean_userbuffers(layers, _FIELD, _error))


def _named_or_file(text: str) -> Any:
    from overlapkit.presets import load_preset, preset_names
    from overlapkit.presets.of_recipe import read_userbuffers
    from overlapkit.recipe.place import YAML_ENDINGS

    if text in preset_names():
        return load_preset(text).userbuffers
    if "/" in text or text.endswith(YAML_ENDINGS):
        return read_userbuffers(Path(text))
    if text == "auto":
        hint = "CommOverlapConfig.decide and from_recipe know it, and choose a preset"
        raise _error(_FIELD, "auto needs the GPU and the model's sizes", hint)
    near = nearest(text, preset_names())
    hint = f"did you mean {near}?" if near else "`overlapkit presets list` names them; a file ends in .yaml"
    raise _error(_FIELD, f"{shown(text)} is neither a preset nor a file", hint)


def _error(path: str, problem: str, hint: str | None = None) -> RecipeError:
    return RecipeError(problem, path=path, hint=hint)
