"""Published and measured step times as cases: a recipe as any user would write it, and the seconds that its step took.

The folder has `vtrain_truth.jsonl.gz` (Megatron-DeepSpeed on A100, from vTrain, MIT) and `perf_summary.jsonl.gz` (the
performance summaries of Megatron-Bridge); see `validate_estimate.py` and `fit_cost.py`, which judge and fit with them.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

from bridge_cases import recipe_of, sizes_named

from overlapkit.cost.constants import Constants, load
from overlapkit.cost.estimate import estimate_of
from overlapkit.cost.interval import kind_of
from overlapkit.cost.result import Estimate
from overlapkit.cost.step import step_seconds, switches_of, work_of
from overlapkit.errors import RecipeError
from overlapkit.facts import Facts, derive
from overlapkit.plan import Plan
from overlapkit.resolver import plan as plan_of
from overlapkit.resolver import read_recipe
from overlapkit.volume.predict import Volume, predict

SINGLE, MULTI, BRIDGE = "vTrain single-node", "vTrain multi-node", "Megatron-Bridge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured step. ``model`` is what is held out together; ``flops_per_token`` None where none is published."""

    name: str
    source: str
    model: str
    gpu: str
    precision: str
    moe: bool
    seconds: float
    recipe: Mapping[str, Any]
    flops_per_token: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A case with all that does not depend on the constants."""

    case: Case
    facts: Facts
    plan: Plan
    volume: Volume

    def seconds(self, constants: Constants) -> float:
        """The predicted step, without what else an estimate says."""
        work = work_of(self.facts, self.plan, self.volume, constants)
        return step_seconds(work, switches_of(work, self.plan))

    def residual(self, constants: Constants) -> float:
        """The logarithm of predicted over measured."""
        return log(self.seconds(constants) / self.case.seconds)

    def estimate(self, constants: Constants) -> Estimate:
        return estimate_of(self.facts, self.plan, self.volume, constants=constants)

    @property
    def kind(self) -> str:
        """The kind of case that intervals are measured by."""
        return kind_of(work_of(self.facts, self.plan, self.volume, load()))


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            yield from map(json.loads, lines)
    except (OSError, ValueError) as error:
        sys.exit(f"{file}: {error}")


def vtrain_cases(folder: Path) -> list[Case]:
    return [vtrain_case(row) for row in read_lines(folder / "vtrain_truth.jsonl.gz")]


def bridge_cases(folder: Path) -> tuple[list[Case], list[str]]:
    """The cases, and the names of rows whose models are not described here."""
    cases, unknown = [], []
    for row in read_lines(folder / "perf_summary.jsonl.gz"):
        if sizes_named(row["model"]) is None:
            unknown.append(f"{row['release']} {row['model']} {row['gpu']} {row['precision']}")
        else:
            cases.append(bridge_case(row))
    return cases, unknown


def prepare(cases: Iterable[Case]) -> tuple[list[Prepared], dict[str, str]]:
    """The cases that are modelled, and why others are not by their name."""
    prepared, refused = [], {}
    for case in cases:
        try:
            facts = derive(read_recipe(case.recipe))
            plan = plan_of(facts)
            volume = predict(facts, plan, approximate=True)
            work_of(facts, plan, volume)
        except RecipeError as error:
            refused[case.name] = str(error)
        else:
            prepared.append(Prepared(case=case, facts=facts, plan=plan, volume=volume))
    return prepared, refused


def vtrain_case(row: Mapping[str, Any]) -> Case:
    layout = f"TP {row['tp']} PP {row['pp']} DP {row['dp']} MBS {row['mbs']} GBS {row['gbs']}"
    return Case(
        name=f"h {row['hidden']} L {row['layers']} {layout} seconds {row['iter_time_s']}",
        source=SINGLE if row["set"] == "single" else MULTI,
        model=f"h {row['hidden']} L {row['layers']}",
        gpu="a100",
        precision="fp16",
        moe=False,
        seconds=row["iter_time_s"],
        recipe=vtrain_recipe(row),
    )


def vtrain_recipe(row: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-DeepSpeed of 2021 in today's names: GPT in FP16, attention in single kernels, every layer recomputed,
    no sequence parallelism, no distributed optimizer, nothing overlapped; nodes of 8 GPUs with 4 NICs of 200 Gbit/s.
    """
    return {
        "cluster": {"gpu": "a100", "num_gpus": row["n_gpus"], "nic_gbps": 100},
        "software": {"framework": "megatron-lm", "megatron_core": "0.16.1"},
        "model": {
            "num_layers": row["layers"],
            "hidden_size": row["hidden"],
            "ffn_hidden_size": 4 * row["hidden"],
            "num_attention_heads": row["heads"],
            "seq_length": row["seq"],
            "vocab_size": 51200,
            "position_embedding_type": "learned_absolute",
            "max_position_embeddings": row["seq"],
            "normalization": "LayerNorm",
            "gated_linear_unit": False,
            "add_bias_linear": True,
            "attention_backend": "unfused",
            "fp16": True,
            "tensor_model_parallel_size": row["tp"],
            "pipeline_model_parallel_size": row["pp"],
            "sequence_parallel": False,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        "train": {"micro_batch_size": row["mbs"], "global_batch_size": row["gbs"]},
        "optimizer": {"use_distributed_optimizer": False},
        "ddp": {"overlap_grad_reduce": False, "overlap_param_gather": False, "grad_reduce_in_fp32": False},
    }


def bridge_case(row: Mapping[str, Any]) -> Case:
    recipe = recipe_of(row)
    layout = " ".join(f"{name.upper()} {row[name]}" for name in ("tp", "pp", "cp", "vp", "ep") if (row[name] or 1) > 1)
    run = f"{row['model']} {row['task']} {row['n_gpus']} x {row['gpu']} {row['precision']}"
    return Case(
        name=f"{row['release']} {run} GBS {row['gbs']} {layout}".rstrip(),
        source=BRIDGE,
        model=sizes_named(row["model"]) or row["model"],
        gpu=row["gpu"].lower(),
        precision=precision_of(row["precision"]),
        moe="num_moe_experts" in recipe["model"],
        seconds=row["step_time_s"],
        recipe=recipe,
        flops_per_token=row["flops_per_token_G"] * 1e9,
    )


def precision_of(label: str) -> str:
    """FP8-CS (per-tensor current scaling) and FP8 are one precision, MXFP8 and FP8-MX another."""
    return {"FP8-CS": "fp8", "FP8": "fp8", "FP8-MX": "mxfp8", "MXFP8": "mxfp8", "NVFP4": "fp4"}.get(label, "bf16")
