"""``--format bridge``: overrides that Bridge's parser accepts, and that end at the plan's settings."""

from __future__ import annotations

import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from generated_recipes import HOSTILE, hostile_recipes, plain_values, recipes, texts
from hypothesis import HealthCheck, example, given, settings
from reading_back import BARE, RECIPES, as_text, in_bridge, loaded, machine, shipped, written_settings

from overlapkit import resolve
from overlapkit.recipe import recipe_from_mapping
from overlapkit.render.bridge import hydra_value, to_bridge
from overlapkit.render.bridge_values import bridge_tree, bridge_values

NEEDS_HYDRA = pytest.mark.skipif(find_spec("hydra") is None, reason="Hydra's parser is a package of its own")
SLOW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
H100 = {"cluster": {"gpu": "h100", "num_gpus": 16}, "software": {"megatron_bridge": "0.6.2"}}
TP4: dict[str, Any] = {**H100, "model": {"tensor_model_parallel_size": 4, "sequence_parallel": True}}


def arguments(mapping: dict[str, Any]) -> list[str]:
    return shlex.split(to_bridge(*loaded(mapping))[0])


def applied(overrides: list[str], base: dict[str, Any]) -> dict[str, Any]:
    """What Bridge's ``parse_hydra_overrides`` makes of them, with Hydra's own parser."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    config = OmegaConf.create(base)
    OmegaConf.set_struct(config, True)
    parsed = OverridesParser.create().parse_overrides(overrides=overrides)
    ConfigLoaderImpl._apply_overrides_to_config(overrides=parsed, cfg=config)
    result: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return result


# --- read back, the settings are the plan's -------------------------------------------------------


@NEEDS_HYDRA
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_read_back(path: Path) -> None:
    mapping = shipped(path)
    recipe, plan = loaded(mapping)
    text, said = to_bridge(recipe, plan)
    assert in_bridge(applied(shlex.split(text), BARE), mapping, plan) == written_settings(plan, said)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_read_back_as_overrides_of_our_own(path: Path) -> None:
    """Without ``++`` they are OmegaConf's dotlist too, as long as no text in them has to be escaped."""
    mapping = shipped(path)
    recipe, plan = loaded(mapping)
    text, said = to_bridge(recipe, plan)
    overrides = [argument.removeprefix("++") for argument in shlex.split(text)]
    again = resolve(recipe_from_mapping(machine(mapping, plan), overrides))
    assert dict(again.settings) == written_settings(plan, said)


@NEEDS_HYDRA
@SLOW
@given(recipes())
def test_generated_recipes_read_back(mapping: dict[str, Any]) -> None:
    recipe, plan = loaded(mapping)
    text, said = to_bridge(recipe, plan)
    assert in_bridge(applied(shlex.split(text), BARE), mapping, plan) == written_settings(plan, said)


@NEEDS_HYDRA
@SLOW
@given(recipes())
def test_nothing_of_what_the_recipe_below_has_there_is_left(mapping: dict[str, Any]) -> None:
    overlap = {"tp_comm_overlap": True, "tp_comm_overlap_cfg": "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"}
    other = {**TP4, "comm_overlap": overlap, "mixed_precision": {"bf16": True, "fp8": "hybrid"}}
    below = {**BARE, **bridge_tree(bridge_values(*loaded(other)))}
    below["model"]["tp_comm_overlap_cfg"] = {"qkv_fprop": {"num_sm": 3}}
    overrides = arguments(mapping)
    found, alone = applied(overrides, below), applied(overrides, BARE)
    assert found["comm_overlap"] == alone["comm_overlap"]
    if alone["mixed_precision"] is not None:
        assert found["mixed_precision"] == alone["mixed_precision"]
    if alone["comm_overlap"] is None:
        assert found["model"]["tp_comm_overlap_cfg"] == alone["model"]["tp_comm_overlap_cfg"]


# --- the forms that Bridge needs -----------------------------------------------------------------


def test_comm_overlap_is_built_anew() -> None:
    """Null first, so that nothing of the recipe's own preset stays, then the class that Bridge builds."""
    found = arguments({**TP4, "comm_overlap": {"tp_comm_overlap": True, "tp_comm_overlap_cfg": None}})
    start = found.index("comm_overlap=null")
    assert found[start + 1] == "++comm_overlap._target_=megatron.bridge.training.comm_overlap.CommOverlapConfig"
    assert "++comm_overlap.tp_comm_overlap_cfg=null" in found[start:]


