"""ENV: the variables to export, which must be set before CUDA starts."""

from __future__ import annotations

from collections.abc import Iterable

from overlapkit.facts import Facts
from overlapkit.rules.ep import EP_OVERLAP
from overlapkit.rules.registry import Finding, State, Verdict, info, rule, warning

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_PLUGIN = "megatron-bridge recipes/run_plugins.py PerfEnvPlugin (0.2 to 0.5.1)"
_PERF = "megatron-bridge perf_recipes (0.6)"
_LARGE = 70_000_000_000  # parameters
_VOCABULARY = 262_144  # of the largest in use
_CHUNK = "2097152"  # bytes


def needs_order(f: Facts) -> bool:
    """TP or CP before Blackwell: collectives must be started before the GEMM beside them."""
    p = f.parallelism
    return (p.tp > 1 or p.cp > 1) and f.gpu is not None and not f.gpu.blackwell_or_newer


def connections(f: Facts, s: State) -> tuple[str, str] | None:
    """The number of device connections and the reason; None without a GPU.

    A later line overrides an earlier one, as in Bridge: the library plugin's rule up to 0.5.1, the
    performance rule from 0.6, Megatron-LM's assertion where that is the target.
    """
    if f.gpu is None:
        return None
    p = f.parallelism
    if f.fsdp or f.torch_fsdp2:
        return "32", "FSDP runs its gathers and scatters beside compute"
    value, because = "8", "CUDA's own default: no TP or CP collective has to start before a GEMM"
    if f.flex_backend in ("deepep", "hybridep"):
        value, because = "32", f"{f.flex_backend} runs its kernels beside compute"
    if f.gpu.blackwell_or_newer:
        if f.megatron_lm and f.core_in("<0.13.0") and p.tp > 1:
            return "1", "Megatron-LM with core 0.12 asserts it for TP above 1 on every GPU"
        splits = (p.tp > 1 or p.cp > 1) and (p.dp > 1 or p.pp > 1)
        # The performance rule names its GPUs, and r100 is not among them; the library's rule still holds for it.
        if splits or (f.gpu.name != "r100" and not f.bridge_in("<0.6.0")):
            value, because = "32", f"{f.gpu.generation} needs no single queue, and collectives get queues of their own"
    elif needs_order(f) and f.recipe.model.pipeline_model_parallel_comm_backend == "ucc":
        return "8", "the UCC pipeline backend refuses 1, which TP or CP would want"
    elif needs_order(f) and not s[EP_OVERLAP]:
        axes = " and ".join(name for name, size in (("TP", p.tp), ("CP", p.cp)) if size > 1)
        value, because = "1", f"{axes} on {f.gpu.generation}: kernels must start in the order of their launch"
    elif s[EP_OVERLAP] and value == "8":
        value, because = "32" if f.megatron_lm else "8", "the EP all-to-all runs beside compute"
    return value, because


@rule("ENV001", source=f"{_PLUGIN}; {_PERF}; Megatron-LM training/arguments.py validate_args")
def device_connections(f: Facts, s: State) -> Finding:
    """``CUDA_DEVICE_MAX_CONNECTIONS`` for this job.

    Before Blackwell, TP or CP above 1 want 1: with one hardware queue kernels start in the order in which
    they were launched, so that a collective begins before the GEMM that should hide it. EP overlap, FSDP
    and the DeepEP and HybridEP dispatchers want several. Blackwell needs no single queue. Without any of
    them 8, CUDA's default, lets data-parallel collectives run beside compute.

    Why: the variable is read when CUDA starts; set from Python later it has no effect.
    Fix: export the value before the launch.
    """
    found = connections(f, s)
    if found is None:
        return None
    return info(f"env.{CONNECTIONS}", found[1], value=found[0])


