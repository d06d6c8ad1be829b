"""Launches that really run: their recipes, what their jobs print, and a Slurm of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
JOBS = Path(__file__).with_name("jobs")
TRAIN = JOBS / "train_tiny_gpt.py"
BASH = shutil.which("bash") or "bash"
# A backstop. A job whose processes wait for one another ends by the timeout of its own process group.
LAUNCH_SECONDS = 300
PARTITION = "local"  # of scripts/slurm_local.sh
KINDS = ("sbatch_", "log-")  # of a Slurm job's files: what the batch script wrote, and what its processes did

# Of a model that trains in a second on a CPU. Transformer Engine is that of the container which the plan is for: the
# job's own layers are Megatron-Core's local ones.
TINY: dict[str, Any] = {
    "cluster": {"gpu": "h100", "num_gpus": 2},
    "software": {
        "framework": "megatron-bridge",
        "megatron_bridge": "0.3.1",
        "megatron_core": "0.16.1",
        "transformer_engine": "2.12",
        "torch": "2.10.0",
    },
    "model": {
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "seq_length": 16,
        "vocab_size": 128,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    },
    "train": {"micro_batch_size": 2, "global_batch_size": 8},
    "ddp": {"use_distributed_optimizer": True},
    "optimizer": {"use_distributed_optimizer": True},
    "mixed_precision": {"bf16": False, "grad_reduce_in_fp32": True},
    "comm_overlap": {"tp_comm_overlap": False},
}


def tiny(**sections: Any) -> dict[str, Any]:
    """The tiny recipe with fields of its sections changed."""
    return {**TINY, **{name: {**TINY.get(name, {}), **fields} for name, fields in sections.items()}}


TENSOR_PARALLEL = tiny(
    model={"tensor_model_parallel_size": 2, "sequence_parallel": True}, comm_overlap={"tp_comm_overlap": True}
)
# Stages of 2 GPUs in virtual stages: right only with overlap_p2p_comm, which keeps two messages between the same two
# ranks apart.
PIPELINE_PARALLEL = tiny(model={"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2})
DATA_PARALLEL = tiny(comm_overlap={"bucket_size": 2_000})


def written(recipe: dict[str, Any], folder: Path) -> str:
    """The path of the recipe as a file."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return str(path)


def launch(name: str, arguments: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of recipes/ with NeMo-Run's home and the user's in ``folder``, stderr among its output."""
    (folder / "home").mkdir()
    environment = {
        **os.environ,
        # The job's python and torchrun are those of the tests.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder / "home"),
        "NEMORUN_HOME": str(folder / "runs"),  # nemo_run in its path would be replaced in sbatch scripts
        "COLUMNS": "100000",  # NeMo-Run's console breaks lines at the width of a terminal
        **variables,
    }
    return subprocess.run(
        [sys.executable, str(ROOT / "recipes" / name), *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LAUNCH_SECONDS,
        check=False,
    )


def printed(log: str) -> list[dict[str, Any]]:
    """What the job's processes printed as JSON, by their rank; launchers put prefixes before it."""
    found = [json.loads(line[line.index('{"rank"') :]) for line in log.splitlines() if '{"rank"' in line]
    return sorted(found, key=lambda process: process["rank"])


def stored_plan(folder: Path) -> dict[str, Any]:
    """The plan that the plugin left in the job's folder."""
    (path,) = folder.rglob("*.overlap_plan.json")
    plan: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return plan


def assert_trained(log: str, plan: dict[str, Any]) -> None:
    """Two processes saw the plan's variables, have its settings on their live objects, and learned something."""
    processes = printed(log)
    assert [process["rank"] for process in processes] == [0, 1], log
    for process in processes:
        assert process["env"] == plan["env"]
        assert process["environment_findings"] == []
        assert process["settings"] == {
            path: value
            for path, value in plan["settings"].items()
            # No field of megatron-core's TransformerConfig; it is set where there is something to set.
            if path != "model.tp_comm_overlap_cfg" or plan["settings"]["model.tp_comm_overlap"]
        }
    losses = [process["losses"] for process in processes if process["losses"][0] is not None]
    assert losses, log
    for first, second in losses:
        assert 0 < second < first < 10


# --- Slurm ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm_conf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The configuration of a Slurm of one node, which ends with the module's tests."""
    folder = tmp_path_factory.mktemp("slurm")
    started = slurm_local("start", folder)
    if started.returncode == 2:
        pytest.skip(started.stdout.strip())
    assert started.returncode == 0, started.stdout
    try:
        yield str(folder / "slurm.conf")
    finally:
        stopped = slurm_local("stop", folder)
        assert stopped.returncode == 0, stopped.stdout
        assert not folder.exists()


def slurm_local(verb: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs scripts/slurm_local.sh, stderr among its output."""
    return subprocess.run(
        [BASH, str(ROOT / "scripts" / "slurm_local.sh"), verb, str(folder)],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LAUNCH_SECONDS,
        check=False,
    )


def slurm_log(folder: Path, seconds: float = 120) -> str:
    """What the processes of the one job under ``folder`` wrote, once it has ended, which must be well."""
    end = time.monotonic() + seconds
    while True:
        batch, log = (
            "".join(path.read_text(encoding="utf-8") for path in folder.rglob(f"{kind}*.out")) for kind in KINDS
        )
        status = re.search(r"^job exited with code (\d+)$", batch, re.MULTILINE)
        if status:
            assert status[1] == "0", f"{batch}\n{log}"
            return log
        assert time.monotonic() < end, f"the job has not ended after {seconds:.0f} seconds\n{batch}\n{log}"
        time.sleep(0.2)
