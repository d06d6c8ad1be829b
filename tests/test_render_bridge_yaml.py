"""``--format bridge-yaml``: a file that Bridge merges over a recipe, and that ends at the plan's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from generated_recipes import hostile_recipes, recipes
from hypothesis import HealthCheck, given, settings
from omegaconf import OmegaConf
from reading_back import BARE, RECIPES, as_text, in_bridge, loaded, machine, shipped, written_settings

from overlapkit import load_recipe, resolve
from overlapkit.render.bridge_yaml import to_bridge_yaml
from overlapkit.userbuffers import DEFAULT_METHODS

SLOW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
COMM_OVERLAP = "megatron.bridge.training.comm_overlap"
PRESET = "userbuffers_fp8_h100_h8192_tp2_mbs1_seqlen4096_lora"
TP2: dict[str, Any] = {
    "cluster": {"gpu": "h100", "num_gpus": 16},
    "software": {"megatron_bridge": "0.6.2"},
    "model": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}


def written(mapping: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(to_bridge_yaml(*loaded(mapping))[0])
    return document


def merged(text: str) -> dict[str, Any]:
    """What Bridge makes of the file, over a configuration that says nothing."""
    config = OmegaConf.merge(OmegaConf.create(BARE), OmegaConf.create(text))
    result: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return result


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_read_back(path: Path, tmp_path: Path) -> None:
    """As a recipe of ours, with the machine as overrides."""
    mapping = shipped(path)
    recipe, plan = loaded(mapping)
    text, said = to_bridge_yaml(recipe, plan)
    file = tmp_path / "bridge.yaml"
    file.write_text(text, encoding="utf-8")
    overrides = [
        f"{section}.{key}={value}" for section, body in machine(mapping, plan).items() for key, value in body.items()
    ]
    assert dict(resolve(load_recipe(file, overrides)).settings) == written_settings(plan, said)


@SLOW
@given(recipes())
def test_generated_recipes_read_back(mapping: dict[str, Any]) -> None:
    recipe, plan = loaded(mapping)
    text, said = to_bridge_yaml(recipe, plan)
    assert in_bridge(merged(text), mapping, plan) == written_settings(plan, said)


@SLOW
@given(hostile_recipes())
def test_any_text_survives(mapping: dict[str, Any]) -> None:
    recipe, plan = loaded(as_text(mapping))
    text, said = to_bridge_yaml(recipe, plan)
    assert text.isascii()
    found = merged(text)
    assert found["checkpoint"] == mapping["checkpoint"]
    assert found["optimizer"]["optimizer"] == mapping["optimizer"]["optimizer"]
    assert found["model"]["transformer_impl"] == mapping["model"]["transformer_impl"]
    if plan.target.megatron_bridge in (None, "0.6.0", "0.6.2"):
        environment = {name: str(value) for name, value in found["env_vars"].items()}
        assert environment == {**mapping["env_vars"], **plan.env}
    assert in_bridge(as_text(found), mapping, plan) == written_settings(plan, said)


def test_a_preset_is_an_object_with_ten_layers() -> None:
    overlap = {"tp_comm_overlap": True, "tp_comm_overlap_cfg": PRESET}
    found = written({**TP2, "comm_overlap": overlap})["comm_overlap"]
    assert found["_target_"] == f"{COMM_OVERLAP}.CommOverlapConfig"
    layers = found["tp_comm_overlap_cfg"]
    assert layers.pop("_target_") == f"{COMM_OVERLAP}.TransformerLayerTPOverlapCfg"
    assert set(layers) == set(DEFAULT_METHODS)
    assert layers["qkv_wgrad"] is None
    assert layers["qkv_fprop"]["_target_"] == f"{COMM_OVERLAP}.RingExchangeOverlapCfg"


@pytest.mark.parametrize(
    ("method", "name"),
    [("bulk", "BulkOverlapCfg"), ("ring_exchange", "RingExchangeOverlapCfg"), ("pipeline", "PipelineOverlapCfg")],
)
def test_the_method_names_the_class(method: str, name: str) -> None:
    overlap = {"tp_comm_overlap": True, "tp_comm_overlap_cfg": {"proj_fprop": {"method": method}}}
    found = written({**TP2, "comm_overlap": overlap})["comm_overlap"]["tp_comm_overlap_cfg"]["proj_fprop"]
    assert found["_target_"] == f"{COMM_OVERLAP}.{name}"


def test_precision_is_a_name_or_an_object() -> None:
    assert written({**TP2, "mixed_precision": "bf16_mixed"})["mixed_precision"] == "bf16_mixed"
    found = written({**TP2, "mixed_precision": {"fp16": True}})["mixed_precision"]
    assert found["_target_"] == "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"
    assert found["params_dtype"] == {"_target_": "torch.float16", "_call_": False}
    assert "mixed_precision" not in written(TP2)


def test_the_environment_stands_in_it_from_bridge_06() -> None:
    assert written(TP2)["env_vars"]["CUDA_DEVICE_MAX_CONNECTIONS"] == 1
    text, said = to_bridge_yaml(*loaded({**TP2, "software": {"megatron_bridge": "0.5.1"}}))
    assert "env_vars" not in yaml.safe_load(text)
    assert any("--format env" in sentence for sentence in said)


def test_a_recipe_for_megatron_lm_becomes_raw_values() -> None:
    mapping = {
        **TP2,
        "software": {"framework": "megatron-lm", "megatron_core": "0.16.1"},
        "ddp": {"overlap_grad_reduce": True},
        "optimizer": {"use_distributed_optimizer": True},
    }
    text, said = to_bridge_yaml(*loaded(mapping))
    found = yaml.safe_load(text)
    assert found["comm_overlap"] is None
    assert found["ddp"]["bucket_size"] is None
    assert found["ddp"]["use_distributed_optimizer"] and found["optimizer"]["use_distributed_optimizer"]
    assert any("Bridge's set-up would change some" in sentence for sentence in said)
