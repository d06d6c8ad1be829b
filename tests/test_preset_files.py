"""The files of presets/userbuffers: each is what its name says, and Transformer Engine takes it in every release."""

from __future__ import annotations

import re

import pytest
import yaml

from overlapkit import RecipeError
from overlapkit.data import load_yaml
from overlapkit.presets import Preset, check_userbuffers, load_preset, preset_names
from overlapkit.render.data import to_yaml

NAME = re.compile(
    r"userbuffers_(?P<precision>bf16|fp8)_(?P<gpu>[a-z0-9]+)_h(?P<hidden_size>\d+)_tp(?P<tensor_model_parallel_size>\d+)"
    r"(?:_cp(?P<context_parallel_size>\d+))?_mbs(?P<micro_batch_size>\d+)_seqlen(?P<seq_length>\d+)(?P<lora>_lora)?"
    r"(?:_(?P<variant>launcher|nemo))?"
)
RELEASES = [row["since"] for row in load_yaml("userbuffers_releases.yaml")]
LAYERS = {f"{linear}_{pass_}" for linear in ("qkv", "proj", "fc1", "fc2") for pass_ in ("fprop", "dgrad", "wgrad")}
H8192 = "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"


def presets() -> list[Preset]:
    return [load_preset(name) for name in preset_names()]


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_what_its_name_says(name: str) -> None:
    preset, parts = load_preset(name), NAME.fullmatch(name)
    assert parts is not None
    assert preset.name == name
    assert (preset.gpu, preset.precision, preset.lora) == (parts["gpu"], parts["precision"], parts["lora"] is not None)
    for field in ("hidden_size", "tensor_model_parallel_size", "micro_batch_size", "seq_length"):
        assert getattr(preset, field) == int(parts[field]), field
    assert preset.context_parallel_size == int(parts["context_parallel_size"] or 1)
    assert preset.provenance in ("bridge", "nemo", "derived")
    assert preset.source
    assert preset.variant == parts["variant"]


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_a_configuration(name: str) -> None:
    userbuffers = load_preset(name).userbuffers
    assert set(userbuffers) <= LAYERS
    for layer, options in userbuffers.items():
        assert options["method"] in ("ring_exchange", "pipeline", "bulk"), layer
        assert all(isinstance(value, (bool, int)) for key, value in options.items() if key != "method"), layer


@pytest.mark.parametrize("te", RELEASES)
def test_every_preset_passes_in_every_transformer_engine(te: str) -> None:
    """In its own precision and sizes there is nothing to say of it, not even that something would be passed over."""
    for preset in presets():
        report = check_userbuffers(
            preset.userbuffers,
            transformer_engine=te,
            tensor_model_parallel_size=preset.tensor_model_parallel_size,
            tokens=preset.tokens_per_rank,
            hidden_size=preset.hidden_size,
            quantization_modes=("fp8" if preset.precision == "fp8" else "none",),
        )
        assert report.problems == (), preset.name
        assert set(report.buffers) >= set(preset.userbuffers), preset.name


def test_presets_read_the_same_as_megatron_lm_reads_them() -> None:
    """It loads a file with PyYAML: what we write has to come back as plain values, no null and no tuple among them."""
    for preset in presets():
        read = yaml.safe_load(to_yaml(preset.userbuffers))
        assert read == preset.userbuffers, preset.name
        values = [value for options in read.values() for value in options.values()]
        assert {type(value) for value in values} <= {bool, int, str}, preset.name


def test_lora_presets_have_no_weight_gradients() -> None:
    for preset in presets():
        assert preset.lora == (not any(layer.endswith("_wgrad") for layer in preset.userbuffers)), preset.name


def test_bridges_19_names_have_14_contents() -> None:
    """15 as Bridge writes them: two differ only in a tuple that Transformer Engine reads as true."""
    bridge = [preset for preset in presets() if preset.provenance == "bridge"]
    contents = {
        repr(sorted((layer, sorted(options.items())) for layer, options in p.userbuffers.items())) for p in bridge
    }
    assert (len(bridge), len(contents)) == (19, 14)


def test_an_unknown_preset() -> None:
    with pytest.raises(RecipeError, match="is not a preset; did you mean userbuffers_bf16_h100_h8192_tp4"):
        load_preset("userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8193")
    with pytest.raises(RecipeError, match="is not a preset"):
        load_preset("../userbuffers/" + H8192)  # a name, never a path
