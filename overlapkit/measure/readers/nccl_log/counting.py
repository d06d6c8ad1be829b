"""The calls of one process, counted as they come: what is kept does not grow with the log.

A call is one more in the :class:`Counter` of its communicator, operation and type, per size. Three kinds of lines say
more in their order than one by one: Send and Recv of an all_to_all, Broadcast or Reduce of an uneven list, and the
all_reduce that marks the optimizer steps. They have a function that is told each count; see :mod:`.sequences`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from overlapkit.measure.events import SOME_STEP, CommEvent
from overlapkit.measure.readers.nccl_log.format import OPERATIONS, Made, Tail
from overlapkit.measure.readers.nccl_log.sequences import Sequences
from overlapkit.measure.readers.step_marks import mark_of_steps

MOST_COMMUNICATORS = 4096  # of one process
_MOST_SIZES = 64  # of one counter; where there are more, they are one event
_MOST_MARKS = 4  # communicators of one process on which steps may be marked
_MOST_COPIES = 20_000_000  # of counters for marks: a log of nothing but marks takes no longer than another


@dataclass(slots=True)
class Room:
    """How much more may be kept of all processes together: damage and malice must not fill the memory."""

    communicators: int = 200_000
    counters: int = 200_000
    sizes: int = 500_000


class Counter:
    """How many calls, of how many elements: per size in ``sizes`` (the count as written), the rest summed."""

    __slots__ = ("calls", "communicator", "dtype", "elements", "op", "room", "sizes", "width")

    def __init__(self, communicator: int, op: str, dtype: str, width: int, room: Room) -> None:
        self.room = room
        self.communicator, self.op, self.dtype, self.width = communicator, op, dtype, width
        self.sizes: dict[bytes, int] = {}
        self.calls = self.elements = 0

    def add(self, count: bytes) -> None:
        """One more call of ``count`` elements."""
        if count in self.sizes:
            self.sizes[count] += 1
        elif len(self.sizes) < _MOST_SIZES and self.room.sizes:
            self.room.sizes -= 1
            self.sizes[count] = 1
        else:
            self.calls += 1
            self.elements += int(count)


# A counter's content at one moment: (calls per size, other calls, their elements).
Content = tuple[dict[bytes, int], int, int]


@dataclass(slots=True)
class Known:
    """A communicator of the process. ``made`` is its Init line, None where the log has none."""

    pointer: str
    size: int
    made: Made | None = None
    parent: int | None = None


@dataclass(slots=True)
class Mark:
    """A kind of call that may mark the optimizer steps, with what was counted at the first and at the last one."""

    dtype: str
    communicator: int
    size: int
    times: int = 0
    first: list[Content] = field(default_factory=list)
    last: list[Content] = field(default_factory=list)


class Forgets(Protocol):
    """What knows lines by the pointers in them, and must not when a pointer comes to mean another communicator."""

    def forget(self) -> None: ...


# How a call is counted: in a counter, and by the function that is told its count, where there is one, instead.
Entry = tuple[Counter, Callable[[bytes], None] | None]


class Process:
    """One process of one log: its communicators, its counters and its marks."""

    def __init__(self, host: str, pid: int, source: str, room: Room) -> None:
        self.room = room
        self.host, self.pid, self.sources = host, pid, [source]
        self.global_rank: int | None = None  # as RCCL says it
        self.communicators: list[Known] = []
        self.functions: dict[str, Forgets] = {}
        self.counters: list[Counter] = []
        self._sequences: dict[int, Sequences] = {}
        self._by_pointer: dict[str, int] = {}
        self._by_kind: dict[tuple[int, str, str, int], Counter] = {}
        self._marks: dict[tuple[str, int], Mark] = {}
        self._own = 0  # the communicator of the whole job: the first of the largest
        self._copies = 0

    def make(self, made: Made) -> bool:
        """An Init line; False where there are too many communicators to keep apart."""
        at = self._by_pointer.get(made.pointer)
        known = None if at is None else self.communicators[at]
        if known is not None and known.made is not None and _completes(made, known.made):
            known.made = made
            return True
        parent = None if made.parent is None else self._by_pointer.get(made.parent)
        return self._new(Known(made.pointer, made.size, made, parent))

    def destroy(self, pointer: str) -> None:
        """The pointer may now come to mean another communicator."""
        if self._by_pointer.pop(pointer, None) is not None:
            self._forget_lines()

    def _new(self, known: Known) -> bool:
        if len(self.communicators) >= MOST_COMMUNICATORS or not self.room.communicators:
            return False
        self.room.communicators -= 1
        at = self._by_pointer[known.pointer] = len(self.communicators)
        self.communicators.append(known)
        if known.size > self.communicators[self._own].size:
            self._own = at
        self._forget_lines()
        return True

    def _forget_lines(self) -> None:
        for function in self.functions.values():
            function.forget()

    def entry(self, function: str, tail: Tail) -> Entry | None:
        """How a call of this kind is counted; None where there are too many communicators to keep apart."""
        if not self.room.counters:
            return None
        at = self._by_pointer.get(tail.pointer)
        if at is None or self.communicators[at].size != tail.size:
            if not self._new(Known(tail.pointer, tail.size)):
                return None
            at = len(self.communicators) - 1
        if tail.global_rank is not None:
            self.global_rank = tail.global_rank
        op, per_rank = OPERATIONS[function]
        counter = self._counter(at, op, tail.dtype, tail.width * (tail.size if per_rank else 1))
        return counter, self._told(counter, tail)

    def _counter(self, communicator: int, op: str, dtype: str, width: int) -> Counter:
        key = communicator, op, dtype, width
        found = self._by_kind.get(key)
        if found is None:
            self.room.counters -= 1
            found = self._by_kind[key] = Counter(*key, self.room)
            self.counters.append(found)
        return found

    def _told(self, counter: Counter, tail: Tail) -> Callable[[bytes], None] | None:
        """The function that must see every call of this kind, None where counting is enough."""
        at, op = counter.communicator, counter.op
        if op == "all_reduce" and tail.dtype in ("int32", "float32"):
            return lambda count: self._reduced(counter, count)
        if op in ("send", "recv", "broadcast", "reduce"):
            sequences = self._sequences.get(at)
            if sequences is None:
                known = self.communicators[at]
                own = None if known.made is None else known.made.rank
                sequences = self._sequences[at] = Sequences(partial(self._counter, at), known.size, own)
            return sequences.told(counter, tail.root)
        return None

    def _reduced(self, counter: Counter, count: bytes) -> None:
        counter.add(count)
        if count == b"1":
            mark = self._marks.get((counter.dtype, counter.communicator)) or self._new_mark(counter)
            if mark is not None:
                self._hit(mark)

    def _new_mark(self, counter: Counter) -> Mark | None:
        """None where it cannot mark the steps: of float32 those on the largest communicators may.

        On the job's own communicator PyTorch's barrier is an all_reduce of one float32 too, before torch 2.3 of one
        byte (ProcessGroupNCCL::barrier), and no step of Megatron reduces any there.
        """
        dtype, at, size = counter.dtype, counter.communicator, self.communicators[counter.communicator].size
        others = self._marks.values()
        if dtype == "float32":
            if at == self._own or any(each.dtype == "int32" or each.size > size for each in others):
                return None
            if any(each.size < size for each in others):
                self._marks.clear()
        else:
            self._marks = {key: each for key, each in self._marks.items() if each.dtype == dtype}
        if len(self._marks) >= _MOST_MARKS:
            return None
        mark = self._marks[dtype, at] = Mark(dtype, at, size)
        return mark

    def _hit(self, mark: Mark) -> None:
        mark.times += 1
        self._copies += len(self.counters)
        if self._copies <= _MOST_COPIES:
            mark.last = [(dict(counter.sizes), counter.calls, counter.elements) for counter in self.counters]
        if mark.times == 1:
            mark.first = mark.last

    def mark(self) -> Mark | None:
        """What marks the steps."""
        if self._copies > _MOST_COPIES:
            return None
        sizes: dict[int | None, int] = {mark.communicator: mark.size for mark in self._marks.values()}
        chosen = mark_of_steps({key: mark.times for key, mark in self._marks.items()}, sizes)
        return next((mark for key, mark in self._marks.items() if key == chosen), None)

    def events(self) -> list[CommEvent]:
        """All that was counted, what lies between the first and the last mark apart from the rest."""
        for sequences in self._sequences.values():
            sequences.finish()
        mark = self.mark()
        steps = mark is not None and mark.times > 1
        found = []
        for at, counter in enumerate(self.counters):
            told = self._sequences.get(counter.communicator)
            if told is not None and told.leaves_out(counter):
                continue
            whole: Content = (counter.sizes, counter.calls, counter.elements)
            inside = _between(mark.first, mark.last, at) if steps and mark is not None else ({}, 0, 0)
            found += _events(counter, inside, SOME_STEP)
            found += _events(counter, _less(whole, inside), None)
        return found


def _completes(made: Made, before: Made) -> bool:
    """Whether it is the second line, COMPLETE, of what START began: all that both say is the same."""
    return before.started and replace(made, started=True, commid=None) == replace(before, commid=None)


def _between(first: list[Content], last: list[Content], at: int) -> Content:
    nothing: Content = ({}, 0, 0)
    return _less(last[at] if at < len(last) else nothing, first[at] if at < len(first) else nothing)


def _less(whole: Content, part: Content) -> Content:
    sizes = {count: times - part[0].get(count, 0) for count, times in whole[0].items()}
    return sizes, whole[1] - part[1], whole[2] - part[2]


def _events(counter: Counter, content: Content, step: int | None) -> list[CommEvent]:
    """One event per size, the smallest first; where sizes are many, one event in all."""
    sizes, calls, elements = content
    parts = sorted((int(count), times) for count, times in sizes.items() if times)
    if counter.calls:
        total = elements + sum(count * times for count, times in parts)
        calls += sum(times for _, times in parts)
        moved = total * counter.width
        return [CommEvent(counter.communicator, counter.op, counter.dtype, calls, moved, step)] if calls else []
    return [
        CommEvent(counter.communicator, counter.op, counter.dtype, times, count * times * counter.width, step)
        for count, times in parts
    ]