def test_a_preset_has_a_class_per_layer() -> None:
    overlap = {"tp_comm_overlap": True, "tp_comm_overlap_cfg": "userbuffers_fp8_h100_h8192_tp2_mbs1_seqlen4096_lora"}
    found = "\n".join(arguments({**TP4, "comm_overlap": overlap}))
    module = "megatron.bridge.training.comm_overlap"
    assert f"\n++comm_overlap.tp_comm_overlap_cfg._target_={module}.TransformerLayerTPOverlapCfg\n" in found
    assert f"\n++comm_overlap.tp_comm_overlap_cfg.qkv_fprop={{_target_: {module}.RingExchangeOverlapCfg, " in found
    assert "\n++comm_overlap.tp_comm_overlap_cfg.qkv_wgrad=null" in found


def test_a_gate_that_bridge_closes_is_closed_already() -> None:
    mapping = {**TP4, "model": {"tensor_model_parallel_size": 4}, "comm_overlap": {"tp_comm_overlap": True}}
    assert "++comm_overlap.tp_comm_overlap=false" in arguments(mapping)


def test_raw_values_stand_without_the_distributed_optimizer() -> None:
    found = arguments({**H100, "ddp": {"overlap_grad_reduce": True}})
    assert "++ddp.overlap_grad_reduce=true" in found
    assert not any(argument.startswith("++comm_overlap.overlap_grad_reduce") for argument in found)
    found = arguments({**H100, "ddp": {"overlap_grad_reduce": True, "use_distributed_optimizer": True}})
    assert "++comm_overlap.overlap_grad_reduce=true" in found
    assert not any(argument.startswith("++ddp.overlap_grad_reduce") for argument in found)


def test_comm_overlap_of_null_stays_null() -> None:
    found = arguments({**TP4, "model": {**TP4["model"], "tp_comm_overlap": True}, "comm_overlap": None})
    assert found[-1 - sum("env_vars" in argument for argument in found)] == "comm_overlap=null"
    assert "++model.tp_comm_overlap=true" in found


def test_a_bootstrap_backend_of_null_stays_null() -> None:
    overlap = {"tp_comm_overlap": True, "tp_comm_bootstrap_backend": None}
    assert "++comm_overlap.tp_comm_bootstrap_backend=null" in arguments({**TP4, "comm_overlap": overlap})


def test_sizes_that_the_recipe_leaves_to_a_default_are_said() -> None:
    """A recipe of Bridge has its own, and the plan is not for those."""
    found = arguments(H100)
    assert {"++model.pipeline_model_parallel_size=1", "++model.virtual_pipeline_model_parallel_size=null"} <= set(found)
    assert "++ddp.use_distributed_optimizer=false" in found


def test_precision_stands_in_the_section() -> None:
    assert "mixed_precision=bf16_mixed" in arguments({**H100, "mixed_precision": "bf16-mixed"})
    found = arguments({**H100, "model": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "mxfp8"}})
    assert {"++mixed_precision.fp8=hybrid", "++mixed_precision.fp8_recipe=mxfp8"} <= set(found)
    assert "++mixed_precision.params_dtype={_target_: torch.bfloat16, _call_: false}" in found
    assert not any(argument.startswith("++model.fp8") for argument in found)
    assert not any("mixed_precision" in argument for argument in arguments(H100))


# --- what cannot be said is ----------------------------------------------------------------------


def test_the_environment_needs_bridge_06() -> None:
    text, said = to_bridge(*loaded({**TP4, "env_vars": {"MINE": "1"}}))
    assert {"++env_vars.CUDA_DEVICE_MAX_CONNECTIONS=1", "++env_vars.MINE=1"} <= set(shlex.split(text))
    assert not said
    text, said = to_bridge(*loaded({**TP4, "software": {"megatron_bridge": "0.5.1"}}))
    assert "env_vars" not in text
    assert any("--format env" in sentence for sentence in said)


def test_keys_that_are_not_kept_are_named() -> None:
    _, said = to_bridge(*loaded({**H100, "model": {"rotary_base": 500_000}, "peft": "lora"}))
    assert any("model.rotary_base" in sentence for sentence in said)
    assert any("peft" in sentence for sentence in said)


