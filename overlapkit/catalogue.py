"""The catalogues: GPUs (``data/gpus.yaml``) and software that belongs together (``data/software.yaml``)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from overlapkit.data import load_yaml
from overlapkit.versions import Version, parse_version

GENERATIONS = ("ampere", "hopper", "blackwell", "rubin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU model; None is unknown. Units as in ``data/gpus.yaml``."""

    name: str
    generation: str
    compute_capability: str | None
    sm_count: int | None
    bf16_tflops: float | None
    fp8_tflops: float | None
    fp4_tflops: float | None
    hbm_gb: float | None
    hbm_gb_per_s: float | None
    nvlink_gb_per_s: float | None
    nvlink_domain_size: int | None
    gpus_per_node: int | None
    nic_gbps: float | None
    cuda_multicast: bool | None
    preset_family: str | None

    @property
    def presets_of(self) -> str:
        """The GPU whose userbuffers presets it starts from; itself where the table names none."""
        return self.preset_family or self.name

    @property
    def blackwell_or_newer(self) -> bool:
        return GENERATIONS.index(self.generation) >= GENERATIONS.index("blackwell")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareRow:
    """Versions that were released together, under a container's or a Bridge release's name."""

    name: str
    megatron_bridge: str
    megatron_core: str
    transformer_engine: str
    torch: str

    @property
    def is_container(self) -> bool:
        return self.name.startswith("nemo:")


def find_gpu(spelling: str) -> Gpu | None:
    """The GPU of a spelling such as ``H100``, ``h100-sxm`` or ``NVIDIA H100 80GB HBM3``."""
    name = _spellings().get(_normalised(spelling))
    return None if name is None else _gpu(name)


def gpu_names() -> tuple[str, ...]:
    return tuple(load_yaml("gpus.yaml"))


def software_rows() -> tuple[SoftwareRow, ...]:
    """Every row, oldest first."""
    return _rows()


def row_of_container(container: str) -> SoftwareRow | None:
    """The row of ``nemo:26.04``, with or without a registry and path before it."""
    tag = container.strip().rpartition("/")[2].lower()
    return next((row for row in _rows() if row.name == tag and row.is_container), None)


def row_of_bridge(version: str) -> SoftwareRow:
    """The row of a Bridge version: the newest that is not newer, if possible of the same minor version.

    0.6.0 gets 0.6.2's rather than 0.5.1's; a version before all rows gets the first.
    """
    here = parse_version(version)
    known = {parse_version(row.megatron_bridge): row for row in _rows()}
    older = [other for other in known if not here < other]
    newer_of_series = [other for other in known if here < other and other.series == here.series]
    if older and (max(older).series == here.series or not newer_of_series):
        return known[max(older)]
    return known[min(newer_of_series)] if newer_of_series else _rows()[0]


def container_of_core(version: Version) -> str | None:
    """The container with this Megatron-Core's minor version, unless the newest row has that too."""
    same = [row for row in _rows() if parse_version(row.megatron_core).series == version.series]
    if not same or same[-1] == _rows()[-1]:
        return None
    return next((row.name for row in reversed(same) if row.is_container), None)


def _normalised(spelling: str) -> str:
    return re.sub(r"[^a-z0-9]", "", spelling.lower()).removeprefix("nvidia")


@lru_cache(maxsize=1)
def _spellings() -> dict[str, str]:
    table = {}
    for name, entry in load_yaml("gpus.yaml").items():
        for spelling in (_normalised(name), *entry["aliases"]):
            table[spelling] = name
    return table


@lru_cache(maxsize=32)
def _gpu(name: str) -> Gpu:
    entry: dict[str, Any] = load_yaml("gpus.yaml")[name]
    tflops = entry["dense_tflops"]
    plain = {key: entry[key] for key in Gpu.__dataclass_fields__ if key in entry}
    return Gpu(name=name, bf16_tflops=tflops["bf16"], fp8_tflops=tflops["fp8"], fp4_tflops=tflops["fp4"], **plain)


@lru_cache(maxsize=1)
def _rows() -> tuple[SoftwareRow, ...]:
    keys = SoftwareRow.__dataclass_fields__
    return tuple(SoftwareRow(**{key: row[key] for key in keys}) for row in load_yaml("software.yaml")["rows"])
