"""ENV: the recipe's own ``env_vars`` against what the plan needs.

``env_vars``, even ``{}``, is the environment of the process. Where it is absent the plan's is taken to be
exported, and nothing here speaks.
"""

from __future__ import annotations

from collections.abc import Iterable

from overlapkit.errors import printable
from overlapkit.facts import Facts
from overlapkit.rules.env import CONNECTIONS, needs_order
from overlapkit.rules.ep import EP_OVERLAP
from overlapkit.rules.registry import (
    BRIDGE,
    MEGATRON_CORE,
    MEGATRON_LM,
    Finding,
    State,
    Verdict,
    error,
    info,
    rule,
    warning,
)

_SUBJECT = f"env_vars.{CONNECTIONS}"
_HYBRIDEP = ("NVLINK_DOMAIN_SIZE", "USE_MNNVL", "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN")
_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")
_DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",), "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8")}


def _said(f: Facts, name: str) -> str | None:
    return None if f.recipe.env_vars is None else f.recipe.env_vars.get(name)


def _wins(f: Facts) -> str:
    """Which of two values reaches the process."""
    if f.bridge_in(">=0.6.0"):
        return "what the launcher exports wins over env_vars"
    return "what the launcher exports is what counts"


@rule("ENV011", source="Megatron-LM training/arguments.py validate_args", bridge=None)
def asserted_connection(f: Facts, s: State) -> Finding:
    """Megatron-LM asserts ``CUDA_DEVICE_MAX_CONNECTIONS=1``.

    For TP or CP above 1 before Blackwell, without FSDP and without EP overlap. With core 0.12 for TP above 1
    on every GPU (a slip of operator precedence, mended in 0.13).

    Why: with one queue a collective starts before the GEMM beside it.
    Fix: export it before the launch.
    """
    if f.recipe.env_vars is None or _said(f, CONNECTIONS) == "1" or f.fsdp or f.torch_fsdp2 or s[EP_OVERLAP]:
        return None
    on_every_gpu = f.core_in("<0.13.0") and f.parallelism.tp > 1
    if not on_every_gpu and not needs_order(f):
        return None
    said = _said(f, CONNECTIONS)
    return error(
        _SUBJECT,
        f"{'not set' if said is None else f'{printable(said)} is set'}, and Megatron-LM asserts 1 for TP or CP above 1",
        fix=f"set env_vars.{CONNECTIONS}=1",
        by=MEGATRON_LM,
        at="validation",
        requested=said,
        value="1",
    )


@rule("ENV012", source="megatron-bridge recipes/run_plugins.py and perf_recipes; Megatron-LM issues 1468 and 6311")
def connections_differ(f: Facts, s: State) -> Finding:
    """The recipe's ``CUDA_DEVICE_MAX_CONNECTIONS`` is not what the plan needs.

    Unset means 8, CUDA's default.

    Why: 1 without TP or CP serialises data-parallel overlap; 1 with EP overlap halves its gain; more than 1
    with TP or CP before Blackwell lets collectives start late. The process environment wins over Bridge's
    ``env_vars``.
    Fix: set the plan's value, or remove the line.
    """
    needed = s.get(f"env.{CONNECTIONS}")
    said = _said(f, CONNECTIONS)
    effective = said if said is not None else "8"
    if f.recipe.env_vars is None or needed is None or effective == needed:
        return None
    if f.fsdp or f.torch_fsdp2:
        return None if effective == "1" else info(_SUBJECT, f"the plan takes {needed}", requested=said, value=needed)
    if s[EP_OVERLAP] and needs_order(f):
        gains = {"1": "1 favours TP and CP", "32": "32 favours the EP all-to-all"}.get(effective, "ENV002 names both")
        return info(_SUBJECT, f"{gains}, the plan takes {needed}; {_wins(f)}", requested=said, value=needed)
    if f.megatron_lm and needed == "1":
        return None  # ENV011
    cost = _cost(f, s, effective, needed)
    fix = f"set env_vars.{CONNECTIONS}={needed}"
    if f.megatron_lm and needs_order(f):  # which asserts 1 (ENV011): it is UCC that wants another (ENV018)
        fix = "set model.pipeline_model_parallel_comm_backend=nccl"
    if cost is None:
        return info(_SUBJECT, f"the plan takes {needed}; {_wins(f)}", requested=said, value=needed, fix=fix)
    what = "not set, so 8" if said is None else printable(said)
    return warning(_SUBJECT, f"{what}: {cost}; {_wins(f)}", requested=said, value=needed, fix=fix)


