"""The best layouts as recipe files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overlapkit.recipe.place import YAML_ENDINGS
from overlapkit.render.data import to_yaml
from overlapkit.search.result import Found
from overlapkit.search.space import Layout
from overlapkit.whole_files import write_whole


def save_recipes(source: str, found: Sequence[Found], folder: str | Path) -> tuple[Path, ...]:
    """A recipe per layout, the fastest first by name; all of them are written or none.

    Raises:
        RecipeError: the folder cannot be written.
    """
    stem = Path(source).stem
    texts = {}
    for rank, each in enumerate(found, start=1):
        head = f"# {Path(source).name}, layout {rank} of a search: {each.seconds:.4g} s per step predicted.\n"
        texts[f"{stem}_{rank:02}_{layout_name(each.layout)}.yaml"] = head + to_yaml(_moved(source, each.recipe))
    return write_whole(Path(folder), texts)


def layout_name(layout: Layout) -> str:
    """Its sizes above 1 and what it recomputes, for a file's name."""
    point = layout.point
    sizes = {"tp": point.tp, "pp": point.pp, "vp": point.vp, "cp": point.cp, "ep": point.ep}
    parts = [f"{point.gpus}gpus", *(f"{name}{size}" for name, size in sizes.items() if size > 1)]
    parts += ["sp"] if layout.sequence_parallel else []
    parts += [f"mbs{point.micro_batch_size}"]
    return "_".join(parts if layout.recompute == "none" else [*parts, layout.recompute])


def _moved(source: str, recipe: Any) -> dict[str, Any]:
    """The recipe for another folder: a userbuffers file beside the old one is named by its whole path."""
    moved = dict(recipe)
    for section in ("comm_overlap", "model"):
        body = moved.get(section)
        if not isinstance(body, dict):
            continue
        path = body.get("tp_comm_overlap_cfg")
        if isinstance(path, str) and ("/" in path or path.endswith(YAML_ENDINGS)):
            moved[section] = {**body, "tp_comm_overlap_cfg": str((Path(source).parent / path).resolve())}
    return moved
