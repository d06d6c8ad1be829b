"""What the processes of NCCL logs counted -> recordings: who is which global rank, and whom its communicators join."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from overlapkit.measure.events import Communicator, Recording
from overlapkit.measure.readers.nccl_log.counting import Known, Process
from overlapkit.measure.readers.nccl_log.format import Made
from overlapkit.measure.readers.nccl_log.ranks import Member, linked, only, rank_sets


class Place(NamedTuple):
    """A process's global rank and the size of its world, None where the log does not say them for certain."""

    rank: int | None
    world_size: int | None


def recordings_of(processes: Sequence[Process]) -> tuple[Recording, ...]:
    """One recording per process, by global rank where that is known."""
    places = _places(processes)
    members = [
        _member(process, known, place)
        for process, place in zip(processes, places, strict=True)
        for known in process.communicators
    ]
    sets = iter(rank_sets(members))
    found = [_recording(process, place, sets) for process, place in zip(processes, places, strict=True)]
    return tuple(sorted(found, key=lambda one: (one.rank is None, one.rank or 0, one.host or "", one.source)))


def _places(processes: Sequence[Process]) -> list[Place]:
    """By the key of a split of the world, by RCCL's word, or by the rank in the communicator that seems the world."""
    worlds = [_world(process) for process in processes]
    jobs = linked([{made.commid for made in _all_made(process) if made.commid} for process in processes])
    sizes = _world_sizes(processes, worlds, jobs)
    places = []
    for process, world, job in zip(processes, worlds, jobs, strict=True):
        certain = world is not None and world.size == sizes.get(job)
        parents = [process.communicators[at] for at in _parents(process)]
        parent_size = only(parent.size for parent in parents)
        rank = only(known.made.key for known in process.communicators if known.made and _of_world(process, known))
        rank = process.global_rank if rank is None else rank
        if rank is None and certain and world is not None and world.made is not None:
            rank = world.made.rank
        size = world.size if parent_size is None and certain and world is not None else parent_size
        places.append(Place(rank, size))
    return places


def _world_sizes(processes: Sequence[Process], worlds: Sequence[Known | None], jobs: Sequence[int]) -> dict[int, int]:
    """Job -> the size of its world, where that is certain: its processes agree which communicator it is.

    Processes that have no communicator in common are of several jobs, such as a run and the one that resumes it, or
    of groups of one job of which the rest is lost: then the world of a job is certain where all its ranks are there
    and have groups beside it.
    """
    found: dict[int, list[Made]] = {}
    bare = set()
    for process, world, job in zip(processes, worlds, jobs, strict=True):
        if world is not None and world.made is not None:
            found.setdefault(job, []).append(world.made)
        if len(_all_made(process)) < 2:
            bare.add(job)
    several = len(set(jobs)) > 1
    sizes = {}
    for job, seen in found.items():
        size = max(made.size for made in seen)
        largest = [made for made in seen if made.size == size]
        whole = job not in bare and size == len(largest) and {made.rank for made in largest} == set(range(size))
        if len({made.commid for made in largest}) == 1 and (whole or not several):
            sizes[job] = size
    return sizes


def _all_made(process: Process) -> list[Made]:
    return [known.made for known in process.communicators if known.made is not None]


def _world(process: Process) -> Known | None:
    """The first communicator that was made, where none is larger: Megatron meets on all ranks before anything else."""
    first = next((known for known in process.communicators if known.made is not None), None)
    if first is None or first.made is None or first.made.color is not None:
        return None
    return first if all(known.size <= first.size for known in process.communicators) else None


def _of_world(process: Process, known: Known) -> bool:
    """Whether it is a split of a communicator that is no split itself: PyTorch splits only the world."""
    if known.made is None or known.made.color is None:
        return False
    parent = None if known.parent is None else process.communicators[known.parent].made
    return parent is None or parent.color is None


def _parents(process: Process) -> set[int]:
    return {known.parent for known in process.communicators if known.parent is not None and _of_world(process, known)}


def _member(process: Process, known: Known, place: Place) -> Member:
    made = known.made
    if made is None:
        return Member(size=known.size, rank=0, identity=None, world_rank=place.rank, world_size=place.world_size)
    parent = None if known.parent is None else process.communicators[known.parent].made
    identity: tuple[object, ...] | None = None
    if made.color is not None:
        identity = (parent.commid if parent else None, made.split_count, made.color, made.size)
    elif made.commid is not None:
        identity = (made.commid, made.size)
    color = made.color if _of_world(process, known) else None
    return Member(
        size=made.size,
        rank=made.rank,
        identity=identity,
        world_rank=place.rank,
        world_size=place.world_size,
        color=color,
    )


def _recording(process: Process, place: Place, sets: Iterator[tuple[int, ...] | None]) -> Recording:
    mark = process.mark()
    sources = process.sources
    return Recording(
        source=sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more",
        kind="nccl_log",
        rank=place.rank,
        world_size=place.world_size,
        host=process.host,
        communicators=tuple(_communicators(process, sets)),
        events=process.events(),
        steps=0 if mark is None else max(mark.times - 1, 0),
        steps_by=None if mark is None else _in_words(process, mark.communicator, mark.dtype),
    )


def _in_words(process: Process, communicator: int, dtype: str) -> str:
    known = process.communicators[communicator]
    ranks = "one rank" if known.size == 1 else f"{known.size} ranks"
    return f"an all_reduce of one {dtype} on comm {known.pointer}, of {ranks}"


def _communicators(process: Process, sets: Iterator[tuple[int, ...] | None]) -> Iterator[Communicator]:
    """Numbered as they were made; where the log has no Init line, as they were used."""
    any_made = any(known.made is not None for known in process.communicators)
    pointers = Counter(known.pointer for known in process.communicators)
    again: Counter[str] = Counter()
    order = 0
    for known in process.communicators:
        label = f"comm {known.pointer}"
        if pointers[known.pointer] > 1:
            again[known.pointer] += 1
            label += f" (number {again[known.pointer]} there)"
        numbered = known.made is not None or not any_made
        yield Communicator(
            label=label,
            size=known.size,
            ranks=next(sets),
            rank=None if known.made is None else known.made.rank,
            order=order if numbered else None,
        )
        order += numbered
