"""The forms that frameworks read, as the command prints them: alone on stdout, what they leave out on stderr."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
BRIDGE = "recipes/llama3_70b_64xh100.yaml"
MEGATRON_LM = "recipes/llama2_7b_32xh20.yaml"


def run(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "overlapkit.cli", "resolve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


@pytest.mark.parametrize("recipe", [BRIDGE, MEGATRON_LM])
def test_bridge_overrides_are_words_of_the_shell(recipe: str) -> None:
    done = run(recipe, "--format", "bridge")
    assert done.returncode == 0
    assert all("=" in word for word in shlex.split(done.stdout))


@pytest.mark.parametrize("recipe", [BRIDGE, MEGATRON_LM])
def test_bridge_yaml_is_a_mapping_of_sections(recipe: str) -> None:
    value = yaml.safe_load(run(recipe, "--format", "bridge-yaml").stdout)
    assert value["model"]["tensor_model_parallel_size"] in (4, 8)


@pytest.mark.parametrize("recipe", [BRIDGE, MEGATRON_LM])
def test_python_is_a_module(recipe: str) -> None:
    names = [type(node).__name__ for node in ast.parse(run(recipe, "--format", "python").stdout).body]
    assert names[0] == "Expr"  # its docstring


def test_userbuffers_are_written_beside_the_flags(tmp_path: Path) -> None:
    done = run(str(ROOT / BRIDGE), "--format", "megatron-lm", folder=tmp_path)
    words = shlex.split(done.stdout)
    named = words[words.index("--tp-comm-overlap-cfg") + 1]
    assert named == "llama3_70b_64xh100.userbuffers.yaml"
    assert yaml.safe_load((tmp_path / named).read_text())["qkv_fprop"]["method"] == "ring_exchange"
    assert f"{named} is written" in done.stderr
    assert "not expressed: " in done.stderr


def test_errors_of_the_plan_stand_on_stderr() -> None:
    done = run(BRIDGE, "model.num_layers=79", "--format", "bridge")
    assert done.returncode == 1
    assert "PP006" in done.stderr and "PP006" not in done.stdout


def test_output_goes_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = run(BRIDGE, "--format", "json", "--output", str(file))
    assert (done.returncode, done.stdout) == (0, "")
    assert file.read_text() == run(BRIDGE, "--format", "json").stdout


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    done = run(BRIDGE, "--output", str(tmp_path / "no" / "plan.txt"))
    assert done.returncode == 2
    assert done.stderr.startswith("overlapkit: ") and done.stderr.count("\n") == 1
