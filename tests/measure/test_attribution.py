"""Which group of Megatron a communicator is: by description, by ranks, by size, by what it carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from recorded_runs import around, issued, recording, runs

from overlapkit import volume
from overlapkit.measure.attribution import Attribution, attribute, infer_mesh, pipeline_rank
from overlapkit.measure.events import SOME_STEP, CommEvent, Communicator, Reading, Recording
from overlapkit.measure.measured import Measured
from overlapkit.measure.measuring import measured
from overlapkit.measure.mesh import Mesh, axis_of, mesh_of
from overlapkit.volume import placement
from overlapkit.volume.predict import Volume

LLAMA = "recipes/llama2_7b_32xh20.yaml"
Traffic = Sequence[tuple[str, str, int, int]]  # operation, type, calls, message bytes


def llama(*overrides: str) -> Volume:
    return volume(LLAMA, ["train.global_batch_size=32", "comm_overlap=null", *overrides])


def recorded(*communicators: tuple[Communicator, Traffic], rank: int | None = 0) -> Recording:
    events = [CommEvent(index, *call) for index, (_, traffic) in enumerate(communicators) for call in traffic]
    return Recording(
        source="log", kind="nccl_log", rank=rank, communicators=tuple(each for each, _ in communicators), events=events
    )


def only(mesh: Mesh | None, communicator: Communicator, traffic: Traffic, rank: int | None = 0) -> Attribution:
    (found,) = attribute(recorded((communicator, traffic), rank=rank), mesh)
    return found


def of_stage(found: Volume, stage: int, *, ranks: bool) -> Recording:
    """What the first process of a stage is predicted to do, as a source without names of groups has it."""
    rank = found.stages[stage].ranks[0][0]
    totals = [
        {
            "group": row.group,
            "nranks": row.size,
            "op": row.op,
            "dtype": row.dtype,
            "count": row.count,
            "bytes": row.message_bytes,
        }
        for row in found.stages[stage].rows
    ]
    run = {"name": "predicted", "rank": rank, "world": found.layout.world_size, "totals": totals}
    return recording(run, found.layout, ranks=ranks)


def predicted_rows(found: Volume, stage: int) -> dict[tuple[str, str, str], tuple[int, int]]:
    return {(row.group, row.op, row.dtype): (row.count, row.message_bytes) for row in found.stages[stage].rows}


def rows(found: Measured, rank: int = 0) -> dict[tuple[str, str, str], tuple[int, int]]:
    return {(row.group, row.op, row.dtype): (row.count, row.message_bytes) for row in found.ranks[rank].rows}


# --- by description --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("description", "group"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP"),
        ("DATA_PARALLEL_GROUP", "DATA_PARALLEL_GROUP"),
        ("default_pg", "WORLD"),
        ("mesh_of_my_own", "mesh_of_my_own"),
    ],
)
def test_a_description_is_the_group(description: str, group: str) -> None:
    found = only(None, Communicator(label="1", size=8, description=description), [("all_reduce", "float32", 1, 4)])
    assert (found.group, found.size, found.by, found.confidence) == (group, 8, "description", "exact")


@pytest.mark.parametrize("description", [None, "", "undefined"])
def test_pytorchs_word_for_no_description_is_none(description: str | None) -> None:
    found = only(None, Communicator(label="1", size=2, description=description), [("send", "bfloat16", 1, 4)])
    assert found.by == "operations" and found.confidence == "guess"


def test_a_description_cannot_move_the_cursor() -> None:
    found = only(None, Communicator(label="1", size=2, description="\x1b[2Jgroup"), [("send", "bfloat16", 1, 4)])
    assert found.group == r"\x1b[2Jgroup"


@pytest.mark.parametrize(
    ("group", "op", "axis"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "all_gather", "tp"),
        ("DATA_PARALLEL_GROUP", "all_reduce", "dp"),
        ("DATA_PARALLEL_GROUP_WITH_CP_AG", "all_gather", "dp"),
        ("EXPERT_DATA_PARALLEL_GROUP_GLOO", "all_reduce", "expert_dp"),
        ("WORLD", "all_reduce", "all"),
        ("WORLD", "send", "pp"),
        ("mesh_of_my_own", "all_reduce", "other"),
    ],
)
def test_the_axis_of_a_group(group: str, op: str, axis: str) -> None:
    assert axis_of(group, op) == axis


GRADIENTS: Traffic = [("reduce_scatter", "float32", 4, 4 << 20), ("all_gather", "bfloat16", 4, 2 << 20)]
ACTIVATIONS: Traffic = [("all_gather", "bfloat16", 300, 3 << 20), ("reduce_scatter", "bfloat16", 200, 2 << 20)]


def named(group: str, *ranks: int, rank: int = 0) -> Communicator:
    return Communicator(label=group, size=len(ranks), ranks=ranks, rank=ranks.index(rank), description=group)


def test_no_other_communicator_is_called_what_the_source_calls_one() -> None:
    """Unnamed gradients through all four ranks are not DP's, which has two; named rows keep their own ranks."""
    tp, dp = named(placement.TP, 0, 1), named(placement.DP_CP, 0, 2)
    unnamed = Communicator(label="u", size=4, ranks=(0, 1, 2, 3), rank=0)
    one = recorded((tp, ACTIVATIONS), (dp, GRADIENTS), (unnamed, GRADIENTS))
    result = measured(Reading(recordings=(one,)))
    sizes = {(row.group, row.size, row.op): row.message_bytes for row in result.ranks[0].rows}
    assert sizes[placement.DP_CP, 2, "reduce_scatter"] == 4 << 20
    assert {size for group, size, _ in sizes if group in (placement.DP_CP, placement.TP)} == {2}
    assert sum(size == 4 for _, size, _ in sizes) == 2
    (mesh,) = result.meshes
    assert (mesh.layout.tp, mesh.layout.dp, mesh.layout.pp) == (2, 2, 1)


