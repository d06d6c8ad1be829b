"""Exposed and hidden communication, by hand and against an independent computation."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapkit.measure.events import Interval, Step
from overlapkit.measure.intervals import exposed, length, overlap, step_at, subtract, union, windows


def step(number: int, start: float, end: float) -> Step:
    return Step(number=number, start_us=start, end_us=end)


def test_a_union_joins_what_overlaps_touches_or_lies_inside() -> None:
    assert union([(5, 7), (0, 2), (2, 4), (5, 9), (6, 7)]) == [(0, 4), (5, 9)]


def test_an_interval_without_length_covers_nothing() -> None:
    assert union([(1, 1), (3, 5), (4, 4), (9, 9)]) == [(3, 5)]
    assert union([]) == []


def test_overlap_is_what_both_cover() -> None:
    assert overlap([(0, 4), (6, 9)], [(1, 2), (3, 7), (8, 12)]) == [(1, 2), (3, 4), (6, 7), (8, 9)]


def test_subtracting_leaves_what_the_other_does_not_cover() -> None:
    assert subtract([(0, 10), (12, 14)], [(2, 3), (5, 6), (9, 13)]) == [(0, 2), (3, 5), (6, 9), (13, 14)]
    assert subtract([(0, 1), (2, 3)], []) == [(0, 1), (2, 3)]
    assert subtract([(1, 2), (3, 4)], [(0, 9)]) == []


@pytest.mark.parametrize(
    ("communication", "work", "time", "bare"),
    [
        pytest.param([(0, 10)], [(10, 20)], 10, 10, id="back to back: nothing is hidden"),
        pytest.param([(0, 10), (10, 20)], [(5, 15)], 20, 10, id="two kernels back to back over one computation"),
        pytest.param([(2, 8)], [(0, 10)], 6, 0, id="nested in work: all hidden"),
        pytest.param([(0, 10)], [(2, 4), (6, 7)], 10, 7, id="work nested in it"),
        pytest.param([(0, 10)], [(0, 6), (4, 8)], 10, 2, id="work on two streams covers once"),
        pytest.param([(0, 10), (2, 12)], [(3, 5)], 12, 10, id="communication on two streams lasts once"),
        pytest.param([(0, 10)], [(3, 3)], 10, 10, id="work without length hides nothing"),
        pytest.param([(3, 3)], [], 0, 0, id="communication without length takes none"),
        pytest.param([], [(0, 10)], 0, 0, id="no communication"),
    ],
)
def test_hand_computed(communication: list[Interval], work: list[Interval], time: float, bare: float) -> None:
    total = exposed({"tp": communication}, work).total
    assert (total.time_us, total.exposed_us, total.hidden_us) == (time, bare, time - bare)


def test_groups_beside_each_other_count_each_and_once_in_all() -> None:
    found = exposed({"tp": [(0, 10)], "dp": [(5, 15)]}, [(8, 20)])
    assert {group: (times.time_us, times.exposed_us) for group, times in found.groups.items()} == {
        "tp": (10, 8),
        "dp": (10, 3),
    }
    assert (found.total.time_us, found.total.exposed_us) == (15, 8)


def test_every_step_counts_also_the_last_and_one_with_nothing() -> None:
    found = exposed(
        {"dp": [(5, 15), (28, 34)]}, [(12, 30)], [step(0, 0, 10), step(1, 10, 20), step(2, 20, 25), step(3, 25, 32)]
    )
    assert [(each.number, each.total.time_us, each.total.exposed_us) for each in found.steps] == [
        (0, 5, 5),
        (1, 5, 2),
        (2, 0, 0),
        (3, 4, 2),
    ]
    assert found.steps[3].groups == {"dp": found.steps[3].total}
    assert found.total.time_us == 16  # 2 of them behind the last step


def test_a_step_lasts_until_the_next_one_begins() -> None:
    assert windows({7: (0, 5), 8: (6, 9), 10: (20, 22)}) == (step(7, 0, 6), step(8, 6, 9), step(10, 20, 22))


def test_a_moment_is_in_one_step_or_none() -> None:
    steps = windows({7: (0, 5), 8: (6, 9)})
    assert [step_at(steps, at) for at in (-1, 0, 5.5, 6, 8.9, 9, float("nan"))] == [None, 7, 7, 8, 8, None, None]


intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda drawn: (drawn[0], drawn[0] + drawn[1]))
)


@given(
    groups=st.dictionaries(st.sampled_from(("tp", "dp", "pp")), intervals),
    work=intervals,
    cuts=st.sets(st.integers(0, 70)),
)
def test_it_agrees_with_counting_microsecond_by_microsecond(
    groups: dict[str, list[Interval]], work: list[Interval], cuts: set[int]
) -> None:
    def ticks(found: list[Interval]) -> set[int]:
        return {tick for start, end in found for tick in range(int(start), int(end))}

    bounds = sorted(cuts)
    steps = [step(number, start, end) for number, (start, end) in enumerate(pairwise(bounds))]
    found = exposed(groups, work, steps)
    busy = ticks(work)
    everything = set().union(*map(ticks, groups.values()))
    for times, covered in ((found.total, everything), *((found.groups[name], ticks(groups[name])) for name in groups)):
        assert (times.time_us, times.exposed_us) == (len(covered), len(covered - busy))
    for window, at in zip(steps, found.steps, strict=True):
        inside = set(range(int(window.start_us), int(window.end_us)))
        assert (at.total.time_us, at.total.exposed_us) == (len(everything & inside), len((everything & inside) - busy))
        for name in groups:
            mine = ticks(groups[name]) & inside
            assert (at.groups[name].time_us, at.groups[name].exposed_us) == (len(mine), len(mine - busy))


@given(first=intervals, second=intervals)
def test_what_is_left_and_what_is_shared_are_the_whole(first: list[Interval], second: list[Interval]) -> None:
    one, other = union(first), union(second)
    left, shared = subtract(one, other), overlap(one, other)
    assert union([*left, *shared]) == one
    assert length(left) + length(shared) == length(one)
