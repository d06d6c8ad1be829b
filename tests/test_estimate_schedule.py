"""Which pass runs when: the order of Megatron-Core's schedules, and the times that follow from it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from estimates import stage_of, timeline_of
from hypothesis import given
from hypothesis import strategies as st

from overlapkit.cost.result import Timeline
from overlapkit.cost.schedule import Block, blocks, order, schedule_of

SECONDS = st.floats(min_value=1e-3, max_value=10.0)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """What Megatron-Core runs: with virtual stages whole groups of microbatches."""
    stages = draw(st.integers(1, 6))
    vp = draw(st.integers(1, 4)) if stages > 1 else 1
    microbatches = draw(st.integers(1, 16)) if vp == 1 else stages * draw(st.integers(1, 4))
    passes = [stage_of(draw(SECONDS), draw(SECONDS)) for _ in range(stages)]
    timeline = timeline_of(passes, microbatches, vp=vp, p2p_s=draw(st.sampled_from([0.0, 0.01, 3.0])))
    return replace(timeline, dp_exposed_s=draw(st.sampled_from([0.0, 0.5])))


def by_key(found: list[Block]) -> dict[tuple[str, int, int, int], Block]:
    return {(block.kind, block.stage, block.chunk, block.microbatch): block for block in found}


# --- order -----------------------------------------------------------------------------------------


def words(stage: int, stages: int, chunks: int, microbatches: int) -> str:
    """The order in short: F or B, the microbatch, and the chunk where there are several."""
    names = {"forward": "F", "backward": "B"}
    return " ".join(
        f"{names[kind]}{microbatch}{'abc'[chunk] if chunks > 1 else ''}"
        for kind, chunk, microbatch in order(stage, stages, chunks, microbatches)
    )


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, "F0 F1 F2 B0 F3 B1 B2 B3"),
        (1, "F0 F1 B0 F2 B1 F3 B2 B3"),
        (2, "F0 B0 F1 B1 F2 B2 F3 B3"),
    ],
)
def test_one_forward_one_backward(stage: int, expected: str) -> None:
    assert words(stage, 3, 1, 4) == expected


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        # warm-up of 2 (p - stage - 1) + (v - 1) p passes
        (0, "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a"),
        (1, "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"),
    ],
)
def test_interleaved(stage: int, expected: str) -> None:
    assert words(stage, 2, 2, 4) == expected


def test_all_is_warm_up_where_microbatches_are_few() -> None:
    assert words(0, 4, 1, 2) == "F0 F1 B0 B1"


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 20))
def test_every_pass_once_and_forward_before_backward(stages: int, chunks: int, microbatches: int) -> None:
    for stage in range(stages):
        found = list(order(stage, stages, chunks, microbatches))
        expected = set(product(("forward", "backward"), range(chunks), range(microbatches)))
        assert (len(found), set(found)) == (len(expected), expected)
        places = {each: place for place, each in enumerate(found)}
        for chunk, microbatch in product(range(chunks), range(microbatches)):
            assert places["forward", chunk, microbatch] < places["backward", chunk, microbatch]


# --- times -----------------------------------------------------------------------------------------


@given(timelines())
def test_every_microbatch_goes_through_every_chunk_there_and_back(timeline: Timeline) -> None:
    found = list(blocks(timeline))
    stages, each = range(len(timeline.stages)), range(timeline.num_microbatches)
    expected = set(product(("forward", "backward"), stages, range(timeline.vp), each))
    assert (len(found), set(by_key(found))) == (len(expected), expected)


@given(timelines())
def test_a_stage_does_one_pass_at_a_time(timeline: Timeline) -> None:
    for stage in range(len(timeline.stages)):
        own = [block for block in blocks(timeline) if block.stage == stage]
        assert own[0].start_s >= 0
        for before, after in pairwise(own):
            assert before.end_s <= after.start_s


@given(timelines())
def test_a_pass_starts_when_its_input_is_there(timeline: Timeline) -> None:
    found = by_key(list(blocks(timeline)))
    last = len(timeline.stages) - 1
    for (kind, stage, chunk, microbatch), block in found.items():
        if kind == "forward":
            before = (stage - 1, chunk) if stage else (last, chunk - 1)
            if before[1] >= 0:
                assert block.start_s >= found[("forward", *before, microbatch)].end_s + timeline.p2p_s
        else:
            assert block.start_s >= found["forward", stage, chunk, microbatch].end_s
            after = (stage + 1, chunk) if stage < last else (0, chunk + 1)
            if after[1] < timeline.vp:
                assert block.start_s >= found[("backward", *after, microbatch)].end_s + timeline.p2p_s


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), SECONDS, SECONDS)
def test_equal_stages_take_what_narayanan_et_al_say(p: int, v: int, groups: int, there: float, back: float) -> None:
    """m passes and (p - 1) / v of them for fill and drain."""
    v = v if p > 1 else 1
    timeline = timeline_of([stage_of(there, back)] * p, groups * p, vp=v)
    expected = (groups * p + (p - 1) / v) * (there + back)
    assert max(block.end_s for block in blocks(timeline)) == pytest.approx(expected)


def test_messages_between_stages_delay_what_waits_for_them() -> None:
    found = by_key(list(blocks(timeline_of(2, 1, p2p_s=0.5))))
    assert [(block.start_s, block.end_s) for block in found.values()] == [(0, 1), (1.5, 2.5), (2.5, 4.5), (5, 7)]


def test_what_megatron_core_refuses_has_no_schedule() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        list(blocks(timeline_of(4, 5, vp=3)))


# --- the step --------------------------------------------------------------------------------------


@given(timelines(), st.floats(min_value=1e-3, max_value=1e3))
def test_a_schedule_ends_when_it_is_told_to(timeline: Timeline, end_s: float) -> None:
    found = schedule_of(timeline, end_s, most_blocks=1_000)
    assert max(block.end_s for block in found.blocks) == pytest.approx(end_s)
    assert min(block.start_s for block in found.blocks) == 0
    assert [block.start_s for block in found.blocks] == sorted(block.start_s for block in found.blocks)
    assert (found.end_s, found.gap) == (end_s, None)


@pytest.mark.parametrize(("stages", "vp"), [(1, 1), (4, 1), (4, 3)])
def test_of_a_long_step_the_middle_is_left_out(stages: int, vp: int) -> None:
    """Start and end are those of the whole schedule."""
    timeline = timeline_of(stages, 120, vp=vp, p2p_s=0.01)
    whole = schedule_of(timeline, 400.0, most_blocks=100_000)
    short = schedule_of(timeline, 400.0, most_blocks=2 * stages * vp * 40)
    assert whole.gap is None
    assert short.gap is not None and 40 <= 120 - short.gap.microbatches <= 60
    assert short.end_s == whole.end_s
    expected = by_key(list(whole.blocks))
    for key, block in by_key(list(short.blocks)).items():
        assert block.start_s == pytest.approx(expected[key].start_s, abs=1e-6), key
        assert not short.gap.start_s <= block.start_s < short.gap.end_s
    for stage in range(stages):
        shown = [block for block in short.blocks if block.stage == stage]
        assert len(shown) == 2 * vp * (120 - short.gap.microbatches)
        for before, after in pairwise(shown):
            assert before.end_s <= after.start_s + 1e-9


def test_a_schedule_that_is_too_large_is_refused_before_it_is_made() -> None:
    with pytest.raises(ValueError, match="passes are too many"):
        schedule_of(timeline_of(2_000, 10**9), 1.0, most_blocks=1_000)


def test_a_step_of_any_number_of_microbatches_is_shown() -> None:
    found = schedule_of(timeline_of(2, 10**12), 1e13, most_blocks=1_000)
    assert found.gap is not None
    assert len(found.blocks) <= 1_000
    assert found.blocks[-1].microbatch == 10**12 - 1