def test_the_mesh_agrees_with_what_the_source_names() -> None:
    """By what it carries alone, the communicator of all ranks would be DP's, beside a TP of one rank."""
    described_tp, every = (
        named(placement.TP, 0, 1, 2, 3),
        Communicator(label="u", size=8, ranks=tuple(range(8)), rank=0),
    )
    mesh, _ = infer_mesh([recorded((described_tp, ()), (every, GRADIENTS))])
    assert mesh is not None and mesh.layout.tp == 4
    mesh, _ = infer_mesh([recorded((every, GRADIENTS))])
    assert mesh is not None and mesh.layout.tp == 1


def test_a_pair_may_be_a_part_of_the_pipeline_that_the_source_names() -> None:
    """PyTorch makes a communicator for each peer of an unbatched send: a part of the group, not another group."""
    whole, pair = named(placement.PP, 0, 8, 16, 24), Communicator(label="u", size=2, ranks=(0, 8), rank=0)
    sends: Traffic = [("send", "bfloat16", 3, 96)]
    mesh = mesh_of(llama("model.pipeline_model_parallel_size=4", "model.tensor_model_parallel_size=4"))
    assert attribute(recorded((whole, ()), (pair, sends)), mesh)[1].group == placement.PP
    part = replace(named(placement.PP, 0, 8), label="its pair")
    (row,) = measured(Reading(recordings=(recorded((whole, sends), (part, sends)),))).ranks[0].rows
    assert (row.size, row.count) == (4, 6)


def test_no_mesh_is_inferred_against_what_the_source_names() -> None:
    crossed = named(placement.TP, 0, 3)
    every = Communicator(label="u", size=4, ranks=(0, 1, 2, 3), rank=0)
    assert infer_mesh([recorded((crossed, ACTIVATIONS), (every, GRADIENTS))]) == (None, ())


def test_what_all_its_groups_are_called_otherwise_is_attributed_to_none() -> None:
    ranks = tuple(range(32))
    every = [named(group, *ranks) for group in (placement.WORLD, placement.INSTANCE)]
    unnamed = Communicator(label="u", size=32, ranks=ranks, rank=0)
    found = attribute(recorded(*((each, ()) for each in every), (unnamed, GRADIENTS)), mesh_of(llama()))[-1]
    assert found.group is None
    assert found.why == f"the source calls other communicators {placement.WORLD}, {placement.INSTANCE}"


def test_a_named_group_of_one_rank_moves_nothing_whatever_another_has_that_name_for() -> None:
    """Two groups of a name and of different sizes stand in two rows, the one of one rank apart."""
    alone, pair = named(placement.DP_CP, 0), named(placement.DP_CP, 0, 1)
    found = measured(Reading(recordings=(recorded((alone, GRADIENTS), (pair, GRADIENTS[:1])),))).ranks[0]
    assert {(row.op, row.size, row.count) for row in found.rows} == {("reduce_scatter", 2, 4)}
    assert {(row.size, row.wire_bytes) for row in found.single_rank} == {(1, 0)}
    assert len(found.single_rank) == 2


