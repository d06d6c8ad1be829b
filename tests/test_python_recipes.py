"""The recipe functions of ``recipes/*.py``: each runs, says what its YAML says, and sets up what its plan says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overlapkit import resolve
from overlapkit.comm_overlap import CommOverlapConfig
from overlapkit.plan import SETTINGS

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
# File -> its function, and the YAML recipe of the same job.
FUNCTIONS = {
    "llama3_70b_h100": ("llama3_70b_pretrain_config", "llama3_70b_64xh100"),
    "qwen3_32b_8xh20": ("qwen3_32b_finetune_config", "qwen3_32b_8xh20"),
    "qwen3_235b_a22b_h100": ("qwen3_235b_a22b_pretrain_config", "qwen3_235b_a22b_h100"),
}
each = pytest.mark.parametrize("name", FUNCTIONS)


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def container(name: str, **options: Any) -> Any:
    return getattr(module(name), FUNCTIONS[name][0])(**options)


@each
def test_it_prints_its_plan(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(RECIPES / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "  starts" in done.stdout.splitlines()[0]
    assert "What overlaps" in done.stdout


@each
def test_it_overlaps_and_exports_what_the_yaml_recipe_does(name: str) -> None:
    overlap = module(name).comm_overlap()
    plan = resolve(RECIPES / f"{FUNCTIONS[name][1]}.yaml")
    assert overlap.plan.settings == plan.settings
    assert overlap.env == plan.env
    assert overlap.plan.target == plan.target


@each
def test_its_sections_are_usable_without_bridge(name: str) -> None:
    cfg = container(name)
    plan = cfg.comm_overlap.plan
    assert cfg.env_vars == plan.env
    owners = {"model": cfg.model, "optimizer": cfg.optimizer, "ddp": cfg.ddp}
    cfg.comm_overlap.setup(
        cfg.model, cfg.optimizer, cfg.ddp, software={"megatron_bridge": "0.6.2", "transformer_engine": "2.18"}
    )
    found = {path: getattr(owners[path.partition(".")[0]], path.partition(".")[2]) for path in SETTINGS}
    assert found == plan.settings


@each
def test_a_container_of_bridge_gets_bridges_own_class(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommOverlapConfig, "to_bridge", lambda self: ("bridge", self))
    sections = {section: SimpleNamespace(of_the_recipe=7) for section in ("model", "train", "optimizer", "ddp")}
    given = SimpleNamespace(**sections, comm_overlap=None, env_vars={"OF_THE_RECIPE": "1"})
    cfg = container(name, cfg=given)
    assert cfg is given
    assert cfg.comm_overlap[0] == "bridge"
    assert cfg.env_vars == {"OF_THE_RECIPE": "1", **cfg.comm_overlap[1].env}
    assert (cfg.model.of_the_recipe, cfg.mixed_precision) == (7, "bf16_mixed")
    plan = cfg.comm_overlap[1].plan
    assert cfg.model.tensor_model_parallel_size == plan.parallelism.tp
    assert cfg.train.global_batch_size == plan.parallelism.num_microbatches * plan.parallelism.dp


def test_overrides_reach_the_moe_recipe() -> None:
    cfg = container("qwen3_235b_a22b_h100", overrides=["comm_overlap.delay_wgrad_compute=false"])
    assert cfg.comm_overlap.delay_wgrad_compute is False
    assert cfg.comm_overlap.overlap_moe_expert_parallel_comm is True
