"""What the real Megatron-Bridge did against what overlapkit resolves: agree/total per oracle.

    python scripts/parity.py [FOLDER]

FOLDER holds oracle files of the form of ``tests/oracles`` (its README says what they are); without it
those are used. Exits 1 when an oracle agrees less than it must.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlapkit import resolve
from overlapkit.plan import Plan
from overlapkit.presets import load_preset

ORACLES = Path(__file__).resolve().parent.parent / "tests" / "oracles"
GPU_OF_MAJOR = {8: "a100", 9: "h100", 10: "b200"}
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
MARGINS = ("NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN")
DOMAIN = (
    "NVLINK_DOMAIN_SIZE",
    "USE_MNNVL",
    "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN",
    "NUM_OF_TOKENS_PER_CHUNK_COMBINE_API",
)


@dataclass
class Score:
    """How often one thing agreed; ``misses`` says where it did not."""

    name: str
    may_miss: int = 0
    agree: int = 0
    total: int = 0
    misses: list[str] = field(default_factory=list)

    def count(self, agrees: bool, where: str) -> None:
        self.total += 1
        self.agree += agrees
        if not agrees:
            self.misses.append(where)

    @property
    def passes(self) -> bool:
        return self.total > 0 and self.total - self.agree <= self.may_miss


def read(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


# --- the set-up of communication overlap ----------------------------------------------------------

_MODEL_FIELDS = {
    "tp": "tensor_model_parallel_size",
    "sp": "sequence_parallel",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dispatcher": "moe_token_dispatcher_type",
    "model_tp_comm_overlap": "tp_comm_overlap",
    "model_overlap_moe": "overlap_moe_expert_parallel_comm",
    "model_delay_wgrad": "delay_wgrad_compute",
    "model_overlap_p2p": "overlap_p2p_comm",
    "model_batch_p2p": "batch_p2p_comm",
}
_SAME_NAME = (
    "num_moe_experts bf16 fp16 recompute_granularity recompute_method recompute_num_layers "
    "recompute_modules moe_shared_expert_overlap moe_shared_expert_intermediate_size mtp_num_layers "
    "gradient_accumulation_fusion cuda_graph_modules cuda_graph_impl add_bias_linear add_qkv_bias "
)
_MODEL_FIELDS |= {name: name for name in _SAME_NAME.split()}
_DDP_FIELDS = {
    "ddp_dist_opt": "use_distributed_optimizer",
    "ddp_overlap_grad_reduce": "overlap_grad_reduce",
    "ddp_overlap_param_gather": "overlap_param_gather",
    "ddp_align_param_gather": "align_param_gather",
    "ddp_bucket_size": "bucket_size",
}
_OPTIMIZER_FIELDS = {
    "opt_dist_opt": "use_distributed_optimizer",
    "opt_overlap_param_gather": "overlap_param_gather",
    "opt_overlap_pg_with_step": "overlap_param_gather_with_optimizer_step",
}
_OVERLAP_FIELDS = {
    "u_tp_comm_overlap": "tp_comm_overlap",
    "u_tp_comm_overlap_cfg": "tp_comm_overlap_cfg",
    "u_bootstrap": "tp_comm_bootstrap_backend",
    "u_overlap_p2p_comm": "overlap_p2p_comm",
    "u_batch_p2p_comm": "batch_p2p_comm",
    "u_overlap_grad_reduce": "overlap_grad_reduce",
    "u_overlap_param_gather": "overlap_param_gather",
    "u_overlap_pg_with_step": "overlap_param_gather_with_optimizer_step",
    "u_align_param_gather": "align_param_gather",
    "u_bucket_size": "bucket_size",
    "u_defer_embedding_wgrad": "defer_embedding_wgrad_compute",
    "u_wgrad_deferral_limit": "wgrad_deferral_limit",
    "u_overlap_moe": "overlap_moe_expert_parallel_comm",
    "u_delay_wgrad": "delay_wgrad_compute",
}


def gating_recipe(given: dict[str, Any], version: str) -> dict[str, Any]:
    """The recipe of a case; ``given`` holds every input, defaults included."""

    def section(names: dict[str, str]) -> dict[str, Any]:
        return {name: given[key] for key, name in names.items()}

    gpus = given["tp"] * given["pp"] * given["cp"] * given["dp"]
    return {
        "cluster": {"gpu": GPU_OF_MAJOR[given["cc"]], "num_gpus": gpus},
        "software": {
            "framework": "megatron-bridge",
            "megatron_bridge": version,
            "transformer_engine": given["te_version"] if given["have_te"] else None,
        },
        "model": section(_MODEL_FIELDS),
        "ddp": section(_DDP_FIELDS),
        "optimizer": section(_OPTIMIZER_FIELDS),
        "comm_overlap": section(_OVERLAP_FIELDS),
    }


def gating(path: Path) -> list[Score]:
    cases = read(path)
    header = next(cases)
    version = header["v"].lstrip("v")
    score = Score(f"gating {version}")
    for case in cases:
        given = {**header["defaults"], **case["in"]}
        if given["dp"] is None or (given["u_delay_wgrad"] and not given["have_te"]):
            continue
        plan = resolve(gating_recipe(given, version))
        refused = any(d.severity == "error" and d.raised_by == "megatron-bridge" for d in plan.decisions)
        expected = case["out"] is None
        if refused != expected:
            score.count(False, f"case {case['id']}: refused {refused}, Bridge {expected}")
            continue
        wrong = [] if expected else _wrong_settings(plan, dict(zip(header["out_fields"], case["out"], strict=True)))
        score.count(not wrong, f"case {case['id']}: {wrong}")
    return [score]


def _wrong_settings(plan: Plan, out: dict[str, Any]) -> list[str]:
    wrong = []
    for name, expected in out.items():
        if name not in plan.settings:
            continue
        mine = plan.settings[name]
        if name == "model.tp_comm_overlap_cfg":
            if not _same_preset(mine, expected):
                wrong.append(name)
        elif mine != expected:
            wrong.append(f"{name} {mine} != {expected}")
    return wrong


def _same_preset(mine: Any, expected: Any) -> bool:
    """Equal by content, fp8_buf aside; an object that was merely left there counts as none."""
    if expected is None or expected[0] == "raw":
        return mine is None
    if mine is None:
        return False
    theirs = load_preset(expected[1]).userbuffers
    return bool(_without_fp8_buf(mine) == _without_fp8_buf(theirs))


def _without_fp8_buf(userbuffers: Any) -> Any:
    return {layer: {k: v for k, v in entry.items() if k != "fp8_buf"} for layer, entry in userbuffers.items()}


# --- the plugins that set the environment -----------------------------------------------------------

_PLUGIN_FIELDS = {
    "tp_size",
    "cp_size",
    "pp_size",
    "num_gpus",
    "gpu_sm100_or_newer",
    "moe_flex_dispatcher_backend",
    "a2a_overlap",
}


def environment_plugin(path: Path) -> list[Score]:
    library, performance = Score("environment, library plugin 0.5.1"), Score("environment, performance rule")
    for case in read(path):
        kind, given = case["kind"], case.get("in", {})
        if kind == "lib":
            if set(given) != _PLUGIN_FIELDS or given["num_gpus"] % (
                given["tp_size"] * given["cp_size"] * given["pp_size"]
            ):
                continue
            env = dict(resolve(library_recipe(given)).env)
            library.count(env == case["env"], f"{given}: {env} != {case['env']}")
        elif kind.startswith("perf"):
            recipe = performance_recipe(case)
            env = dict(resolve(recipe).env)
            names = (CONNECTIONS, *MARGINS, *DOMAIN)
            wrong = [n for n in names if env.get(n) != case["env"].get(n)]
            performance.count(
                not wrong, f"{kind} {given} {case.get('wc')}: {[(n, env.get(n), case['env'].get(n)) for n in wrong]}"
            )
    return [library, performance]


def library_recipe(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "cluster": {"gpu": "b200" if given["gpu_sm100_or_newer"] else "h100", "num_gpus": given["num_gpus"]},
        "software": {"megatron_bridge": "0.5.1"},
        "model": {
            "tensor_model_parallel_size": given["tp_size"],
            "context_parallel_size": given["cp_size"],
            "pipeline_model_parallel_size": given["pp_size"],
            "moe_flex_dispatcher_backend": given["moe_flex_dispatcher_backend"],
        },
        "comm_overlap": {"overlap_moe_expert_parallel_comm": given["a2a_overlap"]},
    }


def performance_recipe(case: dict[str, Any]) -> dict[str, Any]:
    """The performance plugin's workload as a recipe; its rule is the one that recipes carry from Bridge 0.6."""
    given = case["in"]
    workload = {**given.get("wc", {}), **case.get("wc", {})}
    tp = workload.get("tensor_model_parallel_size") or 1
    pp = workload.get("pipeline_model_parallel_size") or 1
    cp = workload.get("context_parallel_size") or 1
    a2a = given.get("moe_a2a_overlap", False)
    return {
        "cluster": {"gpu": given["gpu"], "num_gpus": workload.get("num_gpus") or tp * pp * cp},
        "software": {"megatron_bridge": "0.6.2"},
        "model": {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "context_parallel_size": cp,
            "expert_model_parallel_size": workload.get("expert_model_parallel_size") or 1,
            "moe_flex_dispatcher_backend": workload.get("moe_flex_dispatcher_backend"),
        },
        "comm_overlap": {"overlap_moe_expert_parallel_comm": workload.get("moe_a2a_overlap") if a2a is None else a2a},
    }


