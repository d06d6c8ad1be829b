"""What holds for the volume of any recipe: linear in microbatches, sends equal receives, ratios that do not change."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

import overlapkit
from overlapkit.recipe import recipe_from_mapping
from overlapkit.volume import Row, Stage, Volume, total_wire_bytes

PER_MICROBATCH = ("forward", "recompute", "backward", "p2p")
DP_GROUPS = ("DATA_PARALLEL", "EXPERT_DATA_PARALLEL")  # in the names of all groups that reduce or gather parameters
WORLD, PP = "WORLD", "PIPELINE_MODEL_PARALLEL_GROUP"


@st.composite
def layouts(draw: Any) -> dict[str, Any]:
    """Recipes of GPT models that Megatron-Core takes: dense or MoE, every axis, buckets and precisions."""
    tp, cp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3, 4]))
    pp = draw(st.sampled_from([1, 2, 3, 4]))
    vp = draw(st.sampled_from([None, 2])) if pp > 1 else None
    moe = draw(st.booleans())
    sequence_parallel = tp > 1 and (moe or draw(st.booleans()))
    model: dict[str, Any] = {
        "num_layers": pp * (vp or 1) * draw(st.integers(1, 3)),
        "hidden_size": 64 * draw(st.integers(1, 3)),
        "ffn_hidden_size": 8 * draw(st.integers(8, 24)),
        "num_attention_heads": 8,
        "num_query_groups": draw(st.sampled_from([None, 4, 2])),
        "kv_channels": 16,
        "vocab_size": 512,
        "should_pad_vocab": False,
        "seq_length": 64,
        "gated_linear_unit": draw(st.booleans()),
        "normalization": draw(st.sampled_from(["RMSNorm", "LayerNorm"])),
        "add_bias_linear": not moe and draw(st.booleans()),
        "qk_layernorm": draw(st.booleans()),
        "share_embeddings_and_output_weights": draw(st.booleans()),
        "position_embedding_type": draw(st.sampled_from(["rope", "learned_absolute"])),
        "tensor_model_parallel_size": tp,
        "sequence_parallel": sequence_parallel,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vp,
        "context_parallel_size": cp,
        "cp_comm_type": [draw(st.sampled_from(["p2p", "all_gather", "a2a"]))],
        "variable_seq_lengths": pp > 1 and draw(st.booleans()),
        "calculate_per_token_loss": draw(st.booleans()),
        "bf16": True,
    }
    recompute = draw(st.sampled_from([None, "uniform", "block", "selective"]))
    if recompute == "selective":
        model |= {"recompute_granularity": recompute, "recompute_modules": ["core_attn", "mlp"]}
    elif recompute:
        model |= {"recompute_granularity": "full", "recompute_method": recompute, "recompute_num_layers": 1}
    if moe:
        ep = draw(st.sampled_from([1, 2]))
        assume((cp * dp * tp) % (ep * tp) == 0)
        model |= {
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 64,
            "moe_layer_freq": draw(st.sampled_from([1, 2])),
            "moe_aux_loss_coeff": 0.01,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": tp,
            "moe_token_dispatcher_type": draw(st.sampled_from(["allgather", "alltoall"])),
            "moe_shared_expert_intermediate_size": draw(st.sampled_from([None, 64])),
        }
    overlaps = draw(st.booleans())
    return {
        "cluster": {"gpu": "h100", "num_gpus": tp * cp * dp * pp},
        "software": {"megatron_core": "0.19.2", "transformer_engine": "2.18"},
        "model": model,
        "train": {"micro_batch_size": 1, "global_batch_size": 4 * dp},
        "ddp": {
            "use_distributed_optimizer": draw(st.booleans()),
            "overlap_grad_reduce": overlaps,
            "bucket_size": draw(st.sampled_from([None, 1_000, 50_000])),
            "grad_reduce_in_fp32": draw(st.booleans()),
        },
        "comm_overlap": None,
    }


def volume(recipe: dict[str, Any], **changes: dict[str, Any]) -> Volume:
    changed = {name: {**recipe[name], **values} for name, values in changes.items()}
    return overlapkit.volume(recipe_from_mapping({**recipe, **changed}))


def moved(rows: tuple[Row, ...]) -> dict[tuple[str, str, str, bool], tuple[int, int]]:
    return {(row.group, row.op, row.dtype, row.observable): (row.count, row.message_bytes) for row in rows}


def parts(stage: Stage, *, once: bool) -> dict[tuple[str, str, str, str], tuple[int, int]]:
    """The shares of a stage that happen once per step, or those that happen in every microbatch."""
    found = {}
    for row in stage.rows:
        of_dp = any(name in row.group for name in DP_GROUPS) and "TENSOR" not in row.group
        for share in row.phases:
            if (of_dp or share.phase not in PER_MICROBATCH) is once:
                found[row.group, row.op, row.dtype, share.phase] = (share.count, share.message_bytes)
    return found


@given(layouts(), st.integers(1, 5))
def test_forward_and_backward_are_linear_in_microbatches_and_the_rest_is_not(recipe: dict[str, Any], more: int) -> None:
    batch = recipe["train"]["global_batch_size"]
    once, often = volume(recipe), volume(recipe, train={"global_batch_size": more * batch})
    assert often.num_microbatches == more * once.num_microbatches
    for few, many in zip(once.stages, often.stages, strict=True):
        scaled = {key: (more * count, more * size) for key, (count, size) in parts(few, once=False).items()}
        assert parts(many, once=False) == scaled
        assert parts(many, once=True) == parts(few, once=True)


@given(layouts())
def test_sends_equal_receives_over_the_stages(recipe: dict[str, Any]) -> None:
    for dtype in ("bfloat16", "int64"):
        totals = {}
        for op in ("send", "recv"):
            rows = [row for stage in volume(recipe).stages for row in stage.rows if row.op == op and row.dtype == dtype]
            totals[op] = [sum(row.count for row in rows), sum(row.message_bytes for row in rows)]
        assert totals["send"] == totals["recv"]


@given(layouts())
def test_what_a_stage_sends_on_its_neighbours_receive(recipe: dict[str, Any]) -> None:
    """Every stage gets from the one before, and from the one behind, what these send its way."""
    stages = volume(recipe).stages
    onward, back, received = [], [], []
    for stage in stages:
        sends = [row for row in stage.rows if row.op == "send" and row.axis == "pp"]
        onward.append(sum(row.onward_bytes for row in sends))
        back.append(sum(row.message_bytes for row in sends) - onward[-1])
        received.append(sum(row.message_bytes for row in stage.rows if row.op == "recv" and row.axis == "pp"))
    around = len(stages)
    assert received == [onward[at - 1] + back[(at + 1) % around] for at in range(around)]


@given(layouts())
def test_overlap_of_the_pipeline_moves_rows_to_the_world_only_at_two_stages(recipe: dict[str, Any]) -> None:
    assume(recipe["model"]["virtual_pipeline_model_parallel_size"])
    single = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    batched = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
    for before, after in zip(volume(recipe, model=batched).stages, volume(recipe, model=single).stages, strict=True):
        joined: dict[tuple[str, str, str, bool], tuple[int, int]] = {}
        for (group, *rest), found in moved(after.rows).items():
            key = (PP if group == WORLD else group, *rest)
            joined[key] = tuple(map(sum, zip(found, joined.get(key, (0, 0)), strict=True)))  # type: ignore[assignment]
        assert joined == moved(before.rows)
        uses_world = any(row.group == WORLD for row in after.rows)
        assert uses_world is (recipe["model"]["pipeline_model_parallel_size"] == 2)


@given(layouts())
def test_overlap_of_data_parallelism_changes_padding_and_the_double_gather_alone(recipe: dict[str, Any]) -> None:
    dist_opt, model = recipe["ddp"]["use_distributed_optimizer"], recipe["model"]
    off = volume(recipe, ddp={"overlap_grad_reduce": False})
    on = volume(recipe, ddp={"overlap_grad_reduce": True, "overlap_param_gather": dist_opt})
    twice = dist_opt and "num_moe_experts" in model and model["expert_model_parallel_size"] > 1
    for before, after in zip(off.stages, on.stages, strict=True):
        old, new = moved(before.rows), moved(after.rows)
        assert old.keys() == new.keys()
        has_experts = any("EXPERT" in row.group for row in before.rows)
        for key, (count, size) in new.items():
            group, op, dtype, _ = key
            if "DATA_PARALLEL" not in group or "TENSOR" in group or dtype == "int32":
                assert (count, size) == old[key]
                continue
            gathers = 2 if op == "all_gather" and twice and has_experts else 1
            assert count * gathers >= old[key][0]
            # Buckets end at a multiple of 128 elements and of their ranks (three: 384); an all_reduce does not.
            padding = 0 if op == "all_reduce" else count * 4 * 384
            assert abs(gathers * size - old[key][1]) <= gathers * padding


@given(layouts())
def test_fp32_gradients_are_reduced_in_twice_the_bytes_of_gathered_bf16_parameters(recipe: dict[str, Any]) -> None:
    ddp = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    found = volume(recipe, ddp={**ddp, "grad_reduce_in_fp32": True})
    for stage in found.stages:
        rows = {(row.group, row.op): row for row in stage.rows if "DATA_PARALLEL" in row.group}
        for (group, op), row in rows.items():
            if op == "reduce_scatter":
                gather = rows[group, "all_gather"]
                assert row.message_bytes == 2 * gather.message_bytes
                assert row.wire_bytes == 2 * gather.wire_bytes


@given(layouts())
def test_sequence_parallelism_moves_a_quarter_more_over_the_wire_in_layers(recipe: dict[str, Any]) -> None:
    """The input of each pair is gathered once more, for the weight gradient: 5 passes instead of 4."""
    model = recipe["model"]
    assume(model["tensor_model_parallel_size"] > 1 and "num_moe_experts" not in model)
    assume((model["num_query_groups"] or 8) >= model["tensor_model_parallel_size"])
    plain = {"recompute_granularity": None}

    def layer_bytes(sequence_parallel: bool) -> int:
        """Twice the layers' traffic less that of the layers alone: embedding and output layer fall out."""
        wire = []
        for layers in (model["num_layers"], 2 * model["num_layers"]):
            changed = {**plain, "sequence_parallel": sequence_parallel, "num_layers": layers}
            rows = [row for stage in volume(recipe, model=changed).stages for row in stage.rows]
            wire.append(total_wire_bytes(r for r in rows if r.axis == "tp" and r.dtype == "bfloat16" and per_layer(r)))
        return wire[1] - wire[0]

    def per_layer(row: Row) -> bool:
        return not {share.phase for share in row.phases} & {"finalize"}

    grads = {**recipe["ddp"], "grad_reduce_in_fp32": True}  # so that norms' gradients are rows of another type
    recipe = {**recipe, "ddp": grads}
    assert 4 * layer_bytes(True) == 5 * layer_bytes(False) > 0


@given(layouts())
def test_ranks_of_a_group_of_one_move_nothing(recipe: dict[str, Any]) -> None:
    for stage in volume(recipe).stages:
        assert all(row.size > 1 and row.count > 0 and row.message_bytes > 0 for row in stage.rows)
        assert len({(row.group, row.op, row.dtype, row.observable) for row in stage.rows}) == len(stage.rows)
