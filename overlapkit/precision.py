"""Which precision the recipe trains in, from its mixed-precision section or the model's own fields."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from overlapkit.data import load_yaml
from overlapkit.recipe.sections import MixedPrecision, Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """``compute`` is bf16, fp16 or fp32; ``fp8_recipe`` and ``fp4`` say what the GEMMs do beyond it.

    ``bf16_layers_at_start`` and ``bf16_layers_at_end`` count with ``first_last_layers_bf16`` alone;
    ``reuses_gradient_buffer`` is what the mixed-precision section says of MXFP8 parameters, false without one.
    ``scaled_loss``: gradients may overflow by the loss's scale, FP16's own or a constant one.
    ``assumed`` is true when the recipe names no precision at all and BF16 is taken.
    """

    compute: str
    fp8: str | None
    fp8_recipe: str | None
    fp4: str | None
    first_last_layers_bf16: bool
    bf16_layers_at_start: int
    bf16_layers_at_end: int
    grad_reduce_in_fp32: bool
    fp8_param_gather: bool
    reuses_gradient_buffer: bool
    scaled_loss: bool
    assumed: bool

    @property
    def bf16_layers_at_ends(self) -> bool:
        return self.first_last_layers_bf16 and self.bf16_layers_at_start + self.bf16_layers_at_end > 0

    @property
    def preset_class(self) -> str:
        """The precision that userbuffers presets are made for: ``fp8`` stands for every quantized GEMM."""
        return "fp8" if self.fp8 or self.fp4 else "bf16"

    @property
    def label(self) -> str:
        if self.fp4:
            return "nvfp4"
        return f"fp8 ({self.fp8_recipe})" if self.fp8 else self.compute

    @property
    def param_bytes(self) -> int:
        """Bytes of a parameter in the model's own copy."""
        return 4 if self.compute == "fp32" else 2

    @property
    def grad_bytes(self) -> int:
        """Bytes of a gradient in DDP's buffer, which is what the reduction sends."""
        return 4 if self.grad_reduce_in_fp32 else self.param_bytes


def named_precisions() -> tuple[str, ...]:
    """Bridge's names, with underscores."""
    return tuple(load_yaml("mixed_precision.yaml"))


# MixedPrecisionConfig's own defaults (megatron-bridge training/mixed_precision.py).
_DEFAULTS: dict[str, Any] = {
    "bf16": False,
    "fp16": False,
    "fp8": None,
    "fp8_recipe": "tensorwise",
    "fp4": None,
    "grad_reduce_in_fp32": True,
    "first_last_layers_bf16": False,
    "num_layers_at_start_in_bf16": 0,
    "num_layers_at_end_in_bf16": 0,
    "fp8_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
}


def derive_precision(recipe: Recipe, *, megatron_lm: bool) -> Precision:
    """The precision after Bridge's ``mixed_precision.setup``, or as Megatron-LM's parser leaves it.

    Source: megatron-bridge training/mixed_precision.py; Megatron-LM arguments.py, which reduces BF16
    gradients in FP32 unless told otherwise.
    """
    section = recipe.mixed_precision
    if section is not None:
        fields = _section_fields(section)
        if megatron_lm and recipe.ddp.grad_reduce_in_fp32 is not None and section.grad_reduce_in_fp32 is None:
            fields["grad_reduce_in_fp32"] = recipe.ddp.grad_reduce_in_fp32
        scale = section.loss_scale or (recipe.optimizer.loss_scale if megatron_lm else None)
        return _precision(fields, scale, assumed=False)
    model = recipe.model
    fields = {name: value for name in _DEFAULTS if (value := getattr(model, name, None)) is not None}
    fields.setdefault("fp8_recipe", "delayed")
    for end in ("start", "end"):  # the model's own default; Bridge's sections say 0
        fields.setdefault(f"num_layers_at_{end}_in_bf16", 1)
    fields["fp8_param_gather"] = bool(model.fp8_param or (megatron_lm and recipe.ddp.fp8_param_gather))
    assumed = not recipe.is_dump and model.bf16 is None and model.fp16 is None
    if assumed:
        fields["bf16"] = True
    grad = recipe.ddp.grad_reduce_in_fp32
    fields["grad_reduce_in_fp32"] = grad if grad is not None else megatron_lm and bool(fields.get("bf16"))
    return _precision({**_DEFAULTS, **fields}, recipe.optimizer.loss_scale, assumed=assumed)


def _section_fields(section: MixedPrecision) -> dict[str, Any]:
    named = _named(section.name) if section.name else _DEFAULTS
    own = {name: value for name in _DEFAULTS if (value := getattr(section, name)) is not None}
    if section.fp8_param is not None:
        own.setdefault("fp8_param_gather", section.fp8_param)
    return {**named, **own}


@lru_cache(maxsize=32)
def _named(name: str) -> dict[str, Any]:
    entry = load_yaml("mixed_precision.yaml")[name]
    return {key: entry[key] for key in _DEFAULTS}


def _precision(fields: dict[str, Any], loss_scale: float | None, *, assumed: bool) -> Precision:
    return Precision(
        compute="bf16" if fields["bf16"] else "fp16" if fields["fp16"] else "fp32",
        fp8=fields["fp8"],
        fp8_recipe=fields["fp8_recipe"] if fields["fp8"] else None,
        fp4=fields["fp4"],
        first_last_layers_bf16=fields["first_last_layers_bf16"],
        bf16_layers_at_start=fields["num_layers_at_start_in_bf16"],
        bf16_layers_at_end=fields["num_layers_at_end_in_bf16"],
        grad_reduce_in_fp32=fields["grad_reduce_in_fp32"],
        fp8_param_gather=fields["fp8_param_gather"],
        reuses_gradient_buffer=fields["reuse_grad_buf_for_mxfp8_param_ag"],
        # A constant scale holds in any precision (megatron-core optimizer/__init__.py).
        scaled_loss=bool(loss_scale) or bool(fields["fp16"] and not fields["bf16"]),
        assumed=assumed,
    )
