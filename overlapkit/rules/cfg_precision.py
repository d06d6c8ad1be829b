"""CFG: the precision that the recipe asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from overlapkit.facts import Facts
from overlapkit.recipe.sections import AUTO
from overlapkit.rules.dp_changes import reuse_off
from overlapkit.rules.registry import (
    BRIDGE,
    MEGATRON_CORE,
    MEGATRON_LM,
    TRANSFORMER_ENGINE,
    Finding,
    State,
    Verdict,
    error,
    info,
    passes,
    refusal,
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


def _home(f: Facts) -> str:
    return "mixed_precision" if f.recipe.mixed_precision else "model"


@rule(
    "CFG020",
    source="megatron-core transformer/transformer_config.py; megatron-bridge training/mixed_precision.py finalize; "
    "Megatron-LM training/arguments.py validate_args",
    core=">=0.15.0",
)
def two_quantizations(f: Facts, s: State) -> Finding:
    """FP4 and FP8 are both on.

    Why: a GEMM's inputs are quantized one way. Bridge says so of its ``mixed_precision`` section, Megatron-LM of its
    arguments, else Megatron-Core.
    Fix: set one to null.
    """
    if not (f.precision.fp4 and f.precision.fp8):
        return None
    subject, by = f"{_home(f)}.fp4", BRIDGE if f.recipe.mixed_precision else MEGATRON_CORE
    if f.megatron_lm:
        by = MEGATRON_LM
    return refusal(subject, "fp4 and fp8 are both set", f"set {subject}=null", f.precision.fp4, by)


@rule(
    "CFG021",
    source="megatron-bridge training/mixed_precision.py finalize; Megatron-LM training/arguments.py validate_args",
    core=">=0.15.0",
)
def fp4_needs_transformer_engine(f: Facts, s: State) -> Finding:
    """FP4 needs Transformer Engine 2.7.

    Why: that is where NVFP4 begins. Bridge looks at its ``mixed_precision`` section, Megatron-LM at its arguments.
    Fix: use a newer Transformer Engine, or train in BF16.
    """
    if not f.precision.fp4 or f.te_in(">=2.7.0.dev0") or (f.bridge and f.recipe.mixed_precision is None):
        return None
    version = f.versions.transformer_engine
    because = f"transformer-engine is {version or 'not installed'}, 2.7 is needed"
    off = "mixed_precision=bf16_mixed" if f.recipe.mixed_precision else "model.fp4=null"
    fix, by = f"use a newer one, or set {off}", MEGATRON_LM if f.megatron_lm else BRIDGE
    return refusal(f"{_home(f)}.fp4", because, fix, f.precision.fp4, by)


@rule("CFG022", source="megatron-core transformer/transformer_config.py")
def bf16_layers_at_the_ends(f: Facts, s: State) -> Finding:
    """First and last layers in BF16 under FP8.

    Delayed scaling has none, and there are no more of them at either end than ``num_layers`` divided by PP.

    Why: delayed scaling keeps one history for the whole model; and a stage's layers are what an end can have.
    Megatron-Core refuses both.
    Fix: set ``first_last_layers_bf16=false``, or fewer layers.
    """
    precision, layers = f.precision, f.recipe.model.num_layers
    if not precision.fp8 or not precision.first_last_layers_bf16:
        return None
    switch = f"{_home(f)}.first_last_layers_bf16"
    named = f.recipe.mixed_precision is not None and f.recipe.mixed_precision.name
    if precision.fp8_recipe == "delayed":
        return refusal(switch, "delayed scaling has no layers in BF16", f"set {switch}=false", True)
    if layers is None:
        return None
    most = layers // f.parallelism.pp
    counts = {"start": precision.bf16_layers_at_start, "end": precision.bf16_layers_at_end}
    too_many = {f"num_layers_at_{end}_in_bf16": count for end, count in counts.items() if count > most}
    if not too_many:
        return None
    because = f"{' and '.join(f'{name} is {count}' for name, count in too_many.items())}, a stage has {most} layers"
    fix = f"set {' and '.join(f'{_home(f)}.{name}={most}' for name in too_many)}"
    if named:
        fix = "write mixed_precision as a mapping with fewer of them, or lower model.pipeline_model_parallel_size"
    return refusal("mixed_precision" if named else f"{_home(f)}.{next(iter(too_many))}", because, fix, None)


@rule("CFG023", source="megatron-core transformer/transformer_config.py")
def fp8_parameters_without_fp8(f: Facts, s: State) -> Finding:
    """Parameters in FP8 without FP8.

    ``fp8_param_gather`` of the ``mixed_precision`` section is ``fp8_param`` on the model.

    Why: Megatron-Core refuses it. With PyTorch's FSDP2 Megatron-LM turns it off before.
    Fix: set ``fp8``, or the parameters to false.
    """
    if not f.precision.fp8_param_gather or f.precision.fp8 or (f.megatron_lm and f.torch_fsdp2 and f.te_in(">=2.0")):
        return None
    homes: dict[str, Any] = {"mixed_precision": f.recipe.mixed_precision}
    if f.recipe.mixed_precision is None:
        homes = {"model": f.recipe.model, "ddp": f.recipe.ddp if f.megatron_lm else None}
    names = ("fp8_param_gather", "fp8_param")
    said = [f"{home}.{name}" for home, part in homes.items() for name in names if getattr(part, name, None)]
    if not said:
        return None
    changes = [f"{name}=false" for name in said]
    if f.precision.reuses_gradient_buffer:  # DP021
        changes.append("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=false")
    changes += reuse_off(f) if f.megatron_lm else []
    return refusal(said[0], "fp8 is null", f"set {' and '.join(changes)}", True)
