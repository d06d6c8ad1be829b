"""Device times of communication, joined to the calls that launched it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from overlapkit.measure.events import Span
from overlapkit.measure.readers.kernels import is_nccl, may_run
from overlapkit.measure.readers.torch_trace.collectives import UNKNOWN, Collective, Communicators, collective
from overlapkit.measure.readers.torch_trace.found import Found, Kernel
from overlapkit.measure.readers.torch_trace.json_stream import integer


class Call(NamedTuple):
    """A recorded call: when and on which thread it began, and the id by which its kernels name it."""

    at: float
    thread: int | str
    external: int | None
    what: Collective


def spans(found: Found, calls: Sequence[Call], communicators: Communicators) -> list[Span]:
    """The communication kernels in the order of their start.

    The call of a kernel is the one that its External id names, else what it carries itself, else the last fitting call
    on the thread that launched it: kernels of a group of calls (batched point-to-point) start when the group ends.
    """
    by_id = {call.external: call.what for call in calls if call.external}
    threads: dict[int | str, list[Call]] = {}
    for call in sorted(calls, key=lambda call: call.at):
        threads.setdefault(call.thread, []).append(call)
    made = []
    for kernel in found.kernels:
        what = by_id.get(integer(kernel.args.get("External id")) or 0)
        if what is None and "Collective name" in kernel.args:
            what = collective(kernel.args, communicators)
        if what is None and is_nccl(kernel.name):
            what = _launching(kernel, found, threads)
        if what is None:
            made.append(Span(kernel.start, kernel.end, None, kernel.op, UNKNOWN))
        else:
            made.append(Span(kernel.start, kernel.end, what.communicator, what.op, what.dtype))
    return sorted(made, key=lambda span: span.start_us)


def _launching(kernel: Kernel, found: Found, threads: Mapping[int | str, list[Call]]) -> Collective | None:
    """The last call before the launch, on its thread, that a kernel of this kind may run."""
    launch = found.launches.get(integer(kernel.args.get("correlation")) or -1)
    if launch is None:
        return None
    at, thread = launch
    calls = threads.get(thread, [])
    last = bisect_right(calls, at, key=lambda call: call.at)
    # The calls of one group are few; a launch long after its call is not its launch.
    for call in reversed(calls[max(last - 32, 0) : last]):
        if may_run(kernel.op, call.what.op):
            return call.what
    return None
