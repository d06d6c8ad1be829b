"""Rows per process: totals and steps, times by interval union, bandwidths, skew, and nothing dropped."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest

from overlapkit.measure.bandwidth import algorithm_bandwidth, bus_bandwidth
from overlapkit.measure.events import SOME_STEP, CommEvent, Communicator, Interval, Reading, Recording, Span, Step
from overlapkit.measure.measured import Measured, MeasuredRow
from overlapkit.measure.measuring import measured
from overlapkit.measure.skew import GroupTime, RankTime, skew

TP = Communicator(label="tp", size=4, ranks=(0, 1, 2, 3), rank=0, description="TENSOR_MODEL_PARALLEL_GROUP")
PP = Communicator(label="pp", size=2, ranks=(0, 4), rank=0, description="PIPELINE_MODEL_PARALLEL_GROUP")
ALONE = Communicator(label="dp", size=1, ranks=(0,), rank=0, description="DATA_PARALLEL_GROUP_WITH_CP")
GATHER = CommEvent(0, "all_gather", "bfloat16", 6, 600, None)


def recorded(*events: CommEvent, communicators: tuple[Communicator, ...] = (TP, PP, ALONE)) -> Recording:
    return Recording(source="log", kind="nccl_log", rank=0, world_size=8, communicators=communicators, events=events)


def timed(*spans: Span, busy: tuple[Interval, ...] = (), windows: tuple[Step, ...] = (), rank: int = 0) -> Recording:
    """A trace with a gather on TP and a send and a recv on PP."""
    calls = (GATHER, CommEvent(1, "send", "bfloat16", 2, 5000), CommEvent(1, "recv", "bfloat16", 2, 5000))
    return replace(recorded(*calls), kind="torch_trace", rank=rank, spans=spans, busy=busy, windows=windows)


def only(found: Measured) -> MeasuredRow:
    (row,) = found.ranks[0].rows
    return row


def of(recording: Recording, *, steps: int | None = None) -> Measured:
    return measured(Reading(recordings=(recording,)), steps=steps)


# --- totals and steps ------------------------------------------------------------------------------------


def test_a_row_sums_what_is_of_one_group_operation_and_type() -> None:
    again = replace(TP, label="another communicator of the same group")
    found = of(recorded(GATHER, CommEvent(1, "all_gather", "bfloat16", 2, 200, 1), communicators=(TP, again)))
    row = only(found)
    assert (row.group, row.axis, row.size) == ("TENSOR_MODEL_PARALLEL_GROUP", "tp", 4)
    assert (row.count, row.message_bytes, row.wire_bytes) == (8, 800, 600)
    assert (row.attributed_by, row.confidence, row.ties) == ("description", "exact", ())


def test_steps_count_what_lies_inside_the_complete_ones() -> None:
    events = [
        CommEvent(0, "all_gather", "bfloat16", calls, size, step)
        for calls, size, step in ((5, 500, None), (4, 400, SOME_STEP), (4, 400, 7))
    ]
    row = only(of(replace(recorded(*events), steps=2, steps_by="marks")))
    assert row.count == 13 and row.per_step is not None
    assert (row.per_step.count, row.per_step.message_bytes, row.per_step.wire_bytes) == (4, 400, 300)


def test_steps_that_differ_give_a_fraction_and_what_is_set_up_only_gives_nothing() -> None:
    first, second, setup = (
        CommEvent(0, "all_gather", "bfloat16", 1, size, step) for size, step in ((1, 1), (2, 2), (9, None))
    )
    row = only(of(replace(recorded(first, second, setup), steps=2, steps_by="marks")))
    assert row.per_step is not None and row.per_step.message_bytes == Fraction(3, 2)
    assert row.to_dict()["per_step"] == {"count": 1, "message_bytes": 1.5, "wire_bytes": 1}
    row = only(of(replace(recorded(setup), steps=2, steps_by="marks")))
    assert row.to_dict()["per_step"] == {"count": 0, "message_bytes": 0, "wire_bytes": 0}


def test_a_single_mark_makes_the_whole_input_one_step() -> None:
    row = only(of(replace(recorded(GATHER), steps=0, steps_by="marks")))
    assert row.per_step is not None and (row.per_step.count, row.per_step.message_bytes) == (6, 600)


def test_without_marks_the_user_says_how_many_steps_there_are() -> None:
    assert only(of(recorded(GATHER))).per_step is None
    row = only(of(recorded(GATHER), steps=3))
    assert row.per_step is not None and (row.per_step.count, row.per_step.message_bytes) == (2, 200)
    marked = only(of(replace(recorded(GATHER), steps_by="marks"), steps=3))
    assert marked.per_step is not None and marked.per_step.count == 6


def test_the_json_says_how_many_steps_its_figures_per_step_are_of() -> None:
    marked = replace(recorded(GATHER), steps=2, steps_by="marks")
    for one, given, of_steps in ((marked, 5, 2), (replace(marked, steps=0), 5, 1), (recorded(GATHER), 5, 5)):
        assert of(one, steps=given).to_dict()["ranks"][0]["per_step_of"] == of_steps
    assert of(recorded(GATHER)).to_dict()["ranks"][0]["per_step_of"] is None


def test_what_an_all_to_all_sends_is_said_to_be_as_if_even() -> None:
    even = (
        "all_to_all: of n ranks' message (n-1)/n counts as sent, as if all got as much; routing may send more or less"
    )
    assert of(recorded(CommEvent(0, "all_to_all", "bfloat16", 1, 64))).notes == (even,)
    assert of(recorded(GATHER)).notes == ()


def test_groups_of_one_rank_stand_apart_and_send_nothing() -> None:
    found = of(recorded(GATHER, CommEvent(2, "broadcast", "float32", 3, 300))).ranks[0]
    assert [row.group for row in found.rows] == ["TENSOR_MODEL_PARALLEL_GROUP"]
    (alone,) = found.single_rank
    assert (alone.group, alone.size, alone.message_bytes, alone.wire_bytes) == (
        "DATA_PARALLEL_GROUP_WITH_CP",
        1,
        300,
        0,
    )
    assert alone.to_dict()["wire_bytes"] == 0


# --- times -----------------------------------------------------------------------------------------------


def test_times_are_unions_and_what_other_work_covers_is_hidden() -> None:
    """Two gathers overlap from 10 to 20, work covers 15 to 30: 40 µs in all, 25 of them exposed."""
    spans = (Span(0, 20, 0, "all_gather", "bfloat16"), Span(10, 40, 0, "all_gather", "bfloat16"))
    row = of(timed(*spans, busy=((15, 25), (20, 30)))).ranks[0].rows[-1]
    assert row.group == "TENSOR_MODEL_PARALLEL_GROUP"
    assert (row.time_us, row.exposed_us, row.hidden_us) == (40, 25, 15)


def test_overlap_is_per_group_and_per_step_and_none_is_dropped() -> None:
    spans = (
        Span(0, 10, 0, "all_gather", "bfloat16"),
        Span(5, 20, 1, "send", "bfloat16"),
        Span(100, 110, 1, "send", "bfloat16"),
    )
    windows = (Step(number=4, start_us=0, end_us=50), Step(number=5, start_us=50, end_us=120))
    overlap = of(timed(*spans, busy=((0, 5), (100, 104)), windows=windows)).ranks[0].overlap
    assert overlap is not None
    assert (overlap.total.time_us, overlap.total.exposed_us) == (30, 21)
    assert overlap.groups["TENSOR_MODEL_PARALLEL_GROUP"].exposed_us == 5
    assert overlap.groups["PIPELINE_MODEL_PARALLEL_GROUP"].time_us == 25
    assert [(step.number, step.total.time_us, step.total.exposed_us) for step in overlap.steps] == [
        (4, 20, 15),
        (5, 10, 6),
    ]


def test_a_kernel_that_sends_and_receives_stands_in_the_row_of_what_is_sent() -> None:
    rows = {row.op: row for row in of(timed(Span(0, 10, 1, "send_recv", "bfloat16"))).ranks[0].rows}
    assert rows["send"].time_us == 10 and rows["recv"].time_us is None


def test_of_two_types_a_kernel_stands_in_the_row_of_its_own() -> None:
    calls = [CommEvent(1, "send", dtype, 1, 100) for dtype in ("bfloat16", "float32")]
    for dtype, other in (("bfloat16", "float32"), ("float32", "bfloat16")):
        found = replace(timed(Span(0, 10, 1, "send_recv", dtype)), events=calls)
        assert {row.dtype: row.time_us for row in of(found).ranks[0].rows} == {dtype: 10, other: None}


def test_a_kernel_without_a_group_belongs_to_the_only_one_that_issues_its_operation() -> None:
    """Batched sends and receives become one kernel, which the profiler links to no call."""
    found = of(timed(Span(0, 10, None, "send_recv", "unknown"))).ranks[0]
    assert {row.op: row.time_us for row in found.rows if row.axis == "pp"} == {"send": 10, "recv": None}
    assert found.unattributed == ()


def test_a_kernel_that_could_be_anybodys_is_listed() -> None:
    found = of(timed(Span(0, 10, None, "all_reduce", "unknown"), Span(20, 25, None, "all_reduce", "unknown"))).ranks[0]
    (lost,) = found.unattributed
    assert (lost.op, lost.count, lost.message_bytes, lost.time_us) == ("all_reduce", 2, None, 15)
    assert lost.why == "the source does not say whose kernels they are"
    assert found.overlap is not None and found.overlap.groups[None].time_us == 15


@pytest.mark.parametrize(
    ("op", "group"),
    [("userbuffers", "TENSOR_MODEL_PARALLEL_GROUP"), ("dispatch", "EXPERT_MODEL_PARALLEL_GROUP")],
)
def test_kernels_outside_nccl_belong_to_the_group_that_megatron_uses_them_for(op: str, group: str) -> None:
    overlap = of(timed(Span(0, 10, None, op, "unknown"))).ranks[0].overlap
    assert overlap is not None and overlap.groups[group].time_us == 10


def test_a_source_without_times_has_none() -> None:
    found = of(recorded(GATHER)).ranks[0]
    assert found.overlap is None and found.rows[0].to_dict()["time_us"] is None
    assert found.rows[0].algbw_gbps is None and found.rows[0].busbw_gbps is None


def test_times_without_moments_add_up_and_expose_nothing() -> None:
    """NCCL Inspector without verbose records: 6 calls of 100 bytes in 2 µs each, of which 2 in another communicator."""
    calls = (
        CommEvent(0, "all_gather", "unknown", 4, 400, None, 8.0),
        CommEvent(1, "all_gather", "unknown", 2, 200, None, 4.0),
    )
    row = only(of(recorded(*calls, communicators=(TP, TP))))
    assert (row.time_us, row.exposed_us, row.hidden_us) == (12, None, None)
    assert (row.algbw_gbps, row.busbw_gbps) == (0.05, 0.0375)
    assert row.to_dict()["time_us"] == 12 and row.to_dict()["exposed_us"] is None


def test_where_one_time_is_missing_there_is_no_sum() -> None:
    calls = (CommEvent(0, "all_gather", "bfloat16", 4, 400, None, 8.0), GATHER)
    assert only(of(recorded(*calls))).time_us is None


def test_a_span_says_more_than_a_sum() -> None:
    found = timed(Span(0, 10, 0, "all_gather", "bfloat16"))
    found = replace(found, events=[each._replace(time_us=99.0) for each in found.events])
    assert of(found).ranks[0].rows[-1].time_us == 10


def test_of_a_group_of_unknown_size_nothing_is_said_that_rests_on_it() -> None:
    unsized = Communicator(label="c", description="TENSOR_MODEL_PARALLEL_GROUP")
    row = only(of(recorded(GATHER._replace(time_us=6.0), communicators=(unsized,)), steps=2))
    assert (row.size, row.message_bytes, row.wire_bytes, row.busbw_gbps) == (0, 600, None, None)
    values = row.to_dict()
    assert (values["size"], values["wire_bytes"], values["per_step"]["wire_bytes"]) == (None, None, None)
    assert values["algbw_gbps"] == 0.1


# --- bandwidth and skew ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 1.75),
        ("all_gather", 0.875),
        ("reduce_scatter", 0.875),
        ("all_to_all", 0.875),
        ("send", 1),
        ("recv", 1),
        ("broadcast", 1),
        ("reduce", 1),
    ],
)
def test_bus_bandwidth_has_the_factors_of_nccl_tests(op: str, factor: float) -> None:
    assert algorithm_bandwidth(8_000_000, 100.0) == 80
    assert bus_bandwidth(op, 8, 8_000_000, 100.0) == pytest.approx(80 * factor)


@pytest.mark.parametrize("time_us", [None, 0.0])
def test_without_time_there_is_no_bandwidth(time_us: float | None) -> None:
    assert algorithm_bandwidth(8, time_us) is None and bus_bandwidth("all_reduce", 8, 8, time_us) is None


def test_the_rank_that_the_others_wait_for_has_the_shortest_kernels() -> None:
    job = tuple(
        timed(
            Span(0, taken, 0, "all_gather", "bfloat16"),
            windows=(Step(number=1, start_us=0, end_us=100 + rank),),
            rank=rank,
        )
        for rank, taken in ((0, 30.0), (1, 10.0), (2, 25.0))
    )
    found = measured(Reading(recordings=job)).skew
    assert found is not None
    whole, step = found.groups
    assert (whole.group, whole.ranks, whole.step, step.step) == ("TENSOR_MODEL_PARALLEL_GROUP", (0, 1, 2), None, 1)
    assert (whole.shortest, whole.longest, whole.skew_us) == (RankTime(1, 10.0), RankTime(0, 30.0), 20.0)
    (of_step,) = found.steps
    assert (of_step.step, of_step.slowest, of_step.fastest) == (1, RankTime(2, 102.0), RankTime(0, 100.0))


def test_two_groups_of_one_kind_are_not_compared_with_each_other() -> None:
    times = [GroupTime("TP", (0, 1), None, 0, 5.0), GroupTime("TP", (2, 3), None, 2, 50.0)]
    assert skew(times, []) is None


# --- the whole -------------------------------------------------------------------------------------------


def test_the_json_is_the_contract() -> None:
    spans = (Span(0, 10, 0, "all_gather", "bfloat16"),)
    found = of(timed(*spans, windows=(Step(number=1, start_us=0, end_us=20),))).to_dict()
    assert json.loads(json.dumps(found)) == found
    assert list(found) == ["schema_version", "convention", "per", "meshes", "ranks", "skew", "problems", "notes"]
    (rank,) = found["ranks"]
    assert {
        "rank",
        "world_size",
        "source",
        "kind",
        "host",
        "steps",
        "steps_by",
        "rows",
        "single_rank",
        "unattributed",
        "overlap",
    } <= set(rank)
    row = rank["rows"][-1]
    assert row["group"] == "TENSOR_MODEL_PARALLEL_GROUP" and row["evidence"] == "measured"
    assert row["algbw_gbps"] == 0.06 and row["busbw_gbps"] == 0.045
    assert rank["overlap"]["steps"][0]["groups"] == [
        {"group": "TENSOR_MODEL_PARALLEL_GROUP", "time_us": 10, "exposed_us": 10, "hidden_us": 0}
    ]


def test_several_inputs_of_one_rank_are_said() -> None:
    first, second = recorded(GATHER), replace(recorded(GATHER), source="log of another run")
    found = measured(Reading(recordings=(first, second, replace(recorded(GATHER), rank=1))))
    assert found.notes == ("rank 0 has 2 inputs of one kind: of several runs? Each counts by itself",)
    assert measured(Reading(recordings=(first, replace(second, kind="recorder")))).notes == ()


def test_notes_of_the_sources_stand_once() -> None:
    both = [replace(recorded(GATHER), rank=rank, notes=("no times",)) for rank in (0, 1)]
    assert measured(Reading(recordings=tuple(both))).notes == ("no times",)
    one = (both[0], replace(both[1], notes=()))
    assert measured(Reading(recordings=one)).notes == ("log: no times",)