# --- by the mesh of a recipe -----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [True, False], ids=["ranks known", "sizes alone"])
def test_every_recorded_run_is_attributed_as_it_was_issued(ranks: bool) -> None:
    """What the real Megatron-Core issued, without a name: each of the groups comes out, calls and bytes."""
    for run, found in runs():
        result = measured(Reading(recordings=(recording(run, found.layout, ranks=ranks),)), mesh_of(found))
        assert rows(result) == issued(run), (run["name"], run["rank"])
        assert result.ranks[0].unattributed == () and result.ranks[0].pipeline_rank == run["pp_rank"]
    assert len(runs()) > 400


def test_ranks_that_one_used_group_has_are_exact() -> None:
    mesh = mesh_of(llama())
    ranks = around(mesh.layout, placement.TP, 9)
    found = only(mesh, Communicator(label="c", size=8, ranks=ranks, rank=1), [("all_gather", "bfloat16", 3, 96)], 9)
    assert ranks == tuple(range(8, 16))
    assert (found.group, found.by, found.confidence, found.ties) == (placement.TP, "ranks", "exact", ())


def test_a_size_that_one_used_group_has_is_likely_that_group() -> None:
    found = only(mesh_of(llama()), Communicator(label="c", size=8, rank=0), [("all_gather", "bfloat16", 3, 96)])
    assert (found.group, found.by, found.confidence) == (placement.TP, "size", "likely")


def test_operations_tell_groups_with_the_same_ranks_apart() -> None:
    mesh = mesh_of(llama("model.share_embeddings_and_output_weights=true"))
    pair = Communicator(label="pp", size=2, ranks=(0, 16), rank=0, order=1)
    tied = mesh.stages[0]
    matrix = next(row.message_bytes for row in tied if row.group == placement.EMBEDDING)
    embedding, pipeline = attribute(
        recorded(
            (replace(pair, order=0), [("all_reduce", "float32", 1, matrix)]),
            (pair, [("send", "bfloat16", 16, 67108864), ("recv", "bfloat16", 16, 67108864)]),
        ),
        mesh,
    )
    assert (embedding.group, pipeline.group) == (placement.EMBEDDING, placement.PP)
    assert {one.confidence for one in (embedding, pipeline)} == {"likely"}
    assert {one.by for one in (embedding, pipeline)} == {"ranks and operations"}


def test_what_nothing_tells_apart_follows_the_order_of_creation_and_names_its_ties() -> None:
    mesh = Mesh(layout=llama().layout)  # a mesh without a prediction, in which four groups have these ranks
    later, earlier = (Communicator(label="c", size=8, ranks=tuple(range(8)), rank=0, order=order) for order in (9, 3))
    traffic: Traffic = [("scatter", "uint8", 1, 4)]
    second, first = attribute(recorded((later, traffic), (earlier, traffic)), mesh)
    assert (first.group, first.by, first.confidence) == (placement.TP, "ranks and order", "guess")
    assert first.ties == (placement.TP_CP, placement.EXPERT_TP, placement.EXPERT_TP_EP)
    assert (second.group, second.ties) == (placement.TP_CP, (placement.TP, placement.EXPERT_TP, placement.EXPERT_TP_EP))


def test_a_pair_made_for_single_sends_belongs_to_the_pipeline() -> None:
    """PyTorch makes a communicator of two ranks for each peer; the row has the pipeline's size."""
    mesh = mesh_of(llama("model.pipeline_model_parallel_size=4", "model.tensor_model_parallel_size=4"))
    around_me = around(mesh.layout, placement.PP, 8)
    assert around_me == (0, 8, 16, 24)
    back, onward = (
        Communicator(label="p", size=2, ranks=ranks, rank=place, order=0)
        for ranks, place in (((0, 8), 1), ((8, 16), 0))
    )
    traffic: Traffic = [("send", "bfloat16", 16, 16 << 20), ("recv", "bfloat16", 16, 16 << 20)]
    result = measured(Reading(recordings=(recorded((back, traffic), (onward, traffic), rank=8),)), mesh)
    assert rows(result) == {
        (placement.PP, "send", "bfloat16"): (32, 32 << 20),
        (placement.PP, "recv", "bfloat16"): (32, 32 << 20),
    }
    assert {row.size for row in result.ranks[0].rows} == {4} and result.ranks[0].pipeline_rank == 1


def test_sends_on_the_jobs_own_communicator_are_the_pipelines() -> None:
    """Of two stages that overlap their sends half go there, whatever the recipe says of it."""
    mesh = mesh_of(llama())
    world = Communicator(label="w", size=32, ranks=tuple(range(32)), rank=0, order=0)
    norm = replace(world, label="n", order=1)
    events = [
        CommEvent(0, "all_reduce", "float32", 1, 4),
        CommEvent(0, "recv", "bfloat16", 16, 16 << 22, SOME_STEP),
        CommEvent(1, "all_reduce", "float32", 1, 4, SOME_STEP),
    ]
    found = replace(recorded((world, ()), (norm, ())), events=events, steps=1, steps_by="a mark")
    result = measured(Reading(recordings=(found,)), mesh)
    assert {(row.group, row.axis, row.op) for row in result.ranks[0].rows} == {
        (placement.WORLD, "pp", "recv"),
        (placement.WORLD, "all", "all_reduce"),
        (placement.INSTANCE, "all", "all_reduce"),
    }


