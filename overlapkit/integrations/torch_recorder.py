"""Counts what a running job calls of torch.distributed, per process group, into one small file per process.

    python -m overlapkit.record -o DIR -- pretrain_gpt.py …         # also: torchrun … -m overlapkit.record -o DIR -- …

    with record(DIR) as recorder:                                   # in a script of one's own
        for batch in batches:
            train_step(batch)
            recorder.step()                                         # optional

A call is counted when it is made, under the group's description and global ranks, with the message bytes that
:mod:`overlapkit.volume.rows` defines; a gather's or scatter's are the tensor that this rank gives or gets, a barrier
has none. Sums are written at each mark of a step, and every second: a process that is killed loses a second at most.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from overlapkit.errors import MissingPackageError, RecipeError

try:
    import torch
    import torch.distributed as dist
except ImportError as _error:
    raise MissingPackageError(f"torch cannot be imported here ({_error}): there is nothing to record") from None

from overlapkit.integrations.recorder_calls import Counted
from overlapkit.integrations.recorder_file import RecorderFile
from overlapkit.integrations.recorder_wrappers import install, replace
from overlapkit.measure.readers.step_marks import StepMarks

_SECONDS_BETWEEN_WRITES = 1.0
_MARKS = {torch.int32: "int32", torch.float32: "float32"}
_running: Recorder | None = None


@contextmanager
def record(folder: str | Path, *, steps: tuple[int, int] | None = None) -> Iterator[Recorder]:
    """Records this process into a file of ``folder`` while the context lasts.

    ``steps`` are the first and the last optimizer step to be recorded, counted from 1; None records everything.

    Raises:
        RecipeError: the folder cannot be written, or this process is being recorded already.
    """
    recorder = start(folder, steps=steps)
    try:
        yield recorder
    finally:
        recorder.stop()


def start(folder: str | Path, *, steps: tuple[int, int] | None = None) -> Recorder:
    """The same without a context: until the recorder's ``stop``, or the end of the process."""
    global _running
    if _running is not None:
        raise RecipeError("this process is being recorded already", source=str(folder))
    if steps is not None and not 1 <= steps[0] <= steps[1]:
        hint = "the first is 1, and the last not before the first"
        raise RecipeError(f"no steps {steps[0]}-{steps[1]}", source=str(folder), hint=hint)
    if not dist.is_available():
        raise RecipeError("this torch has no torch.distributed: there is nothing to record", source=str(folder))
    _running = Recorder(RecorderFile(Path(folder), torch_version=str(torch.__version__), steps=steps), steps)
    return _running


def running() -> Recorder | None:
    """The recorder of this process."""
    return _running


