"""The Chrome trace of a step: what Perfetto needs of it, and that it is the estimate's step."""

from __future__ import annotations

import gzip
import json
import resource
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from estimates import estimate_with, stage_of, timeline_of
from hypothesis import given
from hypothesis import strategies as st
from test_estimate_schedule import timelines

from overlapkit.cost.result import Estimate, Timeline
from overlapkit.errors import RecipeError
from overlapkit.render.estimate_parts import schedule_for
from overlapkit.render.estimate_trace import check_trace, events, write_trace

PLAIN = estimate_with(timeline_of(2, 4))


def written(estimate: Estimate, path: Path) -> Any:
    write_trace(estimate, str(path))
    return json.loads(path.read_text(encoding="ascii"))


def complete(trace: Any) -> list[Any]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


# --- the format ------------------------------------------------------------------------------------


def test_a_trace_is_an_object_of_events_in_microseconds(tmp_path: Path) -> None:
    trace = written(PLAIN, tmp_path / "step.json")
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}
    for event in complete(trace):
        assert set(event) == {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"}
        assert event["ts"] >= 0 and event["dur"] > 0
    assert trace["otherData"]["step_time_s"] == 20.0
    assert "not measured" in trace["otherData"]["remarks"][0]


def test_processes_are_stages_and_tracks_have_names(tmp_path: Path) -> None:
    trace = written(PLAIN, tmp_path / "step.json")
    names: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and "name" in event["args"]:
            names[event["name"]][event["pid"], event["tid"]] = event["args"]["name"]
    assert names["process_name"] == {(0, 0): "pipeline stage 0 of 2", (1, 0): "pipeline stage 1 of 2"}
    tracks = ("compute", "TP, exposed", "DP, exposed")
    assert names["thread_name"] == {(stage, thread): name for stage in (0, 1) for thread, name in enumerate(tracks)}
    assert {(event["pid"], event["tid"]) for event in complete(trace)} <= set(names["thread_name"])


def test_a_pass_is_its_compute_then_what_is_exposed(tmp_path: Path) -> None:
    """A step of 20 s leaves 19.25 s for passes that take 15 s unstretched."""
    first, exposed = complete(written(PLAIN, tmp_path / "step.json"))[:2]
    second = 1e6 * 19.25 / 15
    assert (first["name"], first["cat"], first["ts"]) == ("forward 0", "forward", 0)
    assert first["dur"] == pytest.approx(0.75 * second, abs=1e-3)
    assert first["args"]["gemm_us"] == pytest.approx(second / 2, abs=1e-3)
    assert (exposed["name"], exposed["cat"]) == ("TP, forward 0", "communication")
    assert (exposed["ts"], exposed["dur"]) == pytest.approx((0.75 * second, second / 4), abs=1e-3)


def test_after_the_passes_comes_what_is_left_of_dp_then_the_optimizer(tmp_path: Path) -> None:
    tail = complete(written(PLAIN, tmp_path / "step.json"))[-4:]
    found = [(event["name"], event["pid"], event["ts"], event["dur"]) for event in tail]
    left = "gradient reduction and parameter gathers"
    assert found == [
        (left, 0, 19.25e6, 0.5e6),
        ("optimizer", 0, 19.75e6, 0.25e6),
        (left, 1, 19.25e6, 0.5e6),
        ("optimizer", 1, 19.75e6, 0.25e6),
    ]


# --- consistency -----------------------------------------------------------------------------------


@given(timelines(), st.floats(min_value=0.8, max_value=1e4))
def test_nothing_on_a_track_overlaps_and_the_last_event_ends_with_the_step(timeline: Timeline, step_s: float) -> None:
    estimate = estimate_with(timeline, step_time_s=step_s)
    found = list(events(estimate, schedule_for(estimate, most_blocks=1_000, option="--trace")))
    assert max(event.end_ns for event in found) == round(step_s * 1e9)
    tracks = defaultdict(list)
    for event in found:
        assert 0 <= event.start_ns < event.end_ns
        tracks[event.stage, event.track].append((event.start_ns, event.end_ns))
    for spans in tracks.values():
        for before, after in pairwise(spans):
            assert before[1] <= after[0]


@given(timelines())
def test_compute_and_communication_of_all_passes_are_the_stages(timeline: Timeline) -> None:
    """In the ratio of the timeline; a stretched pass is stretched in all its parts."""
    estimate = estimate_with(timeline, step_time_s=100.0)
    schedule = schedule_for(estimate, most_blocks=1_000, option="--trace")
    for stage in range(len(timeline.stages)):
        own = [event for event in events(estimate, schedule) if event.stage == stage]
        compute = sum(event.end_ns - event.start_ns for event in own if event.category in ("forward", "backward"))
        exposed = sum(event.end_ns - event.start_ns for event in own if event.track == "tp")
        assert compute / 3 == pytest.approx(exposed, rel=1e-6, abs=10)


def test_of_a_long_step_the_middle_is_said_to_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlapkit.render.estimate_trace._MOST_BLOCKS", 1_000)
    trace = written(estimate_with(timeline_of(2, 10**6), step_time_s=4e6), tmp_path / "step.json")
    spans = [
        (event["ts"], event["ts"] + event["dur"]) for event in complete(trace) if event["pid"] == event["tid"] == 0
    ]
    left_out = [event for event in complete(trace) if event["cat"] == "left out"]
    assert [event["pid"] for event in left_out] == [0, 1]
    number = left_out[0]["name"].partition(" ")[0]
    assert any(f"{number} microbatches" in remark for remark in trace["otherData"]["remarks"])
    for before, after in pairwise(sorted(spans)):
        assert before[1] <= after[0] + 1e-3
    assert spans[-1][1] == pytest.approx(4e12)


# --- the file --------------------------------------------------------------------------------------


def test_compressed_is_the_same_and_the_same_every_time(tmp_path: Path) -> None:
    plain, packed, again = tmp_path / "step.json", tmp_path / "step.json.gz", tmp_path / "again.JSON.GZ"
    for path in (plain, packed, again):
        write_trace(PLAIN, str(path))
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert packed.read_bytes() == again.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.JSON.GZ", "step.json", "step.json.gz"]


def test_another_ending_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"'step\.txt' is neither \.json nor \.json\.gz; end its name"):
        check_trace("step.txt")


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_a_full_disk_leaves_what_was_there(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("before")
    large = estimate_with(timeline_of(4, 200, vp=4))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, limits[1]))
    try:
        with pytest.raises(RecipeError, match=r"step\.json.*: cannot be written: File too large"):
            write_trace(large, str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_written_to_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.symlink_to("/dev/full")
    with pytest.raises(RecipeError, match="cannot be written: No space left on device"):
        write_trace(PLAIN, str(path))
    assert path.is_symlink()


def test_a_schedule_that_megatron_core_refuses_is_one_line(tmp_path: Path) -> None:
    estimate = estimate_with(timeline_of([stage_of(1.0, 2.0)] * 4, 5, vp=3))
    said = r"by_hand\.yaml: --trace cannot show 5 microbatches on 4 stages of 3 chunks: the stages wait for each other"
    with pytest.raises(RecipeError, match=said):
        write_trace(estimate, str(tmp_path / "step.json"))
    assert list(tmp_path.iterdir()) == []
