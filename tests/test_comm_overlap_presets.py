"""The userbuffers classes, and presets as attributes of ``overlapkit.comm_overlap`` that nobody can change."""

from __future__ import annotations

import copy
import importlib
import pickle
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from overlapkit import comm_overlap
from overlapkit.comm_overlap import (
    BulkOverlapCfg,
    PipelineOverlapCfg,
    RingExchangeOverlapCfg,
    TPOverlapCfg,
    TransformerLayerTPOverlapCfg,
    userbuffers_bf16_h100_h12288_tp4_mbs1_seqlen2048,
)
from overlapkit.presets import load_preset, preset_names
from overlapkit.render.bridge_userbuffers import complete_layers

PRESET = userbuffers_bf16_h100_h12288_tp4_mbs1_seqlen2048


def test_the_classes_have_bridges_fields_in_its_order() -> None:
    """megatron-bridge 0.6.2, training/comm_overlap.py."""
    pipeline = PipelineOverlapCfg(24, 2, 4, True)  # as positional arguments too
    assert asdict(pipeline) == {
        "num_sm": 24,
        "cga_size": 2,
        "num_splits": 4,
        "set_sm_margin": True,
        "fp8_buf": True,  # Bridge's (False,), as Transformer Engine tests it
        "atomic_gemm": False,
        "method": "pipeline",
    }
    assert asdict(BulkOverlapCfg(4, 2, False)) == {"num_sm": 4, "cga_size": 2, "set_sm_margin": False, "method": "bulk"}
    assert list(asdict(RingExchangeOverlapCfg()).items()) == [
        ("aggregate", False),
        ("method", "ring_exchange"),
        ("num_sm", 1),
        ("cga_size", 1),
        ("set_sm_margin", False),
        ("fp8_buf", False),
        ("atomic_gemm", False),
    ]
    assert isinstance(pipeline, TPOverlapCfg)
    assert [spec.name for spec in fields(TransformerLayerTPOverlapCfg)] == [
        *("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad", "qkv_fprop"),
        *("proj_dgrad", "fc1_fprop", "fc2_dgrad", "proj_fprop", "fc2_fprop"),
    ]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_an_attribute_with_its_own_values(name: str) -> None:
    found = getattr(comm_overlap, name)
    assert isinstance(found, TransformerLayerTPOverlapCfg)
    userbuffers = {layer: options for layer, options in asdict(found).items() if options is not None}
    preset = load_preset(name)
    complete, foreign = complete_layers(preset.userbuffers)
    assert (userbuffers, foreign) == (complete, [])
    assert userbuffers == preset.userbuffers or preset.provenance == "nemo"  # which leaves options to the defaults
    assert name in dir(comm_overlap)


def test_importing_everything_brings_the_classes_and_the_presets() -> None:
    """As it does from Bridge's module."""
    found: dict[str, Any] = {}
    exec("from overlapkit.comm_overlap import *", found)
    classes = {"CommOverlapConfig", "SetupError", "TPOverlapCfg", "TransformerLayerTPOverlapCfg"}
    classes |= {"BulkOverlapCfg", "PipelineOverlapCfg", "RingExchangeOverlapCfg"}
    assert found.keys() - {"__builtins__"} == classes | set(preset_names())


def test_a_misspelt_preset_is_named() -> None:
    with pytest.raises(AttributeError, match="did you mean userbuffers_bf16_h100_h12288_tp4_mbs1_seqlen2048"):
        _ = comm_overlap.userbuffers_bf16_h100_h12288_tp4_mbs1_seqlen204
    with pytest.raises(AttributeError, match="no attribute 'no_such'"):
        _ = comm_overlap.no_such


def test_a_preset_cannot_be_changed() -> None:
    before = asdict(PRESET)
    for owner, name in ((PRESET, "qkv_fprop"), (PRESET.qkv_fprop, "aggregate"), (PRESET.qkv_fprop, "of_my_own")):
        with pytest.raises(AttributeError, match=rf"cannot set {name}: .*copy\.deepcopy"):
            setattr(owner, name, True)
        with pytest.raises(AttributeError, match=r"copy\.deepcopy"):
            delattr(owner, name)
    assert asdict(PRESET) == before


def deep(preset: Any) -> Any:
    return copy.deepcopy(preset)


def pickled(preset: Any) -> Any:
    return pickle.loads(pickle.dumps(preset))


@pytest.mark.parametrize("copied", [deep, pickled, copy.copy, replace])
def test_a_copy_of_a_preset_is_equal_and_can_be_changed(copied: Any) -> None:
    mine = copied(PRESET)
    assert mine == PRESET
    mine.qkv_fprop = BulkOverlapCfg(4, 2, False)
    assert mine != PRESET


@pytest.mark.parametrize("copied", [deep, pickled, replace])
def test_so_can_its_layers(copied: Any) -> None:
    mine = copied(PRESET)
    mine.qkv_fprop.aggregate = True
    assert PRESET.qkv_fprop.aggregate is False  # type: ignore[union-attr]


def test_a_layer_of_a_preset_is_copied_where_it_is_put() -> None:
    mine = copy.deepcopy(PRESET)
    mine.fc1_fprop = PRESET.qkv_fprop
    mine.fc1_fprop.num_sm = 9  # type: ignore[union-attr]
    assert PRESET.qkv_fprop.num_sm == 1  # type: ignore[union-attr]


def test_a_preset_is_made_once() -> None:
    again = importlib.import_module("overlapkit.comm_overlap")
    assert again.userbuffers_bf16_h100_h12288_tp4_mbs1_seqlen2048 is PRESET
