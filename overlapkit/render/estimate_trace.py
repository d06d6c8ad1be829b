"""A step as a Chrome trace, which Perfetto and chrome://tracing open.

The trace event format: a JSON object of ``traceEvents``; complete events (``X``) in microseconds, a process per
pipeline stage, in it a track for compute and one for each axis's exposed communication.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, NamedTuple

from overlapkit import __version__
from overlapkit.cost.result import Estimate, StageTime, Timeline
from overlapkit.cost.schedule import Block, Schedule
from overlapkit.errors import RecipeError, printable, shown
from overlapkit.render.estimate_parts import AXES, COMPUTE, schedule_for
from overlapkit.whole_files import check_writable, whole_file

_ENDINGS = (".json", ".json.gz")
_MOST_BLOCKS = 50_000
_NS = 1e9


class Event(NamedTuple):
    """Something that lasts: whole nanoseconds from the start of the step, on a track of a stage."""

    name: str
    category: str
    stage: int
    track: str
    start_ns: int
    end_ns: int
    arguments: Mapping[str, Any]


def check_trace(path: str) -> None:
    """That a trace can have this name.

    Raises:
        RecipeError: another ending than .json or .json.gz, or no such folder.
    """
    if not path.lower().endswith(_ENDINGS):
        problem = f"{shown(Path(path).name)} is neither .json nor .json.gz"
        raise RecipeError(problem, source="--trace", hint="end its name with .json.gz")
    check_writable(path)


def write_trace(estimate: Estimate, path: str) -> None:
    """Writes the step to ``path``, compressed where its name ends in .gz; the same estimate gives the same bytes.

    Raises:
        RecipeError: the file cannot be written, or the passes cannot be put in order.
    """
    found = schedule_for(estimate, most_blocks=_MOST_BLOCKS, option="--trace")
    with whole_file(path) as stream, ExitStack() as opened:
        sink: Any = stream
        if path.lower().endswith(".gz"):
            sink = opened.enter_context(gzip.GzipFile("", "wb", fileobj=stream, mtime=0))
        text = TextIOWrapper(sink, encoding="ascii", newline="\n")
        _write(estimate, found, text)
        text.flush()
        text.detach()  # what is below is closed where it was opened


def _write(estimate: Estimate, found: Schedule, out: IO[str]) -> None:
    about = {
        "recipe": printable(estimate.recipe, limit=300),
        "overlapkit": __version__,
        "step_time_s": estimate.step_time_s,
        "interval_s": list(estimate.interval_s),
        "remarks": _remarks(found),
    }
    out.write(f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(about)},\n"traceEvents": [')
    tracks = tracks_of(estimate.timeline)
    between = "\n"
    for value in (*_names(estimate.timeline, tracks), *(_complete(event, tracks) for event in events(estimate, found))):
        out.write(between + json.dumps(value))
        between = ",\n"
    out.write("\n]}\n")


def _remarks(found: Schedule) -> list[str]:
    remarks = ["estimated, not measured; the exposed communication of a pass is drawn as one piece at its end"]
    if found.gap is not None:
        remarks.append(f"{found.gap.microbatches:,} microbatches in the middle are left out")
    return remarks


# --- events ----------------------------------------------------------------------------------------


def events(estimate: Estimate, found: Schedule) -> Iterator[Event]:
    """What happens in the step; nothing on a track overlaps, and the last event ends with the step.

    A microbatch's pass is its compute, then the communication of each axis that does not hide.
    """
    timeline = estimate.timeline
    for block in found.blocks:
        yield from _of_pass(block, timeline.stages[block.stage])
    if found.gap is not None:
        yield from _left_out(found, len(timeline.stages))
    passes_ns = round(found.end_s * _NS)
    optimizer_ns = max(round((estimate.step_time_s - timeline.optimizer_s) * _NS), passes_ns)
    end_ns = round(estimate.step_time_s * _NS)
    for stage in range(len(timeline.stages)):
        if timeline.dp_exposed_s > 0 and optimizer_ns > passes_ns:
            name = "gradient reduction and parameter gathers"
            yield Event(name, "communication", stage, "dp", passes_ns, optimizer_ns, {})
        if end_ns > optimizer_ns:
            yield Event("optimizer", "optimizer", stage, "compute", optimizer_ns, end_ns, {})


def _of_pass(block: Block, took: StageTime) -> Iterator[Event]:
    made_of = _made_of(took, block.kind)
    scale = (block.end_s - block.start_s) / (sum(made_of.values()) or 1.0)
    computed = sum(seconds for name, seconds in made_of.items() if name in COMPUTE)
    what = f"{block.kind} {block.microbatch}"
    place = {"microbatch": block.microbatch, "chunk": block.chunk}
    parts = {f"{name}_us": round(1e6 * scale * made_of[name], 3) for name in made_of if name in COMPUTE}
    end = round(block.end_s * _NS)
    start, before = round(block.start_s * _NS), computed
    middle = min(round((block.start_s + scale * before) * _NS), end)
    if middle > start:
        yield Event(what, block.kind, block.stage, "compute", start, middle, {**place, **parts})
    for axis, seconds in made_of.items():
        if axis in COMPUTE:
            continue
        before += max(seconds, 0.0)
        start, middle = middle, min(round((block.start_s + scale * before) * _NS), end)
        if middle > start:
            yield Event(f"{AXES[axis]}, {what}", "communication", block.stage, axis, start, middle, place)


def _made_of(took: StageTime, kind: str) -> Mapping[str, float]:
    return took.forward_by if kind == "forward" else took.backward_by


def _left_out(found: Schedule, stages: int) -> Iterator[Event]:
    """On every stage, what is left out between its passes before and after."""
    gap = found.gap
    if gap is None:
        return
    starts, ends = [0.0] * stages, [found.end_s] * stages
    for block in found.blocks:
        if block.start_s < gap.start_s:
            starts[block.stage] = max(starts[block.stage], block.end_s)
        else:
            ends[block.stage] = min(ends[block.stage], block.start_s)
    for stage, (start, end) in enumerate(zip(starts, ends, strict=True)):
        name = f"{gap.microbatches:,} microbatches are left out here"
        yield Event(name, "left out", stage, "compute", round(start * _NS), round(end * _NS), {})


# --- the file --------------------------------------------------------------------------------------


def tracks_of(timeline: Timeline) -> tuple[str, ...]:
    """The tracks of each stage in their order: compute, and the axes that leave something exposed."""
    made_of = [by for stage in timeline.stages for by in (stage.forward_by, stage.backward_by)]
    axes = {name for by in made_of for name, seconds in by.items() if name not in COMPUTE and seconds > 0}
    if timeline.dp_exposed_s > 0:
        axes.add("dp")
    return ("compute", *(axis for axis in AXES if axis in axes))


def _names(timeline: Timeline, tracks: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Metadata events: what processes and tracks are called and where they stand."""

    def about(name: str, stage: int, thread: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {"name": name, "ph": "M", "pid": stage, "tid": thread, "args": arguments}

    stages = len(timeline.stages)
    for stage in range(stages):
        yield about("process_name", stage, 0, {"name": f"pipeline stage {stage} of {stages}"})
        yield about("process_sort_index", stage, 0, {"sort_index": stage})
        for thread, track in enumerate(tracks):
            name = track if track == "compute" else f"{AXES[track]}, exposed"
            yield about("thread_name", stage, thread, {"name": name})
            yield about("thread_sort_index", stage, thread, {"sort_index": thread})


def _complete(event: Event, tracks: tuple[str, ...]) -> dict[str, Any]:
    return {
        "name": event.name,
        "cat": event.category,
        "ph": "X",
        "pid": event.stage,
        "tid": tracks.index(event.track),
        "ts": event.start_ns / 1e3,
        "dur": (event.end_ns - event.start_ns) / 1e3,
        "args": event.arguments,
    }
