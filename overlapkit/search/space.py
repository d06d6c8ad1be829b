"""Which layouts there are: the values of each axis, and how a number from 0 becomes a point of them.

Nothing is ever listed: a range of a million layouts takes the memory of its axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

RECOMPUTES = ("none", "selective", "full")


class Point(NamedTuple):
    """Sizes of the groups and of a microbatch. ``vp`` is 1 without virtual stages."""

    gpus: int
    tp: int
    pp: int
    cp: int
    ep: int
    vp: int
    micro_batch_size: int


class Layout(NamedTuple):
    """A point with what does not change the groups."""

    point: Point
    sequence_parallel: bool
    recompute: str


class Overlaps(NamedTuple):
    """What is on, in the names of the settings; ``False`` also where there is nothing to overlap."""

    tp_comm_overlap: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    overlap_p2p_comm: bool
    overlap_moe_expert_parallel_comm: bool
    delay_wgrad_compute: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The values of each axis, in the order of ``Point``."""

    gpus: tuple[int, ...]
    tp: tuple[int, ...]
    pp: tuple[int, ...]
    cp: tuple[int, ...]
    ep: tuple[int, ...]
    vp: tuple[int, ...]
    micro_batch_size: tuple[int, ...]
    recompute: tuple[str, ...] = RECOMPUTES

    @property
    def size(self) -> int:
        """Points, those among them that no job has: virtual stages without a pipeline."""
        return prod(len(getattr(self, name)) for name in Point._fields)

    def points(self, start: int, stop: int) -> Iterator[Point]:
        """The points from ``start`` to ``stop``, the last axis changing fastest."""
        axes = [getattr(self, name) for name in reversed(Point._fields)]
        for index in range(start, min(stop, self.size)):
            rest, values = index, []
            for axis in axes:
                rest, at = divmod(rest, len(axis))
                values.append(axis[at])
            point = Point(*reversed(values))
            if point.pp > 1 or point.vp == 1:
                yield point

    def layouts(self, point: Point) -> Iterator[Layout]:
        for sequence_parallel in (True, False) if point.tp > 1 else (False,):
            for recompute in self.recompute:
                yield Layout(point, sequence_parallel, recompute)


def overlaps_of(point: Point) -> tuple[Overlaps, ...]:
    """Every setting of the overlaps that a point can have, from all off to all on.

    Parameter gathers overlap only where gradient reductions do, and delayed weight gradients go with EP overlap.
    """
    return _overlaps(point.tp > 1, point.pp > 1 and point.vp > 1, point.ep > 1)


@lru_cache(maxsize=8)
def _overlaps(tp: bool, interleaved: bool, ep: bool) -> tuple[Overlaps, ...]:
    data = ((False, False), (True, False), (True, True))
    experts = ((False, False), (True, False), (True, True))
    found = [
        Overlaps(on, grads, params, p2p, all_to_all, delayed)
        for on, (grads, params), p2p, (all_to_all, delayed) in product(
            _either(tp), data, _either(interleaved), experts if ep else experts[:1]
        )
    ]
    return tuple(sorted(found, key=sum))


def _either(possible: bool) -> tuple[bool, ...]:
    return (False, True) if possible else (False,)
