"""What the real Megatron-Core issued (``tests/oracles/collectives``), as a reader without names of groups sees it."""

from __future__ import annotations

import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from overlapkit.measure.events import CommEvent, Communicator, Recording
from overlapkit.volume import volume
from overlapkit.volume.placement import WORLD, RankLayout, members
from overlapkit.volume.predict import Volume

ROOT = Path(__file__).resolve().parents[2]
Key = tuple[str, str, str]


@lru_cache(maxsize=1)
def _parity() -> Any:
    spec = importlib.util.spec_from_file_location("parity_volume_script", ROOT / "scripts" / "parity_volume.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@lru_cache(maxsize=1)
def runs() -> tuple[tuple[dict[str, Any], Volume], ...]:
    """Every run of a rank that was recorded, and what is predicted of it."""
    paths = sorted((ROOT / "tests" / "oracles" / "collectives").glob("*.jsonl.gz"))
    return tuple((run, volume(recipe_of(run))) for path in paths for run in _parity().runs_of(path))


def recipe_of(run: dict[str, Any]) -> dict[str, Any]:
    recipe: dict[str, Any] = _parity().recipe_of(run)
    return recipe


def issued(run: dict[str, Any]) -> dict[Key, tuple[int, int]]:
    """(group, operation, type) -> calls and message bytes of the step, of groups of two ranks and more."""
    rows = (row for row in run["totals"] if row["nranks"] > 1)
    return {(row["group"], row["op"], row["dtype"]): (row["count"], row["bytes"]) for row in rows}


def around(layout: RankLayout, group: str, rank: int) -> tuple[int, ...]:
    """The global ranks of the group, in PyTorch's order."""
    return tuple(range(layout.world_size)) if group == WORLD else tuple(sorted(members(layout, group, rank)))


def recording(run: dict[str, Any], layout: RankLayout, *, ranks: bool) -> Recording:
    """The run as one process's recording: a communicator per group, in the order of use, without descriptions.

    ``ranks``: the communicators say their global ranks, else their size and this one's place alone.
    """
    communicators: dict[str, Communicator] = {}
    events = []
    for (group, op, dtype), (calls, message_bytes) in issued(run).items():
        if group not in communicators:
            joined = around(layout, group, run["rank"])
            communicators[group] = Communicator(
                label=f"comm {len(communicators)}",
                size=len(joined),
                ranks=joined if ranks else None,
                rank=joined.index(run["rank"]),
                order=len(communicators),
            )
        events.append(CommEvent(list(communicators).index(group), op, dtype, calls, message_bytes))
    return Recording(
        source=run["name"],
        kind="nccl_log",
        rank=run["rank"],
        world_size=run["world"],
        communicators=tuple(communicators.values()),
        events=events,
        steps_by="the all_reduce of one int32",
    )
