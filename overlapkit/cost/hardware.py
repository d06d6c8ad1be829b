"""What one GPU of the job does in a second, in the recipe's precision, and how it reaches the others."""

from __future__ import annotations

from dataclasses import dataclass

from overlapkit.catalogue import Gpu
from overlapkit.cost.collectives import Link
from overlapkit.cost.constants import Constants
from overlapkit.facts import Facts
from overlapkit.recipe.place import Place

_CURVES = {"ampere": "ampere", "hopper": "hopper"}  # newer generations have Blackwell's
_NEEDED = ("bf16_tflops", "hbm_gb_per_s", "nvlink_gb_per_s", "nvlink_domain_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRate:
    """GEMMs in one precision: FLOP/s and HBM bytes/s reached, seconds that each takes at least.

    ``input_bytes`` per element; ``quantize_s`` is seconds per element of the input that is quantized.
    """

    flops_per_s: float
    bytes_per_s: float
    fixed_s: float
    input_bytes: float
    quantize_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Rates per second of one GPU; ``plain`` is BF16 (or FP16), ``rate`` what the layers' GEMMs run in."""

    gpu: Gpu
    dense_tflops: float  # of the layers' precision, what MFU is counted against
    rate: GemmRate
    plain: GemmRate
    bf16_flops_per_s: float
    memory_bytes_per_s: float  # of memory-bound kernels
    kernel_s: float
    attention_efficiency: float
    attention_half_length: float
    narrow_head: float
    gather_width: float  # bytes of a quantized all-gather over those in BF16
    sm_count: int
    link: Link


def hardware_of(facts: Facts, constants: Constants) -> tuple[Hardware, tuple[str, ...]]:
    """The hardware of a recipe, and what was assumed of it.

    Raises:
        RecipeError: no GPU is named, figures of it are missing, or it cannot compute in the recipe's precision.
    """
    recipe = facts.recipe
    place = Place(recipe.source, recipe.lines, recipe.overridden)
    gpu = facts.gpu
    if gpu is None:
        raise place.error("cluster.gpu", "estimate needs the GPU", "for example cluster.gpu=h100")
    missing = [name for name in _NEEDED if not getattr(gpu, name)]
    if missing or gpu.name not in constants.gemm:
        names = ", ".join(missing) or "GEMM rates"
        raise place.error("cluster.gpu", f"the time on {gpu.name} is not modelled: its {names} are not known")
    precision = _precision(facts, place)
    if not _peak_tflops(gpu, precision) or precision not in constants.gemm[gpu.name]:
        path = "mixed_precision" if recipe.mixed_precision is not None else "model"
        raise place.error(path, f"the time of {precision.upper()} GEMMs on {gpu.name} is not modelled")
    if facts.gpus_per_node is None:
        because = f"estimate needs the GPUs of a host, which differ with {gpu.name}"
        raise place.error("cluster.gpus_per_node", because, "for example cluster.gpus_per_node=8")
    nic = recipe.cluster.nic_gbps
    given = nic or gpu.nic_gbps
    if not given:
        raise place.error("cluster.nic_gbps", "estimate needs the network bandwidth per GPU", "cluster.nic_gbps=400")
    assumed = () if nic or facts.parallelism.world_size <= _domain(facts, gpu) else (f"cluster.nic_gbps={given:g}",)
    return _hardware(gpu, precision, float(given), constants), assumed


def _peak_tflops(gpu: Gpu, precision: str) -> float:
    """The dense rate, 0 where it is not known."""
    rates = {"bf16": gpu.bf16_tflops, "fp8": gpu.fp8_tflops, "mxfp8": gpu.fp8_tflops, "fp4": gpu.fp4_tflops}
    return float(rates[precision] or 0.0)


def _domain(facts: Facts, gpu: Gpu) -> int:
    return max(facts.gpus_per_node or 0, facts.nvlink_domain_size or gpu.nvlink_domain_size or 1)


def _precision(facts: Facts, place: Place) -> str:
    found = facts.precision
    if found.fp4:
        return "fp4"
    if found.fp8:
        return "mxfp8" if found.fp8_recipe == "mxfp8" else "fp8"
    if found.compute == "fp32":
        raise place.error("mixed_precision", "the time of FP32 GEMMs is not modelled", "set mixed_precision=bf16_mixed")
    return "bf16"


_CACHE: dict[tuple[Gpu, str, float, int], tuple[Constants, Hardware]] = {}


def _hardware(gpu: Gpu, precision: str, nic_gbps: float, constants: Constants) -> Hardware:
    key = (gpu, precision, nic_gbps, id(constants))
    found = _CACHE.get(key)
    if found is not None and found[0] is constants:
        return found[1]
    if len(_CACHE) > 64:
        _CACHE.clear()
    made = _made(gpu, precision, nic_gbps, constants)
    _CACHE[key] = (constants, made)
    return made


def _made(gpu: Gpu, precision: str, nic_gbps: float, constants: Constants) -> Hardware:
    c = constants
    peak, plain = _peak_tflops(gpu, precision), _peak_tflops(gpu, "bf16")
    gather = {"fp8": c.gather_fp8, "mxfp8": c.gather_mxfp8, "fp4": c.gather_fp4}
    attention = c.attention[gpu.name]
    narrow = {"ampere": c.attention_narrow_head_ampere, "hopper": c.attention_narrow_head_hopper}
    return Hardware(
        gpu=gpu,
        dense_tflops=peak,
        rate=_rate(gpu, precision, peak, c),
        plain=_rate(gpu, "bf16", plain, c),
        bf16_flops_per_s=plain * 1e12,
        memory_bytes_per_s=float(gpu.hbm_gb_per_s or 0.0) * 1e9 * c.hbm_efficiency,
        kernel_s=c.kernel_s,
        attention_efficiency=attention.efficiency,
        attention_half_length=attention.half_length,
        narrow_head=narrow.get(gpu.generation, c.attention_narrow_head_blackwell),
        gather_width=gather.get(precision, 1.0),
        sm_count=gpu.sm_count or 132,
        link=Link(
            curves=_CURVES.get(gpu.generation, "blackwell"),
            gpu=gpu.name,
            nvlink_bytes_per_s=float(gpu.nvlink_gb_per_s or 0.0) / 2 * 1e9,
            nic_bytes_per_s=nic_gbps / 8 * 1e9,
            ring_efficiency=c.nic_ring_efficiency,
            all_to_all_efficiency=c.nic_all_to_all_efficiency,
            point_to_point_efficiency=c.nvlink_point_to_point_efficiency,
            latency_s=c.node_latency_s,
        ),
    )


def _rate(gpu: Gpu, precision: str, peak: float, c: Constants) -> GemmRate:
    fit = c.gemm[gpu.name][precision]
    in_situ = c.gemm_in_situ[gpu.name] * (c.gemm_in_situ_fp4 if precision == "fp4" else 1.0)
    width = {"fp8": 1.0, "mxfp8": 1.0, "fp4": 0.5}.get(precision, 2.0)
    passes = {"fp8": c.quantize_fp8, "mxfp8": c.quantize_mxfp8, "fp4": c.quantize_fp4}.get(precision, 0.0)
    bytes_per_s = float(gpu.hbm_gb_per_s or 0.0) * 1e9 * fit.hbm_efficiency
    return GemmRate(
        flops_per_s=peak * 1e12 * fit.efficiency * in_situ,
        bytes_per_s=bytes_per_s,
        fixed_s=fit.fixed_s,
        input_bytes=width,
        quantize_s=passes * (2 + width) / bytes_per_s,
    )
