"""Transformer Engine's releases, as far as they treat userbuffers differently: ``data/userbuffers_releases.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from overlapkit.data import load_yaml
from overlapkit.userbuffers.layers import DEFAULT_METHODS, EXTERNAL_METHODS
from overlapkit.versions import Version, VersionRange, parse_range

NEWEST = "2.20"
_LATER = parse_range(">=2.21")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What holds from one release on; the data file says what each field means."""

    since: str
    options: tuple[str, ...]
    external: bool
    quantization_modes: bool
    set_sm_margin_but_ring: bool
    num_splits_are_tp: tuple[str, ...]
    refuses_by: str
    kernels: tuple[int, ...]

    @property
    def methods(self) -> dict[str, str]:
        """Layer -> its method, for the layers that get a buffer, in the order in which they get it."""
        return {**DEFAULT_METHODS, **(EXTERNAL_METHODS if self.external else {})}

    @property
    def asserts(self) -> bool:
        return self.refuses_by == "AssertionError"


def release_of(version: Version) -> Release:
    """The row that a version falls under; the first for an older one."""
    rows = _rows()
    return next((row for held, row in reversed(rows) if version in held), rows[0][1])


def taken_for(version: Version) -> str | None:
    """The release that stands for a version which is older or newer than those that the data was read from."""
    oldest = _rows()[0][1].since
    if version in parse_range(f"<{oldest}"):
        return oldest
    return NEWEST if version in _LATER else None


@lru_cache(maxsize=1)
def _rows() -> tuple[tuple[VersionRange, Release], ...]:
    rows = []
    for row in load_yaml("userbuffers_releases.yaml"):
        values: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in row.items()}
        rows.append((parse_range(f">={row['since']}"), Release(**values)))
    return tuple(rows)
