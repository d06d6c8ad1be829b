"""Calls that no step needs: what is judged where steps are marked, and where they are not."""

from __future__ import annotations

import pytest

from overlapkit.measure.beside_steps import explained
from overlapkit.measure.row_comparison import RowComparison, Seen, compare_rows

WORLD = "WORLD"
TP = "TENSOR_MODEL_PARALLEL_GROUP"
EMBEDDING = "EMBEDDING_GROUP"
INSTANCE = "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"


def judged(op: str, dtype: str, group: str, each: int, *, steps: int) -> RowComparison:
    """Two calls of ``each`` bytes that nothing predicts."""
    [row] = compare_rows([], [Seen(group, 8, op, dtype, 2, 2 * each)], kind="nccl_log")
    return explained(row, steps)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("op", "dtype", "group", "each"),
    [
        ("barrier", "uint8", TP, 1),
        ("all_reduce", "float32", WORLD, 4),
        ("all_reduce", "uint8", WORLD, 1),
        ("all_reduce", "unknown", WORLD, 4),
    ],
)
def test_a_barrier_is_no_difference_anywhere(op: str, dtype: str, group: str, each: int, steps: int) -> None:
    row = judged(op, dtype, group, each, steps=steps)
    assert row.matches and row.note == "barriers of timers, checkpoints and set-up"


@pytest.mark.parametrize(
    ("dtype", "group", "each"),
    [("bfloat16", EMBEDDING, 1 << 20), ("int32", INSTANCE, 4), ("float64", WORLD, 8)],
)
def test_set_up_is_no_difference_where_steps_are_not_marked_and_one_inside_them(
    dtype: str, group: str, each: int
) -> None:
    unmarked = judged("all_reduce", dtype, group, each, steps=0)
    assert unmarked.status == "beside_steps" and unmarked.note is not None
    assert judged("all_reduce", dtype, group, each, steps=2).status == "not_predicted"


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("op", "dtype", "group", "each"),
    [("all_reduce", "float32", WORLD, 8), ("all_reduce", "float32", TP, 4), ("broadcast", "int64", TP, 64)],
)
def test_everything_else_is_one(op: str, dtype: str, group: str, each: int, steps: int) -> None:
    assert not judged(op, dtype, group, each, steps=steps).matches


def test_the_batch_says_what_would_predict_it() -> None:
    assert (
        judged("broadcast", "int64", TP, 64, steps=2).note == "the batch of Megatron-LM: --data-broadcast predicts it"
    )
