"""Runs of the real Megatron-Core, and how they are compared with what overlapkit predicts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlapkit.volume import Row, Volume

SERVER = Path(__file__).parent / "server.py"
# Without Transformer Engine attention has no exchange over CP: see attend_to_own_part.
NOT_RUN = ("CONTEXT_PARALLEL_GROUP",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one rank of a pipeline stage called in a step: (group, size, op, dtype, bytes, peer) each."""

    rank: int
    stage: int
    calls: list[list[Any]]


class Runner:
    """One process that has Megatron-Core imported, and is asked for runs."""

    def __init__(self, python: str = sys.executable) -> None:
        self._server = subprocess.Popen(
            [python, "-W", "ignore", str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, recipe: dict[str, Any], ranks: list[int], backend: str, device: str = "cpu") -> list[Run]:
        """A run per rank, in this order.

        Raises:
            RuntimeError: a rank failed; its traceback is the message.
        """
        world = recipe["cluster"]["num_gpus"]
        request = {"recipe": recipe, "world": world, "ranks": ranks, "backend": backend, "device": device}
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(f"{SERVER.name} ended with {self._server.wait()}")
        answers = json.loads(line)
        for answer in answers:
            if "error" in answer:
                raise RuntimeError(f"rank {answer['rank']}: {answer['error']}")
        return [Run(**answer) for answer in answers]

    def close(self) -> None:
        self._server.communicate()


def differences(predicted: Volume, run: Run, world: int) -> tuple[int, list[str]]:
    """(rows compared, those that disagree, in words), over all groups of more than one rank.

    Group size, calls and bytes must be equal; of rows whose bytes the routing decides, the calls.
    """
    rows = {(row.group, row.op, row.dtype): row for row in predicted.stages[run.stage].rows}
    ours = {key: row for key, row in rows.items() if row.group not in NOT_RUN}
    counts, moved, sizes = Counter[Any](), Counter[Any](), dict[Any, int]()
    for group, size, op, dtype, bytes_, _ in run.calls:
        if size > 1:
            key = group, op, dtype
            counts[key], moved[key], sizes[key] = counts[key] + 1, moved[key] + bytes_, size
    wrong = []
    for key in sorted(ours.keys() | counts.keys()):
        row = ours.get(key)
        exact = row is None or row.exact
        said = (row.size, row.count, row.message_bytes if exact else None) if row else (0, 0, 0)
        real = (sizes.get(key, 0), counts[key], moved[key] if exact else None)
        if said != real:
            wrong.append(f"rank {run.rank}, stage {run.stage}: {' '.join(key)}: {_told(said)}, not {_told(real)}")
    return len(ours.keys() | counts.keys()), wrong + _onward(predicted, list(ours.values()), run, world)


def _told(row: tuple[int, int, int | None]) -> str:
    size, count, moved = row
    return f"{count} calls of {size} ranks" + ("" if moved is None else f" with {moved:,} B")


def _onward(predicted: Volume, rows: list[Row], run: Run, world: int) -> list[str]:
    """Which part of what is sent goes to the next pipeline stage; of two stages each is the other's next."""
    stages = len(predicted.stages)
    if stages < 3:
        return []
    following = (run.rank + world // stages) % world
    sent = sum(call[4] for call in run.calls if call[2] == "send" and call[5] == following)
    said = sum(row.onward_bytes for row in rows if row.axis == "pp")
    return [] if said == sent else [f"rank {run.rank}, stage {run.stage}: onward {said:,} B, not {sent:,} B"]