def test_fields_of_other_versions_are_left_out() -> None:
    old = {**H100, "software": {"megatron_bridge": "0.3.1"}, "ddp": {"num_buckets": 4}}
    text, said = to_bridge(*loaded(old))
    assert "num_buckets" not in text
    assert any("0.3.1 does not have ddp.num_buckets" in sentence for sentence in said)


def test_userbuffers_beyond_the_classes_of_bridge_stand_on_the_model() -> None:
    userbuffers = {"qkv_fprop": {"method": "ring_exchange", "use_ce": 0}}
    overlap = {"tp_comm_overlap": True, "tp_comm_overlap_cfg": userbuffers}
    text, said = to_bridge(*loaded({**TP4, "comm_overlap": overlap}))
    assert "comm_overlap=null" in shlex.split(text)
    assert "++model.tp_comm_overlap_cfg={qkv_fprop: {method: ring_exchange, use_ce: 0}}" in shlex.split(text)
    assert any("qkv_fprop.use_ce" in sentence for sentence in said)


def test_layers_are_completed_aloud() -> None:
    overlap = {"tp_comm_overlap": True, "tp_comm_overlap_cfg": {"fc1_dgrad": {"method": "bulk", "num_sm": 8}}}
    text, said = to_bridge(*loaded({**TP4, "comm_overlap": overlap}))
    assert "BulkOverlapCfg, method: bulk, num_sm: 8, cga_size: 2, set_sm_margin: true}" in text
    assert any("fc1_dgrad got" in sentence for sentence in said)


def test_objects_are_not_carried() -> None:
    mapping = {**H100, "dataset": {"dataset_kwargs": {"_target_": "os.system", "command": "true"}}}
    text, said = to_bridge(*loaded(mapping))
    assert "os.system" not in text
    assert any("dataset.dataset_kwargs is left out" in sentence for sentence in said)


def test_what_a_command_line_cannot_hold_is_left_out() -> None:
    mapping = {**H100, "checkpoint": {"save": "a\0b", "load": "\ud800"}, "env_vars": {"A.B": "1"}}
    text, said = to_bridge(*loaded(mapping))
    assert "save" not in text and "load" not in text and "A.B" not in text
    for path in ("checkpoint.save", "checkpoint.load", "env_vars.A.B"):
        assert any(sentence.startswith(f"{path} is left out") for sentence in said)


# --- no text breaks out --------------------------------------------------------------------------


@NEEDS_HYDRA
@given(texts)
@example("'" * 3 + '"' * 3)
def test_text_survives_hydra(text: str) -> None:
    encodable = text.replace("\0", "").encode("utf-8", "ignore").decode("utf-8")
    assert applied([f"++a={hydra_value(encodable)}"], {}) == {"a": encodable}


@NEEDS_HYDRA
@SLOW
@given(plain_values)
def test_values_survive_hydra(value: Any) -> None:
    """All but mappings whose keys Hydra does not take, and floats, which it reads but may write otherwise."""
    recipe, plan = loaded(as_text({**H100, "dataset": {"dataset_kwargs": value}}))
    text, said = to_bridge(recipe, plan)
    if any(sentence.startswith("dataset.dataset_kwargs is left out") for sentence in said):
        assert "dataset_kwargs" not in text
    elif value is not None:
        base = {**BARE, "dataset": {"dataset_kwargs": None}}
        assert applied(shlex.split(text), base)["dataset"]["dataset_kwargs"] == recipe.dataset.dataset_kwargs


@NEEDS_HYDRA
@SLOW
@given(hostile_recipes())
def test_every_line_is_an_override_of_a_known_section(mapping: dict[str, Any]) -> None:
    text, said = to_bridge(*loaded(as_text(mapping)))
    for argument in shlex.split(text):
        section = argument.removeprefix("++").partition("=")[0].partition(".")[0]
        assert section in BARE
    applied(shlex.split(text), BARE)
    assert all(sentence.isprintable() for sentence in said)


def test_a_real_shell_hands_on_what_was_written() -> None:
    for value in HOSTILE:
        text, _ = to_bridge(*loaded(as_text({**H100, "checkpoint": {"save": value}})))
        script = 'eval "overrides=($1)"; printf "%s\\0" "${overrides[@]}"'
        run = subprocess.run(["bash", "-c", script, "bash", text], capture_output=True, check=True, cwd="/")
        assert run.stdout.decode().split("\0")[:-1] == shlex.split(text)
        assert f"++checkpoint.save={hydra_value(value)}" in run.stdout.decode().split("\0")
