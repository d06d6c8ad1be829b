"""Which ranks form a group, whether they share a node, and what goes from node to node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlapkit
from overlapkit.volume import placement
from overlapkit.volume.placement import AXES, RankLayout, group_sizes, members, placements, stage_ranks

# TP 8, PP 2, DP 2 on four nodes.
LLAMA2 = RankLayout(
    tp=8, cp=1, dp=2, pp=2, etp=8, ep=1, expert_dp=2, instances=1, cp_levels=(1, 1), pp_before_dp=False, node=8
)
# TP 2, CP 2, DP 4, PP 2; the same ranks as expert TP 1, EP 4, expert DP 4.
MIXED = RankLayout(
    tp=2, cp=2, dp=4, pp=2, etp=1, ep=4, expert_dp=4, instances=2, cp_levels=(2, 1), pp_before_dp=False, node=8
)


@pytest.mark.parametrize(
    ("group", "rank", "ranks"),
    [
        (placement.TP, 9, (8, 9, 10, 11, 12, 13, 14, 15)),
        (placement.DP_CP, 0, (0, 8)),
        (placement.PP, 0, (0, 16)),
        (placement.EMBEDDING, 17, (1, 17)),
        (placement.MODEL, 8, (*range(8, 16), *range(24, 32))),
        (placement.INSTANCE, 5, tuple(range(32))),
        (placement.WORLD, 3, (3, 19)),  # the pipeline's part of it
    ],
)
def test_groups_of_llama2_7b_on_32_gpus(group: str, rank: int, ranks: tuple[int, ...]) -> None:
    assert tuple(sorted(members(LLAMA2, group, rank))) == ranks


@pytest.mark.parametrize(
    ("group", "rank", "ranks"),
    [
        (placement.CP, 1, (1, 3)),
        (placement.DP_CP, 0, (0, 2, 4, 6, 8, 10, 12, 14)),
        (placement.DP_CP_INNER, 8, (8, 10, 12, 14)),
        (placement.TP_CP, 5, (4, 5, 6, 7)),
        (placement.TP_DP_CP, 20, tuple(range(16, 32))),
        (placement.EP, 6, (4, 5, 6, 7)),
        (placement.EXPERT_DP, 1, (1, 5, 9, 13)),
        (placement.EXPERT_DP_INNER, 9, (9, 13)),
        (placement.INSTANCES, 1, (1, 9)),
        (placement.EXPERT_MODEL, 0, (0, 1, 2, 3, 16, 17, 18, 19)),
        (placement.INSTANCE, 0, (*range(8), *range(16, 24))),
    ],
)
def test_experts_split_the_same_ranks_in_their_own_way(group: str, rank: int, ranks: tuple[int, ...]) -> None:
    assert tuple(sorted(members(MIXED, group, rank))) == ranks


def test_the_other_order_puts_pipeline_stages_side_by_side() -> None:
    layout = replace(LLAMA2, pp_before_dp=True)
    assert members(layout, placement.PP, 0) == (0, 8)
    assert members(layout, placement.DP_CP, 0) == (0, 16)
    assert members(layout, placement.EMBEDDING, 24) == (16, 24)
    assert stage_ranks(layout, 1) == (range(8, 16), range(24, 32))


def test_places_of_llama2_7b() -> None:
    found = placements(LLAMA2)
    assert found[placement.TP] == "intra_node"
    assert found[placement.DP_CP] == found[placement.PP] == found[placement.EMBEDDING] == "inter_node"
    assert found[placement.MODEL] == found[placement.INSTANCE] == "mixed"


def test_a_smaller_node_than_usual_has_a_smaller_nvlink_domain() -> None:
    recipe = "recipes/qwen3_30b_a3b_16xh100.yaml"
    placed = overlapkit.volume(recipe, ["cluster.gpus_per_node=4", "model.expert_model_parallel_size=8"])
    assert placed.layout.node == 4
    assert {row.placement for row in placed.stages[0].rows if row.axis == "ep"} == {"mixed"}
    slower, faster = (overlapkit.estimate(recipe, [f"cluster.gpus_per_node={node}"]) for node in (4, 8))
    assert slower.groups["ep"].total_s > 2 * faster.groups["ep"].total_s


def test_an_nvlink_domain_is_one_node() -> None:
    recipe: dict[str, Any] = {
        "cluster": {"gpu": "gb200", "num_gpus": 64},
        "model": {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 8,
            "vocab_size": 512,
            "seq_length": 32,
            "tensor_model_parallel_size": 8,
            "bf16": True,
        },
        "train": {"micro_batch_size": 1, "global_batch_size": 8},
    }
    found = overlapkit.volume(recipe)
    assert found.layout.node == 72
    assert {row.placement for row in found.stages[0].rows} == {"intra_node"}
    hosts = overlapkit.volume({**recipe, "cluster": {**recipe["cluster"], "nvlink_domain_size": 4}})
    assert {row.axis: row.placement for row in hosts.stages[0].rows} == {
        "tp": "mixed",
        "dp": "inter_node",
        "all": "mixed",
    }
    unknown = overlapkit.volume({**recipe, "cluster": {"num_gpus": 64}})
    assert {row.placement for row in unknown.stages[0].rows} == {None}
    assert unknown.between_nodes() == {}


def test_bytes_between_the_nodes_of_llama2_7b() -> None:
    """DP pairs of ranks on nodes 0 and 1, and 2 and 3; pipeline pairs on 0 and 2, and 1 and 3."""
    plain = ["train.global_batch_size=32", "comm_overlap=null"]
    found = overlapkit.volume("recipes/llama2_7b_32xh20.yaml", plain).between_nodes()
    gradients_and_parameters = 8 * (1_686_634_496 + 843_317_248) // 2
    activations = 8 * 67_108_864
    scalars = 32
    assert gradients_and_parameters == 10_119_806_976
    assert gradients_and_parameters <= found[0, 1] < gradients_and_parameters + scalars
    assert activations <= found[0, 2] < activations + scalars
    assert activations <= found[3, 1] < activations + scalars
    assert set(found) <= {(a, b) for a in range(4) for b in range(4) if a != b}
    assert max(found.get((0, 3), 0), found.get((3, 0), 0)) < scalars


@st.composite
def rank_layouts(draw: Any) -> RankLayout:
    tp, cp, pp = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    instances = draw(st.sampled_from([1, 2]))
    dp = instances * draw(st.sampled_from([1, 2, 3]))
    etp = draw(st.sampled_from([1, tp]))
    per_stage = tp * cp * dp // instances
    ep = draw(st.sampled_from([ep for ep in (1, 2, 4) if per_stage % (etp * ep) == 0] or [1]))
    expert_dp = tp * cp * dp // (etp * ep)
    return RankLayout(
        tp=tp,
        cp=cp,
        dp=dp,
        pp=pp,
        etp=etp,
        ep=ep,
        expert_dp=expert_dp,
        instances=instances,
        cp_levels=(cp, 1),
        pp_before_dp=draw(st.booleans()) and expert_dp == dp and instances == 1,
        node=draw(st.sampled_from([1, 2, 4, 8, 72])),
    )


@given(rank_layouts())
def test_groups_of_a_kind_share_out_the_ranks(layout: RankLayout) -> None:
    sizes = group_sizes(layout)
    for group in AXES:
        if group in (placement.WORLD, placement.EMBEDDING):
            continue
        found = {frozenset(members(layout, group, rank)) for rank in range(layout.world_size)}
        assert sorted(rank for ranks in found for rank in ranks) == list(range(layout.world_size)), group
        assert {len(ranks) for ranks in found} == {sizes[group]}, group


@given(rank_layouts())
def test_a_place_is_what_the_nodes_of_all_groups_say(layout: RankLayout) -> None:
    assert layout.node is not None
    for group, place in placements(layout).items():
        nodes = [
            [rank // layout.node for rank in members(layout, group, rank)]
            for rank in range(layout.world_size)
            if group != placement.EMBEDDING or rank in stage_ranks(layout, 0)[0]
        ]
        if all(len(set(each)) == 1 for each in nodes):
            assert place == "intra_node", group
        elif all(len(set(each)) == len(each) for each in nodes):
            assert place == "inter_node", group
        else:
            assert place == "mixed", group


@given(rank_layouts(), st.integers(0, 3))
def test_stages_share_out_the_ranks(layout: RankLayout, stage: int) -> None:
    ranks = [rank for index in range(layout.pp) for part in stage_ranks(layout, index) for rank in part]
    assert sorted(ranks) == list(range(layout.world_size))
    own = [rank for part in stage_ranks(layout, stage % layout.pp) for rank in part]
    assert all(members(layout, placement.PP, rank)[stage % layout.pp] == rank for rank in own)


def test_an_axis_of_one_rank_places_nothing() -> None:
    """With one stage, DP slowest: the step between stages lies within a node, and no rank has a neighbour there."""
    alone = replace(LLAMA2, tp=3, pp=1, dp=2, etp=1, ep=1, expert_dp=6, pp_before_dp=True, node=4)
    assert placements(alone)[placement.INSTANCE] == "mixed"
