"""What is imported, and when: a login node should not wait for what it does not need."""

from __future__ import annotations

import subprocess
import sys

import pytest
from test_cli import RECIPE, ROOT

import overlapkit

HEAVY = ["omegaconf", "typer", "rich", "yaml", "torch", "megatron", "nemo_run", "msgspec", "matplotlib"]


def imported(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        check=True,
        timeout=60,
    )
    return {name.partition(".")[0] for name in done.stdout.split()} & set(HEAVY)


def test_importing_the_package_costs_nothing() -> None:
    assert imported("import overlapkit") == set()
    assert imported("import overlapkit; overlapkit.RecipeError, overlapkit.__version__") == set()


def test_resolving_a_mapping_needs_yaml_only() -> None:
    recipe = "{'cluster': {'gpu': 'h100', 'num_gpus': 8}}"
    assert imported(f"import overlapkit; overlapkit.resolve({recipe}, ['model.num_layers=2']).to_dict()") == {"yaml"}
    assert imported(f"import overlapkit; overlapkit.resolve('{RECIPE}').to_dict()") == {"yaml"}


def test_the_command_imports_omegaconf_only_for_references() -> None:
    line = (
        "import sys; from typer.testing import CliRunner; from overlapkit.cli import app; CliRunner().invoke(app, {})"
    )
    assert "omegaconf" not in imported(line.format(["resolve", RECIPE]))
    assert "omegaconf" in imported(line.format(["resolve", RECIPE, "train.micro_batch_size=${model.num_layers}"]))


def test_public_names() -> None:
    for name in overlapkit.__all__:
        assert getattr(overlapkit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'no_such'"):
        _ = overlapkit.no_such  # type: ignore[attr-defined]
