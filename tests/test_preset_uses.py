"""Where Megatron-Bridge's own recipes use a preset: each difference from the sizes that it was made for is named."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from overlapkit import resolve
from overlapkit.facts import derive
from overlapkit.presets import choose_named
from overlapkit.recipe import recipe_from_mapping

RECIPES = Path(__file__).resolve().parent / "oracles" / "recipes_bridge_v0.6.2.jsonl.gz"
SIZES = re.compile(r"_tp(\d+)(?:_cp(\d+))?_mbs(\d+)_seqlen(\d+)")
NAMES = ("tensor_model_parallel_size", "context_parallel_size", "micro_batch_size", "seq_length")


def uses() -> list[Any]:
    with gzip.open(RECIPES, "rt", encoding="utf-8") as stream:
        cases = [json.loads(line) for line in stream]
    named = [case for case in cases if (case["comm_overlap"] or {}).get("tp_comm_overlap_cfg")]
    return [pytest.param(case, id=case["name"]) for case in named]


USES = uses()


def recipe(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "cluster": {"gpu": case["gpu"], "num_gpus": case["num_gpus"]},
        "software": {"framework": "megatron-bridge", "megatron_bridge": "0.6.2"},
        "model": case["m"],
        "train": {"micro_batch_size": case["train"]["mbs"], "global_batch_size": case["train"]["gbs"]},
        "ddp": case["ddp"],
        "optimizer": case["opt"],
        "dist": case["dist"],
        "mixed_precision": case["mixed_precision"],
        "comm_overlap": case["comm_overlap"],
    }


def differing(case: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Field -> (what the preset's name says, what the recipe has), where they differ."""
    found = SIZES.search(case["comm_overlap"]["tp_comm_overlap_cfg"])
    assert found is not None
    theirs = [int(text or 1) for text in found.groups()]
    ours = [case["m"].get(name) or case["train"]["mbs"] for name in NAMES]
    return {name: (made, is_) for name, made, is_ in zip(NAMES, theirs, ours, strict=True) if made != is_}


def test_there_are_uses_of_every_kind() -> None:
    kinds = {name for use in USES for name in differing(use.values[0])}
    assert len(USES) >= 40
    assert kinds >= {"tensor_model_parallel_size", "context_parallel_size", "micro_batch_size"}


@pytest.mark.parametrize("case", USES)
def test_each_difference_of_a_named_preset(case: dict[str, Any]) -> None:
    """Whether or not the overlap is on in the end."""
    name = case["comm_overlap"]["tp_comm_overlap_cfg"]
    choice, _ = choose_named(name, derive(recipe_from_mapping(recipe(case))).wanted)
    assert choice.name == name
    assert {field: pair for field, pair in choice.differs.items() if field in NAMES} == differing(case)


@pytest.mark.parametrize("case", USES)
def test_each_difference_is_told_where_the_overlap_is_on(case: dict[str, Any]) -> None:
    plan = resolve(recipe(case))
    told = " ".join(decision.because for decision in plan.decisions if decision.code == "UB102")
    if not plan.settings["model.tp_comm_overlap"]:
        assert (told, plan.preset.name) == ("", None)  # Bridge's gates leave no userbuffers
        return
    assert plan.preset.name == case["comm_overlap"]["tp_comm_overlap_cfg"]
    for made, is_ in differing(case).values():
        assert f"{made} (this is {is_})" in told
