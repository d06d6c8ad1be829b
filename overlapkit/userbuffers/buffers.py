"""The buffers that ``initialize_ub`` of Transformer Engine builds of a configuration, or its refusal.

What its Python part decides, release by release; kernels and C++ checks come later (``overlapkit.userbuffers.check``).
Source: transformer-engine pytorch/module/base.py initialize_ub.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from overlapkit.errors import nearest, printable, shown
from overlapkit.userbuffers.layers import (
    ATOMIC_PAIRS,
    BULK,
    COLUMN_PARALLEL_DGRAD,
    EXTERNAL,
    EXTERNAL_METHODS,
    PIPELINE,
    REDUCE_SCATTERS,
    RING,
)
from overlapkit.userbuffers.releases import Release

FP8, NONE = "fp8", "none"
Buffer = dict[str, Any]
_FLAGS = (
    *("is_reduce_scatter", "set_sm_margin", "fp8_buf", "aggregate", "atomic_gemm", "use_ce"),
    "pipeline_rs_overlap_first_gemm",
)


class Refusal(Exception):
    """What Transformer Engine raises: the class of its exception and its text, None for a bare assert.

    ``code`` is the rule's, ``layer`` the one that it stops at, None for the configuration as a whole.
    """

    def __init__(self, code: str, exception: str, message: str | None, layer: str | None, because: str) -> None:
        super().__init__(because)
        self.code = code
        self.exception = exception
        self.message = message
        self.layer = layer
        self.because = because


@dataclass(slots=True)
class _Lists:
    """What initialize_ub keeps while it goes through layers and modes: a second mode begins where the first ended."""

    methods: dict[str, list[str]]
    reduces: list[str]
    atomic: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, release: Release) -> _Lists:
        methods: dict[str, list[str]] = {
            RING: [],
            PIPELINE: [],
            BULK: [],
            **({EXTERNAL: []} if release.external else {}),
        }
        for layer, method in release.methods.items():
            methods[method].append(layer)
        return cls(methods, list(REDUCE_SCATTERS))

    def default_method(self, layer: str) -> str:
        return next(method for method, layers in self.methods.items() if layer in layers)


def buffers_of(
    ub_cfgs: Any, release: Release, *, tensor_model_parallel_size: int, quantization_modes: Sequence[str]
) -> dict[str, Buffer]:
    """Buffer by layer, by ``layer@mode`` where there are two modes. Its options are ``add_ub``'s, with ``dtype``.

    ``ub_cfgs`` is None, a mapping for every mode, or one entry per mode; before 2.8 a list is passed over.

    Raises:
        Refusal: initialize_ub raises.
    """
    found: dict[str, Buffer] = {}
    lists = _Lists.of(release)
    for mode, given in zip(quantization_modes, _per_mode(ub_cfgs, release, quantization_modes), strict=True):
        config = given if isinstance(given, Mapping) else {}
        for dgrad in COLUMN_PARALLEL_DGRAD:
            if dgrad in config:
                _move_reduce_scatter(dgrad, config, lists, release)
        for layer in [layer for layers in lists.methods.values() for layer in layers]:
            name = layer if len(quantization_modes) == 1 else f"{layer}@{mode}"
            found[name] = _buffer(layer, config, lists, release, tensor_model_parallel_size, mode)
    return found


def nbytes(buffer: Buffer, *, tokens: int, hidden_size: int, tensor_model_parallel_size: int) -> int:
    """Bytes of a buffer on one rank, before they are rounded up to the memory's granularity.

    A ring's reduce-scatter keeps every chunk that it receives: (2 · TP - 1) / TP of the tensor.
    Source: transformer-engine common/comm_gemm_overlap/comm_gemm_overlap.cpp CommOverlapP2PBase.
    """
    size = tokens * hidden_size * (1 if buffer["dtype"] == "u8" else 2)
    if buffer["method"] != RING or not buffer["is_reduce_scatter"]:
        return size
    tp = tensor_model_parallel_size
    return size * (2 * tp - 1) // tp


def _per_mode(ub_cfgs: Any, release: Release, modes: Sequence[str]) -> Sequence[Any]:
    if ub_cfgs is None or isinstance(ub_cfgs, Mapping) or not release.quantization_modes:
        return [ub_cfgs] * len(modes)
    given: Sequence[Any] = ub_cfgs
    if len(given) != len(modes):
        message = "Number of ub_cfgs settings must match number of quantization configurations"
        if not release.asserts:
            message = (
                f"Number of ub_cfgs settings ({len(given)}) must match number of quantization configurations "
                f"({len(modes)})"
            )
        because = f"{len(given)} configurations for {len(modes)} quantization modes"
        raise Refusal("UB036", release.refuses_by, message, None, because)
    return given


def _move_reduce_scatter(dgrad: str, config: Mapping[str, Any], lists: _Lists, release: Release) -> None:
    """A dgrad layer that is not bulk reduces itself, and its weight gradient has nothing left to reduce."""
    entry = config[dgrad]
    if entry is None:
        raise _null(dgrad, "TypeError", "argument of type 'NoneType' is not iterable")
    method = entry.get("method", BULK)
    if method == BULK:
        return
    wgrad = dgrad.replace("dgrad", "wgrad")
    if wgrad in config:
        message = (
            f"Cannot specify user UB config for '{wgrad}' when its corresponding dgrad '{dgrad}' uses a non-bulk "
            f"overlap method ('{method}')"
        )
        because = f"{dgrad} is {printable(str(method))}, so that {wgrad} has nothing to reduce, and may have no entry"
        raise Refusal("UB008", release.refuses_by, None if release.asserts else message, dgrad, because)
    if wgrad not in lists.reduces:
        because = f"{dgrad} is {printable(str(method))}, not bulk, with two quantization modes"
        raise Refusal("UB009", "ValueError", "list.remove(x): x not in list", dgrad, because)
    lists.reduces.remove(wgrad)
    lists.reduces.append(dgrad)
    lists.methods[BULK].remove(dgrad)
    if not isinstance(method, str) or method not in lists.methods:
        known = ", ".join(lists.methods)
        raise Refusal("UB010", "KeyError", repr(method), dgrad, f"{dgrad}: {shown(method)} is no method ({known})")
    lists.methods[method].append(dgrad)


def _buffer(layer: str, config: Mapping[str, Any], lists: _Lists, release: Release, tp: int, mode: str) -> Buffer:
    options = _defaults(layer, lists, release, tp)
    gathers = options["fp8_buf"]
    if layer in config:
        entry = config[layer]
        if entry is None and gathers:
            raise _null(layer, "TypeError", "'NoneType' object is not iterable")
        if entry is None:
            raise _null(layer, "AttributeError", "'NoneType' object has no attribute 'get'")
        reduces_in_fp8 = bool(entry.get("fp8_buf", False)) and layer in lists.methods[PIPELINE]
        options = {**options, **entry, "fp8_buf": gathers or reduces_in_fp8}
    _check_options(layer, options, release)
    options = _checked(layer, options, lists, release, mode)
    flags = {name: bool(value) for name, value in options.items() if name in _FLAGS}
    return {**options, **flags, "dtype": "u8" if mode == FP8 and options["fp8_buf"] else "bf16"}


def _defaults(layer: str, lists: _Lists, release: Release, tp: int) -> Buffer:
    """Of the layer's default method, whatever the configuration then says."""
    method = lists.default_method(layer)
    ring, reduces = method == RING, layer in lists.reduces
    return {
        "method": method,
        "is_reduce_scatter": reduces,
        "num_sm": 1 if ring else 16,
        "cga_size": 1 if ring else 2,
        "set_sm_margin": release.set_sm_margin_but_ring and not ring,
        "num_splits": tp if method in release.num_splits_are_tp else 4,
        "aggregate": False,
        "atomic_gemm": False,
        "use_ce": True,
        "fp8_buf": layer in EXTERNAL_METHODS or not (reduces or layer.endswith("wgrad")),
    }


