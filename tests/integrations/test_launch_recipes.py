"""The launch scripts of recipes/, run as a user runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from real_launches import (
    DATA_PARALLEL,
    PARTITION,
    TENSOR_PARALLEL,
    TRAIN,
    assert_trained,
    launch,
    slurm_conf,
    slurm_log,
    stored_plan,
    tiny,
    written,
)

from overlapkit import resolve

__all__ = ["slurm_conf"]  # the fixture

SLURM = ["--account", "me", "--partition", PARTITION, "--nodes", "1", "--gpus-per-node", "2"]
BOTH = [("launch_local.py", []), ("launch_slurm.py", SLURM)]
# Megatron-LM refuses userbuffers without sequence parallelism.
WRONG = tiny(
    software={"framework": "megatron-lm", "megatron_bridge": None},
    model={"tensor_model_parallel_size": 2, "sequence_parallel": False},
    comm_overlap={"tp_comm_overlap": True},
)

# How launch_local.py runs a job that ends well is in test_real_local.py.


def test_a_local_job_that_fails_fails_the_launch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('the words of the job')\n", encoding="utf-8")
    done = launch("launch_local.py", [written(DATA_PARALLEL, tmp_path), "--", str(script)], tmp_path)
    assert done.returncode == 1, done.stdout
    assert "the words of the job" in done.stdout
    assert done.stdout.splitlines()[-1] == "launch_local.py: FAILED"


def test_a_tiny_gpt_trains_under_slurm(slurm_conf: str, tmp_path: Path) -> None:
    recipe = written(DATA_PARALLEL, tmp_path)
    done = launch("launch_slurm.py", [recipe, *SLURM, "--", str(TRAIN), recipe], tmp_path, SLURM_CONF=slurm_conf)
    assert done.returncode == 0, done.stdout
    assert_trained(slurm_log(tmp_path), stored_plan(tmp_path))
    assert not list((tmp_path / "home").iterdir())


def test_a_container_is_told_every_variable(tmp_path: Path) -> None:
    recipe = written(TENSOR_PARALLEL, tmp_path)
    container = ["--container-image", "nvcr.io/nvidia/nemo:26.04", "--container-mount", "/data:/data"]
    done = launch("launch_slurm.py", [recipe, *SLURM, *container, "--dryrun", "--", "train.py", "--mine"], tmp_path)
    assert done.returncode == 0, done.stdout
    (srun,) = (line for line in done.stdout.splitlines() if "--container-image" in line)
    env = resolve(TENSOR_PARALLEL).env
    assert "--container-image nvcr.io/nvidia/nemo:26.04" in srun
    assert "--container-mounts /data:/data," in srun
    assert re.search(r"--container-env (\S+)", srun)[1].split(",") == list(env)
    assert re.search(r"torchrun .*--nproc-per-node 2 .* train.py --mine \S", srun)
    for name, value in env.items():
        assert re.search(rf"^\s*export {name}={value}\s*$", done.stdout, re.MULTILINE)
    assert not list((tmp_path / "runs").rglob("*_sbatch.sh"))


def test_a_local_dryrun_starts_nothing(tmp_path: Path) -> None:
    overrides = ["comm_overlap.bucket_size=3000", "--dryrun"]
    done = launch("launch_local.py", [written(DATA_PARALLEL, tmp_path), *overrides, "--", "train.py"], tmp_path)
    assert done.returncode == 0, done.stdout
    assert "comm_overlap.bucket_size=3000" in done.stdout
    assert "'CUDA_DEVICE_MAX_CONNECTIONS': '8'" in done.stdout
    assert not list(tmp_path.rglob("*.overlap_plan.json"))


@pytest.mark.parametrize(("name", "options"), BOTH)
def test_a_plan_with_errors_is_not_launched(name: str, options: list[str], tmp_path: Path) -> None:
    done = launch(name, [written(WRONG, tmp_path), *options, "--", "train.py"], tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith(f"{name}: {tmp_path}/recipe.yaml would fail with")
    assert "TP002 model.tp_comm_overlap: sequence_parallel is false" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("launch_local.py", ["--nproc-per-node", "4"], "1 node × 4 = 4"),
        ("launch_slurm.py", [*SLURM, "--nodes", "2"], "2 nodes × 2 = 4"),
    ],
)
def test_another_number_of_gpus_than_the_recipes_is_refused(
    name: str, options: list[str], size: str, tmp_path: Path
) -> None:
    done = launch(name, [written(DATA_PARALLEL, tmp_path), *options, "--", "train.py"], tmp_path)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1].endswith(f"cluster.num_gpus: 2, but the executor has {size}")


@pytest.mark.parametrize(("name", "options"), BOTH)
def test_a_launch_needs_a_script(name: str, options: list[str], tmp_path: Path) -> None:
    done = launch(name, [written(DATA_PARALLEL, tmp_path), *options], tmp_path)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == f"{name}: error: there is no script to run: give it after --"
