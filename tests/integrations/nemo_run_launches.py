"""What the tests of the NeMo-Run plugin launch."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nemo_run as run
import pytest
from nemo_run.config import get_nemorun_home, set_nemorun_home

RECIPE: dict[str, Any] = {
    "cluster": {"gpu": "h100"},
    "software": {"megatron_bridge": "0.5.1"},
    "model": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2},
    "ddp": {"use_distributed_optimizer": True},
}
MEGATRON_LM: dict[str, Any] = {**RECIPE, "software": {"framework": "megatron-lm", "megatron_core": "0.16.1"}}
# Of TP 2 on H100 with Bridge 0.5.1, whose recipes recommend no further variables.
PLAN_ENV = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NVTE_FWD_LAYERNORM_SM_MARGIN": "16",
    "NVTE_BWD_LAYERNORM_SM_MARGIN": "16",
}


def recipe(**sections: Any) -> dict[str, Any]:
    """The recipe with fields of its sections changed."""
    return {**RECIPE, **{name: {**RECIPE.get(name, {}), **body} for name, body in sections.items()}}


# More ranks for experts than there are experts.
IMPOSSIBLE = recipe(
    model={"num_moe_experts": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
)


def script(**fields: Any) -> Any:
    return run.Script(**{"path": "train.py", "entrypoint": "python", **fields})


def local(**fields: Any) -> Any:
    return run.LocalExecutor(**{"nodes": 1, "ntasks_per_node": 8, **fields})


def slurm(home: Path, **fields: Any) -> Any:
    defaults = {"account": "a", "nodes": 1, "ntasks_per_node": 8, "packager": run.Packager()}
    return run.SlurmExecutor(**{**defaults, "tunnel": run.LocalTunnel(job_dir=str(home / "experiments")), **fields})


def folder_of(experiment: Any) -> Path:
    return Path(experiment._exp_dir)


def stored(experiment: Any, task: str, folder: str | None = None) -> dict[str, Any]:
    """The plan that a task left in its folder."""
    return json.loads((folder_of(experiment) / (folder or task) / f"{task}.overlap_plan.json").read_text("utf-8"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of NeMo-Run for this test alone, and a standard input that its local commands may read."""
    before = get_nemorun_home()
    set_nemorun_home(str(tmp_path))
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        yield tmp_path
    set_nemorun_home(before)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What overlapkit logs. Not pytest's caplog: NeMo-Run replaces the root logger's handlers, that one among them."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("overlapkit"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield messages
    logger.setLevel(level)
    logger.removeHandler(handler)