def _cost(f: Facts, s: State, effective: str, needed: str) -> str | None:
    """What the wrong number costs; None where it hardly does."""
    p = f.parallelism
    if effective == "1":
        if s[EP_OVERLAP]:
            return "1 serialises the EP all-to-all against compute, about +4 % instead of +8 %"
        if p.tp == 1 and p.cp == 1:
            return "without TP and CP 1 is not needed, and it serialises DP's collectives against compute"
        return "1 serialises every collective against compute, which this GPU does not need"
    if needed == "1":
        return "with more than 1 a TP or CP collective may start after the GEMM that should hide it"
    return None


@rule("ENV013", source="the plan's env")
def other_variables(f: Facts, s: State) -> Finding:
    """Other variables of the recipe that differ from the plan's, or that it lacks.

    Why: they shift SMs, memory or bandwidth between compute and communication; the job runs either way.
    Fix: take the plan's values unless yours were measured.
    """
    given = f.recipe.env_vars
    if given is None:
        return None
    needed = {name[4:]: value for name, value in s.items() if name.startswith("env.") and value is not None}
    needed.pop(CONNECTIONS, None)
    for name in ("UB_SKIPMC", *_HYBRIDEP):
        needed.pop(name, None)
    findings = [
        info(f"env_vars.{name}", f"the plan takes {value}; {_wins(f)}", requested=given[name], value=value)
        for name, value in needed.items()
        if name in given and given[name] != value
    ]
    missing = [f"{name}={value}" for name, value in needed.items() if name not in given]
    if missing:
        findings.append(info("env_vars", f"not among them: {', '.join(missing)}"))
    return findings


@rule("ENV017", source="megatron-bridge issues 5365 and 6062, perf_recipes (0.6)")
def hybridep_domain_differs(f: Facts, s: State) -> Iterable[Verdict]:
    """HybridEP's domain in ``env_vars`` is not the one of this GPU and EP.

    A recipe's variables stay behind when an override changes ``expert_model_parallel_size`` or the GPU.

    Why: with too small a number traffic within the NVLink domain takes the network; with too large a one HybridEP
    writes past the domain and hangs or crashes.
    Fix: set the plan's values.
    """
    given = f.recipe.env_vars
    if given is None:
        return
    for name in _HYBRIDEP:
        needed = s.get(f"env.{name}")
        said = given.get(name)
        if needed is None or said == needed:
            continue
        because = "not set" if said is None else printable(said)
        where = f"{f.gpu.name if f.gpu else 'this GPU'} with EP {f.parallelism.ep}"
        yield warning(
            f"env_vars.{name}",
            f"{because}, {where} needs {needed}: traffic leaves NVLink, or goes past its end; {_wins(f)}",
            requested=said,
            value=needed,
            fix=f"set env_vars.{name}={needed}",
        )


@rule("ENV018", source="megatron-core parallel_state.py initialize_model_parallel")
def ucc_needs_connections(f: Facts, s: State) -> Finding:
    """UCC for pipeline messages and ``CUDA_DEVICE_MAX_CONNECTIONS=1``.

    Megatron-Core looks at PP 1 too.

    Why: UCC's kernels would wait behind compute, so Megatron-Core asserts another number. Megatron-LM asserts 1 for
    TP or CP before Blackwell, so that both cannot be met.
    Fix: remove ``model.pipeline_model_parallel_comm_backend``.
    """
    if f.recipe.model.pipeline_model_parallel_comm_backend != "ucc":
        return None
    asserted = f.megatron_lm and needs_order(f) and not (f.fsdp or f.torch_fsdp2 or s[EP_OVERLAP])
    if _said(f, CONNECTIONS) != "1" and not asserted:
        return None
    because = f"ucc excludes {CONNECTIONS}=1" + (", which Megatron-LM asserts for TP or CP" if asserted else "")
    fix = "set model.pipeline_model_parallel_comm_backend=nccl"
    return error(
        "model.pipeline_model_parallel_comm_backend",
        because,
        fix=fix if asserted else f"{fix}, or env_vars.{CONNECTIONS}=8",
        by=MEGATRON_CORE,
        at="initialize_model_parallel",
        requested="ucc",
        value="ucc",
    )


@rule(
    "ENV014",
    source="megatron-bridge training/config.py; Megatron-LM training/arguments.py and determinism.py",
)
def deterministic_algorithm(f: Facts, s: State) -> Finding:
    """Deterministic mode needs ``NCCL_ALGO``.

    Bridge and Megatron-LM want Tree, Ring, CollnetDirect, CollnetChain or ^NVLS in the environment. From
    core 0.19 Megatron-LM sets Ring itself where it is unset, takes a list of them, and no longer takes Tree.

    Why: NCCL would otherwise choose by message size and topology.
    Fix: export ``NCCL_ALGO=Ring``.
    """
    if not f.recipe.model.deterministic_mode or f.recipe.env_vars is None:
        return None
    said = _said(f, "NCCL_ALGO")
    if _fills_in(f):
        tokens = [] if said is None else [token.strip() for token in said.split(",") if token.strip()]
        if said is None or (tokens and all(token in _ALGORITHMS[1:] for token in tokens)):
            return None
    elif said in _ALGORITHMS:
        return None
    return error(
        "env_vars.NCCL_ALGO",
        f"deterministic_mode needs a fixed algorithm, this is {'not set' if said is None else printable(said)}",
        fix="set env_vars.NCCL_ALGO=Ring",
        by=MEGATRON_LM if f.megatron_lm else BRIDGE,
        at="validation",
        requested=said,
        value="Ring",
    )


