"""Bridge's overrides with one for each value, which launchers pass on where they would not pass a mapping."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from reading_back import BARE, RECIPES, loaded, shipped
from test_render_bridge import NEEDS_HYDRA, applied

from overlapkit.render.bridge import bridge_overrides

pytestmark = NEEDS_HYDRA


def both(mapping: dict[str, Any]) -> tuple[list[str], list[str]]:
    recipe, plan = loaded(mapping)
    whole, said = bridge_overrides(recipe, plan)
    leaves, said_of_leaves = bridge_overrides(recipe, plan, leaves=True)
    assert said == said_of_leaves
    return list(whole), list(leaves)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_they_set_the_same_and_a_shell_reads_lists_and_quoted_text_alone(path: Path) -> None:
    whole, leaves = both(shipped(path))
    assert applied(leaves, BARE) == applied(whole, BARE)
    read = [word.partition("=")[2][0] for word in leaves if shlex.quote(word) != word]
    assert set(read) <= {"[", '"'}


def test_a_preset_and_userbuffers_on_the_model_are_split_too() -> None:
    bridge = {"cluster": {"gpu": "h100", "num_gpus": 8}, "software": {"megatron_bridge": "0.6.2"}}
    model = {"tensor_model_parallel_size": 8, "sequence_parallel": True}
    for layer in ({"method": "bulk", "num_sm": 4}, {"method": "bulk", "num_sm": 4, "of_a_later_version": 1}):
        overlap = {"tp_comm_overlap": True, "tp_comm_overlap_cfg": {"qkv_dgrad": layer}}
        whole, leaves = both({**bridge, "model": model, "comm_overlap": overlap})
        assert applied(leaves, BARE) == applied(whole, BARE)
        assert any(word.endswith("tp_comm_overlap_cfg.qkv_dgrad.num_sm=4") for word in leaves)
        assert not any("{" in word for word in leaves)


@pytest.mark.parametrize("text", ["expandable_segments:True", "a:b:c", "on", "on:off", "1:2", "a b", "a:", ""])
def test_text_of_a_variable_survives_hydra(text: str) -> None:
    machine = {"cluster": {"gpu": "h100", "num_gpus": 8}, "software": {"megatron_bridge": "0.6.2"}}
    _, leaves = both({**machine, "env_vars": {"NAME": text}})
    assert applied(leaves, BARE)["env_vars"]["NAME"] == text
