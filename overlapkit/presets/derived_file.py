"""A derived preset as a file of ``presets/userbuffers``: what the derivation chose, and all that it rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlapkit.catalogue import find_gpu
from overlapkit.errors import RecipeError
from overlapkit.presets.derivation import DerivedLayer, derive
from overlapkit.presets.times import MODEL_SIZES, Inputs, communication_share

_TUNED = {"ampere": "a100", "hopper": "h100", "blackwell": "b200"}  # by generation, the GPU that NVIDIA tuned for


def preset_name(inputs: Inputs) -> str:
    """The name in Bridge's pattern; a GPU's name loses its underscores there and is still a spelling of that GPU."""
    gpu = inputs.gpu.name.replace("_", "")
    cp = f"_cp{inputs.context_parallel_size}" if inputs.context_parallel_size > 1 else ""
    return (
        f"userbuffers_{inputs.precision}_{gpu}_h{inputs.hidden_size}_tp{inputs.tensor_model_parallel_size}{cp}"
        f"_mbs{inputs.micro_batch_size}_seqlen{inputs.seq_length}"
    )


def derived_userbuffers(derived: Mapping[str, DerivedLayer]) -> dict[str, dict[str, Any]]:
    """Layer -> options, as Transformer Engine reads them."""
    return {layer: dict(chosen.options) for layer, chosen in derived.items()}


def derivation_record(inputs: Inputs, derived: Mapping[str, DerivedLayer]) -> dict[str, Any]:
    """The inputs of a derivation, and per layer the times in microseconds, their ratio and the rule that chose.

    Times are those of one layer and microbatch; ``communication_share`` is the TP communication of a forward and
    backward pass at wire speed over its GEMMs, the bound of what TP overlap can save.
    """
    gpu = inputs.gpu
    return {
        "model": inputs.model,
        "sizes": {name: getattr(inputs, name) for name in MODEL_SIZES},
        "gpu": {
            "sm_count": gpu.sm_count,
            "dense_tflops": gpu.fp8_tflops if inputs.precision == "fp8" else gpu.bf16_tflops,
            "hbm_gb_per_s": gpu.hbm_gb_per_s,
            "nvlink_gb_per_s": gpu.nvlink_gb_per_s,
        },
        "communication_share": round(communication_share(inputs), 3),
        "layers": {
            layer: {
                "gemm_us": round(chosen.times.gemm * 1e6),
                "collective_us": round(chosen.times.collective * 1e6),
                "ratio": round(chosen.times.ratio, 1),
                "because": chosen.because,
            }
            for layer, chosen in derived.items()
        },
    }


def beside_tuned(inputs: Inputs) -> Inputs | None:
    """The same shape on the GPU of the generation that NVIDIA tuned for; None where it is that, or cannot have it."""
    tuned = find_gpu(_TUNED.get(inputs.gpu.generation, ""))
    if tuned is None or tuned == inputs.gpu:
        return None
    other = replace(inputs, gpu=tuned)
    try:
        derive(other)
    except RecipeError:  # TP 16 fits into a GB200's NVLink domain, not into a B200's
        return None
    return other


def preset_text(inputs: Inputs, *, beside: Inputs | None = None) -> str:
    """The file. ``beside``: the same shape on another GPU, whose SM counts a comment sets against these.

    Raises:
        RecipeError: no preset can be derived from the inputs.
    """
    derived = derive(inputs)
    gpu, precision = inputs.gpu.name.upper(), inputs.precision.upper()
    sizes = f"hidden {inputs.hidden_size}, TP {inputs.tensor_model_parallel_size}, CP {inputs.context_parallel_size}"
    compared = []
    if beside is not None:
        compared = [f"# The same derivation for the {beside.gpu.name.upper()}: {_sms(beside, derive(beside))}."]
    lines = [
        f"# TP userbuffers for {gpu}, {precision}, {sizes}, MBS {inputs.micro_batch_size}, "
        f"sequence {inputs.seq_length}",
        "# Derived from computed times, neither tuned nor measured: scripts/validate_presets.py says how far off.",
        f"# SMs that communicate: {_sms(inputs, derived)}.",
        *compared,
        f"name: {preset_name(inputs)}",
        "provenance: derived",
        f'source: "{_source(inputs)}"',
        f"gpu: {inputs.gpu.name}",
        f"precision: {inputs.precision}",
        f"hidden_size: {inputs.hidden_size}",
        f"tensor_model_parallel_size: {inputs.tensor_model_parallel_size}",
        f"context_parallel_size: {inputs.context_parallel_size}",
        f"micro_batch_size: {inputs.micro_batch_size}",
        f"seq_length: {inputs.seq_length}",
        "lora: false",
        "userbuffers:",
        *(f"  {layer}: {flow(options)}" for layer, options in derived_userbuffers(derived).items()),
        "derivation:",
        *_record_lines(derivation_record(inputs, derived)),
    ]
    return "\n".join(lines) + "\n"


def _source(inputs: Inputs) -> str:
    return (
        f"overlapkit/presets/derivation.py, from the GEMM and collective times of {inputs.model} on the "
        f"{inputs.gpu.name.upper()}: the SM counts and methods with the shortest computed time per layer"
    )


def _sms(inputs: Inputs, derived: Mapping[str, DerivedLayer]) -> str:
    """The SM counts where there was something to choose, and what share of the GPU the largest is."""
    chosen = {name: layer.options for name, layer in derived.items() if layer.options["method"] != "ring_exchange"}
    listed = ", ".join(f"{name} {options['num_sm']}" for name, options in chosen.items())
    most = max(options["num_sm"] for options in chosen.values())
    return f"{listed}; at most {most} of {inputs.gpu.sm_count} ({100 * most / (inputs.gpu.sm_count or 1):.0f} %)"


def _record_lines(record: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, value in record.items():
        if key == "layers":
            lines += ["  layers:", *(f"    {layer}: {flow(entry)}" for layer, entry in value.items())]
        else:
            lines.append(f"  {key}: {flow(value) if isinstance(value, Mapping) else value}")
    return lines


def flow(options: Mapping[str, Any]) -> str:
    """Options as YAML on one line."""
    return "{" + ", ".join(f"{key}: {_scalar(key, value)}" for key, value in options.items()) + "}"


def _scalar(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if key == "because" else f"{value:g}" if isinstance(value, float) else str(value)
