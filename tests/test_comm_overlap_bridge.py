"""A CommOverlapConfig with presets, in Bridge's override machinery, and as Bridge's own class."""

from __future__ import annotations

import sys
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comm_overlap_cases import PRESET, after, config
from omegaconf import OmegaConf

import overlapkit
from overlapkit.comm_overlap import (
    CommOverlapConfig,
    PipelineOverlapCfg,
    TransformerLayerTPOverlapCfg,
    userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192,
)
from overlapkit.errors import MissingPackageError, RecipeError
from overlapkit.presets import load_preset

# --- presets ----------------------------------------------------------------------------------------


def test_a_config_holds_its_own_copy_of_a_preset() -> None:
    first, second = config(tp_comm_overlap_cfg=userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192), config()
    second.tp_comm_overlap_cfg = userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192
    first.tp_comm_overlap_cfg.qkv_fprop.aggregate = True
    assert second.tp_comm_overlap_cfg == userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192
    assert userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192.qkv_fprop.aggregate is False  # type: ignore[union-attr]
    assert after(first).tp_comm_overlap_cfg["qkv_fprop"]["aggregate"] is True


def test_layers_without_a_setting_get_no_entry() -> None:
    lora = overlapkit.comm_overlap.userbuffers_fp8_h100_h8192_tp2_mbs1_seqlen4096_lora  # type: ignore[attr-defined]
    assert lora.qkv_wgrad is None
    found = after(config(tp_comm_overlap_cfg=lora)).tp_comm_overlap_cfg
    assert "qkv_wgrad" not in found
    assert None not in found.values()


@pytest.mark.parametrize("form", ["name", "mapping", "file"])
def test_a_name_a_mapping_and_a_file_will_do(form: str, tmp_path: Path) -> None:
    file = tmp_path / "userbuffers.yaml"
    file.write_text("qkv_fprop: {method: ring_exchange, aggregate: true}\n")
    layer = {"method": "ring_exchange", "aggregate": True}
    given: Any = {"name": PRESET, "mapping": {"qkv_fprop": layer}, "file": str(file)}[form]
    expected = load_preset(PRESET).userbuffers if form == "name" else {"qkv_fprop": layer}
    assert after(config(tp_comm_overlap_cfg=given)).tp_comm_overlap_cfg == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen819",
            "did you mean userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192",
        ),
        ("auto", "CommOverlapConfig.decide and from_recipe"),
        ("no/such.yaml", "cannot be read"),
        (7, "7 is no userbuffers configuration"),
        ({"qkv_fprop": 7}, "expected a mapping of options, got 7"),
    ],
)
def test_what_is_no_configuration_is_refused(given: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        after(config(tp_comm_overlap_cfg=given))


# --- Bridge's overrides -------------------------------------------------------------------------------


def overridden(target: Any, override: str) -> None:
    """What megatron-bridge does for an override: to plain values, merge, set field by field."""
    plain = OmegaConf.to_container(
        OmegaConf.merge(OmegaConf.create(asdict(target)), OmegaConf.from_dotlist([override]))
    )
    _set(target, plain)


def _set(target: Any, values: Any) -> None:
    for name, value in values.items():
        current = getattr(target, name)
        if is_dataclass(current) and isinstance(value, dict):
            _set(current, value)
        else:
            setattr(target, name, value)


def test_an_override_changes_this_config_alone() -> None:
    overlap = config(tp_comm_overlap_cfg=userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192)
    other = config(tp_comm_overlap_cfg=userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192)
    overridden(overlap, "tp_comm_overlap_cfg.qkv_fprop.aggregate=true")
    assert after(overlap).tp_comm_overlap_cfg["qkv_fprop"]["aggregate"] is True
    assert after(other).tp_comm_overlap_cfg == load_preset(PRESET).userbuffers


def test_a_presets_name_as_an_override() -> None:
    overlap = config()
    overridden(overlap, f"tp_comm_overlap_cfg={PRESET}")
    assert after(overlap).tp_comm_overlap_cfg == load_preset(PRESET).userbuffers


def test_it_is_a_structured_configuration_of_omegaconf() -> None:
    overlap = config(tp_comm_overlap_cfg=userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192)
    structured = OmegaConf.structured(overlap)
    merged = OmegaConf.merge(structured, OmegaConf.from_dotlist(["tp_comm_overlap_cfg.qkv_fprop.aggregate=true"]))
    again: Any = OmegaConf.to_object(merged)
    assert OmegaConf.to_object(structured) == overlap
    assert again.tp_comm_overlap_cfg.qkv_fprop.aggregate is True
    assert overlap.tp_comm_overlap_cfg == userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192
    assert after(again).tp_comm_overlap_cfg["qkv_fprop"]["aggregate"] is True


# --- Bridge's own class --------------------------------------------------------------------------------


def test_without_bridge_to_bridge_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(
        MissingPackageError, match=r"megatron-bridge cannot be imported here \(.*megatron.*\): "
    ) as caught:
        config().to_bridge()
    assert isinstance(caught.value, ImportError)
    assert "\n" not in str(caught.value)


def test_to_bridge_fills_bridges_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stand-ins with Bridge's names; scripts/bridge_reads_back.py has the real 0.3.1."""

    def stand_in(name: str) -> Any:
        return lambda **values: SimpleNamespace(made=name, **values)

    names = ("CommOverlapConfig", "TransformerLayerTPOverlapCfg", "BulkOverlapCfg", "PipelineOverlapCfg")
    module = SimpleNamespace(**{name: stand_in(name) for name in (*names, "RingExchangeOverlapCfg")})
    monkeypatch.setattr("overlapkit.integrations.bridge.comm_overlap_module", lambda: module)
    overlap = config(tp_comm_overlap_cfg=userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192, bucket_size=5)
    made = overlap.to_bridge()
    assert (made.made, made.bucket_size, made.data_parallel_size) == ("CommOverlapConfig", 5, 2)
    assert vars(made).keys() - {"made"} == {spec.name for spec in fields(CommOverlapConfig)}
    assert vars(made.tp_comm_overlap_cfg).keys() - {"made"} == {
        spec.name for spec in fields(TransformerLayerTPOverlapCfg)
    }
    pipeline = made.tp_comm_overlap_cfg.proj_fprop
    assert pipeline.made == "PipelineOverlapCfg"
    assert vars(pipeline).keys() - {"made"} == {spec.name for spec in fields(PipelineOverlapCfg)}
    with pytest.raises(RecipeError, match="Bridge's classes for userbuffers cannot hold of_my_own"):
        config(tp_comm_overlap_cfg={"of_my_own": {"method": "bulk"}}).to_bridge()
