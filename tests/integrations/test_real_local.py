"""Two processes of a real Megatron-Core train a tiny GPT with the plan applied, started by NeMo-Run and torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from real_launches import (
    DATA_PARALLEL,
    PIPELINE_PARALLEL,
    TENSOR_PARALLEL,
    TRAIN,
    assert_trained,
    launch,
    printed,
    stored_plan,
    written,
)

from overlapkit import resolve


@pytest.mark.parametrize(
    ("recipe", "cut_into_buckets"),
    [(TENSOR_PARALLEL, False), (PIPELINE_PARALLEL, False), (DATA_PARALLEL, True)],
    ids=["tp", "pp", "dp"],
)
def test_the_job_has_the_plan_of_its_recipe(recipe: dict[str, Any], cut_into_buckets: bool, tmp_path: Path) -> None:
    path = written(recipe, tmp_path)
    done = launch("launch_local.py", [path, "--", str(TRAIN), path], tmp_path)
    assert done.returncode == 0, done.stdout
    plan, resolved = stored_plan(tmp_path), resolve(recipe)
    assert (plan["settings"], plan["env"]) == (resolved.to_dict()["settings"], dict(resolved.env))
    assert_trained(done.stdout, plan)
    for process in printed(done.stdout):
        assert all((buckets > 1) == cut_into_buckets for buckets in process["buckets"])
    assert not list((tmp_path / "home").iterdir())
