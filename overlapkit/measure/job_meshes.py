"""The meshes that inputs are attributed by: a recipe's for jobs of its size, for others the one that they fit best."""

from __future__ import annotations

from collections.abc import Sequence

from overlapkit.measure.attribution import infer_mesh, undescribed
from overlapkit.measure.events import Recording
from overlapkit.measure.mesh import Mesh
from overlapkit.volume.placement import RankLayout


def job_meshes(recordings: Sequence[Recording], mesh: Mesh | None) -> tuple[dict[int | None, Mesh | None], list[str]]:
    """Ranks of a job (None: unknown) -> the mesh to attribute by, and what the reader of the report should know of it.

    ``mesh`` is of jobs of its own size, and of those that do not say theirs.
    """
    jobs: dict[int | None, list[Recording]] = {}
    for recording in recordings:
        jobs.setdefault(recording.world_size, []).append(recording)
    own = (None, mesh.layout.world_size) if mesh is not None else ()
    found = {world: mesh for world in jobs if world in own}
    notes = []
    others = sorted(world for world in jobs if world is not None and world not in own)
    if mesh is not None and others:
        used = "its groups are not used" + (" there" if found else "")
        sizes = ", ".join(map(str, others))
        notes.append(f"the recipe has {mesh.layout.world_size} ranks, the input {sizes}: {used}")
    for world in (each for each in jobs if each not in found):
        found[world], more = _inferred(jobs[world])
        several = len(jobs) > 1 and world is not None
        notes += [f"of the job of {_count(world or 0)}: {note}" if several else note for note in more]
    return found, notes


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _inferred(job: Sequence[Recording]) -> tuple[Mesh | None, list[str]]:
    if not any(undescribed(recording) for recording in job):
        return None, []
    inferred, others = infer_mesh(job)
    if inferred is None:
        return None, ["the groups are guessed from what they carry: a recipe would tell them apart"]
    note = f"no recipe says how the ranks are laid out: {_words(inferred.layout)} fits the input best"
    return inferred, [note, *(f"{_words(layout)} fits as well" for layout in others[:3])]


def _words(layout: RankLayout) -> str:
    axes = [(name, getattr(layout, name.lower())) for name in ("TP", "CP", "DP", "PP", "EP")]
    return " × ".join(f"{name} {size}" for name, size in axes if size > 1) or "one rank"
