"""Layouts measured through NeMo-Run: tasks that really run, and what compare makes of their logs."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nemo_run_launches import RECIPE, home

from overlapkit import compare
from overlapkit.cli import app
from overlapkit.errors import OverlapkitError, PlanError, RecipeError
from overlapkit.integrations.nemo_run.submission import submit
from overlapkit.render.data import to_yaml

__all__ = ["home"]  # the fixture

LOG_WRITER = Path(__file__).resolve().parents[1] / "measure"  # the folder of write_nccl_log
GPUS = 4
BASE: dict[str, Any] = {
    "cluster": {"gpu": "h100", "num_gpus": GPUS, "gpus_per_node": GPUS},
    "software": {"megatron_bridge": "0.5.1"},
    "model": {
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 256,
        "num_attention_heads": 4,
        "seq_length": 32,
        "vocab_size": 512,
        "sequence_parallel": True,
        "tensor_model_parallel_size": 2,
    },
    "train": {"micro_batch_size": 1, "global_batch_size": 8},
    "ddp": {"use_distributed_optimizer": True},
    "comm_overlap": {"tp_comm_overlap": False},  # nothing of it leaves NCCL
}
# Stands for a training script: it logs what the recipe of its first argument is predicted to move.
TRAIN = f"""
import os, sys
sys.path.insert(0, {str(LOG_WRITER)!r})
from pathlib import Path
from write_nccl_log import write_logs
from overlapkit import volume
assert any(word.startswith("++model.tensor_model_parallel_size=") for word in sys.argv[2:]), sys.argv
assert os.environ["NCCL_DEBUG"] == "INFO"
write_logs(volume(sys.argv[1]), Path(os.environ["NCCL_DEBUG_FILE"]).parent, steps=2)
"""
EXECUTOR = f"""
import sys
import nemo_run as run

def executor():
    return run.LocalExecutor(ntasks_per_node={GPUS})

def task(recipe):
    return run.Script(path=TRAIN, args=[recipe], entrypoint=sys.executable)
"""


@pytest.fixture
def layouts(home: Path) -> list[Path]:
    """Two layouts of one model."""
    pipeline = {**BASE["model"], "pipeline_model_parallel_size": 2}
    paths = []
    for name, recipe in (("tp2", BASE), ("tp2_pp2", {**BASE, "model": pipeline})):
        paths.append(home / f"{name}.yaml")
        paths[-1].write_text(to_yaml(recipe), "utf-8")
    return paths


def executor_file(home: Path, text: str = EXECUTOR, train: str = TRAIN) -> Path:
    script, path = home / "train.py", home / "cluster.py"
    script.write_text(train, "utf-8")
    path.write_text(f"TRAIN = {str(script)!r}\n{text}", "utf-8")
    return path


def commands(said: str) -> list[list[str]]:
    """The words of each ``overlapkit compare`` that was told."""
    return [line.split()[1:] for line in said.splitlines() if line.startswith("  overlapkit compare ")]


def test_every_layout_runs_and_is_compared_by_the_command_that_is_told(
    home: Path, layouts: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    identity = submit(layouts, executor_file(home), name="best")
    out, said = capfd.readouterr()
    assert identity.startswith("best_")
    assert out == ""
    told = commands(said)
    assert [recipe for _, recipe, _ in told] == [str(path) for path in layouts]
    for (_, recipe, logs), layout in zip(told, layouts, strict=True):
        folder, pattern = Path(logs).parent, Path(logs).name
        assert folder.relative_to(home).parts == ("experiments", "best", identity, layout.stem)
        found = compare(recipe, sorted(folder.glob(pattern)))
        assert (len(found.ranks), found.equal) == (GPUS, True)
        assert (folder / f"{layout.stem}.overlap_plan.json").is_file()


def test_a_search_submits_the_layouts_that_it_finds(
    home: Path, layouts: list[Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    ranges = ["--tp", "2", "--pp", "1,2", "--top", "2", "--workers", "1"]
    with pytest.raises(SystemExit) as ended:
        app(["search", str(layouts[0]), *ranges, "--format", "json", "--submit", str(executor_file(home))])
    assert ended.value.code == 0
    out, said = capfd.readouterr()
    assert json.loads(out)["best"]
    told = commands(said)
    assert len(told) == 2
    for _, recipe, logs in told:
        found = compare(recipe, sorted(Path(logs).parent.glob(Path(logs).name)))
        assert (len(found.ranks), found.equal) == (GPUS, True)


def test_recipes_of_one_name_have_a_task_each(
    home: Path, layouts: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    (home / "other").mkdir()
    twin = home / "other" / "tp2.yaml"
    twin.write_bytes(layouts[0].read_bytes())
    submit([layouts[0], twin], executor_file(home), name="twins")
    folders = [Path(logs).parent.name for _, _, logs in commands(capfd.readouterr().err)]
    assert folders == ["tp2", "tp2_2"]


def test_a_layout_that_fails_is_told_when_the_others_have_run(home: Path, layouts: list[Path]) -> None:
    train = f"import sys\nif 'pp2' not in sys.argv[1]: sys.exit(3)\n{TRAIN}"
    with pytest.raises(RecipeError, match=r"NeMo-Run: 1 of 2 layouts did not run to the end: tp2 \(FAILED\); their"):
        submit(layouts, executor_file(home, train=train), name="half")
    assert len(list(home.glob("experiments/half/*/tp2_pp2/nccl.*.log"))) == GPUS


SLURM = f"""
import nemo_run as run

