"""Ranks of small GPTs of the real Megatron-Core under PyTorch's profiler, on a CPU.

    python traced_steps.py LIBRARY REQUESTS

REQUESTS is a list in JSON, each with a ``recipe``, its ``world``, and ``traces``, which maps ranks to the files to
write. Every call goes, as ProcessGroupNCCL's do, through the macro that records its parameters
(``record_param_comms.cpp``, built as LIBRARY), and then to the fake process group. After one step that is not traced
come two that are.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
sys.path += [str(Path(__file__).resolve().parent.parent / folder) for folder in ("jobs", "volume")]

import recording
import torch
from cpu_megatron import run_on_cpu
from torch.distributed.distributed_c10d import _get_process_group_name
from train_gpt import _step, build

LIBRARY = ctypes.CDLL(sys.argv[1])
_NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "all_gather_list": "all_gather",
    "reduce_scatter": "_reduce_scatter_base",
    "reduce_scatter_list": "reduce_scatter",
    "all_to_all": "all_to_allv",
}
_COALESCED = {
    "all_reduce": "allreduce_coalesced",
    "all_gather": "allgather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter_tensor_coalesced",
}
# c10::ScalarType
_DTYPES = {"uint8": 0, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5, "float32": 6, "bool": 11}
_DTYPES["bfloat16"] = 15


class TracedGroup(recording.RecordingGroup):
    """Records as ProcessGroupNCCL does: calls that come coalesced as one, of all their elements."""

    _sequence = 0
    _held: list[tuple[str, list[torch.Tensor]]] | None = None

    def _note(self, op: str, tensors: list[torch.Tensor], peer: int | None = None) -> None:
        super()._note(op, tensors, peer)
        if self._held is not None:
            self._held.append((op, tensors))
        else:
            self._record(op, _NAMES.get(op, op), tensors, peer)

    def _record(self, op: str, name: str, tensors: list[torch.Tensor], peer: int | None) -> None:
        elements = sum(tensor.numel() for tensor in tensors)
        part = elements // len(self.ranks)
        sent = part if op.startswith("all_gather") else elements
        received = part if op.startswith("reduce_scatter") else elements
        strides = {after - before for before, after in pairwise(self.ranks)} or {1}
        self._sequence += 1
        LIBRARY.record_param_comms(
            ctypes.c_int64(self._sequence),
            ctypes.c_bool(peer is not None),
            _get_process_group_name(self).encode(),
            self.group_desc.encode(),
            self.rank() if peer is None else peer,
            name.encode(),
            ctypes.c_int64(sent),
            ctypes.c_int64(received),
            _DTYPES[str(tensors[0].dtype).removeprefix("torch.")],
            self.ranks[0],
            strides.pop() if len(strides) == 1 else -1,
            len(self.ranks),
            ctypes.c_bool(False),
        )

    def _together(self, run: Any, *arguments: Any) -> Any:
        self._held = []
        done = run(*arguments)
        held, self._held = self._held, None
        op = held[0][0]
        self._record(op, _COALESCED[op], [tensor for _, tensors in held for tensor in tensors], None)
        return done

    def allreduce_coalesced(self, *arguments: Any) -> Any:
        return self._together(super().allreduce_coalesced, *arguments)

    def all_gather_single_coalesced(self, *arguments: Any) -> Any:
        return self._together(super().all_gather_single_coalesced, *arguments)

    def reduce_scatter_single_coalesced(self, *arguments: Any) -> Any:
        return self._together(super().reduce_scatter_single_coalesced, *arguments)


def trace(recipe: dict[str, Any], world: int, rank: int, path: str) -> None:
    """In a process of its own."""
    run_on_cpu("cpu")
    recording.RecordingGroup = TracedGroup  # type: ignore[misc]
    recording.start("fake", rank, world, None)
    training = build(recipe)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
    ) as profiler:
        for _ in range(3):
            _step(training)
            profiler.step()


def main() -> int:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # a process that has threads cannot be forked
    fork = multiprocessing.get_context("fork")
    for request in json.loads(sys.argv[2]):
        for rank, path in request["traces"].items():
            process = fork.Process(target=trace, args=(request["recipe"], request["world"], int(rank), path))
            process.start()
            process.join()
            if process.exitcode:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