def test_a_pair_that_no_pipeline_has_is_not_attributed() -> None:
    mesh = mesh_of(llama("model.pipeline_model_parallel_size=4", "model.tensor_model_parallel_size=4"))
    pair = Communicator(label="comm 0x55", size=2, ranks=(8, 27), rank=0)
    (lost,) = measured(Reading(recordings=(recorded((pair, [("send", "bfloat16", 3, 96)]), rank=8),)), mesh).ranks
    assert lost.rows == ()
    (one,) = lost.unattributed
    assert (one.communicator, one.op, one.count, one.message_bytes) == ("comm 0x55", "send", 3, 96)
    assert one.why == "no group of the mesh of the recipe has the ranks 8, 27"


@pytest.mark.parametrize("stage", [0, 1])
def test_a_process_of_unknown_rank_is_of_the_stage_that_its_traffic_fits(stage: int) -> None:
    found = llama()
    one = of_stage(found, stage, ranks=False)
    result = measured(Reading(recordings=(replace(one, rank=None),)), mesh_of(found))
    assert rows(result) == predicted_rows(found, stage)


def test_a_recipe_of_another_size_is_not_used() -> None:
    run, found = next(each for each in runs() if each[0]["name"] == "tied_pp2")
    result = measured(Reading(recordings=(recording(run, found.layout, ranks=True),)), mesh_of(llama()))
    assert "the recipe has 32 ranks, the input 8: its groups are not used" in result.notes
    assert [mesh.inferred for mesh in result.meshes] == [True] and rows(result) == issued(run)


def test_each_job_of_several_in_the_inputs_has_its_own_mesh() -> None:
    """Two jobs of 8 and 32 ranks: neither is attributed by the other's mesh, with a recipe for one or without."""
    run, small = next(each for each in runs() if each[0]["name"] == "tied_pp2")
    large = llama()
    job = Reading(recordings=(recording(run, small.layout, ranks=True), of_stage(large, 1, ranks=True)))
    for recipe in (None, mesh_of(large)):
        result = measured(job, recipe)
        assert {mesh.layout.world_size: mesh.inferred for mesh in result.meshes} == {8: True, 32: recipe is None}
        assert (rows(result), rows(result, 1)) == (issued(run), predicted_rows(large, 1))
        assert [one.pipeline_rank for one in result.ranks] == [0, 1]
    assert "the recipe has 32 ranks, the input 8: its groups are not used there" in result.notes


ON_8 = ("cluster.num_gpus=8", "model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=1")
NO_TP = ("cluster.num_gpus=8", *(f"model.{axis}_model_parallel_size=1" for axis in ("tensor", "pipeline")))
EXPERTS = ("num_moe_experts=8", "moe_router_topk=2", "moe_token_dispatcher_type=alltoall", "moe_ffn_hidden_size=1024")
MOE = (*ON_8, *(f"model.{each}" for each in EXPERTS))


@pytest.mark.parametrize("ranks", [True, False], ids=["ranks known", "sizes alone"])
@pytest.mark.parametrize(
    "ran",
    [
        ("model.sequence_parallel=false",),
        ("ddp.use_distributed_optimizer=false",),
        ("train.global_batch_size=64",),
        ("model.share_embeddings_and_output_weights=true",),
    ],
    ids=lambda ran: ran[0],
)
@pytest.mark.parametrize(
    "layout",
    [(), ON_8, (*NO_TP, "model.sequence_parallel=false"), MOE, (*MOE, "model.expert_model_parallel_size=2")],
    ids=["TP 8, PP 2, DP 2", "TP 2, DP 4", "DP 8", "MoE", "MoE, EP 2"],
)
def test_a_job_that_ran_otherwise_is_attributed_by_what_groups_are_for(
    layout: Sequence[str], ran: Sequence[str], ranks: bool
) -> None:
    """Traffic that the recipe's prediction has in no group stands in the group that it went through."""
    recipe, job = llama(*layout), llama(*layout, *ran)
    for stage in range(len(job.stages)):
        result = measured(Reading(recordings=(of_stage(job, stage, ranks=ranks),)), mesh_of(recipe))
        assert rows(result) == predicted_rows(job, stage)


