"""``presets show`` in the forms of the frameworks: each loads as its reader loads it, and `check` reads it too."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_cli import run
from test_cli_presets import H20, H100, LORA, NEMO, out

from overlapkit import comm_overlap
from overlapkit.comm_overlap.userbuffers import layers_of
from overlapkit.presets import load_preset, preset_names
from overlapkit.recipe.userbuffers import clean_userbuffers


@pytest.mark.parametrize("name", preset_names())
def test_te_is_a_literal_of_python_and_of_json(name: str) -> None:
    text = out("show", name, "--format", "te")
    assert ast.literal_eval(text) == json.loads(text) == load_preset(name).userbuffers


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("form", ["megatron-lm", "yaml"])
def test_megatron_lm_loads_the_file(name: str, form: str) -> None:
    """As its initialize.py does, yaml.safe_load; a flag is a flag there, and nothing is null."""
    loaded = yaml.safe_load(out("show", name, "--format", form))
    assert loaded == load_preset(name).userbuffers
    for layer, options in loaded.items():
        for option, value in options.items():
            assert type(value) is type(load_preset(name).userbuffers[layer][option])


@pytest.mark.parametrize("name", preset_names())
def test_bridge_builds_the_classes(name: str) -> None:
    section = yaml.safe_load(out("show", name, "--format", "bridge"))["comm_overlap"]
    assert section["_target_"] == "megatron.bridge.training.comm_overlap.CommOverlapConfig"
    assert section["tp_comm_overlap"] is True
    assert len(section["tp_comm_overlap_cfg"]) == 11  # all ten layers, Bridge's class has no defaults
    built = layers_of(
        {
            layer: options
            for layer, options in clean_userbuffers(section["tp_comm_overlap_cfg"], "", ValueError).items()
            if options is not None
        }
    )
    assert built == getattr(comm_overlap, name)
    for layer, options in section["tp_comm_overlap_cfg"].items():
        if isinstance(options, dict):
            expected = type(getattr(built, layer)).__name__
            assert options["_target_"] == f"megatron.bridge.training.comm_overlap.{expected}"


@pytest.mark.parametrize("name", preset_names())
def test_python_builds_the_classes(name: str) -> None:
    source = out("show", name, "--format", "python").replace(
        "megatron.bridge.training.comm_overlap", "overlapkit.comm_overlap"
    )
    module: dict[str, Any] = {}
    exec(compile(source, name, "exec"), module)
    assert module[name] == getattr(comm_overlap, name)


def test_what_is_completed_for_bridge_is_said_on_stderr() -> None:
    assert "got Transformer Engine's defaults for the rest" in run("presets", "show", NEMO, "-f", "bridge").stderr
    assert run("presets", "show", H100, "-f", "bridge").stderr == ""


@pytest.mark.parametrize("name", [H100, H20, NEMO, LORA])
@pytest.mark.parametrize("form", ["te", "megatron-lm", "yaml", "bridge"])
def test_check_reads_what_show_writes(name: str, form: str, tmp_path: Path) -> None:
    file, preset = tmp_path / "written", load_preset(name)
    file.write_text(out("show", name, "--format", form))
    sizes = [
        f"--tp={preset.tensor_model_parallel_size}",
        f"--tokens={preset.tokens_per_rank}",
        f"--hidden-size={preset.hidden_size}",
        f"--quantization={'fp8' if preset.precision == 'fp8' else 'none'}",
        "--rs-dgrad",
    ]
    of_the_file = json.loads(out("check", str(file), *sizes, "--format", "json"))
    assert of_the_file == json.loads(out("check", name, "--rs-dgrad", "--format", "json"))
    assert len(of_the_file["buffers"]) == 12 and of_the_file["bytes"] > 0
