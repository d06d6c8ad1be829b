"""GEMM and collective times of the linears that TP communicates beside, and their ratio: what TP overlap has to hide.

Times of one layer and microbatch (bytes, seconds; T = seq_length * micro_batch_size / CP tokens, M = T * hidden * b):

* GEMM: ``2 * T * hidden * n / TP / (dense FLOP/s * efficiency)``, n the linear's other width before TP divides it;
  forward, dgrad and wgrad alike. Efficiency is assumed: 0.65, and 0.85 on the H20, whose few FLOP/s are easier to use.
* Collective at wire speed: ``(TP - 1) / TP * M / (NVLink, one direction * 0.8)``. b is 2; 1 for an all-gather in FP8.

Nothing here is measured. Figures of GPUs are those of ``data/gpus.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from overlapkit.catalogue import Gpu
from overlapkit.data import load_yaml
from overlapkit.errors import RecipeError
from overlapkit.recipe.sections import Model

Precision = Literal["bf16", "fp8"]
MODEL_SIZES = ("ffn_hidden_size", "gated_linear_unit", "num_attention_heads", "num_query_groups", "kv_channels")
TP_SIZES = (2, 4, 8, 16, 32)
_NVLINK_EFFICIENCY = 0.8
_GEMM_EFFICIENCY = {"h20": 0.85, "h20_141": 0.85}
_USUAL_GEMM_EFFICIENCY = 0.65

# Layer -> (the linear whose GEMM it is, the collective beside it).
LAYERS: Mapping[str, tuple[str, str]] = {
    "qkv_fprop": ("qkv", "all-gather"),
    "qkv_dgrad": ("qkv", "all-gather"),
    "qkv_wgrad": ("qkv", "reduce-scatter"),
    "proj_fprop": ("proj", "reduce-scatter"),
    "proj_dgrad": ("proj", "all-gather"),
    "fc1_fprop": ("fc1", "all-gather"),
    "fc1_dgrad": ("fc1", "all-gather"),
    "fc1_wgrad": ("fc1", "reduce-scatter"),
    "fc2_fprop": ("fc2", "reduce-scatter"),
    "fc2_dgrad": ("fc2", "all-gather"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a preset is derived from. Sizes are the model's, before TP divides them; ``model`` is its name."""

    model: str
    gpu: Gpu
    precision: Precision
    hidden_size: int
    ffn_hidden_size: int
    gated_linear_unit: bool
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    tensor_model_parallel_size: int
    context_parallel_size: int = 1
    micro_batch_size: int = 1
    seq_length: int = 8192

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one CP rank."""
        return self.seq_length * self.micro_batch_size // self.context_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """A layer's GEMM, and the collective beside it at wire speed, in seconds."""

    gemm: float
    collective: float

    @property
    def ratio(self) -> float:
        """GEMM over collective: below 1 the collective cannot be hidden, far above 1 there is little to win."""
        return self.gemm / self.collective


