"""Megatron-Bridge's own objects."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from overlapkit.comm_overlap.userbuffers import layers_of, userbuffers_of
from overlapkit.errors import MissingPackageError, printable
from overlapkit.render.bridge_userbuffers import COMM_OVERLAP, layer_class

if TYPE_CHECKING:
    from overlapkit.comm_overlap import CommOverlapConfig


def comm_overlap_config(config: CommOverlapConfig) -> Any:
    """``config`` as Bridge's class; see ``CommOverlapConfig.to_bridge``."""
    module = comm_overlap_module()
    values = {spec.name: getattr(config, spec.name) for spec in fields(config)}
    userbuffers = userbuffers_of(config.tp_comm_overlap_cfg)
    if userbuffers is not None:
        layers = {layer: options and vars(options) for layer, options in vars(layers_of(userbuffers)).items()}
        made = {
            layer: options and getattr(module, layer_class(options))(**options) for layer, options in layers.items()
        }
        userbuffers = module.TransformerLayerTPOverlapCfg(**made)
    return module.CommOverlapConfig(**{**values, "tp_comm_overlap_cfg": userbuffers})


def comm_overlap_module() -> Any:
    """Bridge's module. Its package imports Transformer Engine and much else, which raise what they like.

    Raises:
        MissingPackageError: it, or what it needs, cannot be imported here.
    """
    from importlib import import_module

    try:
        return import_module(COMM_OVERLAP)
    except Exception as error:
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        why = f"{kind}{printable(str(error).strip(), limit=200)}"
        where = (
            "use a container that has it, such as nemo:26.04, or pip install megatron-bridge with transformer-engine"
        )
        raise MissingPackageError(f"megatron-bridge cannot be imported here ({why}): {where}") from None