def test_traffic_that_no_group_is_predicted_to_have_names_its_ties() -> None:
    mesh = mesh_of(llama(*ON_8))
    ranks = around(mesh.layout, placement.TP, 0)
    found = only(mesh, Communicator(label="c", size=2, ranks=ranks, rank=0), [("all_reduce", "bfloat16", 500, 1 << 30)])
    assert (found.group, found.by, found.confidence) == (placement.TP, "ranks and operations", "likely")
    assert placement.TP_CP in found.ties


def test_a_barrier_beside_the_gradients_norm_is_of_the_whole_job() -> None:
    """Both are an all_reduce of one float32 by all ranks: the job's own group is made first."""
    mesh = mesh_of(llama())
    job, optimizer = (Communicator(label="c", size=32, ranks=tuple(range(32)), rank=0, order=order) for order in (0, 5))
    scalar: Traffic = [("all_reduce", "float32", 1, 4)]
    first, second = attribute(recorded((job, scalar), (optimizer, scalar)), mesh)
    assert (first.group, second.group) == (placement.WORLD, placement.INSTANCE)


# --- without a recipe ------------------------------------------------------------------------------------


def test_a_job_shows_its_own_mesh() -> None:
    found = llama()
    job = Reading(recordings=tuple(of_stage(found, stage, ranks=True) for stage in (0, 1)))
    result = measured(job)
    assert [rows(result, stage) for stage in (0, 1)] == [predicted_rows(found, stage) for stage in (0, 1)]
    assert [one.pipeline_rank for one in result.ranks] == [0, 1]
    assert {row.confidence for one in result.ranks for row in one.rows} == {"likely"}
    assert result.notes == ("no recipe says how the ranks are laid out: TP 8 × DP 2 × PP 2 fits the input best",)
    (mesh,) = result.to_dict()["meshes"]
    axes = {"tp": 8, "cp": 1, "dp": 2, "pp": 2, "etp": 8, "ep": 1}
    assert mesh == {"world_size": 32, **axes, "by": "input"}


@pytest.mark.parametrize("ranks", [True, False], ids=["ranks known", "sizes alone"])
def test_one_process_without_a_recipe_mostly_suffices_and_never_claims_to_be_sure(ranks: bool) -> None:
    """Seven of eight recorded runs come out whole; what is wrong in the others is not called exact."""
    right = 0
    for run, prediction in runs()[::3]:
        result = measured(Reading(recordings=(recording(run, prediction.layout, ranks=ranks),)))
        found = result.ranks[0]
        right += rows(result) == issued(run)
        assert all(row.confidence != "exact" and (ranks or row.confidence == "guess") for row in found.rows)
        moved = sum(row.message_bytes for row in found.rows) + sum(one.message_bytes or 0 for one in found.unattributed)
        assert moved == sum(bytes_ for _, bytes_ in issued(run).values()), run["name"]
    assert right >= len(runs()[::3]) * 7 // 8


def test_a_job_of_an_absurd_size_is_guessed_from_what_it_carries() -> None:
    huge = Communicator(label="c", size=1 << 40)
    one = recorded((huge, [("all_to_all", "bfloat16", 1, 64)]), rank=None)
    assert infer_mesh([one]) == (None, ())
    (found,) = attribute(one, None)
    assert (found.group, found.confidence, found.by) == (placement.EP, "guess", "operations")


def test_calls_of_which_no_group_is_known_are_given_to_none() -> None:
    """A trace of gloo names no group: its sends do not make a pipeline, with or without a recipe."""
    nobodys = Communicator(label="c10d operators")
    one = recorded((nobodys, [("send", "bfloat16", 2, 64), ("all_reduce", "float32", 3, 96)]), rank=None)
    for mesh in (None, mesh_of(llama())):
        result = measured(Reading(recordings=(one,)), mesh)
        assert result.ranks[0].rows == () and result.ranks[0].pipeline_rank is None
        lost = result.ranks[0].unattributed
        assert [(each.op, each.count, each.message_bytes, each.size) for each in lost] == [
            ("send", 2, 64, None),
            ("all_reduce", 3, 96, None),
        ]
        assert {each.why for each in lost} == {"the source does not say whose calls they are"}
    assert infer_mesh([one]) == (None, ())


def test_a_place_in_the_pipelines_group_is_the_stage() -> None:
    pipeline = Communicator(label="p", size=4, rank=2, description=placement.PP)
    one = recorded((pipeline, [("send", "bfloat16", 1, 4)]), rank=None)
    assert pipeline_rank(one, None, attribute(one, None)) == 2