# --- the recipes of 0.6.2 --------------------------------------------------------------------------

_RESOLVED = {
    "tp_comm_overlap": "model.tp_comm_overlap",
    "tp_comm_bootstrap_backend": "model.tp_comm_bootstrap_backend",
    "overlap_p2p_comm": "model.overlap_p2p_comm",
    "batch_p2p_comm": "model.batch_p2p_comm",
    "defer_embedding_wgrad_compute": "model.defer_embedding_wgrad_compute",
    "wgrad_deferral_limit": "model.wgrad_deferral_limit",
    "overlap_moe_expert_parallel_comm": "model.overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute": "model.delay_wgrad_compute",
    "opt.overlap_param_gather": "optimizer.overlap_param_gather",
    "opt.overlap_param_gather_with_optimizer_step": "optimizer.overlap_param_gather_with_optimizer_step",
    "ddp.overlap_grad_reduce": "ddp.overlap_grad_reduce",
    "ddp.overlap_param_gather": "ddp.overlap_param_gather",
    "ddp.align_param_gather": "ddp.align_param_gather",
    "ddp.bucket_size": "ddp.bucket_size",
    "ddp.delay_wgrad_compute": "ddp.delay_wgrad_compute",
}
# Errors that the recipes really have: an EP that does not fit, a batch that does not divide.
_REAL_ERRORS = {"EP023", "CFG005"}
# Errors of single recipes, each with its reason.
_ARGUED = {
    # recipes/glm/h100/glm45.py sets TP 2, experts and sequence_parallel=False: megatron-core 0.19.2 raises in
    # MoELayer.forward, transformer/moe/moe_layer.py:627.
    "glm45_355b_sft_128gpu_h100_bf16_config": "EP025",
    # recipes/glm/h100/glm5.py sets microbatch_group_size_per_vp_stage=16, which the recorded facts leave out;
    # without it the 16 microbatches are grouped by PP 13 and the schedule raises.
    "glm52_sft_416gpu_h100_bf16_config": "PP008",
}
# Recipes "with Blackwell MXFP8", as their docstrings say, that stand among those of H100: it has no MXFP8.
_ON_BLACKWELL = ("_h100_fp8mx_config", "CFG015")


