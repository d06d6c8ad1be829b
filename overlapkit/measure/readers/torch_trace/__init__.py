"""Traces of PyTorch's profiler (2.1 to 2.13; .json, .json.gz): calls with their groups, and device times.

Bytes come from ``record_param_comms``, one per call, and time from the kernels, never both from one: kernels carry a
copy of the call's arguments, and one kernel may run several calls. Steps are ``ProfilerStep#N`` ranges; none is
dropped; a trace without them has its steps by a call that recurs with each. Speed and memory:
:mod:`overlapkit.measure.readers.torch_trace.json_stream`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlapkit.errors import printable
from overlapkit.measure.events import CommEvent, Communicator, Interval, Problem, Reading, Recording, Step
from overlapkit.measure.intervals import step_at, windows
from overlapkit.measure.readers.torch_trace.collectives import IGNORED, Collective, Communicators, collective
from overlapkit.measure.readers.torch_trace.cpu_operators import operator_call
from overlapkit.measure.readers.torch_trace.found import Found
from overlapkit.measure.readers.torch_trace.json_stream import NotATrace, TraceFile, integer
from overlapkit.measure.readers.torch_trace.marked_steps import marked_steps
from overlapkit.measure.readers.torch_trace.spans import Call, spans


def recognises(head: bytes, path: Path) -> bool:
    """Whether a file that begins so is a trace of a profiler; ``head`` is uncompressed."""
    if not head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return False
    return b'"traceEvents"' in head or (b'"schemaVersion"' in head and b'"deviceProperties"' in head)


def read(paths: Sequence[Path], progress: Callable[[int], None] | None = None) -> Reading:
    """One recording per file; one that gives none is a problem.

    ``progress`` is told, again and again, how many more bytes of the files were read (compressed ones, where they are).
    """
    recordings: list[Recording] = []
    problems: list[Problem] = []
    for path in paths:
        file = TraceFile(path, progress)
        found = Found()
        try:
            for block in file.blocks():
                found.add(block)
        except (NotATrace, OSError) as error:
            what = str(error) if isinstance(error, NotATrace) else error.strerror or "it cannot be read"
            problems += [*file.problems, Problem(source=str(path), what=what)]
            continue
        if found.any or not file.problems:
            recordings.append(_recording(str(path), file.header, found))
        problems += [*file.problems, *found.problems(str(path))]
    return Reading(recordings=tuple(recordings), problems=tuple(problems))


def _recording(source: str, header: Mapping[str, Any], found: Found) -> Recording:
    distributed, host = header.get("distributedInfo"), header.get("host_name")
    communicators = Communicators(distributed if isinstance(distributed, dict) else {})
    notes: list[str] = []
    steps, device = _real_steps(found, notes), found.device_steps
    step_windows = windows(device if device.keys() >= steps.keys() else steps)
    calls = _calls(found, communicators)
    kernels = spans(found, calls, communicators)
    counted, on_devices_time = _counted(found, calls, communicators, notes)
    steps_by = "ProfilerStep ranges" if step_windows else None
    of_calls = step_windows if on_devices_time else windows(steps)
    if not step_windows:
        of_calls, steps_by = marked_steps(counted, communicators.found)
        step_windows = of_calls
    events = _summed(counted, of_calls, found.unclear)
    on_device = bool(found.kernels or found.busy)
    if not on_device:
        notes.append("no GPU kernels captured: host times alone, so that no overlap can be measured")
    elif not found.kernels:
        notes.append("no communication kernel among the GPU work")
    nameless = sum(span.communicator is None for span in kernels)
    if nameless:
        notes.append(f"communication kernels that name no process group: {nameless}; their time counts")
    return Recording(
        source=source,
        kind="torch_trace",
        rank=communicators.rank,
        world_size=communicators.world_size,
        host=printable(host) if isinstance(host, str) else None,
        communicators=tuple(communicators.found),
        events=events,
        steps=len(step_windows),
        steps_by=steps_by,
        windows=step_windows,
        spans=kernels if on_device else None,
        busy=sorted(found.busy) if on_device else None,
        notes=tuple(notes),
    )


def _calls(found: Found, communicators: Communicators) -> list[Call]:
    """The recorded calls; what moves nothing is left out."""
    calls: list[Call] = []
    for at, thread, args in found.records:
        name = args.get("Collective name")
        if name is None:
            found.unclear["a record_param_comms does not say which collective it is"] += 1
        elif str(name) not in IGNORED:
            calls.append(Call(at, thread, integer(args.get("External id")), collective(args, communicators)))
    return calls


def _counted(
    found: Found, calls: Sequence[Call], communicators: Communicators, notes: list[str]
) -> tuple[list[tuple[float, Collective]], bool]:
    """What is counted, and when each began, from the best source that the trace has; whether that is device time."""
    if calls:
        return [(call.at, call.what) for call in calls], False
    copies = [kernel for kernel in found.kernels if "Collective name" in kernel.args]
    if copies:
        notes.append("no record_param_comms (CPU activity was off): calls are counted by the kernels that carry them")
        return [(copy.start, collective(copy.args, communicators)) for copy in copies], True
    place = len(communicators.found)
    if found.operators:
        notes.append(
            "no record_param_comms (only NCCL and its like record them): calls are c10d's operators, of unknown groups"
        )
        communicators.found.append(Communicator(label="c10d operators"))
    return [(each.at, operator_call(each.name, each.args, found.range_types, place)) for each in found.operators], False


def _summed(calls: Iterable[tuple[float, Collective]], steps: Sequence[Step], unclear: Counter[str]) -> list[CommEvent]:
    """Equal calls together, in the order of their first; what is not known of their bytes is counted in ``unclear``."""
    sums: dict[tuple[int, str, str, int | None], list[int]] = {}
    for at, call in calls:
        known = sums.setdefault((call.communicator, call.op, call.dtype, step_at(steps, at)), [0, 0])
        known[0] += 1
        known[1] += call.message_bytes
        if call.unclear is not None:
            unclear[call.unclear] += 1
    return [
        CommEvent(communicator, op, dtype, count, moved, step)
        for (communicator, op, dtype, step), (count, moved) in sums.items()
    ]


def _real_steps(found: Found, notes: list[str]) -> dict[int, Interval]:
    """The host's ranges of steps, without the one that the profiler opens behind the last step and closes empty."""
    steps = dict(found.host_steps or found.device_steps)
    last = max(steps, default=0)
    if len(steps) > 1 and found.has_operators and steps[last][0] > found.last_operator:
        del steps[last]
        notes.append(f"ProfilerStep#{last} holds no operator: the profiler opened it behind the last step")
    return steps
