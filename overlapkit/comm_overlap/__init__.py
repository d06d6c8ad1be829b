"""Communication overlap for Python recipes: Megatron-Bridge's classes, decided by overlapkit.

A Bridge recipe works with its import line changed; it then needs neither Bridge nor torch::

    from overlapkit.comm_overlap import CommOverlapConfig, userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192

    comm_overlap = CommOverlapConfig(
        tp_comm_overlap=True, tp_comm_overlap_cfg=userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192
    )

``CommOverlapConfig.decide`` and ``CommOverlapConfig.from_recipe`` need not be told. Every preset of
``overlapkit presets list`` is an attribute of this module, loaded on first use. It cannot be changed: a
CommOverlapConfig that is given one holds a copy, and so does ``copy.deepcopy``.
"""

from __future__ import annotations

from overlapkit.comm_overlap.config import CommOverlapConfig as CommOverlapConfig
from overlapkit.comm_overlap.userbuffers import BulkOverlapCfg as BulkOverlapCfg
from overlapkit.comm_overlap.userbuffers import PipelineOverlapCfg as PipelineOverlapCfg
from overlapkit.comm_overlap.userbuffers import RingExchangeOverlapCfg as RingExchangeOverlapCfg
from overlapkit.comm_overlap.userbuffers import TPOverlapCfg as TPOverlapCfg
from overlapkit.comm_overlap.userbuffers import TransformerLayerTPOverlapCfg as TransformerLayerTPOverlapCfg
from overlapkit.errors import SetupError as SetupError


def __getattr__(name: str) -> TransformerLayerTPOverlapCfg:
    from overlapkit.comm_overlap.userbuffers import preset
    from overlapkit.errors import RecipeError

    if name == "__all__":  # which `import *` asks for: the presets too, as from Bridge's module
        from overlapkit.presets import preset_names

        classes = [each for each, value in globals().items() if isinstance(value, type)]
        return [*classes, *preset_names()]  # type: ignore[return-value]
    if name.startswith("userbuffers_"):
        try:
            return preset(name)
        except RecipeError as error:
            raise AttributeError(f"module {__name__!r}: {error}") from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    from overlapkit.presets import preset_names

    return sorted([*globals(), *preset_names()])
