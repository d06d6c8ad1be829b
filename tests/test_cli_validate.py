"""``overlapkit resolve --validate`` where megatron-core is not installed; tests/integrations has the rest."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from test_cli import RECIPE, run


@pytest.fixture
def without_megatron(tmp_path: Path) -> dict[str, str]:
    """An environment in which importing megatron fails as where it is not installed."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'megatron'\")\n")
    return {"PYTHONPATH": str(tmp_path)}


def refused(done: subprocess.CompletedProcess[str]) -> bool:
    expected = "overlapkit: megatron-core cannot be imported here (No module named 'megatron'): pip install"
    (line,) = done.stderr.splitlines()
    return done.returncode == 2 and done.stdout == "" and line == f"{expected} 'overlapkit[megatron]'"


@pytest.mark.parametrize("form", ["text", "json", "env", "bridge"])
def test_without_megatron_core_it_is_one_line_and_two(form: str, without_megatron: dict[str, str]) -> None:
    assert refused(run("resolve", RECIPE, "--validate", "--format", form, env=without_megatron))


def test_for_a_launch_script_too(tmp_path: Path, without_megatron: dict[str, str]) -> None:
    script = tmp_path / "pretrain.sh"
    script.write_text("torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --tensor-model-parallel-size 1\n")
    arguments = ("resolve", "--megatron-lm-args", str(script), "cluster.gpu=h100", "cluster.num_gpus=8")
    assert run(*arguments, env=without_megatron).returncode == 0
    assert refused(run(*arguments, "--validate", env=without_megatron))


def test_unless_it_is_asked_nothing_is_imported(without_megatron: dict[str, str]) -> None:
    assert run("resolve", RECIPE, env=without_megatron).returncode == 0