@rule("ENV002", source="Megatron-LM training/arguments.py validate_args; Megatron-LM issue 6311")
def both_choices(f: Facts, s: State) -> Finding:
    """EP overlap with TP or CP before Blackwell: two settings pull in opposite directions.

    One connection favours the TP and CP collectives, many favour the expert all-to-all. Megatron-LM says
    1 or 32; Bridge takes 8, and 32 with DeepEP or HybridEP.

    Why: measured, EP overlap gains about 8 % of a step with 32 connections and about 4 % with 1.
    Fix: export 1 if TP and CP traffic dominates, 32 if the all-to-all does; better, use TP 1 and CP 1.
    """
    if not s[EP_OVERLAP] or not needs_order(f) or f.fsdp:
        return None
    who = "Megatron-LM" if f.megatron_lm else "Bridge"
    return warning(
        f"env.{CONNECTIONS}",
        f"{s[f'env.{CONNECTIONS}']} is what {who} takes; 1 favours TP and CP, 32 the EP all-to-all",
        fix="use TP 1 and CP 1 with EP overlap, or measure CUDA_DEVICE_MAX_CONNECTIONS=1 against 32",
    )


@rule("ENV003", source=f"{_PLUGIN}; {_PERF}; transformer-engine pytorch/module/layernorm_linear.py")
def layernorm_margin(f: Facts, s: State) -> Iterable[Verdict]:
    """``NVTE_FWD_LAYERNORM_SM_MARGIN`` and ``NVTE_BWD_LAYERNORM_SM_MARGIN``.

    16 SMs are left free by Transformer Engine's norm kernels; 20 with DeepEP or HybridEP from Bridge 0.6.

    Why: a persistent norm kernel on all SMs would hold back the collectives beside it.
    Fix: export both.
    """
    if f.versions.transformer_engine is None:
        return
    wide = f.flex_backend in ("deepep", "hybridep") and f.bridge_in(">=0.6.0")
    value = "20" if wide else "16"
    because = "SMs that norm kernels leave to collectives"
    if wide:
        uses = f.recipe.model.num_moe_experts and f.dispatcher == "flex"
        because = f"{f.flex_backend}'s kernels need more SMs"
        if not uses:
            because = f"what Bridge takes while moe_flex_dispatcher_backend is {f.flex_backend}, in use or not"
    for name in ("NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN"):
        yield info(f"env.{name}", because, value=value)


@rule("ENV004", source="megatron-bridge scripts/performance/perf_plugins.py (0.5.1)")
def p2p_chunk_size(f: Facts, s: State) -> Finding:
    """``NCCL_P2P_NET_CHUNKSIZE`` for pipelines of large dense models.

    2 MiB with PP above 1 and 70 billion parameters or more; Bridge leaves LoRA out.

    Why: the activations that such stages exchange over the network fill larger chunks.
    Fix: export it.
    """
    size = f.dense_parameters
    if f.parallelism.pp == 1 or size is None or f.recipe.peft is not None:
        return None
    hidden = f.recipe.model.hidden_size or 0
    if f.recipe.model.vocab_size is None and size < _LARGE <= size + 2 * _VOCABULARY * hidden:
        because = f"{size / 1e9:.1f} billion parameters without the embeddings, 2097152 from 70 with them"
        return info("env.NCCL_P2P_NET_CHUNKSIZE", because, fix="set model.vocab_size")
    if size < _LARGE:
        return None
    because = f"PP {f.parallelism.pp} of a dense model with {size / 1e9:.0f} billion parameters"
    return info("env.NCCL_P2P_NET_CHUNKSIZE", because, value=_CHUNK)


@rule("ENV005", source="megatron-bridge perf_recipes (0.6); megatron-core nccl_allocator.py")
def nvlink_sharp(f: Facts, s: State) -> Finding:
    """``NCCL_NVLS_ENABLE``: 1 with NCCL user buffers for DP, else 0 from Bridge 0.6.

    Why: NVLink SHARP pays with registered buffers; without them its kernels take SMs and memory.
    Fix: export it.
    """
    if f.recipe.ddp.nccl_ub:
        return info("env.NCCL_NVLS_ENABLE", "ddp.nccl_ub registers DP's buffers", value="1")
    if f.bridge_in(">=0.6.0"):
        return info("env.NCCL_NVLS_ENABLE", "DP's buffers are not registered", value="0")
    return None


