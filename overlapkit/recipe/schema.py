"""The sections that overlapkit reads, and the kind of each of their fields."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache

from overlapkit.recipe import sections

SECTIONS: dict[str, type] = {
    "cluster": sections.Cluster,
    "software": sections.Software,
    "model": sections.Model,
    "train": sections.Train,
    "validation": sections.Validation,
    "optimizer": sections.Optimizer,
    "ddp": sections.Ddp,
    "dist": sections.Dist,
    "checkpoint": sections.Checkpoint,
    "mixed_precision": sections.MixedPrecision,
    "comm_overlap": sections.CommOverlap,
    "dataset": sections.Dataset,
}
OURS = ("cluster", "software")


@lru_cache(maxsize=32)
def specs_of(section: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Field -> its kind and choices, read from the section's dataclass."""
    return {
        spec.name: (spec.metadata["kind"], spec.metadata["choices"])
        for spec in fields(SECTIONS[section])
        if "kind" in spec.metadata
    }
