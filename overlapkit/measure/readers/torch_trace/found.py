"""What of a profiler's events matters to the measurement, gathered block by block."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from overlapkit.measure.events import Interval, Problem
from overlapkit.measure.readers.kernels import communication, synchronisation
from overlapkit.measure.readers.torch_trace.cpu_operators import OPERATORS, range_types
from overlapkit.measure.readers.torch_trace.json_stream import arguments, correlation

_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
# HIP's too. NCCL launches by cudaLaunchKernelExC or cuLaunchKernelEx.
_HOST = frozenset({"cuda_runtime", "cuda_driver"})
_COLLECTIVES = frozenset({"record_param_comms", *OPERATORS})
_WORK, _WAIT = "work", "wait"
_LATEST = 1e18  # microseconds; some 30 000 years
_NAMES_LIMIT = 1 << 16  # kernels have far fewer
_STEP = re.compile(r"ProfilerStep#(\d{1,12})$")


class Record(NamedTuple):
    """A ``record_param_comms``: when and on which thread it began."""

    at: float
    thread: int | str
    args: dict[str, Any]


class Kernel(NamedTuple):
    """A communication kernel and the operation that its name says."""

    start: float
    end: float
    name: str
    op: str
    args: dict[str, Any]


class Operator(NamedTuple):
    """A collective of c10d."""

    at: float
    name: str
    args: dict[str, Any]


class Found:
    """What of a file's events matters, as it comes."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.kernels: list[Kernel] = []
        self.busy: list[Interval] = []
        self.launches: dict[int, tuple[float, int | str]] = {}
        self.operators: list[Operator] = []
        self.range_types: dict[tuple[str, str], set[str]] = {}
        self.host_steps: dict[int, Interval] = {}
        self.device_steps: dict[int, Interval] = {}
        self.last_operator = float("-inf")
        self.unclear: Counter[str] = Counter()
        self.any = False  # whether there was any event
        self._kinds: dict[str, str] = {}

    def add(self, events: Sequence[Any]) -> None:
        """Takes what matters of one block. Operators, launches and kernels are most of a trace: for them no call."""
        self.any |= bool(events)
        kinds, busy = self._kinds, self.busy
        for event in events:
            cat = event.cat
            if cat == "cpu_op":
                if event.ts > self.last_operator:
                    self.last_operator = event.ts
                if event.name in _COLLECTIVES:
                    self._collective(event)
            elif cat in _DEVICE:
                start = event.ts
                end = start + event.dur
                kind = kinds.get(event.name) or self._kind(event.name)
                if not -_LATEST < start <= end < _LATEST:
                    self.unclear["a device activity has no time"] += 1
                elif kind == _WORK:
                    busy.append((start, end))
                elif kind != _WAIT:
                    self.kernels.append(Kernel(start, end, event.name, kind, arguments(event)))
            elif cat in _HOST:
                if "LaunchKernelEx" in event.name or "hip" in event.name:
                    launch = correlation(event)
                    if launch is not None:
                        self.launches[launch] = (event.ts, event.tid)
            elif cat == "user_annotation":
                if event.name.startswith("gloo:"):
                    range_types(event.name, arguments(event), self.range_types)
                else:
                    self._step(event, self.host_steps)
            elif cat == "gpu_user_annotation":
                self._step(event, self.device_steps)

    def _collective(self, event: Any) -> None:
        if event.name == "record_param_comms":
            self.records.append(Record(event.ts, event.tid, arguments(event)))
        else:
            self.operators.append(Operator(event.ts, event.name, arguments(event)))

    @property
    def has_operators(self) -> bool:
        """Whether the trace has any operator of the host."""
        return self.last_operator > float("-inf")

    def _kind(self, name: str) -> str:
        """Of a device activity: its operation of communication, work or waiting."""
        kind = communication(name) or (_WAIT if synchronisation(name) else _WORK)
        if len(self._kinds) < _NAMES_LIMIT:
            self._kinds[name] = kind
        return kind

    def _step(self, event: Any, steps: dict[int, Interval]) -> None:
        named = _STEP.match(event.name)
        if named and abs(event.ts) < _LATEST and abs(event.dur) < _LATEST:
            # One range per thread or stream: together they are the step.
            start, end = steps.get(int(named[1]), (event.ts, event.ts))
            steps[int(named[1])] = (min(start, event.ts), max(end, event.ts + event.dur))

    def problems(self, source: str) -> list[Problem]:
        return [Problem(source=source, what=what, count=count) for what, count in self.unclear.items()]
