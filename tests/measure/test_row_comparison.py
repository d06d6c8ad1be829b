"""Predicted rows beside measured ones: what is equal whatever a source calls it, and what is not."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from overlapkit.measure.row_comparison import Figures, Number, RowComparison, Seen, compare_rows
from overlapkit.volume.rows import Row

TP = "TENSOR_MODEL_PARALLEL_GROUP"
PP = "PIPELINE_MODEL_PARALLEL_GROUP"
DP = "DATA_PARALLEL_GROUP_WITH_CP"
EXPERT_TP = "EXPERT_TENSOR_PARALLEL_GROUP"
EP = "EXPERT_MODEL_PARALLEL_GROUP"


def predicted(op: str, count: int, message_bytes: int, group: str = TP, **other: Any) -> Row:
    fixed = {"axis": "tp", "size": 4, "dtype": "bfloat16", "placement": None, "observable": True, "exact": True}
    fields = {**fixed, "evidence": "run", "phases": (), **other}
    return Row(group=group, op=op, count=count, message_bytes=message_bytes, **fields)


def seen(op: str, count: Number, message_bytes: Number, group: str = TP, dtype: str = "bfloat16") -> Seen:
    return Seen(group, 4, op, dtype, count, message_bytes)


def only(rows: list[Row], measured: list[Seen], kind: str = "nccl_log") -> RowComparison:
    [row] = compare_rows(rows, measured, kind=kind)
    return row


# --- the four answers --------------------------------------------------------------------------------


def test_the_same_figures_are_equal() -> None:
    row = only([predicted("all_gather", 6, 600)], [seen("all_gather", 6, 600)])
    assert (row.status, row.matches, row.mismatch, row.note) == ("equal", True, 0.0, None)


@pytest.mark.parametrize("figures", [(7, 600), (6, 700), (6, 599)])
def test_other_figures_differ(figures: tuple[int, int]) -> None:
    row = only([predicted("all_gather", 6, 600)], [seen("all_gather", *figures)])
    assert (row.status, row.predicted, row.measured) == ("differs", Figures(6, 600), Figures(*figures))
    assert not row.matches and row.mismatch > 0


def test_what_is_not_there_differs_from_what_was_predicted() -> None:
    row = only([predicted("all_gather", 6, 600)], [])
    assert (row.status, row.measured, row.mismatch) == ("differs", None, 2.0)


def test_what_leaves_nccl_is_not_observable() -> None:
    row = only([predicted("all_gather", 6, 600, observable=False)], [])
    assert (row.status, row.measured, row.matches) == ("not_observable", None, True)


def test_a_group_of_the_name_and_another_size_is_not_added_to_the_predicted_one() -> None:
    other = replace(seen("all_gather", 2, 50), size=2)
    rows = compare_rows([predicted("all_gather", 6, 600)], [other, seen("all_gather", 6, 600)], kind="nccl_log")
    assert [(row.size, row.status, row.measured) for row in rows] == [
        (4, "equal", Figures(6, 600)),
        (2, "not_predicted", Figures(2, 50)),
    ]
    (row,) = compare_rows([predicted("all_gather", 2, 50)], [other], kind="nccl_log")
    assert row.status == "differs" and row.note is not None and row.note.startswith("on 2 ranks, not 4")


def test_what_is_seen_without_a_prediction() -> None:
    row = only([], [seen("all_gather", 6, 600)])
    assert (row.status, row.axis, row.predicted, row.matches) == ("not_predicted", "tp", None, False)


def test_traffic_that_was_to_leave_nccl_and_did_not_is_a_difference_of_the_rest() -> None:
    split = [predicted("all_gather", 2, 200), predicted("all_gather", 6, 600, observable=False)]
    rows = compare_rows(split, [seen("all_gather", 8, 800)], kind="nccl_log")
    assert [(row.status, row.predicted, row.measured) for row in rows] == [
        ("differs", Figures(2, 200), Figures(8, 800)),
        ("not_observable", Figures(6, 600), None),
    ]


def test_a_step_may_hold_part_of_a_call() -> None:
    row = only([predicted("all_gather", 6, 600)], [seen("all_gather", Fraction(13, 2), 650)])
    assert row.to_dict()["measured"] == {"count": 6.5, "message_bytes": 650}
    assert row.status == "differs"


# --- what only the spelling of a source changes ----------------------------------------------------------


def test_a_list_of_equal_tensors_is_one_call() -> None:
    assert only([predicted("all_gather_list", 6, 600)], [seen("all_gather", 6, 600)]).status == "equal"
    assert only([predicted("reduce_scatter_list", 6, 600)], [seen("reduce_scatter", 6, 600)]).status == "equal"


def test_a_list_and_a_tensor_add_up() -> None:
    both = [predicted("all_gather_list", 6, 600), predicted("all_gather", 1, 50)]
    assert only(both, [seen("all_gather", 7, 650)]).op == "all_gather"


@pytest.mark.parametrize(("op", "part"), [("all_gather_list", "broadcast"), ("reduce_scatter_list", "reduce")])
def test_a_list_of_unequal_tensors_is_a_call_for_each_rank(op: str, part: str) -> None:
    row = only([predicted(op, 6, 600, EXPERT_TP)], [seen(part, 24, 600, EXPERT_TP)])
    assert (row.status, row.op, row.measured) == ("equal", op, Figures(6, 600))


def test_a_broadcast_where_no_list_is_predicted_stays_one() -> None:
    rows = compare_rows([predicted("all_gather", 6, 600)], [seen("broadcast", 24, 600)], kind="nccl_log")
    assert [(row.op, row.status) for row in rows] == [("all_gather", "differs"), ("broadcast", "not_predicted")]


def test_booleans_are_bytes_to_nccl() -> None:
    row = only([predicted("all_gather", 6, 600, dtype="bool")], [seen("all_gather", 6, 600, dtype="uint8")])
    assert (row.status, row.dtype) == ("equal", "bool")


def test_a_source_without_types_is_compared_over_all_of_them() -> None:
    typed = [predicted("all_reduce", 1, 4, dtype="int32"), predicted("all_reduce", 2, 8, dtype="float32")]
    row = only(typed, [seen("all_reduce", 3, 12, dtype="unknown")])
    assert (row.status, row.dtype) == ("equal", "unknown")


def test_sends_through_the_job_are_the_pipelines() -> None:
    both = [predicted("send", 6, 600, PP), predicted("send", 2, 200, "WORLD")]
    row = only(both, [seen("send", 8, 800, PP)])
    assert (row.status, row.group, row.axis) == ("equal", PP, "pp")


def test_a_profiler_writes_buckets_that_are_issued_together_as_one() -> None:
    rows, measured = [predicted("reduce_scatter", 6, 600, DP)], [seen("reduce_scatter", 3, 600, DP)]
    assert only(rows, measured, "torch_trace").status == "equal"
    assert "together" in (only(rows, measured, "torch_trace").note or "")
    assert only(rows, measured, "nccl_log").status == "differs"
    assert only(rows, [seen("reduce_scatter", 7, 600, DP)], "torch_trace").status == "differs"


@pytest.mark.parametrize(("group", "count"), [(TP, 3), (PP, 3), (DP, 1)])
def test_fewer_and_larger_calls_are_another_batch_or_other_buckets(group: str, count: int) -> None:
    rows, measured = [predicted("reduce_scatter", 6, 600, group)], [seen("reduce_scatter", count, 600, group)]
    assert only(rows, measured, "torch_trace").status == "differs"


def test_a_group_of_another_size_is_another_layout() -> None:
    row = only([predicted("all_gather", 6, 600, size=8)], [seen("all_gather", 6, 600)])
    assert (row.status, row.note) == ("differs", "on 4 ranks, not 8: the job ran with another layout")


def test_bytes_that_routing_decides_are_compared_by_calls() -> None:
    rows = [predicted("all_to_all", 6, 600, EP, exact=False)]
    row = only(rows, [seen("all_to_all", 6, 660, EP)])
    assert (row.status, row.note) == ("equal", "calls are equal; routing decides the bytes, ×1.10 of balanced experts")
    assert only(rows, [seen("all_to_all", 7, 600, EP)]).status == "differs"


def test_the_inspector_writes_no_sends() -> None:
    rows = [predicted("send", 6, 600, PP)]
    assert only(rows, [], "nccl_inspector").status == "not_observable"
    assert only(rows, [], "nccl_log").status == "differs"