class Recorder:
    """Counts calls until it is stopped. ``step`` and ``stop`` are for users."""

    def __init__(self, file: RecorderFile, steps: tuple[int, int] | None) -> None:
        self._file = file
        self._steps = steps
        self._open = steps is None or steps[0] == 1  # whether the calls are counted now
        self._over = False  # whether there is nothing more to count
        self._marks = StepMarks()
        self._groups: dict[Any, int] = {}  # None is the default group
        self._sizes: list[int] = []
        self._calls: dict[tuple[int, str, Any], list[int]] = {}
        self._missed: Counter[tuple[str, str]] = Counter()
        self._pending: list[dict[str, Any]] = [{"window": "open"}] if self._open else []
        self._stopped = threading.Event()
        # Backward runs in threads of its own, and another one writes.
        self._lock = threading.RLock()
        self._wrappers = install(self._note, self._forget_groups)
        atexit.register(self.stop)
        threading.Thread(target=self._write_now_and_then, name="overlapkit recorder", daemon=True).start()

    def step(self) -> None:
        """Marks the end of an optimizer step. Where it is called, nothing else marks steps."""
        if self._over:
            return
        with self._lock:
            self._mark("step", None)

    def stop(self) -> None:
        """Writes what is left and puts torch.distributed back as it was."""
        global _running
        if self._stopped.is_set():
            return
        self._stopped.set()
        replace(self._wrappers)
        atexit.unregister(self.stop)
        with self._lock:
            self._end()
        _running = None

    # --- a call ----------------------------------------------------------------------------------

    def _note(self, counted: Counted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._over:
            return
        try:
            given, messages = counted.arguments(args, kwargs)
            with self._lock:
                group = self._group(given)
                if group is None:
                    return
                for message in messages:
                    self._count(group, counted.op, message)
        except Exception as error:  # a training does not end because it is counted
            self._missed[counted.op, type(error).__name__] += 1

    def _count(self, group: int, op: str, message: Any) -> None:
        if isinstance(message, (list, tuple)):
            dtype = message[0].dtype if message else torch.uint8
            moved = sum(tensor.numel() * tensor.element_size() for tensor in message)
        else:
            dtype, elements = message.dtype, message.numel()
            moved = elements * message.element_size()
            if elements == 1 and op == "all_reduce" and dtype in _MARKS:
                self._mark(_MARKS[dtype], group)
        if self._open:
            sums = self._calls.get((group, op, dtype))
            if sums is None:
                sums = self._calls[group, op, dtype] = [0, 0]
            sums[0] += 1
            sums[1] += moved

    def _group(self, given: Any) -> int | None:
        """The group's number in the file; None where this process is no member."""
        number = self._groups.get(given)
        if number is not None:
            return number
        group = dist.distributed_c10d._get_default_group() if given is None else given
        if not isinstance(group, dist.ProcessGroup):
            return None
        number = self._groups.get(group)
        if number is None:
            number = len(self._sizes)
            if number == 0:
                self._pending.append({"rank": dist.get_rank(), "world_size": dist.get_world_size()})
            self._sizes.append(group.size())
            self._pending.append(_described(group, number))
        self._groups[given] = self._groups[group] = number
        return number

    def _forget_groups(self) -> None:
        """Groups that are destroyed are not kept, and a new one is not taken for the default one of before."""
        with self._lock:
            self._groups.clear()

    # --- steps -----------------------------------------------------------------------------------

    def _mark(self, kind: str, group: int | None) -> None:
        """Notes what may mark a step, before the call itself is counted, and opens and closes the window of steps."""
        self._marks.add(kind, group, 0 if group is None else self._sizes[group])
        mark = {"mark": kind, "group": group, "us": time.time_ns() // 1000}
        if self._steps is None:
            self._write(mark)
            return
        first, last = self._steps
        done = self._marks.count()
        inside = first <= done + 1 <= last
        if inside and not self._open:
            self._write({"window": "open"}, mark)
        elif self._open and not inside:
            self._write(mark, {"window": "closed"})
        else:
            self._write(mark)
        self._open = inside
        if done >= last:
            self._end()

    # --- the file --------------------------------------------------------------------------------

    def _write(self, *lines: dict[str, Any]) -> None:
        calls = [
            [group, op, str(dtype).removeprefix("torch."), *sums] for (group, op, dtype), sums in self._calls.items()
        ]
        self._calls.clear()
        self._file.write([*self._pending, *([{"calls": calls}] if calls else []), *lines])
        self._pending.clear()
        self._over |= not self._file.writable

    def _leave(self) -> None:
        """Counts and writes nothing any more; the file is another process's."""
        self._over = True
        self._stopped.set()

    def _end(self) -> None:
        if not self._over:
            missed = [[name, why, count] for (name, why), count in self._missed.items()]
            self._write(*([{"missed": missed}] if missed else []), {"end": True})
            self._over = True
        self._file.close()

    def _write_now_and_then(self) -> None:
        while not self._stopped.wait(_SECONDS_BETWEEN_WRITES):
            with self._lock:
                if self._over:
                    return
                self._write()


def _leave_fork() -> None:
    """A process that was forked from a recorded one, such as a data loader's, is not recorded."""
    global _running
    if _running is not None:
        _running._leave()
        _running = None


os.register_at_fork(after_in_child=_leave_fork)


def _described(group: Any, number: int) -> dict[str, Any]:
    made = list(getattr(dist.distributed_c10d._world, "pg_map", ()))
    return {
        "group": number,
        "name": getattr(group, "group_name", None),
        "desc": getattr(group, "group_desc", None),
        "size": group.size(),
        "ranks": dist.get_process_group_ranks(group),
        "rank": group.rank(),
        "order": made.index(group) if group in made else number,
    }
