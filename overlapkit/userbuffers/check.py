"""A userbuffers configuration judged for one Transformer Engine: what it would build, refuse, pass over or fail at.

``initialize_ub`` itself is ``buffers``; here is what it lets through and what stops later, at kernels and C++ checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from overlapkit.errors import RecipeError, nearest, printable, shown
from overlapkit.recipe.userbuffers import clean_userbuffers
from overlapkit.userbuffers.buffers import FP8, NONE, Buffer, Refusal, buffers_of, nbytes
from overlapkit.userbuffers.layers import (
    BULK,
    COLUMN_PARALLEL_DGRAD,
    COLUMN_PARALLEL_WGRAD,
    DEFAULT_METHODS,
    EXTERNAL,
    EXTERNAL_METHODS,
    PIPELINE,
    RING,
    ROW_PARALLEL_FORWARD,
)
from overlapkit.userbuffers.releases import Release, release_of
from overlapkit.versions import parse_range, parse_version

MAX_SMS = 32  # NVTE_MAX_SMS, transformer-engine common/comm_gemm_overlap/userbuffers/userbuffers.h
_METHODS = (RING, PIPELINE, BULK, EXTERNAL)
_GATHERING = tuple(layer for layer, method in DEFAULT_METHODS.items() if method == RING)
_INIT = "transformer-engine pytorch/module/base.py initialize_ub"
_OVERLAP_CPP = "transformer-engine common/comm_gemm_overlap/comm_gemm_overlap.cpp"
_OVERLAP_H = "transformer-engine common/include/transformer_engine/comm_gemm_overlap.h"
_KERNELS = "transformer-engine common/comm_gemm_overlap/userbuffers/userbuffers.cu"
_FILL = "transformer-engine pytorch/module/base.py fill_userbuffers_buffer_for_all_gather"
_QUANTIZERS_GATHER = parse_range(">=2.4")  # before, the buffer took what it was given
Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing about a configuration, as a decision of a plan has it; ``layer`` is None for all of it.

    ``raised_at`` is None where nothing raises. ``exception`` and ``message`` are Transformer Engine's own where
    initialize_ub refuses; the message is None for a bare assert.
    """

    code: str
    severity: Severity
    layer: str | None
    because: str
    raised_at: str | None
    source: str
    exception: str | None = None
    message: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The keys of a plan's decision, and the exception."""
        raised_by = None if self.raised_at is None else "transformer-engine"
        subject = "tp_comm_overlap_cfg" if self.layer is None else f"tp_comm_overlap_cfg.{self.layer}"
        return {
            "code": self.code,
            "severity": self.severity,
            "subject": subject,
            "requested": None,
            "value": None,
            "because": self.because,
            "fix": None,
            "raised_by": raised_by,
            "raised_at": self.raised_at,
            "source": self.source,
            "exception": self.exception,
            "message": self.message,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """``buffers`` by layer, by ``layer@mode`` with two modes; empty where Transformer Engine refuses.

    ``bytes`` of all of them on one rank, without rounding; None where it refuses or the shape is not known.
    """

    problems: tuple[Problem, ...]
    buffers: Mapping[str, Buffer]
    bytes: int | None

    @property
    def ok(self) -> bool:
        return all(problem.severity != "error" for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        return {
            "decisions": [problem.to_dict() for problem in self.problems],
            "buffers": {name: dict(buffer) for name, buffer in self.buffers.items()},
            "bytes": self.bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFlags:
    """The model's fields that decide which buffers a layer uses, with Megatron-Core's defaults.

    ``weights_train``: the linears' weights have gradients, as they have not under LoRA.

    Source: megatron-core extensions/transformer_engine.py; transformer-engine pytorch/module/layernorm_linear.py.
    """

    tp_comm_overlap_ag: bool = True
    tp_comm_overlap_rs: bool = True
    tp_comm_overlap_rs_dgrad: bool = False
    tp_comm_bulk_dgrad: bool = True
    tp_comm_bulk_wgrad: bool = True
    weights_train: bool = True

    def uses(self, layer: str) -> bool:
        """Whether a GEMM overlaps with the layer's buffer, which is there in any case."""
        if layer in ROW_PARALLEL_FORWARD:
            return self.tp_comm_overlap_rs
        if layer in COLUMN_PARALLEL_DGRAD:
            return self.tp_comm_overlap_rs_dgrad or self.tp_comm_bulk_dgrad
        if layer in COLUMN_PARALLEL_WGRAD:
            return self.tp_comm_bulk_wgrad and not self.tp_comm_overlap_rs_dgrad
        return self.tp_comm_overlap_ag

    def reduces(self, layer: str) -> bool:
        """Whether the layer's GEMM is cut, so that its output is reduce-scattered piece by piece."""
        if layer in ROW_PARALLEL_FORWARD:
            return self.tp_comm_overlap_rs
        return layer in COLUMN_PARALLEL_DGRAD and self.tp_comm_overlap_rs_dgrad


def check_userbuffers(
    ub_cfgs: Any,
    *,
    transformer_engine: str,
    tensor_model_parallel_size: int,
    tokens: int | None,
    hidden_size: int | None,
    quantization_modes: Sequence[str] = (NONE,),
    flags: LayerFlags | None = None,
) -> Report:
    """What Transformer Engine builds of a configuration, and what is wrong with it.

    ``ub_cfgs`` is None, a mapping of layers to options, or a list with one of them per quantization mode. A buffer has
    ``tokens`` (seq_length · micro_batch_size / CP) rows of ``hidden_size`` elements; None where it is not known, and
    then what depends on it is not judged. ``quantization_modes`` are ``fp8`` and ``none``, both from 2.8 only.

    Raises:
        RecipeError: an argument that is none of these.
    """
    release = _release(transformer_engine)
    _check_arguments(ub_cfgs, tensor_model_parallel_size, tokens, hidden_size, quantization_modes, release)
    problems = list(_passed_over(ub_cfgs, release, quantization_modes))
    try:
        buffers = buffers_of(
            ub_cfgs,
            release,
            tensor_model_parallel_size=tensor_model_parallel_size,
            quantization_modes=quantization_modes,
        )
    except Refusal as refusal:
        problems.append(_refused(refusal))
        return Report(problems=tuple(problems), buffers={}, bytes=None)
    shape = _Shape(tensor_model_parallel_size, tokens, hidden_size)
    flags = flags or LayerFlags()
    quantizers_gather = parse_version(transformer_engine) in _QUANTIZERS_GATHER
    problems += _rows(shape)
    for name, buffer in buffers.items():
        layer, _, mode = name.partition("@")
        problems += _of_buffer(layer, buffer, release, shape, flags)
        if quantizers_gather and (mode or quantization_modes[0]) == FP8:
            problems += _gathers_fp8(layer, buffer, flags)
    size = None
    if tokens is not None and hidden_size is not None:
        tp = tensor_model_parallel_size
        size = sum(
            nbytes(each, tokens=tokens, hidden_size=hidden_size, tensor_model_parallel_size=tp)
            for each in buffers.values()
        )
    return Report(problems=tuple(dict.fromkeys(problems)), buffers=buffers, bytes=size)


@dataclass(frozen=True, slots=True)
class _Shape:
    tp: int
    tokens: int | None
    hidden: int | None


# --- arguments -----------------------------------------------------------------------------------


def _release(text: Any) -> Release:
    try:
        return release_of(parse_version(text))
    except (ValueError, AttributeError):
        hint = 'write it as text, such as "2.10"'
        raise RecipeError(f"{shown(text)} is not a version", path="transformer_engine", hint=hint) from None


def _check_arguments(
    ub_cfgs: Any, tp: Any, tokens: Any, hidden_size: Any, modes: Sequence[str], release: Release
) -> None:
    sizes = {"tensor_model_parallel_size": tp, "tokens": tokens, "hidden_size": hidden_size}
    for name, size in sizes.items():
        whole = isinstance(size, int) and not isinstance(size, bool) and 1 <= size < 2**63
        if not whole and not (size is None and name != "tensor_model_parallel_size"):
            raise RecipeError(f"expected a whole number of at least 1, got {shown(size)}", path=name)
    if isinstance(modes, str) or list(modes) not in ([NONE], [FP8], [FP8, NONE], [NONE, FP8]):
        given = modes if isinstance(modes, str) else ",".join(map(str, modes))
        raise RecipeError(f"expected fp8, none or both, got {shown(given)}", path="quantization_modes")
    if len(modes) > 1 and not release.quantization_modes:
        problem = f"two modes are known from Transformer Engine 2.8, and this is {release.since}"
        raise RecipeError(problem, path="quantization_modes")
    for config in ub_cfgs if isinstance(ub_cfgs, (list, tuple)) else [ub_cfgs]:
        if isinstance(config, str):
            hint = "load_preset(NAME).userbuffers is what a name stands for"
            raise RecipeError(f"expected a mapping of layers, got {shown(config)}", path="ub_cfgs", hint=hint)
        clean_userbuffers(config, "ub_cfgs", lambda path, problem, hint: RecipeError(problem, path=path, hint=hint))


# --- what initialize_ub does ----------------------------------------------------------------------


def _refused(refusal: Refusal) -> Problem:
    return Problem(
        code=refusal.code,
        severity="error",
        layer=refusal.layer,
        because=str(refusal),
        raised_at="initialize_ub",
        source=_INIT,
        exception=refusal.exception,
        message=refusal.message,
    )


def _passed_over(ub_cfgs: Any, release: Release, modes: Sequence[str]) -> Iterator[Problem]:
    """What initialize_ub does not look at: layers that it does not know, and before 2.8 a list."""
    configs = ub_cfgs if isinstance(ub_cfgs, (list, tuple)) else [ub_cfgs]
    if isinstance(ub_cfgs, (list, tuple)) and not release.quantization_modes:
        because = "a list of configurations is passed over before Transformer Engine 2.8: its defaults hold"
        yield Problem(code="UB036", severity="warning", layer=None, because=because, raised_at=None, source=_INIT)
        return
    for config in configs:
        for layer in config or {}:
            if layer in release.methods:
                continue
            near = nearest(layer, release.methods)
            meant = f" (did you mean {near}?)" if near else ""
            because = f"{printable(layer)} is no layer of this Transformer Engine{meant}: the entry is passed over"
            yield Problem(code="UB005", severity="warning", layer=layer, because=because, raised_at=None, source=_INIT)
        yield from _atomic_without_use(config or {}, modes, release)


def _atomic_without_use(config: Mapping[str, Any], modes: Sequence[str], release: Release) -> Iterator[Problem]:
    for layer, default in release.methods.items():
        entry = config.get(layer) or {}
        method = entry.get("method", default)
        if entry.get("atomic_gemm") and method in (BULK, EXTERNAL) and list(modes) == [FP8]:
            because = f"{layer} is {method}, which has no atomic GEMM: atomic_gemm is taken for false"
            yield Problem(code="UB015", severity="warning", layer=layer, because=because, raised_at=None, source=_INIT)


# --- what kernels and C++ checks do ----------------------------------------------------------------


def _of_buffer(layer: str, buffer: Buffer, release: Release, shape: _Shape, flags: LayerFlags) -> Iterator[Problem]:
    """What is wrong with a buffer that is used; an external one is, for FP8 GEMMs with MXFP8 scaling alone."""
    method = buffer["method"]
    if not flags.uses(layer) or (layer in EXTERNAL_METHODS and buffer["dtype"] != "u8"):
        return
    yield from _unsupported(layer, buffer, flags)
    yield from _sms(layer, buffer)
    if method not in (RING, EXTERNAL) and shape.tp > 1 and shape.tp not in release.kernels:
        sizes = ", ".join(map(str, release.kernels))
        because = f"bulk and pipelined layers have kernels for TP {sizes} only: results would be wrong in silence"
        yield Problem(code="UB019", severity="error", layer=None, because=because, raised_at=None, source=_KERNELS)
    yield from _columns(layer, buffer, shape, flags)
    yield from _too_large(layer, buffer, shape)


def _unsupported(layer: str, buffer: Buffer, flags: LayerFlags) -> Iterator[Problem]:
    """Methods that the object behind a layer does not have: "Operation not supported." when it is first used."""
    method = buffer["method"]
    backward = "first_backward" if layer.endswith(("dgrad", "wgrad")) else "first_forward"
    if method not in _METHODS:
        what = f"{layer}: {shown(method)} is no method ({', '.join(_METHODS[:3])})"
        if layer in _GATHERING:
            yield _fails("UB011", layer, f"{what}, and only a ring exchange gathers here", backward, _OVERLAP_H)
        else:
            because = f"{what}: Transformer Engine takes a collective, and does not say so"
            yield Problem(code="UB011", severity="warning", layer=layer, because=because, raised_at=None, source=_INIT)
    elif layer in _GATHERING and method != RING:
        yield _fails("UB016", layer, f"{layer} is {method}, and can only be a ring exchange", backward, _OVERLAP_H)
    elif layer in COLUMN_PARALLEL_DGRAD and method == RING and not flags.tp_comm_overlap_rs_dgrad:
        because = f"{layer} is a ring exchange, which needs model.tp_comm_overlap_rs_dgrad=true"
        yield _fails("UB017", layer, because, "first_backward", _OVERLAP_H)
    elif layer in COLUMN_PARALLEL_WGRAD and method == RING:
        yield _fails("UB018", layer, f"{layer} is a ring exchange, and can only be bulk", "first_backward", _OVERLAP_H)


def _gathers_fp8(layer: str, buffer: Buffer, flags: LayerFlags) -> Iterator[Problem]:
    """A pipelined dgrad that does not reduce gathers the layer's input for the weight gradient, which is FP8."""
    bulk_gather = layer in COLUMN_PARALLEL_DGRAD and buffer["method"] == PIPELINE and flags.weights_train
    if bulk_gather and flags.uses(layer) and not flags.tp_comm_overlap_rs_dgrad and buffer["dtype"] != "u8":
        because = f"{layer} is pipelined without fp8_buf, so that its buffer is BF16, and gathers FP8 input in bulk"
        yield _fails("UB017", layer, because, "first_backward", _FILL)


def _fails(code: str, layer: str, because: str, at: str, source: str) -> Problem:
    return Problem(code=code, severity="error", layer=layer, because=because, raised_at=at, source=source)


def _sms(layer: str, buffer: Buffer) -> Iterator[Problem]:
    num_sm, cga_size = buffer["num_sm"], buffer["cga_size"]
    if not 1 <= num_sm <= MAX_SMS:
        because = f"{layer}: num_sm {num_sm} is not within 1 to {MAX_SMS}: the collective never ends (UB_TIMEOUT)"
        yield Problem(code="UB020", severity="error", layer=layer, because=because, raised_at=None, source=_KERNELS)
    elif cga_size > 1 and num_sm % cga_size and buffer["method"] in (BULK, PIPELINE):
        because = f"{layer}: num_sm {num_sm} is not a multiple of cga_size {cga_size}: the SMs do not work in clusters"
        yield Problem(code="UB021", severity="info", layer=layer, because=because, raised_at=None, source=_KERNELS)


def _rows(shape: _Shape) -> Iterator[Problem]:
    """Every buffer is cut into TP chunks of whole tokens."""
    if shape.tokens is not None and shape.tokens % shape.tp:
        because = f"{shape.tokens} tokens do not split into TP {shape.tp} chunks"
        at, source = "first_forward", _OVERLAP_CPP
        yield Problem(code="UB023", severity="error", layer=None, because=because, raised_at=at, source=source)


def _columns(layer: str, buffer: Buffer, shape: _Shape, flags: LayerFlags) -> Iterator[Problem]:
    """A reduce-scatter that is no ring cuts the hidden size into num_splits, of 16 bytes at a time."""
    if buffer["method"] == RING or not flags.reduces(layer) or shape.hidden is None:
        return
    splits, elements = buffer["num_splits"], 16 if buffer["dtype"] == "u8" else 8
    if splits < 1:
        because = f"{layer}: num_splits {splits} is not at least 1: nothing is computed"
    elif shape.hidden % (splits * elements):
        because = (
            f"{layer}: hidden_size {shape.hidden} is not a multiple of {splits * elements} ({splits} splits of "
            f"{elements} elements): the last columns are not computed"
        )
    else:
        return
    yield Problem(code="UB022", severity="error", layer=layer, because=because, raised_at=None, source=_OVERLAP_CPP)


def _too_large(layer: str, buffer: Buffer, shape: _Shape) -> Iterator[Problem]:
    """Sizes that the C++ code holds in 32 bits: elements of a collective in pairs of bytes, bytes of a ring's chunk."""
    if shape.tokens is None or shape.hidden is None:
        return
    size = shape.tokens * shape.hidden * (1 if buffer["dtype"] == "u8" else 2)
    counted, what = {
        RING: (size // shape.tp, "bytes of a ring's chunk"),
        EXTERNAL: (size, "bytes"),
    }.get(buffer["method"], (size // 2, "pairs of bytes"))
    if counted >= 2**31:
        because = f"{layer}: {counted:,} {what} do not fit the 32 bits of Transformer Engine: it reads past the buffer"
        yield Problem(code="UB031", severity="error", layer=layer, because=because, raised_at=None, source=_OVERLAP_CPP)
