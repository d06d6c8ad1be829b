"""What `validate_estimate.py` judges beside step times: collectives, the ranking of layouts, and what overlaps save."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import build_collective_curves as curves
from bridge_cases import SIZES

from overlapkit.cost.constants import Constants
from overlapkit.cost.estimate import estimate_of
from overlapkit.cost.result import Estimate
from overlapkit.facts import derive
from overlapkit.resolver import plan as plan_of
from overlapkit.resolver import read_recipe

if TYPE_CHECKING:
    from cost_truth import Prepared


@dataclass(frozen=True, slots=True)
class Finding:
    """A figure in percent with its limit, if it has one; ``detail`` says what it is made of."""

    name: str
    percent: float | None
    limit: float | None = None
    detail: str = ""

    @property
    def held(self) -> bool:
        return self.limit is None or (self.percent is not None and self.percent <= self.limit)

    def __str__(self) -> str:
        figure = "not judged" if self.percent is None else f"{self.percent:.1f} %"
        limit = "" if self.limit is None else f", at most {self.limit:g}: {'held' if self.held else '**missed**'}"
        return f"- {self.name}: {figure}{limit}{f' ({self.detail})' if self.detail else ''}"


def collective_errors(folder: Path, package: Path | None) -> Iterator[Finding]:
    """The table's points of 1 MiB and more, each with curves built from the package without it."""
    judged = curves.read_table(folder)
    try:
        with tempfile.TemporaryDirectory() as place:
            points = curves.read_package(package or curves._download(Path(place)))
    except (subprocess.CalledProcessError, StopIteration):
        yield Finding("collectives", None, None, "aiconfigurator-core is not at hand")
        return
    errors = [abs(e.relative) for e in curves.leaving_one_out(points, judged) if e.log2_bytes >= curves.MIB]
    line = [abs(e.relative) for e in curves.interpolating(points, judged) if e.log2_bytes >= curves.MIB]
    detail = f"{len(errors)} points; a straight line between their neighbours: {100 * fmean(line):.1f}"
    yield Finding("collectives of 1 MiB and more, one point left out", 100 * fmean(errors), 3.0, detail)


def ranking(cases: Sequence[Prepared], constants: Constants) -> Iterator[Finding]:
    """How much slower than the fastest layout the one is that is predicted to be, over the models."""
    models = sorted({case.case.model for case in cases})
    regrets, random = [], []
    for model in models:
        members = [case for case in cases if case.case.model == model]
        fastest = min(case.case.seconds for case in members)
        chosen = min(members, key=lambda case: case.seconds(constants))
        regrets.append(chosen.case.seconds / fastest - 1)
        random.append(fmean(case.case.seconds for case in members) / fastest - 1)
    detail = ", ".join(f"{model} {100 * regret:.1f}" for model, regret in zip(models, regrets, strict=True))
    detail += f"; a layout at random: {100 * fmean(random):.0f}"
    yield Finding("the layout predicted to be fastest, over the fastest measured", 100 * fmean(regrets), 2.0, detail)


def savings(constants: Constants, without_qwen3_30b: Constants) -> Iterator[Finding]:
    """What overlaps save, where somebody measured it; the second constants were fitted without any Qwen3-30B-A3B."""
    yield _qwen3_32b(constants)
    yield from _expert_overlap(without_qwen3_30b)
    yield from _tp_overlap(constants)


def _estimate(recipe: Mapping[str, Any], constants: Constants) -> Estimate:
    facts = derive(read_recipe(recipe))
    return estimate_of(facts, plan_of(facts), constants=constants)


def _qwen3_32b(constants: Constants) -> Finding:
    """Megatron-LM issue 2662: about 43 s a step, of which userbuffers saved less than 2."""
    sizes = {"num_layers": 64, "hidden_size": 5120, "ffn_hidden_size": 25600, "num_attention_heads": 64}
    groups = {"num_query_groups": 8, "kv_channels": 128, "qk_layernorm": True, "vocab_size": 151936}
    recipe = _dense({**sizes, **groups}, gpu="h20", gpus=8, tp=8, pp=1, seq=16384, batch=16)
    saved = _estimate(recipe, constants).saves["tp_comm_overlap"]
    detail = f"at a step of 43 s that is {43 * saved.share:.1f} s; measured: less than 2 s"
    return Finding("Qwen3-32B on 8 H20: TP overlap saves", 100 * saved.share, 5.0, detail)


