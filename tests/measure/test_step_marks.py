"""What marks the optimizer steps, of all that was seen: one rule for NCCL's logs and the recorder."""

from __future__ import annotations

import pytest

from overlapkit.measure.readers.step_marks import Mark, mark_of_steps

SIZES = {None: 0, 1: 2, 2: 8, 3: 8}


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({}, None),
        ({("int32", 1): 9, ("step", None): 1}, ("step", None)),
        ({("int32", 2): 1, ("int32", 1): 2, ("int32", 3): 9}, ("int32", 1)),
        ({("int32", 2): 1, ("int32", 1): 1}, ("int32", 2)),
        ({("float32", 2): 9, ("int32", 1): 1}, ("int32", 1)),
        ({("float32", 1): 9, ("float32", 2): 1}, ("float32", 2)),
        ({("float32", 2): 1, ("float32", 3): 2}, ("float32", 3)),
    ],
    ids=[
        "nothing",
        "the user's",
        "recurs first",
        "first of all",
        "int32",
        "largest group",
        "of equals the most frequent",
    ],
)
def test_what_marks_the_steps(times: dict[Mark, int], chosen: Mark | None) -> None:
    assert mark_of_steps(times, SIZES) == chosen
