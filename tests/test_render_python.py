"""``--format python``: source that sets the plan's settings, and in which text is nothing but literals."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
from generated_recipes import hostile_recipes, plain_values, recipes
from hypothesis import HealthCheck, given, settings
from reading_back import RECIPES, as_text, in_bridge, loaded, shipped, written_settings

from overlapkit import resolve
from overlapkit.presets import load_preset, preset_names
from overlapkit.render.python import to_python
from overlapkit.render.python_source import source
from overlapkit.userbuffers import DEFAULT_METHODS

SLOW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
COMM_OVERLAP = "megatron.bridge.training.comm_overlap"
METHODS = {"BulkOverlapCfg": "bulk", "PipelineOverlapCfg": "pipeline", "RingExchangeOverlapCfg": "ring_exchange"}
BRIDGE: dict[str, Any] = {
    "cluster": {"gpu": "h100", "num_gpus": 16},
    "software": {"megatron_bridge": "0.6.2"},
    "model": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
}


class Section:
    """Holds what is set on it."""


def stand_ins() -> dict[str, ModuleType]:
    """Modules whose classes answer with their arguments."""
    modules = {}
    for name in ("torch", "megatron", "megatron.bridge", "megatron.bridge.training"):
        modules[name] = ModuleType(name)
    for dtype in ("bfloat16", "float16", "float32"):
        setattr(modules["torch"], dtype, {"_target_": f"torch.{dtype}", "_call_": False})
    overlap = modules[COMM_OVERLAP] = ModuleType(COMM_OVERLAP)
    for name in ("CommOverlapConfig", "TransformerLayerTPOverlapCfg"):
        setattr(overlap, name, lambda name=name, **values: {"_target_": name, **values})
    for name, method in METHODS.items():
        setattr(
            overlap, name, lambda name=name, method=method, **values: {"_target_": name, "method": method, **values}
        )
    for name in preset_names():
        if load_preset(name).provenance == "bridge":
            setattr(overlap, name, {"_target_": "preset", **load_preset(name).userbuffers})
    precision = modules["megatron.bridge.training.mixed_precision"] = ModuleType("mixed_precision")
    precision.MixedPrecisionConfig = lambda **values: {"_target_": "precision", **values}  # type: ignore[attr-defined]
    return modules


def run(text: str) -> dict[str, Any]:
    """The names of the module. Only here, and only with what ``checked`` lets through, is it executed."""
    names: dict[str, Any] = {}
    with patch.dict(sys.modules, stand_ins()):
        exec(compile(checked(text), "<written>", "exec"), names)
    return names


def configured(text: str) -> dict[str, Any]:
    """What ``configure`` leaves on a ConfigContainer."""
    config = Section()
    for name in ("model", "train", "validation", "optimizer", "ddp", "dist", "checkpoint", "dataset"):
        setattr(config, name, Section())
    config.env_vars = {}  # type: ignore[attr-defined]
    assert run(text)["configure"](config) is config
    return {name: vars(body) if isinstance(body, Section) else body for name, body in vars(config).items()}


def checked(text: str) -> ast.Module:
    """Imports, constants, and one function of assignments: nothing that text of a recipe could have become."""
    module = ast.parse(text, feature_version=(3, 10))
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
            known = {"CommOverlapConfig", "TransformerLayerTPOverlapCfg", "MixedPrecisionConfig", *METHODS}
            assert name in {*known, "cfg.env_vars.update"}
        elif isinstance(node, ast.Name):
            assert (
                node.id in {"cfg", "torch", "Any", *CONSTANTS, *METHODS}
                or node.id in dir(stand_ins()[COMM_OVERLAP])
                or (node.id == "MixedPrecisionConfig")
            )
        else:
            assert isinstance(node, ALLOWED), ast.dump(node)
    return module


CONSTANTS = ("ENV", "TRANSFORMER_CONFIG", "OPTIMIZER_CONFIG", "DDP_CONFIG", "USERBUFFERS")
ALLOWED = (
    *(ast.Module, ast.Expr, ast.Constant, ast.Import, ast.ImportFrom, ast.alias, ast.Assign, ast.FunctionDef),
    *(ast.arguments, ast.arg, ast.Return, ast.Attribute, ast.keyword, ast.Dict, ast.List),
    *(ast.UnaryOp, ast.USub, ast.Load, ast.Store),
)


def read_back(mapping: dict[str, Any]) -> None:
    recipe, plan = loaded(mapping)
    text, said = to_python(recipe, plan)
    if plan.target.framework == "megatron-bridge":
        assert in_bridge(as_text(configured(text)), mapping, plan) == written_settings(plan, said)
        return
    names = run(text)
    sections = {
        "model": names["TRANSFORMER_CONFIG"],
        "optimizer": names["OPTIMIZER_CONFIG"],
        "ddp": names["DDP_CONFIG"],
        "comm_overlap": {
            "tp_comm_overlap": names["TRANSFORMER_CONFIG"]["tp_comm_overlap"],
            "tp_comm_overlap_cfg": names["USERBUFFERS"],
        },
    }
    machine = {name: mapping[name] for name in ("cluster", "software")}
    # The distribution and checkpoints are Megatron-LM's own, and so is one of the ways to ask for FSDP.
    rest = {name: mapping[name] for name in ("dist", "checkpoint") if name in mapping}
    plain = {name: {key: item for key, item in body.items() if "dtype" not in key} for name, body in sections.items()}
    again = dict(resolve({**as_text({**plain, **rest}), **machine}).settings)
    written = {f"{section}.{name}" for section, body in sections.items() for name in body}
    missing = set(plan.settings) - written - {"model.tp_comm_overlap_cfg"}
    for path in missing:
        assert not plan.settings[path] or any(path in sentence for sentence in said)
    assert {path: value for path, value in again.items() if path not in missing} == {
        path: value for path, value in plan.settings.items() if path not in missing
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_read_back(path: Path) -> None:
    read_back(shipped(path))


@SLOW
@given(recipes())
def test_generated_recipes_read_back(mapping: dict[str, Any]) -> None:
    read_back(mapping)


@SLOW
@given(hostile_recipes())
def test_text_stays_text(mapping: dict[str, Any]) -> None:
    recipe, plan = loaded(as_text(mapping))
    text, _ = to_python(recipe, plan)
    assert text.isascii()
    assert run(text)["ENV"] == {**mapping["env_vars"], **plan.env}
    if plan.target.framework == "megatron-bridge":
        found = configured(text)
        assert found["checkpoint"] == mapping["checkpoint"]
        assert found["optimizer"]["optimizer"] == mapping["optimizer"]["optimizer"]


@given(plain_values)
def test_literals_are_the_values(value: Any) -> None:
    assert ast.literal_eval(source(value)) == value


def test_a_preset_of_bridge_is_imported_by_its_name() -> None:
    name = "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"
    overlap = {"tp_comm_overlap": True, "tp_comm_overlap_cfg": name}
    text, _ = to_python(*loaded({**BRIDGE, "comm_overlap": overlap}))
    assert f"from {COMM_OVERLAP} import CommOverlapConfig, {name}\n" in text
    assert f"        tp_comm_overlap_cfg={name},\n" in text


def test_other_userbuffers_are_spelled_out() -> None:
    overlap = {"tp_comm_overlap": True, "tp_comm_overlap_cfg": {"qkv_fprop": {"aggregate": True}}}
    text, said = to_python(*loaded({**BRIDGE, "comm_overlap": overlap}))
    found = configured(text)["comm_overlap"]["tp_comm_overlap_cfg"]
    assert found["qkv_fprop"]["aggregate"] is True
    assert [layer for layer in DEFAULT_METHODS if found[layer] is not None] == ["qkv_fprop"]
    assert any("qkv_fprop got" in sentence for sentence in said)


def test_the_environment_goes_where_bridge_has_a_place_for_it() -> None:
    text, said = to_python(*loaded(BRIDGE))
    assert configured(text)["env_vars"] == run(text)["ENV"] != {}
    assert not said
    text, said = to_python(*loaded({**BRIDGE, "software": {"megatron_bridge": "0.5.1"}}))
    assert configured(text)["env_vars"] == {} != run(text)["ENV"]
    assert any("--format env" in sentence for sentence in said)


def test_what_megatron_core_has_no_place_for_is_named() -> None:
    mapping = {**BRIDGE, "software": {"framework": "megatron-lm", "megatron_core": "0.16.1"}}
    mapping |= {"train": {"micro_batch_size": 1}, "model": {**BRIDGE["model"], "seq_length": 4096}}
    mapping |= {"ddp": {"num_buckets": 4}}
    text, said = to_python(*loaded(mapping))
    assert "seq_length" not in text and "num_buckets" not in text
    assert any("train.micro_batch_size, model.seq_length" in sentence for sentence in said)
    assert any("megatron-core 0.16.1 does not have ddp.num_buckets" in sentence for sentence in said)


def test_it_is_laid_out_as_ruff_would(tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    for path in RECIPES:
        text, _ = to_python(*loaded(shipped(path)))
        (tmp_path / f"{path.stem}.py").write_text(text, encoding="utf-8")
    rules = ["--isolated", "--line-length", "120", "--target-version", "py310"]
    for command in (["format", "--check", *rules], ["check", *rules, "--select", "E,F,I,UP,B"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