def _fills_in(f: Facts) -> bool:
    """Megatron-LM from core 0.19 sets what deterministic mode lacks and refuses what contradicts it."""
    return f.megatron_lm and f.core_in(">=0.19.0")


@rule("ENV016", source="megatron-core extensions/transformer_engine.py; Megatron-LM training/determinism.py")
def deterministic_kernels(f: Facts, s: State) -> Finding:
    """Deterministic mode needs ``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0``.

    Megatron-Core raises when it builds Transformer Engine's attention. From core 0.19 Megatron-LM sets it
    itself where it is unset and refuses another value, as it does ``CUBLAS_WORKSPACE_CONFIG`` other than
    :4096:8 and :16:8.

    Why: Transformer Engine's attention and cuBLAS take faster algorithms whose sums have no fixed order.
    Fix: export ``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0``.
    """
    model, given = f.recipe.model, f.recipe.env_vars
    if not model.deterministic_mode or given is None:
        return None
    if _fills_in(f):
        return [
            _not_deterministic(name, given[name], accepted[0], MEGATRON_LM, "validation")
            for name, accepted in _DETERMINISTIC.items()
            if name in given and given[name] not in accepted
        ]
    if f.versions.transformer_engine is None or model.transformer_impl not in (None, "transformer_engine"):
        return None
    name = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    said = given.get(name)
    return None if said == "0" else _not_deterministic(name, said, "0", MEGATRON_CORE, "construction")


def _not_deterministic(name: str, said: str | None, needed: str, by: str, at: str) -> Verdict:
    return error(
        f"env_vars.{name}",
        f"deterministic_mode needs {needed}, this is {'not set' if said is None else printable(said)}",
        fix=f"set env_vars.{name}={needed}",
        by=by,
        at=at,
        requested=said,
        value=needed,
    )


@rule("ENV015", source="megatron-core transformer/cuda_graphs.py; Megatron-LM training/arguments.py", core=">=0.15.0")
def graph_registration(f: Facts, s: State) -> Finding:
    """CUDA graphs of layers with expandable segments need ``NCCL_GRAPH_REGISTER=0``.

    Transformer Engine's graphs on every GPU; Megatron-Core's own (``local``) before Blackwell, up to core
    0.18. Core 0.15 takes no expandable segments at all.

    Why: NCCL would register graph memory that the allocator can move; Megatron-Core asserts it.
    Fix: export ``NCCL_GRAPH_REGISTER=0``.
    """
    conf = _said(f, "PYTORCH_CUDA_ALLOC_CONF")
    if f.graph_impl == "none" or "expandable_segments:True" not in (conf or ""):
        return None
    if f.core_in("<0.16.0"):
        return error(
            "env_vars.PYTORCH_CUDA_ALLOC_CONF",
            f"CUDA graphs with megatron-core {f.versions.megatron_core} exclude expandable segments",
            fix="take expandable_segments:True out of env_vars.PYTORCH_CUDA_ALLOC_CONF",
            by=MEGATRON_LM if f.megatron_lm else MEGATRON_CORE,
            at="validation" if f.megatron_lm else "construction" if f.graph_impl == "local" else "first_forward",
            requested=conf,
        )
    said = _said(f, "NCCL_GRAPH_REGISTER")
    if said == "0" or not (f.graph_impl == "transformer_engine" or _core_checks_its_own(f)):
        return None
    in_arguments = f.megatron_lm and f.graph_impl == "transformer_engine"
    whose = "Transformer Engine's" if f.graph_impl == "transformer_engine" else "Megatron-Core's"
    return error(
        "env_vars.NCCL_GRAPH_REGISTER",
        f"{whose} CUDA graphs with expandable segments need 0",
        fix="set env_vars.NCCL_GRAPH_REGISTER=0",
        by=MEGATRON_LM if in_arguments else MEGATRON_CORE,
        at="validation" if in_arguments else "construction" if f.graph_impl == "local" else "first_forward",
        requested=said,
        value="0",
    )


def _core_checks_its_own(f: Facts) -> bool:
    """Megatron-Core's own graphs of layers make the check before Blackwell, up to 0.18."""
    own = f.graph_impl == "local" and not f.full_iteration_graph
    return own and f.core_in("<0.19.0") and f.gpu is not None and not f.gpu.blackwell_or_newer