def bridge_recipes(path: Path) -> list[Score]:
    version = path.name.split("_v")[1].removesuffix(".jsonl.gz")
    settings = Score(f"recipes {version}, resolved settings")
    connections = Score(f"recipes {version}, connections")
    margins = Score(f"recipes {version}, margins", may_miss=2)
    errors = Score(f"recipes {version}, no false error")
    for case in read(path):
        if not case.get("num_gpus"):
            continue
        plan = resolve(bridge_recipe(case, version))
        suffix, code = _ON_BLACKWELL
        known = _REAL_ERRORS | {code if case["name"].endswith(suffix) else _ARGUED.get(case["name"], "")}
        found = sorted({d.code for d in plan.decisions if d.severity == "error"} - known)
        errors.count(not found, f"{case['name']}: {found}")
        if case.get("resolved"):
            wrong = [
                f"{name} {plan.settings[mine]} != {case['resolved'][name]}"
                for name, mine in _RESOLVED.items()
                if plan.settings[mine] != case["resolved"][name]
            ]
            settings.count(not wrong, f"{case['name']}: {wrong}")
        env = {name: str(value) for name, value in (case.get("env") or {}).items()}
        if CONNECTIONS in env:
            mine = plan.env.get(CONNECTIONS)
            connections.count(mine == env[CONNECTIONS], f"{case['name']}: {mine} != {env[CONNECTIONS]}")
        if MARGINS[0] in env:
            agrees = all(plan.env.get(name) == env.get(name) for name in MARGINS)
            margins.count(agrees, f"{case['name']}: {plan.env.get(MARGINS[0])} != {env[MARGINS[0]]}")
    return [settings, connections, margins, errors]


def bridge_recipe(case: dict[str, Any], version: str) -> dict[str, Any]:
    overlap = case["comm_overlap"]
    if overlap is not None:
        overlap = {"tp_comm_overlap_cfg": None, **overlap}
    return {
        "cluster": {"gpu": case["gpu"], "num_gpus": case["num_gpus"]},
        "software": {"framework": "megatron-bridge", "megatron_bridge": version},
        "model": case["m"],
        "ddp": case["ddp"],
        "optimizer": case["opt"],
        "dist": case["dist"],
        "train": {"micro_batch_size": case["train"]["mbs"], "global_batch_size": case["train"]["gbs"]},
        "mixed_precision": case["mixed_precision"],
        "comm_overlap": overlap,
        "env_vars": case.get("env"),
    }


READERS = {"gating": gating, "env_plugin": environment_plugin, "recipes": bridge_recipes}


def main(folder: Path) -> int:
    scores = []
    for path in sorted(folder.glob("*.jsonl.gz")):
        for start, reader in READERS.items():
            if path.name.startswith(start):
                scores += reader(path)
    for score in scores:
        allowed = f" (may miss {score.may_miss})" if score.may_miss else ""
        print(f"{score.agree:5d}/{score.total:<5d} {score.name}{allowed}{'' if score.passes else '   DISAGREES'}")
    for score in scores:
        if not score.passes:
            for miss in score.misses[:5]:
                print(f"  {score.name}: {miss}", file=sys.stderr)
    return 0 if scores and all(score.passes for score in scores) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ORACLES))