def executor():
    tunnel = run.LocalTunnel(job_dir="")
    return run.SlurmExecutor(account="me", nodes=1, ntasks_per_node={GPUS}, tunnel=tunnel, packager=run.Packager())

def task(recipe):
    return run.Script(path=TRAIN, args=[recipe], entrypoint="python")
"""


@pytest.fixture
def cluster(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file for a Slurm of which there is nothing but an sbatch that takes jobs."""
    commands = home / "bin"
    commands.mkdir()
    for command, answer in (("sbatch", "echo 7"), ("sacct", "echo"), ("squeue", "echo")):
        (commands / command).write_text(f"#!/bin/sh\n{answer}\n", "utf-8")
        (commands / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    yield executor_file(home, SLURM)
    gc.collect()  # NeMo-Run's commands leave pipes open, and here a warning of that is ignored


def test_slurm_gets_a_job_for_every_layout_and_their_folders_are_told(
    home: Path, cluster: Path, layouts: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    identity = submit(layouts, cluster, name="queued")
    folder = home / "experiments" / "queued" / identity
    logs = [logs for _, _, logs in commands(capfd.readouterr().err)]
    assert logs == [f"{folder}/tp2/nccl.*.log", f"{folder}/tp2_pp2/nccl.*.log"]
    for layout in layouts:
        script = (folder / f"{layout.stem}_sbatch.sh").read_text("utf-8")
        assert f"export NCCL_DEBUG_FILE={folder}/{layout.stem}/nccl.%h.%p.log\n" in script


def test_a_cluster_that_takes_no_job_is_one_line(home: Path, cluster: Path, layouts: list[Path]) -> None:
    (home / "bin" / "sbatch").write_text("#!/bin/sh\necho no such account >&2\nexit 1\n", "utf-8")
    with pytest.raises(RecipeError, match=r"NeMo-Run: the experiment could not be launched: .*no such account$"):
        submit(layouts, cluster, name="queued")


# --- nothing is launched -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def task(recipe): ...", r"cluster\.py: it defines no function executor\(\); executor\(\) returns a NeMo-Run"),
        ("def executor(): ...", r"cluster\.py: it defines no function task\(recipe\); "),
        ("import nowhere_to_be_found", r"cluster\.py:2: ModuleNotFoundError: No module named 'nowhere_to_be_found'$"),
        ("def executor(:", r"cluster\.py:2: SyntaxError: invalid syntax$"),
        ("raise SystemExit", r"cluster\.py:2: SystemExit$"),
        (EXECUTOR + "\ndef executor():\n    return 1 / 0", r"cluster\.py:\d+: ZeroDivisionError: division by zero$"),
        (EXECUTOR + "\ndef executor(): return 'slurm'", r"cluster\.py: executor\(\) returned 'slurm', no executor"),
        (EXECUTOR + "\ndef task(recipe): return recipe", r"cluster\.py: task\(recipe\) returned '.*', no run\.Script"),
        (EXECUTOR.replace(f"={GPUS}", "=8"), r"tp2\.yaml:\d+: cluster\.num_gpus: 4, but the executor has 1 node × 8"),
    ],
    ids=["no executor", "no task", "import", "syntax", "exit", "raises", "a text", "no task's type", "other size"],
)
def test_a_file_that_cannot_be_used_is_one_line(text: str, problem: str, home: Path, layouts: list[Path]) -> None:
    with pytest.raises(OverlapkitError, match=problem) as caught:
        submit(layouts, executor_file(home, text), name="refused")
    assert "\n" not in str(caught.value)
    assert not list(home.glob("experiments/refused/*/*/nccl*"))


def test_a_file_that_is_not_there(home: Path, layouts: list[Path]) -> None:
    with pytest.raises(RecipeError, match=r"nowhere\.py: there is no such file; name a Python file"):
        submit(layouts, home / "nowhere.py", name="refused")


def test_one_layout_with_errors_launches_none(home: Path, layouts: list[Path]) -> None:
    experts = {**RECIPE["model"], "num_moe_experts": 2, "expert_model_parallel_size": 4}
    layouts[1].write_text(to_yaml({**BASE, "model": {**experts, "expert_tensor_parallel_size": 1}}), "utf-8")
    with pytest.raises(PlanError, match=r"tp2_pp2\.yaml would fail with \d error"):
        submit(layouts, executor_file(home), name="refused")
    assert not list(home.glob("experiments/refused/*/*/nccl*"))


def test_no_recipe(home: Path) -> None:
    with pytest.raises(RecipeError, match="there is no recipe to measure"):
        submit([], executor_file(home), name="refused")
