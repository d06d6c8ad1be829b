"""CFG: the precision that the recipe asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from overlapkit.facts import Facts
from overlapkit.recipe.sections import AUTO
from overlapkit.rules.dp_changes import reuse_off
from overlapkit.rules.registry import (
    MEGATRON_CORE,
    MEGATRON_LM,
    TRANSFORMER_ENGINE,
    Finding,
    State,
    Verdict,
    error,
    info,
    passes,
    rule,
    warning,
)


@rule("CFG004", source="megatron-bridge training/mixed_precision.py; Megatron-LM training/arguments.py")
def precision_assumed(f: Facts, s: State) -> Finding:
    """The recipe names no precision; BF16 mixed precision is taken.

    Why: presets, bucket bytes and the conditions of expert-parallel overlap depend on the precision. A
    framework that is told nothing trains in FP32, which hardly anybody means.
    Fix: set ``mixed_precision``, for example ``bf16_mixed``.
    """
    if not f.precision.assumed:
        return None
    return info("mixed_precision", "no precision is named; bf16 is taken", fix="set mixed_precision=bf16_mixed")


@rule("CFG008", source="megatron-core transformer/transformer_config.py; Megatron-LM training/arguments.py")
def two_precisions(f: Facts, s: State) -> Finding:
    """BF16 and FP16 are both on.

    Why: Megatron-Core accepts one of them, as does Megatron-LM's parser.
    Fix: set one to false.
    """
    section = f.recipe.mixed_precision or f.recipe.model
    if not (section.bf16 and section.fp16):
        return None
    name = "mixed_precision" if f.recipe.mixed_precision else "model"
    return error(
        f"{name}.fp16",
        "bf16 and fp16 are both true",
        fix=f"set {name}.fp16=false",
        by=MEGATRON_LM if f.megatron_lm else MEGATRON_CORE,
        at="validation",
        requested=True,
        value=True,
    )


@rule("CFG014", source="megatron-bridge training/mixed_precision.py setup")
def model_precision_overwritten(f: Facts, s: State) -> Iterable[Verdict]:
    """Precision fields on the model beside a ``mixed_precision`` section.

    Why: Bridge copies every field of the section over the model's, so that an override such as
    ``model.fp8=hybrid`` is lost. For Megatron-LM the section counts here too.
    Fix: set the field under ``mixed_precision``, or give the model's the same value.
    """
    section, precision = f.recipe.mixed_precision, f.precision
    if section is None:
        return
    final = {
        "bf16": precision.compute == "bf16",
        "fp16": precision.compute == "fp16",
        "fp8": precision.fp8,
        "fp8_recipe": precision.fp8_recipe,
        "fp4": precision.fp4,
        "first_last_layers_bf16": precision.first_last_layers_bf16,
    }
    for name, value in final.items():
        subject, said = f"model.{name}", getattr(f.recipe.model, name)
        if not f.written(subject) or said == value or (name == "fp8_recipe" and value is None):
            continue
        yield warning(
            subject,
            "the mixed_precision section overwrites it",
            requested=said,
            value=value,
            fix=f"set {_same_twice(f, s, name, said, value)}",
        )


def _same_twice(f: Facts, s: State, name: str, said: Any, value: Any) -> str:
    """What lets the section and the model say the same. BF16 and FP16 exclude each other (CFG008): the section's."""
    said_text, text = ("null" if each is None else str(each) for each in (said, value))
    if name in ("bf16", "fp16"):
        return f"model.{name}={text.lower()}, or name the precision in mixed_precision"
    if isinstance(said, bool):
        said_text, text = said_text.lower(), text.lower()
    if name in ("fp8", "fp8_recipe", "fp4"):
        would = replace(f, precision=replace(f.precision, **{name: said}))
        named = () if f.asked.tp_comm_overlap_cfg == AUTO else ("UB027",)
        if not passes(would, s, "CFG015", "DP020", "UB025", "UB026", *named):
            return f"model.{name}={text}"
    return f"mixed_precision.{name}={said_text}, or model.{name}={text}"


@rule("CFG015", source="transformer-engine pytorch/quantization.py check_fp8_support, check_mxfp8_support", te=">=1.0")
def format_not_on_gpu(f: Facts, s: State) -> Finding:
    """A number format that the GPU does not have.

    FP8 came with Hopper, MXFP8 and NVFP4 with Blackwell.

    Why: Transformer Engine asserts the compute capability when the first forward pass enters its autocast.
    Fix: choose another ``mixed_precision``, for example ``bf16_mixed``, or leave the model's field null.
    """
    precision, gpu = f.precision, f.gpu
    if gpu is None or gpu.blackwell_or_newer:
        return None
    kind = "NVFP4" if precision.fp4 else "MXFP8" if precision.fp8_recipe == "mxfp8" else None
    if kind is None and precision.fp8 and gpu.generation == "ampere":
        kind = "FP8"
    if kind is None:
        return None
    field = "model.fp4" if precision.fp4 else "model.fp8"
    off = "mixed_precision=bf16_mixed" if f.recipe.mixed_precision else f"{field}=null"
    return error(
        "mixed_precision" if f.recipe.mixed_precision else field,
        f"{gpu.name} has no {kind}",
        fix=f"set {' and '.join([off, *reuse_off(f)])}",
        by=TRANSFORMER_ENGINE,
        at="first_forward",
        requested=f.precision.label,
        value=f.precision.label,
    )
