"""``overlapkit.volume``: what every rank moves per optimizer step, what it leaves out, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from volume_recipes import MOE, small

import overlapkit
from overlapkit import RecipeError
from overlapkit.volume import Volume

ROOT = Path(__file__).resolve().parent.parent
LLAMA2 = ROOT / "recipes" / "llama2_7b_32xh20.yaml"
HIDDEN_STATES = 4096 * 4096 * 2  # tokens · hidden size · bytes of BF16
AG, RS, AR = "all_gather", "reduce_scatter", "all_reduce"
TP, DP = "TENSOR_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_WITH_CP"
PP = "PIPELINE_MODEL_PARALLEL_GROUP"


def llama2(*overrides: str) -> Volume:
    """Llama-2-7B, TP 8, PP 2, DP 2, 16 microbatches, without userbuffers and in one bucket."""
    plain = ("train.global_batch_size=32", "comm_overlap=null", "model.tp_comm_overlap=false")
    return overlapkit.volume(LLAMA2, (*plain, *overrides))


def table(volume: Volume, stage: int) -> dict[tuple[str, str, str], tuple[int, int]]:
    return {(row.group, row.op, row.dtype): (row.count, row.message_bytes) for row in volume.stages[stage].rows}


# --- Llama-2-7B on 32 GPUs, as it was counted in the real Megatron-Core ------------------------------------

SCALARS = {
    ("MODEL_PARALLEL_GROUP", AR, "int32"): (1, 4),
    ("MODEL_PARALLEL_GROUP", AR, "float32"): (1, 4),
    ("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", AR, "float32"): (1, 4),
}
LOSS = {(DP, AR, "float32"): (1, 8)}
SENDS = {(PP, "send", "bfloat16"): (16, 67_108_864), (PP, "recv", "bfloat16"): (16, 67_108_864)}
DIST_OPT = (
    {(DP, RS, "float32"): (1, 1_686_634_496), (DP, AG, "bfloat16"): (1, 843_317_248)},
    {(DP, RS, "float32"): (1, 1_686_650_880), (DP, AG, "bfloat16"): (1, 843_325_440)},
)


def layers(gathers: int, scatters: int) -> dict[tuple[str, str, str], tuple[int, int]]:
    return {
        (TP, AG, "bfloat16"): (gathers, gathers * HIDDEN_STATES),
        (TP, RS, "bfloat16"): (scatters, scatters * HIDDEN_STATES),
    }


def test_llama2_7b_with_sequence_parallelism() -> None:
    found = llama2()
    assert found.num_microbatches == 16
    assert [stage.global_ranks for stage in found.stages] == ["0-15", "16-31"]
    norms = (TP, AR, "float32")
    assert table(found, 0) == layers(1552, 1040) | SENDS | DIST_OPT[0] | SCALARS | {norms: (1, 524_288)}
    assert table(found, 1) == layers(1568, 1040) | SENDS | DIST_OPT[1] | SCALARS | LOSS | {norms: (49, 1_327_104)}


def test_llama2_7b_wire_bytes() -> None:
    first, last = llama2().stages
    wire = {(row.group, row.op, row.dtype): row.wire_bytes for row in first.rows}
    assert wire[TP, AG, "bfloat16"] == 45_566_918_656
    assert wire[TP, RS, "bfloat16"] == 30_534_533_120
    assert wire[TP, AR, "float32"] == 917_504
    assert wire[PP, "send", "bfloat16"] == 67_108_864
    assert wire[PP, "recv", "bfloat16"] == 0
    assert wire[DP, RS, "float32"] == 843_317_248
    assert wire[DP, AG, "bfloat16"] == 421_658_624
    assert first.wire_bytes("MODEL_PARALLEL_GROUP") == 15  # twice 7.5
    assert first.wire_bytes("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP") == 7
    assert (first.wire_bytes(TP), last.wire_bytes(TP)) == (76_102_369_280, 76_573_536_256)
    assert last.wire_bytes(DP) == 843_325_440 + 421_662_720 + 8


def test_llama2_7b_without_sequence_parallelism() -> None:
    found = llama2("model.sequence_parallel=false")
    reduces = {(TP, AR, "bfloat16"): (1040, 34_896_609_280)}
    sends = {(PP, "send", "bfloat16"): (16, 536_870_912), (PP, "recv", "bfloat16"): (16, 536_870_912)}
    assert table(found, 0) == reduces | sends | DIST_OPT[0] | SCALARS
    assert table(found, 1) == reduces | sends | DIST_OPT[1] | SCALARS | LOSS | {(TP, AR, "float32"): (48, 786_432)}
    assert sum(row.wire_bytes for row in found.stages[0].rows if row.group == TP) == 61_069_066_240


def test_llama2_7b_without_the_distributed_optimizer() -> None:
    without = ("model.sequence_parallel=false", "ddp.use_distributed_optimizer=false")
    found = llama2(*without, "model.should_pad_vocab=false")
    assert table(found, 0)[DP, AR, "float32"] == (1, 1_685_061_632)
    assert table(found, 1)[DP, AR, "float32"] == (2, 1_685_078_016 + 8)
    assert not any(row.op in (AG, RS) for stage in found.stages for row in stage.rows)
    assert table(found, 0)["MODEL_PARALLEL_GROUP", AR, "float32"] == (2, 8)  # the norm as well


def test_llama2_7b_with_full_recomputation() -> None:
    full = ("model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1")
    first = table(llama2(*full), 0)
    assert first[TP, AG, "bfloat16"] == (2064, 69_256_347_648)
    assert first[TP, RS, "bfloat16"] == (1552, 52_076_478_464)


def test_llama2_7b_with_the_vocabulary_as_it_is() -> None:
    found = llama2("model.should_pad_vocab=false")
    assert table(found, 0)[DP, RS, "float32"] == (1, 1_685_061_632)
    assert table(found, 1)[DP, AG, "bfloat16"] == (1, 842_539_008)


# --- the form ----------------------------------------------------------------------------------------------


def test_to_dict_is_contract_3() -> None:
    found = llama2().to_dict()
    assert json.loads(json.dumps(found)) == found
    assert (found["schema_version"], found["per"], found["num_microbatches"]) == (1, "optimizer step", 16)
    assert set(found["convention"]) == {"message", "wire"}
    stage = found["stages"][0]
    assert (stage["pipeline_rank"], stage["global_ranks"]) == (0, "0-15")
    assert {
        "group": "TENSOR_MODEL_PARALLEL_GROUP",
        "axis": "tp",
        "size": 8,
        "op": "all_gather",
        "dtype": "bfloat16",
        "count": 1552,
        "message_bytes": 52_076_478_464,
        "wire_bytes": 45_566_918_656,
        "placement": "intra_node",
        "observable": True,
        "exact": True,
        "evidence": "run",
    } in stage["rows"]
    assert "between_nodes" not in found and "phases" not in stage["rows"][0]


def test_phases_on_request() -> None:
    rows = llama2().to_dict(phases=True)["stages"][0]["rows"]
    gathers = next(row for row in rows if (row["group"], row["op"]) == (TP, AG))
    assert list(gathers["phases"]) == ["forward", "backward"]
    assert gathers["phases"]["forward"]["count"] == 16 * 16 * 2
    assert gathers["phases"]["backward"]["count"] == 16 * (16 * 4 + 1)
    for row in rows:
        for name in ("count", "message_bytes"):
            assert sum(share[name] for share in row["phases"].values()) == row[name]


def test_overlap_moves_calls_to_other_phases_only() -> None:
    def phases(**ddp: bool) -> dict[str, list[str]]:
        rows = overlapkit.volume(small(ddp=ddp)).stages[0].rows
        return {row.op: [share.phase for share in row.phases] for row in rows if row.group == DP and row.op != AR}

    assert phases() == {RS: ["finalize"], AG: ["optimizer"]}
    assert phases(overlap_grad_reduce=True, overlap_param_gather=True) == {RS: ["backward"], AG: ["forward"]}


def test_it_takes_what_resolve_takes() -> None:
    recipe = small()
    assert overlapkit.volume(recipe) == overlapkit.volume(recipe)
    assert overlapkit.volume(str(LLAMA2)) == overlapkit.volume(LLAMA2)
    with pytest.raises(TypeError, match="already loaded"):
        overlapkit.volume(recipe, ["model.num_layers=2"])


@pytest.mark.parametrize(
    "code",
    [
        "import overlapkit; overlapkit.volume(P)",
        "import overlapkit.volume.rows; overlapkit.volume(P)",
        "from overlapkit import volume; volume(P); volume.Volume",
        "from overlapkit.volume import volume; volume(P)",
    ],
)
def test_the_package_and_the_function_have_one_name(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code.replace("P", repr(str(LLAMA2)))], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_parts_that_are_assumed_are_named() -> None:
    assert llama2("model.position_embedding_type=null").assumed == ("model.position_embedding_type=rope",)
    assert overlapkit.volume(small()).assumed == ()
    bare = overlapkit.volume(small(model={"normalization": None, "cross_entropy_loss_fusion": None})).assumed
    assert bare == ("model.normalization=LayerNorm", "model.cross_entropy_loss_fusion=true")


# --- what NCCL does not see, and what depends on the data -----------------------------------------------------


def test_userbuffers_take_the_layers_away_from_nccl() -> None:
    found = overlapkit.volume(LLAMA2, ["train.global_batch_size=32"])
    for stage, seen in zip(found.stages, (layers(16, 16), layers(32, 16)), strict=True):
        visible = [row for row in stage.rows if row.group == TP and row.dtype == "bfloat16" and row.observable]
        assert {(row.group, row.op, row.dtype): (row.count, row.message_bytes) for row in visible} == seen
        hidden = {row.op: (row.count, row.evidence) for row in stage.rows if not row.observable}
        assert hidden == {AG: (1536, "source"), RS: (1024, "source")}


@pytest.mark.parametrize(
    ("switch", "gathers", "scatters"),
    [
        ("tp_comm_overlap_ag=false", 16 * 4, 0),  # the input, and backward the output's gradient
        ("tp_comm_overlap_rs=false", 0, 16 * 2),
        ("tp_comm_bulk_dgrad=false", 16 * 2, 0),
        ("tp_comm_bulk_wgrad=false", 0, 16 * 2),
        ("tp_comm_overlap_rs_dgrad=true", 16 * 2, 0),  # takes the place of both bulk overlaps
        ("tp_comm_overlap_disable_qkv=true", 16, 16),
    ],
)
def test_a_switch_of_userbuffers_brings_calls_back(switch: str, gathers: int, scatters: int) -> None:
    rows = overlapkit.volume(LLAMA2, ["train.global_batch_size=32", f"model.{switch}"]).stages[0].rows
    seen = {row.op: row.count for row in rows if row.group == TP and row.dtype == "bfloat16" and row.observable}
    assert seen == {AG: 16 + 16 * gathers, RS: 16 + 16 * scatters}


def test_rows_that_depend_on_the_routing_are_the_balanced_expectation() -> None:
    rows = overlapkit.volume(small(model=MOE)).stages[0].rows
    (dispatch,) = [row for row in rows if row.op == "all_to_all"]
    tokens = 32 // 2 * 2  # of a rank, times topk
    assert (dispatch.count, dispatch.exact) == (4 * 2 * 6, False)
    assert dispatch.message_bytes == 4 * 2 * 2 * (2 * tokens * 64 * 2 + tokens * 2)
    assert all(row.exact for row in rows if row.op != "all_to_all")


def test_padding_to_capacity_fixes_the_bytes() -> None:
    padded = {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}
    rows = overlapkit.volume(small(model={**MOE, **padded})).stages[0].rows
    (dispatch,) = [row for row in rows if row.op == "all_to_all"]
    assert dispatch.exact
    assert dispatch.message_bytes == 4 * 2 * 2 * 8 * 5 * (2 * 64 * 2 + 2)  # eight experts, ceil(32 / 8 · 1.25) rows
    assert not any(row.group == "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP" for row in rows)  # nothing to tell


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_the_flex_dispatcher_moves_tokens_without_nccl(backend: str) -> None:
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend, "moe_router_dtype": "fp32"}
    rows = overlapkit.volume(small(model={**MOE, **flex})).stages[0].rows
    (payload,) = [row for row in rows if not row.observable]
    assert (payload.group, payload.op) == ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "all_to_all")
    assert (payload.count, payload.exact, payload.evidence) == (4 * 2 * 4, False, "source")
    assert payload.message_bytes == payload.count * 16 * 2 * 64 * 2


# --- context parallelism, from source --------------------------------------------------------------------------

CP = "CONTEXT_PARALLEL_GROUP"
KEYS = 32 // 2 * 4 * 8 * 2  # tokens of a rank · heads of a TP rank · width · bytes


def context_parallel(cp: int = 2, **model: Any) -> dict[tuple[str, str], tuple[int, int]]:
    recipe = small(cluster={"num_gpus": 2 * cp}, model={"context_parallel_size": cp, **model})
    rows = overlapkit.volume(recipe).stages[0].rows
    assert all(row.evidence == "source" for row in rows if row.axis == "cp")
    return {(row.group, row.op): (row.count, row.message_bytes) for row in rows if row.axis == "cp"}


def test_a_ring_passes_keys_and_values_on_and_back() -> None:
    layers_times_microbatches = 4 * 4
    count, moved = layers_times_microbatches * 3, layers_times_microbatches * 3 * 2 * KEYS
    assert context_parallel() == {(CP, "send"): (count, moved), (CP, "recv"): (count, moved)}


def test_a_longer_ring_sends_gradients_along() -> None:
    block, times = 2 * KEYS // 2, 4 * 4  # four ranks: half the tokens
    assert context_parallel(4)[CP, "send"] == (times * (3 + 4), times * (3 + 6) * block)


def test_all_gather_repeats_itself_backward() -> None:
    found = context_parallel(cp_comm_type=["all_gather"])
    assert found == {(CP, AG): (16 * 4, 16 * 4 * 2 * KEYS), (CP, RS): (16 * 2, 16 * 2 * 2 * KEYS)}


def test_all_to_all_moves_heads() -> None:
    few = {"num_query_groups": 4, "cp_comm_type": ["a2a"]}
    assert context_parallel(**few) == {(CP, "all_to_all"): (16 * 8, 16 * 2 * (2 * KEYS + 2 * KEYS // 2))}


def test_all_to_all_and_ring_have_groups_of_their_own() -> None:
    found = context_parallel(4, cp_comm_type=["a2a+p2p"], hierarchical_context_parallel_sizes=[2, 2])
    keys = KEYS // 2
    assert found["HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0", "all_to_all"] == (16 * 9, 16 * 9 * keys)
    assert found["HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L1", "send"] == (16 * 3, 16 * 3 * 2 * keys)


def test_each_layer_may_have_its_own_way() -> None:
    kinds = ["p2p", "all_gather", "all_gather", "p2p"]
    found = context_parallel(cp_comm_type=kinds)
    assert found[CP, "send"][0] == 2 * 4 * 3
    assert found[CP, AG][0] == 2 * 4 * 4


@pytest.mark.parametrize("recompute", [("full", None), ("selective", ["core_attn"])])
def test_recomputed_attention_exchanges_again(recompute: tuple[str, Any]) -> None:
    granularity, modules = recompute
    found = context_parallel(recompute_granularity=granularity, recompute_modules=modules)
    assert found[CP, "send"] == (16 * 4, 16 * 4 * 2 * KEYS)


# --- Megatron-LM's batch ------------------------------------------------------------------------------------------


def test_megatron_lm_broadcasts_the_batch_on_request() -> None:
    def batch(*overrides: str) -> list[dict[str, tuple[int, int]]]:
        given = ["train.global_batch_size=32", "model.tp_comm_overlap=false", *overrides]
        found = overlapkit.volume(LLAMA2, given, data_broadcast=True)
        return [
            {row.dtype: (row.count, row.message_bytes) for row in stage.rows if row.op == "broadcast"}
            for stage in found.stages
        ]

    mask = (16, 16 * 16_777_216)
    assert batch() == [
        {"int64": (32, 16 * 65_536), "bool": mask},
        {"int64": (16, 16 * 32_768), "float32": (16, 16 * 16_384), "bool": mask},
    ]
    assert "bool" not in batch("dataset.create_attention_mask=false")[0]
    assert not any(row.op == "broadcast" for stage in llama2().stages for row in stage.rows)


def test_bridge_broadcasts_no_batch() -> None:
    with pytest.raises(RecipeError, match="only Megatron-LM broadcasts"):
        overlapkit.volume(small(), data_broadcast=True)