def _expert_overlap(constants: Constants) -> Iterator[Finding]:
    """Qwen3-30B-A3B on 16 H100, EP 16: steps of 25.1 and 21.0 s with HybridEP, 41.25 and 31.31 with all-to-all."""
    for name, extra, measured, limit in (
        ("HybridEP and partial graphs", _HYBRID_AND_GRAPHS, 25.1 / 21.0, 0.1),
        ("all-to-all, eager", {"moe_token_dispatcher_type": "alltoall"}, 41.25 / 31.31, None),
    ):
        off, on = (_estimate(_qwen3_30b(extra, overlap), constants).step_time_s for overlap in (False, True))
        detail = f"EP overlap is x{off / on:.2f} ({off:.1f} to {on:.1f} s), measured x{measured:.2f}"
        bound = None if limit is None else 100 * limit
        yield Finding(f"Qwen3-30B-A3B on 16 H100, {name}", 100 * abs(off / on - measured), bound, detail)


_HYBRID_AND_GRAPHS = {
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "cuda_graph_impl": "transformer_engine",
    "cuda_graph_scope": ["moe_router", "moe_preprocess"],
}


def _qwen3_30b(extra: Mapping[str, Any], overlap: bool) -> dict[str, Any]:
    recipe = _dense(SIZES["qwen3_30b_a3b"], gpu="h100", gpus=16, tp=1, pp=1, seq=4096, batch=1024)
    recipe["model"] |= {"expert_model_parallel_size": 16, "expert_tensor_parallel_size": 1, "moe_grouped_gemm": True}
    recipe["model"] |= extra
    recipe["comm_overlap"] = {"tp_comm_overlap": False, "overlap_moe_expert_parallel_comm": overlap}
    return recipe


_ORDER = ("h20", "a100", "h100", "h800")


def _tp_overlap(constants: Constants) -> Iterator[Finding]:
    """Llama-3-70B with PP 4: the more FLOP/s over NVLink bandwidth a GPU has, the more TP overlap saves."""
    for tp in (4, 8):
        shares = {}
        for gpu in _ORDER:
            recipe = _dense(SIZES["llama3_70b"], gpu=gpu, gpus=8 * tp, tp=tp, pp=4, seq=8192, batch=128)
            shares[gpu] = 100 * _estimate(recipe, constants).saves["tp_comm_overlap"].share
        ordered = sorted(shares.values()) == list(shares.values())
        detail = ", ".join(f"{gpu.upper()} {share:.1f} %" for gpu, share in shares.items())
        name = f"Llama-3-70B, PP 4, TP {tp}: GPUs out of their order by what TP overlap saves"
        yield Finding(name, 0.0 if ordered else 100.0, 0.0, detail)


def _dense(sizes: Mapping[str, Any], *, gpu: str, gpus: int, tp: int, pp: int, seq: int, batch: int) -> dict[str, Any]:
    """A BF16 recipe with one sequence per microbatch and TP overlap where there is TP."""
    model = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        **sizes,
        "seq_length": seq,
        "share_embeddings_and_output_weights": False,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "pipeline_model_parallel_size": pp,
    }
    return {
        "cluster": {"gpu": gpu, "num_gpus": gpus},
        "model": model,
        "train": {"micro_batch_size": 1, "global_batch_size": batch},
        "optimizer": {"use_distributed_optimizer": True},
        "ddp": {"use_distributed_optimizer": True},
        "mixed_precision": {"bf16": True, "grad_reduce_in_fp32": False},
        "comm_overlap": {"tp_comm_overlap": tp > 1},
    }
