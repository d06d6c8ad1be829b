"""UB: what stands in the userbuffers configuration and this precision or version cannot do."""

from __future__ import annotations

from collections.abc import Mapping

from overlapkit.facts import Facts
from overlapkit.rules.registry import TRANSFORMER_ENGINE, Finding, State, rule, warning
from overlapkit.rules.tp import OVERLAP, obstacle
from overlapkit.rules.ub_preset import another_preset
from overlapkit.userbuffers import Userbuffers, fp8_reduce_scatters


def _configured(f: Facts, s: State) -> Userbuffers | None:
    """The layers that the configuration names, while they count: the overlap is on and there is a TP group."""
    if not s[OVERLAP] or f.parallelism.tp == 1 or not isinstance(f.userbuffers, Mapping):
        return None
    return f.userbuffers


@rule("UB027", source="transformer-engine pytorch/csrc/extensions/gemm.cpp", te=">=2.0")
def fp8_reduce_scatter_without_delayed_scaling(f: Facts, s: State) -> Finding:
    """``fp8_buf`` on a reduce-scatter, and FP8 with another scaling than delayed.

    Known from reading Transformer Engine; it was not run on a GPU.

    Why: only delayed scaling writes the GEMM's output in FP8. With current scaling or MXFP8 it is BF16, for which a
    buffer of one byte per element is too small: Transformer Engine stops with "Unsupported dtype".
    Fix: choose a configuration without ``fp8_buf`` on ``proj_fprop`` and ``fc2_fprop``.
    """
    layers = _fp8_reduce_scatters(f, s)
    if not layers or f.precision.fp8_recipe == "delayed":
        return None
    because = f"fp8_buf on {' and '.join(layers)}, and {f.precision.fp8_recipe} FP8 leaves the GEMM's output in BF16"
    return obstacle(f, because, fix=another_preset(f), by=TRANSFORMER_ENGINE, at="first_forward")


@rule("UB028", source="megatron-bridge training/comm_overlap.py PipelineOverlapCfg; presets/userbuffers")
def bf16_preset_reduces_in_fp8(f: Facts, s: State) -> Finding:
    """A BF16 preset under FP8, whose reduce-scatters would run in FP8.

    Bridge's ``fp8_buf`` has a default of ``(False,)``, which is true to Transformer Engine. Without FP8 it is not
    looked at.

    Why: the layers' outputs would be summed over the TP group in FP8, which nobody asked for.
    Fix: name an FP8 preset, or set ``fp8_buf: false`` on ``proj_fprop`` and ``fc2_fprop``.
    """
    layers = _fp8_reduce_scatters(f, s)
    if not layers or f.precision.fp8_recipe != "delayed" or "precision" not in f.preset.differs:
        return None
    because = f"{f.preset.name} is a BF16 preset, and its {' and '.join(layers)} would be reduced in FP8"
    return warning("preset", because, value=f.preset.name, fix=another_preset(f))


def _fp8_reduce_scatters(f: Facts, s: State) -> tuple[str, ...]:
    if f.precision.fp8 is None:
        return ()
    return fp8_reduce_scatters(_configured(f, s), rs_dgrad=bool(f.recipe.model.tp_comm_overlap_rs_dgrad))