def _check_options(layer: str, options: Buffer, release: Release) -> None:
    taken = ("name", "quantization_mode") if release.quantization_modes else ("name",)
    call = "initialize_ub.<locals>.add_ub()"
    for name in options:
        if name in taken:
            message = f"{call} got multiple values for argument '{name}'"
        elif name not in release.options:
            message = f"{call} got an unexpected keyword argument '{name}'"
        else:
            continue
        near = nearest(name, release.options) if name not in taken else None
        meant = f" (did you mean {near}?)" if near else ""
        because = f"{layer} has {printable(name)}, which is no option of this Transformer Engine{meant}"
        raise Refusal("UB004", "TypeError", message, layer, because)


def _checked(layer: str, options: Buffer, lists: _Lists, release: Release, mode: str) -> Buffer:
    """The options after ``add_ub``'s own checks, which take atomic GEMMs away where nothing could use them."""
    method, atomic = options["method"], bool(options["atomic_gemm"])
    if atomic and mode != FP8:
        message = "Atomic GEMM overlap supported only for FP8 GEMM"
        message += "." if release.asserts else ", got quantization_mode=UserBufferQuantizationMode.NONE"
        raise Refusal(
            "UB013", release.refuses_by, message, layer, f"{layer} has atomic_gemm, which is for FP8 GEMMs alone"
        )
    atomic = atomic and method != BULK and not (release.external and method == EXTERNAL)
    if method == PIPELINE and not options["is_reduce_scatter"]:
        message = f"At {layer}, `pipeline` overlap method is not supported for AllGather."
        raise Refusal("UB007", "ValueError", message, layer, f"{layer} gathers, and only a reduce-scatter is pipelined")
    ring = atomic and method == RING
    if ring and layer in ATOMIC_PAIRS:
        lists.atomic += [layer, ATOMIC_PAIRS[layer]]
    if layer in ATOMIC_PAIRS.values() and ring != (layer in lists.atomic):
        partner = next(first for first, second in ATOMIC_PAIRS.items() if second == layer)
        message = (
            f"At {layer}, atomic AG-GEMM overlap with `ring_exchange` shuffles GEMM chunk outputs, and  RS-GEMM "
            "overlap un-suffle them. When one of the GEMM-AG and GEMM-RS overlaps forming a TP block (e.g., qkv_fprop "
            "and proj_fprop) uses `atomic gemm` and `ring_exhcnage`, its pair must use the same overlap config for "
            "functionality."
        )
        because = f"only one of {partner} and {layer} is a ring exchange with atomic_gemm"
        raise Refusal("UB014", release.refuses_by, message, layer, because)
    if release.external and layer in EXTERNAL_METHODS and method != EXTERNAL:
        message = f"At {layer}, `external` overlap method is specified, but the selected method is {method}"
        raise Refusal(
            "UB012",
            release.refuses_by,
            message,
            layer,
            f"{layer} is {printable(str(method))}, and can only be external",
        )
    return {**options, "atomic_gemm": atomic}


def _null(layer: str, exception: str, message: str) -> Refusal:
    return Refusal("UB006", exception, message, layer, f"{layer} is null, where a mapping of options belongs")