@rule("ENV006", source="megatron-bridge scripts/performance/perf_plugins.py (0.5.1) and perf_recipes (0.6)")
def hybridep_domain(f: Facts, s: State) -> Iterable[Verdict]:
    """The NVLink domain that HybridEP works in.

    GPUs with a rack-wide domain: 72, MNNVL on, all EP ranks in one domain. Others: 8, MNNVL off, at most 8
    EP ranks in one. 128 tokens per combined chunk, from Bridge 0.4.

    Why: HybridEP cannot find the domain out by itself; a wrong number sends traffic over the network, or
    past the end of NVLink.
    Fix: export them, and again after changing ``expert_model_parallel_size``.
    """
    if f.flex_backend != "hybridep" or f.gpu is None or (f.parallelism.ep == 1 and f.bridge_in("<0.6.0")):
        return
    rack = f.gpu.nvlink_domain_size == 72 or f.gpu.generation == "rubin"
    ep = f.parallelism.ep
    if rack and ep > 72:
        return
    because = f"HybridEP on {f.gpu.name} with EP {ep}"
    values = {
        "NVLINK_DOMAIN_SIZE": "72" if rack else "8",
        "USE_MNNVL": "1" if rack else "0",
        "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": str(ep if rack else min(8, ep)),
    }
    if not f.bridge_in("<0.4.0"):
        values["NUM_OF_TOKENS_PER_CHUNK_COMBINE_API"] = "128"
    for name, value in values.items():
        yield info(f"env.{name}", because, value=value)


@rule("ENV007", source="megatron-bridge perf_recipes (0.6); torch ProcessGroupNCCL.hpp")
def record_streams(f: Facts, s: State) -> Finding:
    """``TORCH_NCCL_AVOID_RECORD_STREAMS``: 1 from Bridge 0.6, 0 with CUDA graphs of whole iterations.

    Why: with 1, torch holds references to a collective's tensors instead of marking their memory on the
    communication stream, which keeps it from being reused late. A graph of the whole iteration wants 0.
    Fix: export it.
    """
    name = "env.TORCH_NCCL_AVOID_RECORD_STREAMS"
    if f.full_iteration_graph:
        return info(name, "CUDA graphs capture whole iterations", value="0")
    if f.bridge_in(">=0.6.0"):
        return info(name, "communication memory is freed without waiting on the stream", value="1")
    return None


@rule(
    "ENV008",
    source="megatron-bridge perf_recipes (0.6); megatron-core transformer/cuda_graphs.py",
    bridge=">=0.6.0",
    megatron_lm=None,
)
def allocator(f: Facts, s: State) -> Iterable[Verdict]:
    """``PYTORCH_CUDA_ALLOC_CONF`` and ``NCCL_GRAPH_REGISTER``.

    Expandable segments and no registration of graph memory; both are left unset with NCCL user buffers.
    CUDA graphs of whole iterations reuse recorded streams besides.

    Why: expandable segments save memory, but NCCL cannot register them: a captured collective would touch
    memory that has moved.
    Fix: export both, or neither with ``ddp.nccl_ub``.
    """
    if f.recipe.ddp.nccl_ub:
        return
    conf = "expandable_segments:True"
    if f.full_iteration_graph:
        conf += ",graph_capture_record_stream_reuse:True"
    yield info("env.PYTORCH_CUDA_ALLOC_CONF", "segments that grow save memory", value=conf)
    yield info("env.NCCL_GRAPH_REGISTER", "NCCL must not register memory that expandable segments move", value="0")


@rule("ENV009", source="megatron-bridge perf_recipes/environment.py (0.6)", bridge=">=0.6.0", megatron_lm=None)
def high_priority(f: Facts, s: State) -> Finding:
    """``TORCH_NCCL_HIGH_PRIORITY=1``.

    Why: NCCL's kernels then get SMs before queued compute does, so that a collective starts when it can.
    Fix: export it.
    """
    return info("env.TORCH_NCCL_HIGH_PRIORITY", "collectives are scheduled before queued compute", value="1")


@rule("ENV010", source="megatron-bridge recipes/utils/determinism_utils.py; Megatron-LM training/determinism.py")
def determinism(f: Facts, s: State) -> Iterable[Verdict]:
    """The variables of deterministic mode.

    Why: NCCL's choice of algorithm, Transformer Engine's attention and cuBLAS's workspace each change the
    order of sums unless they are pinned.
    Fix: export them.
    """
    if not f.recipe.model.deterministic_mode:
        return
    because = "deterministic_mode is true"
    yield info("env.NCCL_ALGO", because, value="Ring")
    yield info("env.NVTE_ALLOW_NONDETERMINISTIC_ALGO", because, value="0")
    yield info("env.CUBLAS_WORKSPACE_CONFIG", because, value=":4096:8")
