"""UB: what Transformer Engine makes of each layer of the userbuffers configuration; see ``overlapkit.userbuffers``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from overlapkit.errors import printable
from overlapkit.facts import Facts
from overlapkit.rules.registry import TRANSFORMER_ENGINE, Finding, State, Verdict, info, observation, rule, warning
from overlapkit.rules.tp import OVERLAP, obstacle, off
from overlapkit.rules.ub_preset import CFG, another_preset
from overlapkit.userbuffers.check import Problem
from overlapkit.userbuffers.layers import ATOMIC_PAIRS, BULK, DEFAULT_METHODS, RING

_INIT = "transformer-engine pytorch/module/base.py initialize_ub"
_OVERLAP_H = "transformer-engine common/include/transformer_engine/comm_gemm_overlap.h"
_OVERLAP_CPP = "transformer-engine common/comm_gemm_overlap/comm_gemm_overlap.cpp"
_KERNELS = "transformer-engine common/comm_gemm_overlap/userbuffers"


def _found(f: Facts, s: State, code: str) -> list[Problem]:
    """What the report has under a code, while the overlap is on."""
    report = f.userbuffers_report
    return [each for each in report.problems if each.code == code] if s[OVERLAP] and report is not None else []


def _layers(found: Iterable[Problem]) -> list[str]:
    return list(dict.fromkeys(problem.layer for problem in found if problem.layer is not None))


def _fails(f: Facts, found: list[Problem], mend: str | None = None) -> Finding:
    """One verdict about the overlap for all layers in which it is found."""
    if not found:
        return None
    because = "; ".join(dict.fromkeys(problem.because for problem in found))
    at = found[0].raised_at
    return obstacle(f, because, fix=_or_else(mend, another_preset(f)), by=TRANSFORMER_ENGINE if at else None, at=at)


def _or_else(mend: str | None, other: str) -> str:
    if mend is None:
        return other
    return f"{mend}, or {other.removeprefix('set ') if mend.startswith('set ') else other}"


def _set(f: Facts, layers: Iterable[str], option: str, value: object) -> str:
    """Sets an option of layers: as on the command line where the configuration stands in the recipe itself."""
    section = _section(f)
    if section is None:
        return f"write {option}: {str(value).lower()} for {' and '.join(layers)}"
    return "set " + " and ".join(f"{section}.tp_comm_overlap_cfg.{layer}.{option}={value}".lower() for layer in layers)


def _section(f: Facts) -> str | None:
    """Where the configuration stands as a mapping."""
    asks = f.recipe.comm_overlap
    if asks is not None and isinstance(asks.tp_comm_overlap_cfg, Mapping):
        return "comm_overlap"
    on_model = isinstance(f.recipe.model.tp_comm_overlap_cfg, Mapping) and (asks is None or f.megatron_lm)
    return "model" if on_model else None


def _beside(found: Iterable[Problem], fix: dict[str, str]) -> Iterable[Verdict]:
    """A warning per layer, with its own fix."""
    for problem in found:
        if problem.layer is not None:
            layer = printable(problem.layer)
            yield warning(f"{CFG}.{layer}", problem.because, fix=fix[problem.layer])


@rule("UB004", source=_INIT)
def unknown_option(f: Facts, s: State) -> Finding:
    """A layer has an option that Transformer Engine does not know.

    ``comm_priority`` and ``gemm_priority`` came with 1.14, ``pipeline_rs_overlap_first_gemm`` with 2.0.

    Why: options are the keyword arguments of a function; another one is a TypeError.
    Fix: take it out, or correct its name.
    """
    return _fails(f, _found(f, s, "UB004"), "take it out, or correct its name")


@rule("UB005", source=_INIT)
def unknown_layer(f: Facts, s: State) -> Finding:
    """The configuration names a layer that Transformer Engine does not know.

    ``proj_wgrad`` and ``fc2_wgrad`` came with 2.7.

    Why: the entry is passed over without a word, and the layer that was meant has the defaults.
    Fix: correct the name, or take the entry out.
    """
    found = _found(f, s, "UB005")
    return _beside(found, dict.fromkeys(_layers(found), "correct the name, or take the entry out"))


@rule("UB006", source=_INIT)
def null_layer(f: Facts, s: State) -> Finding:
    """A layer's entry is null.

    Bridge's set-up takes such layers away; a file that Megatron-LM reads keeps them.

    Why: Transformer Engine looks into the entry, which is an AttributeError or a TypeError.
    Fix: leave the layer out.
    """
    found = _found(f, s, "UB006")
    return _fails(f, found, f"leave {' and '.join(_layers(found))} out")


@rule("UB007", source=_INIT)
def pipelined_all_gather(f: Facts, s: State) -> Finding:
    """A layer that gathers is pipelined.

    ``qkv_fprop``, ``fc1_fprop``, ``proj_dgrad`` and ``fc2_dgrad`` gather, and every layer that says
    ``is_reduce_scatter: false``.

    Why: a GEMM can be cut for what comes behind it, not for the input that it waits for; Transformer Engine refuses it.
    Fix: make the layer a ring exchange.
    """
    found = _found(f, s, "UB007")
    layers = _layers(found)
    gathers = all(DEFAULT_METHODS.get(layer) == RING for layer in layers)
    return _fails(f, found, _set(f, layers, *(("method", RING) if gathers else ("is_reduce_scatter", True))))


@rule("UB008", source=_INIT)
def wgrad_beside_its_dgrad(f: Facts, s: State) -> Finding:
    """A dgrad layer is not bulk, and its weight gradient has an entry.

    Why: such a dgrad layer reduces its own output, so that the weight gradient has no collective; Transformer Engine
    wants no entry for it.
    Fix: leave the weight gradient's entry out, or make the dgrad layer bulk.
    """
    found = _found(f, s, "UB008")
    return _fails(f, found, _set(f, _layers(found), "method", BULK))


@rule("UB009", source=_INIT, te=">=2.8")
def dgrad_in_two_modes(f: Facts, s: State) -> Finding:
    """A dgrad layer that is not bulk, in a model of FP8 and BF16 layers.

    With ``first_last_layers_bf16`` Bridge and Megatron-LM ask for the buffers of two quantization modes. The LoRA
    presets have such layers.

    Why: a dgrad layer that is not bulk takes the weight gradient's place in a list of Transformer Engine, from which it
    removes the weight gradient once per mode; the second time raises a ValueError.
    Fix: make ``qkv_dgrad`` and ``fc1_dgrad`` bulk, or set ``first_last_layers_bf16=false``.
    """
    found = _found(f, s, "UB009")
    return _fails(f, found, _set(f, _layers(found), "method", BULK))


@rule("UB010", source=_INIT)
def unknown_method_of_a_dgrad(f: Facts, s: State) -> Finding:
    """``qkv_dgrad`` or ``fc1_dgrad`` has a method that does not exist.

    Why: Transformer Engine looks its list up by that name: a KeyError.
    Fix: choose bulk, ring_exchange or pipeline.
    """
    found = _found(f, s, "UB010")
    return _fails(f, found, _set(f, _layers(found), "method", BULK))


@rule("UB011", source=f"{_INIT}; {_OVERLAP_H}")
def unknown_method(f: Facts, s: State) -> Finding:
    """A layer has a method that does not exist.

    Why: Transformer Engine takes it for a collective without a word. For a layer that gathers before its GEMM that is
    not supported, and its first use raises; a reduce-scatter works, but not as it was meant.
    Fix: choose ring_exchange, pipeline or bulk.
    """
    found = _found(f, s, "UB011")
    grave = [problem for problem in found if problem.severity == "error"]
    if grave:
        return _fails(f, grave, _set(f, _layers(grave), "method", RING))
    return _beside(found, {layer: _set(f, [layer], "method", DEFAULT_METHODS[layer]) for layer in _layers(found)})


@rule("UB012", source=_INIT, te=">=2.7")
def weight_gradient_not_external(f: Facts, s: State) -> Finding:
    """``proj_wgrad`` or ``fc2_wgrad`` is anything but external.

    Why: their collective runs beside the GEMM of another layer, which is all that they can do.
    Fix: leave the entry out.
    """
    found = _found(f, s, "UB012")
    return _fails(f, found, _set(f, _layers(found), "method", "external"))


@rule("UB013", source=_INIT)
def atomic_gemm_without_fp8(f: Facts, s: State) -> Finding:
    """``atomic_gemm`` where the GEMMs are not FP8.

    The BF16 layers of an FP8 model count: their buffers have the same configuration.

    Why: Transformer Engine has atomic GEMMs in FP8 only, and refuses.
    Fix: set ``atomic_gemm: false``.
    """
    found = _found(f, s, "UB013")
    return _fails(f, found, _set(f, _layers(found), "atomic_gemm", False))


@rule("UB014", source=_INIT)
def half_an_atomic_pair(f: Facts, s: State) -> Finding:
    """Only one of a pair is a ring exchange with ``atomic_gemm``: qkv_fprop and proj_fprop, fc1_fprop and fc2_fprop.

    Why: the first leaves its chunks in another order, which the second undoes.
    Fix: give both the same, or neither.
    """
    found = _found(f, s, "UB014")
    pair = [layer for both in ATOMIC_PAIRS.items() for layer in both if both[1] in _layers(found)]
    return _fails(f, found, _set(f, pair, "atomic_gemm", False))


@rule("UB015", source=_INIT)
def atomic_gemm_taken_away(f: Facts, s: State) -> Finding:
    """``atomic_gemm`` on a bulk or external layer.

    Why: these have no atomic GEMM; Transformer Engine warns and goes on without.
    Fix: set ``atomic_gemm: false``.
    """
    found = _found(f, s, "UB015")
    return _beside(found, {layer: _set(f, [layer], "atomic_gemm", False) for layer in _layers(found)})


@rule("UB016", source=_OVERLAP_H)
def gather_that_is_no_ring(f: Facts, s: State) -> Finding:
    """A layer that gathers before its GEMM is bulk or external.

    Only while ``tp_comm_overlap_ag`` is on, as it is unless set. Known from reading; it was not run on a GPU.

    Why: the buffer of a collective has no such overlap: "Operation not supported." at its first use.
    Fix: make ``qkv_fprop``, ``fc1_fprop``, ``proj_dgrad`` and ``fc2_dgrad`` ring exchanges.
    """
    found = _found(f, s, "UB016")
    return _fails(f, found, _set(f, _layers(found), "method", RING))


@rule("UB017", source=f"{_OVERLAP_H}; transformer-engine pytorch/module/base.py")
def dgrad_without_its_flag(f: Facts, s: State) -> Finding:
    """``qkv_dgrad`` or ``fc1_dgrad`` is not bulk, and ``tp_comm_overlap_rs_dgrad`` is not on.

    Said of a ring exchange, and from 2.4 of a pipeline without ``fp8_buf`` under FP8. The flag is off unless set, and
    Bridge's ``comm_overlap`` has no field for it. Known from reading; it was not run on a GPU.

    Why: without the flag the layer gathers in bulk. The buffer of a ring does not support that ("Operation not
    supported."), and a BF16 buffer cannot hold the FP8 input; either raises in the first backward pass.
    Fix: set ``model.tp_comm_overlap_rs_dgrad=true``, or make the layer bulk.
    """
    return _fails(f, _found(f, s, "UB017"), "set model.tp_comm_overlap_rs_dgrad=true")


@rule("UB018", source=_OVERLAP_H)
def ring_weight_gradient(f: Facts, s: State) -> Finding:
    """``qkv_wgrad`` or ``fc1_wgrad`` is a ring exchange.

    Only while ``tp_comm_bulk_wgrad`` is on, as it is unless set, and ``tp_comm_overlap_rs_dgrad`` off. Known from
    reading; it was not run on a GPU.

    Why: the layer overlaps in bulk, which the buffer of a ring does not support: "Operation not supported." in the
    first backward pass.
    Fix: make it bulk.
    """
    found = _found(f, s, "UB018")
    return _fails(f, found, _set(f, _layers(found), "method", BULK))


@rule("UB019", source=f"{_KERNELS}/userbuffers.cu callranks", te=">=1.0")
def tp_size_without_kernels(f: Facts, s: State) -> Finding:
    """A TP size for which Transformer Engine has no userbuffers kernels.

    Bulk and pipelined collectives exist for TP 2, 4 and 8, from 2.2 also for 16 and 32. Known from reading; it was not
    run on a GPU.

    Why: for other sizes no kernel is launched and nothing says so: the results are wrong.
    Fix: choose one of these sizes, or turn TP overlap off.
    """
    found = _found(f, s, "UB019")
    if not found:
        return None
    fix = f"choose a model.tensor_model_parallel_size that has kernels, or {off(f)}"
    return obstacle(f, found[0].because, fix=fix)


@rule("UB020", source=f"{_KERNELS}/userbuffers.h NVTE_MAX_SMS")
def too_many_sms(f: Facts, s: State) -> Finding:
    """A layer communicates on more than 32 SMs, or on none.

    Known from reading; it was not run on a GPU.

    Why: the kernels have flags for 32 SMs; with more the barrier never completes, and the job ends 110 seconds later
    (``UB_TIMEOUT``).
    Fix: choose ``num_sm`` from 1 to 32.
    """
    return _fails(f, _found(f, s, "UB020"), "choose num_sm from 1 to 32")


@rule("UB021", source=f"{_KERNELS}/userbuffers.cu SETUP_LAUNCH_CONFIG")
def sms_not_in_clusters(f: Facts, s: State) -> Finding:
    """``num_sm`` is not a multiple of ``cga_size``.

    Why: the kernel is then launched without clusters, which says nothing and costs a little.
    Fix: choose a multiple.
    """
    found = _found(f, s, "UB021")
    return info(CFG, "; ".join(problem.because for problem in found)) if found else None


@rule("UB022", source=_OVERLAP_CPP)
def columns_left_over(f: Facts, s: State) -> Finding:
    """The hidden size does not split into ``num_splits`` pieces of a pipelined reduce-scatter.

    A piece is a multiple of 8 elements, of 16 in an FP8 buffer. Known from reading; it was not run on a GPU.

    Why: the division is rounded down, and the last columns are neither computed nor said to be missing.
    Fix: choose another ``num_splits``.
    """
    return _fails(f, _found(f, s, "UB022"), "choose another num_splits")


@rule("UB031", source=_OVERLAP_CPP)
def sizes_beyond_32_bits(f: Facts, s: State) -> Finding:
    """A buffer is larger than Transformer Engine can count.

    2³¹ pairs of bytes of a collective, 2³¹ bytes of a ring's chunk. Known from reading; it was not run on a GPU.

    Why: its sizes are 32-bit numbers, which overflow.
    Fix: split the sequence over more CP ranks, or take smaller microbatches.
    """
    found = _found(f, s, "UB031")
    if not found:
        return None
    fix = f"raise model.context_parallel_size, or lower train.micro_batch_size, or {off(f)}"
    return obstacle(f, "; ".join(problem.because for problem in found), fix=fix)


@observation("UB036", source=_INIT)
def configurations_for_other_modes(problem: Problem) -> Verdict:
    """A list of configurations that is not one per quantization mode.

    No recipe holds a list; ``check_userbuffers`` takes one, as ``initialize_ub`` does.

    Why: Transformer Engine refuses a list of another length; before 2.8 it passes every list over, and its defaults
    hold.
    Fix: give one configuration per mode, or one mapping for all.
    """
    return warning(CFG, problem.because, fix="give one configuration per mode, or one mapping for all")
