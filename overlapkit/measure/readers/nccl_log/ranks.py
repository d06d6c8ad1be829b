"""Which global ranks a communicator joins: by its unique id over files, or by the colour of a split.

PyTorch splits the world communicator with ``key`` the global rank and ``color`` a hash of the group's sorted global
ranks (torch/distributed/distributed_c10d.py, _process_group_color), so that a set of ranks can be checked against it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_LARGEST_WORLD = 1 << 17  # ranks: a size beyond is damage
_MOST_TRIED = 4_000_000  # ranks in the sets that are tried for one colour, and
_MOST_TRIED_IN_ALL = 40_000_000  # for all: a colour that is no hash of PyTorch's costs little


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process's view of a communicator. ``identity`` is the same on all its ranks, and only there.

    ``world_rank``: the process's global rank, None where unknown. ``color`` is None unless it is a split of a world of
    ``world_size``.
    """

    size: int
    rank: int
    identity: tuple[object, ...] | None
    world_rank: int | None
    world_size: int | None
    color: int | None = None


def color_of(ranks: Sequence[int]) -> int:
    """The colour that PyTorch gives a group of these global ranks (CPython's hash on 64 bits)."""
    return abs(hash(tuple(ranks))) % 2**31


def rank_sets(members: Sequence[Member]) -> list[tuple[int, ...] | None]:
    """The global ranks of each member's communicator, in the group's order; None where they cannot be told."""
    joined: dict[tuple[object, ...], dict[int, set[int]]] = {}
    for member in members:
        if member.identity is not None and member.world_rank is not None:
            joined.setdefault(member.identity, {}).setdefault(member.rank, set()).add(member.world_rank)
    complete = {identity: _complete(by_rank) for identity, by_rank in joined.items()}
    worlds: dict[int, tuple[int, ...]] = {}
    by_color: dict[int, tuple[int, ...]] = {}
    tried, budget = set[object](), _MOST_TRIED_IN_ALL
    found: list[tuple[int, ...] | None] = []
    for member in members:
        ranks = complete.get(member.identity or ())
        if member.size == member.world_size and member.size <= _LARGEST_WORLD:
            ranks = worlds.setdefault(member.size, tuple(range(member.size)))
        elif member.size == 1 and member.world_rank is not None:
            ranks = (member.world_rank,)
        elif ranks is not None and len(ranks) != member.size:
            ranks = None
        if ranks is None and member.color is not None:
            ranks = by_color.get(member.color)
            if ranks is not None and ranks[member.rank : member.rank + 1] != (member.world_rank,):
                ranks = None
            if ranks is None and member not in tried and budget > 0:
                tried.add(member)
                ranks, cost = _colored(member)
                budget -= cost
                if ranks is not None:
                    by_color[member.color] = ranks
        found.append(ranks)
    return found


def _complete(by_rank: dict[int, set[int]]) -> tuple[int, ...] | None:
    """The global ranks of places 0, 1, …, each said by one process; None where one is missing or two disagree."""
    if max(by_rank) != len(by_rank) - 1 or any(len(ranks) > 1 for ranks in by_rank.values()):
        return None
    ranks = tuple(rank for at in range(len(by_rank)) for rank in by_rank[at])
    return ranks if len(set(ranks)) == len(ranks) else None


def _colored(member: Member) -> tuple[tuple[int, ...] | None, int]:
    """The set of ranks whose colour the split has, and how many ranks were tried.

    Tried are sorted sets, the process in its place, in strides along one to three axes of a mesh.
    """
    size, rank, world_rank, world_size = member.size, member.rank, member.world_rank, member.world_size
    cost = 0
    if world_rank is None or world_size is None or not rank < size <= world_size <= _LARGEST_WORLD:
        return None, cost
    if sys.hash_info.width != 64:
        return None, cost
    for axes in _axes(size, world_size):
        offsets = [0]
        for stride, length in axes:
            offsets = [offset + index * stride for index in range(length) for offset in offsets]
        first = world_rank - offsets[rank]
        if first >= 0 and first + offsets[-1] < world_size:
            ranks = tuple(first + offset for offset in offsets)
            if color_of(ranks) == member.color:
                return ranks, cost
        cost += size
        if cost > _MOST_TRIED:
            break
    return None, cost


def _axes(size: int, world_size: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """(stride, length) of the axes of a group, the fastest first: any stride along one, else those of a mesh."""
    yield from (((stride, size),) for stride in range(1, (world_size - 1) // (size - 1) + 1))
    strides = [stride for stride in range(1, world_size + 1) if world_size % stride == 0]
    for inner in (length for length in range(2, size) if size % length == 0):
        outer = size // inner
        for low in strides:
            above = [high for high in strides if high > low * inner]
            yield from (((low, inner), (high, outer)) for high in above if high * outer <= world_size)
            for middle in (length for length in range(2, outer) if outer % length == 0):
                for high in above:
                    highest = (top for top in strides if top > high * middle and top * (outer // middle) <= world_size)
                    yield from (((low, inner), (high, middle), (top, outer // middle)) for top in highest)


def linked(names: Sequence[Iterable[object]]) -> list[int]:
    """A number for each of the sets, the same for those that have something in common, directly or through others."""
    above = list(range(len(names)))

    def top(at: int) -> int:
        while above[at] != at:
            above[at] = at = above[above[at]]
        return at

    first: dict[object, int] = {}
    for at, those in enumerate(names):
        for name in those:
            above[top(at)] = top(first.setdefault(name, at))
    return [top(at) for at in range(len(names))]


def only(values: Iterable[int | None]) -> int | None:
    """The one value that is said, None where none is or several are."""
    said = {value for value in values if value is not None}
    return said.pop() if len(said) == 1 else None
