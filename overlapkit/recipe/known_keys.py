"""The keys that Megatron-Bridge and Megatron-Core know, per version, from their sources.

``data/known_keys.json`` is written by ``scripts/known_keys.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from overlapkit.data import load_json
from overlapkit.versions import parse_version

_FREE = frozenset({"env_vars"})


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """``snapshots`` are "package version"; a key maps to the indices of the snapshots that have it."""

    snapshots: tuple[str, ...]
    tables: Mapping[str, Mapping[str, str]]
    key_sets: Mapping[str, frozenset[str]]
    free_sections: frozenset[str] = _FREE

    @property
    def sections(self) -> Mapping[str, str]:
        return self.tables[""]

    def keys(self, section: str) -> frozenset[str]:
        return self.key_sets.get(section, frozenset())

    def sections_of(self, key: str) -> tuple[str, ...]:
        """The sections that have ``key``."""
        return tuple(section for section in self.tables if section and key in self.tables[section])

    def partial(self, value: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
        """The dotted keys of a recipe that only some snapshots know, with their indices."""
        everywhere = "".join(map(str, range(len(self.snapshots))))
        found = []
        for section, body in value.items():
            table = self.tables.get(section)
            if table is None or not isinstance(body, dict):
                continue
            written = [key for key, item in body.items() if item is not None]
            found += [(f"{section}.{key}", table[key]) for key in written if table.get(key, everywhere) != everywhere]
        return tuple(found)


@lru_cache(maxsize=1)
def known_keys() -> KnownKeys:
    data = load_json("known_keys.json")
    tables = data["sections"]
    return KnownKeys(
        tuple(data["snapshots"]),
        tables,
        {section: frozenset(table) for section, table in tables.items()},
    )


def snapshots_around(package: str, version: str) -> frozenset[int]:
    """The snapshots of ``package`` between which ``version`` lies: one outside their range, else two."""
    pairs = [
        (parse_version(name.rpartition(" ")[2]), index)
        for index, name in enumerate(known_keys().snapshots)
        if name.startswith(package + " ")
    ]
    pairs.sort()
    here = parse_version(version)
    below = [index for snapshot, index in pairs if not here < snapshot]
    above = [index for snapshot, index in pairs if not snapshot < here]
    return frozenset([*below[-1:], *above[:1]])
