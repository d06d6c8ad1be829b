"""What the real Megatron-Core issued against what overlapkit.volume predicts: agree/total rows per version.

    python scripts/parity_volume.py [ORACLE ...] [--phases]

An oracle is a file of JSON lines (.gz or not) of the form of ``tests/oracles/collectives`` (its README says what a line
holds); without one that sample is used. A row is a (group, operation, type) of one run and rank, groups of one rank
aside: count and bytes must be equal, for data-dependent rows the counts. Rows that only one side has disagree. With
``--phases`` the rows of every phase of the step are compared too. Exits 1 when a row disagrees.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from overlapkit import volume

SAMPLE = Path(__file__).resolve().parent.parent / "tests" / "oracles" / "collectives"
Key = tuple[str, ...]
Moved = tuple[int, int]
# The recorded runs had attention of one rank's part alone: nothing of CP's own exchange.
_NOT_RECORDED = ("CONTEXT_PARALLEL_GROUP",)
# Where an overlap flag moves a call from one phase to another, the interleaved schedule issues it itself.
_ISSUED_BY_SCHEDULE = "step"

_MODEL = {
    "layers": "num_layers",
    "h": "hidden_size",
    "ffn": "ffn_hidden_size",
    "heads": "num_attention_heads",
    "kv": "num_query_groups",
    "vocab": "vocab_size",
    "seq": "seq_length",
    "swiglu": "gated_linear_unit",
    "tied": "share_embeddings_and_output_weights",
    "normalization": "normalization",
    "position_embedding": "position_embedding_type",
    "qk_layernorm": "qk_layernorm",
    "ce_fusion": "cross_entropy_loss_fusion",
    "calculate_per_token_loss": "calculate_per_token_loss",
    "variable_seq_lengths": "variable_seq_lengths",
    "tp": "tensor_model_parallel_size",
    "sp": "sequence_parallel",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "bf16": "bf16",
    "fp16": "fp16",
    "recompute_num_layers": "recompute_num_layers",
    "recompute_modules": "recompute_modules",
    "distribute_saved_activations": "distribute_saved_activations",
    "num_experts": "num_moe_experts",
    "topk": "moe_router_topk",
    "moe_ffn": "moe_ffn_hidden_size",
    "dispatcher": "moe_token_dispatcher_type",
    "moe_layer_freq": "moe_layer_freq",
    "aux_loss_coeff": "moe_aux_loss_coeff",
    "load_balancing": "moe_router_load_balancing_type",
    "capacity_factor": "moe_expert_capacity_factor",
    "pad_to_capacity": "moe_pad_expert_input_to_capacity",
    "shared_expert_ffn": "moe_shared_expert_intermediate_size",
    "expert_bias": "moe_router_enable_expert_bias",
}
_OF_EXPERTS = frozenset(name for name in _MODEL.values() if name.startswith(("moe_", "num_moe")))
_DDP = (
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "bucket_size",
    "grad_reduce_in_fp32",
    "average_in_collective",
    "pad_buckets_for_high_nccl_busbw",
)


def recipe_of(run: dict[str, Any]) -> dict[str, Any]:
    """A recorded run's configuration as a recipe: its layers are Megatron-Core's own, its vocabulary is final."""
    config = run["config"]
    model = {name: config[key] for key, name in _MODEL.items() if config[key] is not None}
    if config["num_experts"] is None:
        model = {name: value for name, value in model.items() if name not in _OF_EXPERTS}
    recompute = config["recompute"]
    if recompute:
        granularity, _, method = recompute.partition("-")
        model["recompute_granularity"] = granularity
        if method:
            model |= {"recompute_method": method, "recompute_num_layers": config["recompute_num_layers"] or 1}
    model |= {
        "add_bias_linear": config["add_bias"] and config["num_experts"] is None,
        "should_pad_vocab": False,
        "transformer_impl": "local",
        "expert_tensor_parallel_size": config["etp"] or config["tp"],  # the core's default; Bridge has another
        "overlap_p2p_comm": config["overlap_p2p"],
        "batch_p2p_comm": not config["overlap_p2p"],
    }
    model |= config.get("xcfg") or {}
    ddp = {name: config[name] for name in _DDP if config[name] is not None}
    ddp["num_distributed_optimizer_instances"] = config["dist_opt_instances"]
    optimizer = {name: config[name] for name in ("use_distributed_optimizer", "overlap_param_gather")}
    optimizer |= {"log_num_zeros_in_grad": config["log_num_zeros"], **(config.get("xopt") or {})}
    return {
        "cluster": {"gpu": "h100", "num_gpus": run["world"]},
        "software": {
            "megatron_bridge": "0.3.1" if run["megatron_core"] < "0.17" else "0.6.2",
            "megatron_core": run["megatron_core"],
        },
        "model": model,
        "train": {
            "micro_batch_size": config["mbs"],
            "global_batch_size": config["mbs"] * config["num_microbatches"] * config["dp"],
        },
        "ddp": ddp | (config.get("xddp") or {}),
        "optimizer": optimizer,
        "dist": {"align_grad_reduce": config["vp"] is not None},  # the recorder aligned the interleaved schedule alone
        "comm_overlap": None,
    }


def predicted(run: dict[str, Any], *, phases: bool = False) -> dict[Key, tuple[Moved, bool]]:
    """(group, operation, type), with the phase in front on request -> count and bytes, and whether they are exact."""
    found: dict[Key, tuple[Moved, bool]] = {}
    for row in volume(recipe_of(run)).stages[run["pp_rank"]].rows:
        key = (row.group, row.op, row.dtype)
        if row.group in _NOT_RECORDED:
            continue
        if not phases:
            found[key] = ((row.count, row.message_bytes), row.exact)
            continue
        for share in row.phases:
            found[share.phase, row.group, row.op, row.dtype] = ((share.count, share.message_bytes), row.exact)
    return found


def recorded(run: dict[str, Any], *, phases: bool = False) -> dict[Key, Moved]:
    """The same of what was recorded, without groups of one rank."""
    sizes = {row["group"]: row["nranks"] for row in run["totals"]}
    if not phases:
        return {
            (row["group"], row["op"], row["dtype"]): (row["count"], row["bytes"])
            for row in run["totals"]
            if row["nranks"] > 1
        }
    return {tuple(row[:4]): (row[4], row[5]) for row in run["by_phase"] if sizes[row[1]] > 1}


def differences(run: dict[str, Any], *, phases: bool = False) -> tuple[int, list[str]]:
    """(rows compared, those that disagree, in words)."""
    ours, theirs = predicted(run, phases=phases), recorded(run, phases=phases)
    wrong = []
    for key in sorted(ours.keys() | theirs.keys()):
        (count, moved), exact = ours.get(key, ((0, 0), True))
        real_count, real_bytes = theirs.get(key, (0, 0))
        if count != real_count or (exact and moved != real_bytes):
            told = f"predicted {count} × {moved:,} B, recorded {real_count} × {real_bytes:,} B"
            wrong.append(f"{run['name']} rank {run['rank']}: {' '.join(key)}: {told}")
    return len(ours.keys() | theirs.keys()), wrong


def runs_of(path: Path) -> Iterator[dict[str, Any]]:
    """The runs of an oracle file."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines)


def main(arguments: Sequence[str]) -> int:
    phases = "--phases" in arguments
    paths = [Path(each) for each in arguments if each != "--phases"] or sorted(SAMPLE.glob("*.jsonl.gz"))
    totals: dict[str, list[int]] = {}
    for path in paths:
        for run in runs_of(path):
            for by_phase in (False, True) if phases else (False,):
                if by_phase and any(row[0] == _ISSUED_BY_SCHEDULE for row in run["by_phase"]):
                    continue
                count, wrong = differences(run, phases=by_phase)
                score = totals.setdefault(f"{run['megatron_core']}{', by phase' if by_phase else ''}", [0, 0, 0])
                for index, more in enumerate((count - len(wrong), count, 1)):
                    score[index] += more
                sys.stderr.write("".join(f"{line}\n" for line in wrong))
    for name, (agree, total, runs) in sorted(totals.items()):
        print(f"{agree}/{total} rows of {runs} runs  megatron-core {name}")
    return 0 if totals and all(agree == total for agree, total, _ in totals.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
