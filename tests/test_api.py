"""``overlapkit.resolve`` from Python: what it takes, and that a plan is the caller's own."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from overlapkit import RecipeError, load_recipe, resolve

PATH = Path(__file__).resolve().parent.parent / "recipes" / "llama3_70b_64xh100.yaml"


def test_paths_mappings_and_recipes_give_the_same_plan() -> None:
    plan = resolve(PATH)
    assert resolve(str(PATH)) == plan == resolve(load_recipe(PATH))


@pytest.mark.parametrize("recipe", [None, b"recipe.yaml", 7, ["recipe.yaml"]])
def test_anything_else_is_refused(recipe: Any) -> None:
    with pytest.raises(RecipeError, match="a recipe is a path, a mapping or a loaded Recipe, this is"):
        resolve(recipe)


@pytest.mark.parametrize("overrides", ["model.seq_length=8", b"model.seq_length=8", [1], [None]])
def test_overrides_are_texts(overrides: Any) -> None:
    with pytest.raises(RecipeError, match=r"overrides are a list of section\.key=value texts"):
        resolve(PATH, overrides)


def test_a_plan_can_be_pickled_and_copied() -> None:
    plan = resolve(PATH)
    assert pickle.loads(pickle.dumps(plan)) == plan == copy.deepcopy(plan)


def test_a_plan_is_the_callers_own() -> None:
    first = resolve(PATH).to_dict()
    layers = resolve(PATH).settings["model.tp_comm_overlap_cfg"]
    layers["qkv_fprop"]["method"] = "changed"
    layers.clear()
    assert resolve(PATH).to_dict() == first


def test_the_callers_mapping_is_left_alone() -> None:
    recipe: dict[str, Any] = {
        "cluster": {"gpu": "h100", "num_gpus": 8},
        "model": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "comm_overlap": {"tp_comm_overlap_cfg": {"qkv_fprop": {"method": "ring_exchange"}}},
    }
    before = copy.deepcopy(recipe)
    plan = resolve(recipe, ["model.tensor_model_parallel_size=4"])
    plan.settings["model.tp_comm_overlap_cfg"].clear()
    assert recipe == before


@pytest.mark.parametrize(("megatron_bridge", "kept"), [("0.3.1", True), ("0.4.0", False)])
def test_sequence_parallel_at_tp_1_is_cleared_by_bridge_from_0_4(megatron_bridge: str, kept: bool) -> None:
    plan = resolve(
        {
            "cluster": {"gpu": "h100", "num_gpus": 8},
            "software": {"megatron_bridge": megatron_bridge},
            "model": {"sequence_parallel": True},
        }
    )
    assert plan.parallelism.sequence_parallel is kept
