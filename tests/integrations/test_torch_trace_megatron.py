"""Genuine traces of the profiler, of the real Megatron-Core, say what ``overlapkit.volume`` says, step by step."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import include_paths
from volume.layouts import layout

from overlapkit import volume
from overlapkit.measure.events import Recording
from overlapkit.measure.readers import torch_trace

HERE = Path(__file__).parent / "measure"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp pp2 dp2": layout(tp=2, sp=True, pp=2, dp=2),
    "pp2 dp2, several buckets": layout(
        pp=2, dp=2, ddp={"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 30_000}
    ),
    "tp2 dp2, all gradients reduced": layout(tp=2, dp=2, ddp={"use_distributed_optimizer": False}),
    "pp4 vp2": layout(pp=4, vp=2, num_layers=8),
}
# DDP issues the buckets of a group together, and the profiler writes them as one call.
_TOGETHER = ("all_gather", "reduce_scatter", "all_reduce")
Key = tuple[str, str, str]  # group, operation, type


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The macro of ProcessGroupNCCL as a library."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    target = tmp_path_factory.mktemp("library") / "record_param_comms.so"
    flags = [
        "-std=c++20",
        "-O0",
        "-shared",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    includes = [f"-I{folder}" for folder in include_paths()]
    libraries = Path(torch.__file__).parent / "lib"
    links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10"]
    source = HERE / "record_param_comms.cpp"
    done = subprocess.run(
        [compiler, *flags, *includes, str(source), "-o", str(target), *links],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="session")
def traces(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Path]]:
    """Of each layout, a trace of a rank of each pipeline stage."""
    folder = tmp_path_factory.mktemp("traces")
    written = {
        name: {
            rank: folder / f"{number}-{rank}.json.gz"
            for rank in (stage.ranks[-1][-1] for stage in volume(recipe).stages)
        }
        for number, (name, recipe) in enumerate(LAYOUTS.items())
    }
    requests = [
        {
            "recipe": LAYOUTS[name],
            "world": LAYOUTS[name]["cluster"]["num_gpus"],
            "traces": {rank: str(path) for rank, path in paths.items()},
        }
        for name, paths in written.items()
    ]
    command = [sys.executable, "-W", "ignore", str(HERE / "traced_steps.py"), str(library), json.dumps(requests)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return written


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_step_of_a_trace_is_what_was_predicted(name: str, traces: dict[str, dict[int, Path]]) -> None:
    said, paths = volume(LAYOUTS[name]), traces[name]
    found = torch_trace.read(list(paths.values()))
    assert found.problems == ()
    assert [recording.rank for recording in found.recordings] == list(paths)
    for stage, recording in zip(said.stages, found.recordings, strict=True):
        rows = {(row.group, row.op, row.dtype): row for row in stage.rows}
        assert recording.steps == 2
        for step in recording.windows:
            counts, moved = _of_step(recording, step.number)
            assert moved == {key: row.message_bytes for key, row in rows.items()}
            for key, row in rows.items():
                assert counts[key] == row.count or (counts[key] < row.count and key[1] in _TOGETHER)


def _of_step(recording: Recording, number: int) -> tuple[dict[Key, int], dict[Key, int]]:
    """Calls and message bytes of a step, in groups of more than one rank."""
    counts: Counter[Key] = Counter()
    moved: Counter[Key] = Counter()
    for event in recording.events:
        group = recording.communicators[event.communicator]
        if event.step == number and group.size != 1:
            key = (group.description or "", event.op, event.dtype)
            counts[key] += event.calls
            moved[key] += event.message_bytes
    return counts, moved
