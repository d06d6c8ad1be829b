"""UB: what the userbuffers cost in memory, and what they can save at best."""

from __future__ import annotations

from overlapkit.errors import RecipeError
from overlapkit.facts import Facts
from overlapkit.presets.times import Inputs, communication_share, forward_ratios, sizes_of_model
from overlapkit.rules.registry import Finding, State, info, rule, warning
from overlapkit.rules.tp import OVERLAP

_SUBJECT = "userbuffers"
_GIB = 2**30
_LITTLE = 0.10  # of the GEMMs' time, which is most of a step's but not all


@rule("UB108", source="transformer-engine pytorch/module/base.py initialize_ub")
def memory(f: Facts, s: State) -> Finding:
    """What the buffers take of each GPU's memory.

    The value counts bytes. Every layer gets its buffer, used or not: tokens times hidden size, of two bytes, of one for
    an all-gather between FP8 GEMMs; the reduce-scatter of a ring nearly twice as much. Transformer Engine 2.7 and newer
    have two buffers more. Each is rounded up to the granularity of CUDA multicast (2 MiB), which is not counted.

    Why: they are allocated for good, before the model.
    Fix: nothing to do; TP overlap off frees them.
    """
    report = f.userbuffers_report
    if not s[OVERLAP] or report is None or report.bytes is None or f.wanted.quantization_modes_differ:
        return None
    return info(_SUBJECT, f"{len(report.buffers)} buffers {_of_the_gpu(f, report.bytes)}", value=report.bytes)


@rule("UB109", source="transformer-engine pytorch/module/base.py initialize_ub", te=">=2.8")
def memory_of_two_modes(f: Facts, s: State) -> Finding:
    """A model of FP8 and BF16 layers has every buffer twice.

    With ``first_last_layers_bf16`` Bridge and Megatron-LM ask for two quantization modes. The value counts bytes.

    Why: the buffers of the BF16 layers are twice as large as those of the FP8 layers, and there are as many of them for
    one layer as for all.
    Fix: set ``first_last_layers_bf16=false``, if the model converges without.
    """
    report = f.userbuffers_report
    if not s[OVERLAP] or report is None or report.bytes is None or not f.wanted.quantization_modes_differ:
        return None
    because = f"{len(report.buffers)} buffers, for FP8 layers and for BF16 ones, {_of_the_gpu(f, report.bytes)}"
    section = "mixed_precision" if f.recipe.mixed_precision is not None else "model"
    named = f.recipe.mixed_precision is not None and f.recipe.mixed_precision.name
    fix = None if named else f"set {section}.first_last_layers_bf16=false"
    return warning(_SUBJECT, because, value=report.bytes, fix=fix)


def _of_the_gpu(f: Facts, size: int) -> str:
    memory = f.gpu.hbm_gb if f.gpu else None
    taken = f"take {size / _GIB:.2f} GiB of each GPU"
    return f"{taken}'s {memory:g} GB ({100 * size / (memory * 1e9):.1f} %)" if memory else taken


@rule("UB110", source="overlapkit/presets/times.py")
def little_to_win(f: Facts, s: State) -> Finding:
    """TP overlap works here, and has little to hide.

    The GEMMs of a layer take so much longer than the collectives beside them that hiding all of these would save less
    than a tenth of the GEMMs' time. Computed from the GPU's figures and the model's sizes, not measured.

    Why: H20 has an H100's NVLink and 15 % of its FLOP/s.
    Fix: nothing to do; without TP overlap there is less to go wrong.
    """
    inputs = _inputs(f) if s[OVERLAP] else None
    if inputs is None:
        return None
    try:
        share, ratios = communication_share(inputs), forward_ratios(inputs)
    except RecipeError:  # a GPU of which not all figures are known, or a TP size that UB019 speaks of
        return None
    if share >= _LITTLE:
        return None
    times = ", ".join(f"{linear} {ratio:.1f}" for linear, ratio in ratios.items())
    because = f"of little value on {inputs.gpu.name}: all TP communication is {100 * share:.0f} % of the GEMMs' time"
    return info(_SUBJECT, f"{because}; forward GEMM over its collective: {times}")


def _inputs(f: Facts) -> Inputs | None:
    """The sizes that GEMM times follow from; None where the recipe does not say them, or a layer has other GEMMs."""
    model, train = f.recipe.model, f.recipe.train
    hidden, heads, micro, length = (
        model.hidden_size,
        model.num_attention_heads,
        train.micro_batch_size,
        model.seq_length,
    )
    if f.gpu is None or hidden is None or heads is None or micro is None or length is None:
        return None
    if model.num_moe_experts or model.multi_latent_attention or f.precision.fp4 or f.recipe.peft is not None:
        return None
    return Inputs(
        model="",
        gpu=f.gpu,
        precision="fp8" if f.precision.fp8 else "bf16",
        hidden_size=hidden,
        tensor_model_parallel_size=f.parallelism.tp,
        context_parallel_size=f.parallelism.cp,
        micro_batch_size=micro,
        seq_length=length,
        **sizes_of_model(model, hidden_size=hidden, num_attention_heads=heads),
    )