def inputs_of_hidden_size(
    gpu: Gpu,
    precision: Precision,
    *,
    hidden_size: int,
    tensor_model_parallel_size: int,
    context_parallel_size: int = 1,
    micro_batch_size: int = 1,
    seq_length: int = 8192,
) -> Inputs:
    """Inputs with the usual model of a hidden size (``data/preset_models.yaml``).

    Of another hidden size: GPT's widths, 4 * hidden and heads of 128 channels.
    """
    usual = {"model": f"a GPT of hidden size {hidden_size}", "ffn": 4 * hidden_size, "gated": False, "channels": 128}
    usual |= {"heads": hidden_size // 128, "groups": hidden_size // 128}
    model = load_yaml("preset_models.yaml").get(hidden_size, usual)
    return Inputs(
        model=model["model"],
        gpu=gpu,
        precision=precision,
        hidden_size=hidden_size,
        ffn_hidden_size=model["ffn"],
        gated_linear_unit=model["gated"],
        num_attention_heads=model["heads"],
        num_query_groups=model["groups"],
        kv_channels=model["channels"],
        tensor_model_parallel_size=tensor_model_parallel_size,
        context_parallel_size=context_parallel_size,
        micro_batch_size=micro_batch_size,
        seq_length=seq_length,
    )


def sizes_of_model(model: Model, *, hidden_size: int, num_attention_heads: int) -> dict[str, Any]:
    """A recipe's widths for `Inputs`, with Megatron-Core's defaults for what it leaves out."""
    return {
        "ffn_hidden_size": model.ffn_hidden_size or 4 * hidden_size,
        "gated_linear_unit": bool(model.gated_linear_unit),
        "num_attention_heads": num_attention_heads,
        "num_query_groups": model.num_query_groups or num_attention_heads,
        "kv_channels": model.kv_channels or max(hidden_size // num_attention_heads, 1),
    }


def layer_times(inputs: Inputs) -> dict[str, LayerTimes]:
    """Layer -> its times, for the ten layers.

    Raises:
        RecipeError: a size or GPU that userbuffers cannot serve, or a figure of the GPU that is unknown.
    """
    _check(inputs)
    gemm = {linear: _gemm_seconds(inputs, width) for linear, width in _widths(inputs).items()}
    return {
        layer: LayerTimes(gemm=gemm[linear], collective=_wire_seconds(inputs, collective))
        for layer, (linear, collective) in LAYERS.items()
    }


def forward_ratios(inputs: Inputs) -> dict[str, float]:
    """Linear -> GEMM time over the time of its forward collective at wire speed.

    8 H20 with Qwen3-32B on TP 8: qkv 4.2, proj 3.3, fc1 20.9, fc2 10.5; the H100 has 0.8, 0.7, 4.1 and 2.0.

    Raises:
        RecipeError: as `layer_times`.
    """
    times = layer_times(inputs)
    return {LAYERS[layer][0]: times[layer].ratio for layer in times if layer.endswith("_fprop")}


def communication_share(inputs: Inputs) -> float:
    """TP communication at wire speed over GEMM time, of a layer's forward and backward pass.

    The upper bound of what TP overlap can save, as a share of the GEMMs; a step takes longer than its GEMMs. In the
    example of `forward_ratios`: H20 0.09, H100 0.44, H800 0.98.

    Raises:
        RecipeError: as `layer_times`.
    """
    times = layer_times(inputs)
    linears = {linear: times[layer].gemm for layer, (linear, _) in LAYERS.items()}
    return sum(time.collective for time in times.values()) / (3 * sum(linears.values()))


def _check(inputs: Inputs) -> None:
    gpu, tp = inputs.gpu, inputs.tensor_model_parallel_size
    needed = {"sm_count": gpu.sm_count, "bf16_tflops": gpu.bf16_tflops, "nvlink_gb_per_s": gpu.nvlink_gb_per_s}
    needed |= {"hbm_gb_per_s": gpu.hbm_gb_per_s, "nvlink_domain_size": gpu.nvlink_domain_size}
    unknown = [name for name, value in needed.items() if not value]
    if unknown:
        raise RecipeError(f"no preset can be derived for {gpu.name}: {', '.join(unknown)} unknown", path="cluster.gpu")
    if inputs.precision == "fp8" and gpu.fp8_tflops is None:
        raise RecipeError(f"{gpu.name} has no FP8", path="mixed_precision")
    path = "model.tensor_model_parallel_size"
    if tp not in TP_SIZES:
        raise RecipeError(f"userbuffers have kernels for TP {', '.join(map(str, TP_SIZES))}, not {tp}", path=path)
    if tp > (gpu.nvlink_domain_size or 0):
        reach = f"{gpu.nvlink_domain_size} {gpu.name}"
        raise RecipeError(f"TP {tp} does not fit into an NVLink domain of {reach}", path=path)
    if inputs.tokens < tp or inputs.tokens % tp:
        raise RecipeError(f"{inputs.tokens} tokens per CP rank are not divisible by TP {tp}", path="model.seq_length")


def _widths(inputs: Inputs) -> dict[str, int]:
    attention = inputs.num_attention_heads * inputs.kv_channels
    keys_and_values = 2 * inputs.num_query_groups * inputs.kv_channels
    ffn = inputs.ffn_hidden_size
    return {
        "qkv": attention + keys_and_values,
        "proj": attention,
        "fc1": 2 * ffn if inputs.gated_linear_unit else ffn,
        "fc2": ffn,
    }


def _gemm_seconds(inputs: Inputs, width: int) -> float:
    gpu = inputs.gpu
    tflops = gpu.fp8_tflops if inputs.precision == "fp8" else gpu.bf16_tflops
    flops = 2.0 * inputs.tokens * inputs.hidden_size * width / inputs.tensor_model_parallel_size
    return flops / ((tflops or 0.0) * 1e12 * _GEMM_EFFICIENCY.get(gpu.name, _USUAL_GEMM_EFFICIENCY))


def part_bytes(inputs: Inputs, collective: str) -> float:
    """Bytes of one rank's part: what it sends in an all-gather, what it keeps of a reduce-scatter."""
    width = 1 if inputs.precision == "fp8" and collective == "all-gather" else 2
    return inputs.tokens * inputs.hidden_size * width / inputs.tensor_model_parallel_size


def _wire_seconds(inputs: Inputs, collective: str) -> float:
    one_direction = (inputs.gpu.nvlink_gb_per_s or 0.0) / 2 * 1e9 * _NVLINK_EFFICIENCY
    return (inputs.tensor_model_parallel_size - 1) * part_bytes(inputs, collective) / one_direction
