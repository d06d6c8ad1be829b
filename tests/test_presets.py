"""Userbuffers presets: each is what its name says, and the one that fits a recipe is chosen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from overlapkit import Plan, RecipeError, resolve
from overlapkit import presets as presets_module
from overlapkit.presets import Preset, load_preset, preset_names
from overlapkit.render.data import to_yaml

NAME = re.compile(
    r"userbuffers_(?P<precision>bf16|fp8)_(?P<gpu>[a-z0-9]+)_h(?P<hidden_size>\d+)_tp(?P<tensor_model_parallel_size>\d+)"
    r"(?:_cp(?P<context_parallel_size>\d+))?_mbs(?P<micro_batch_size>\d+)_seqlen(?P<seq_length>\d+)(?P<lora>_lora)?"
)
LAYERS = {f"{linear}_{pass_}" for linear in ("qkv", "proj", "fc1", "fc2") for pass_ in ("fprop", "dgrad", "wgrad")}
H8192 = "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"
H8192_TP2 = "userbuffers_bf16_h100_h8192_tp2_mbs1_seqlen8192"
CONTENT = {"qkv_fprop": {"method": "ring_exchange", "num_sm": 1}}


def presets() -> list[Preset]:
    return [load_preset(name) for name in preset_names()]


def plan(cfg: Any = "auto", *, source: Path | None = None, **changes: Any) -> Plan:
    """A recipe for which H8192 was made, with some fields changed."""
    recipe = {
        "cluster": {"gpu": changes.pop("gpu", "h100"), "num_gpus": 64},
        "model": {
            "hidden_size": changes.pop("hidden_size", 8192),
            "seq_length": changes.pop("seq_length", 8192),
            "tensor_model_parallel_size": changes.pop("tp", 4),
            "context_parallel_size": changes.pop("cp", 1),
            "sequence_parallel": True,
        },
        "train": {"micro_batch_size": changes.pop("micro_batch_size", 1)},
        "comm_overlap": {"tp_comm_overlap": True, "tp_comm_overlap_cfg": cfg},
        **changes,
    }
    if source is None:
        return resolve(recipe)
    source.write_text(yaml.safe_dump(recipe))
    return resolve(source)


def content(name: str) -> dict[str, Any]:
    return {layer: dict(options) for layer, options in load_preset(name).userbuffers.items()}


# --- the files -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_a_configuration(name: str) -> None:
    userbuffers = load_preset(name).userbuffers
    assert set(userbuffers) <= LAYERS
    for layer, options in userbuffers.items():
        assert options["method"] in ("ring_exchange", "pipeline", "bulk"), layer
        assert all(isinstance(value, (bool, int)) for key, value in options.items() if key != "method"), layer


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


# --- auto: the nearest ---------------------------------------------------------------------------


def test_exact() -> None:
    choice = plan().preset
    assert (choice.name, choice.match, choice.differs, choice.provenance) == (H8192, "exact", {}, "bridge")
    assert plan().settings["model.tp_comm_overlap_cfg"] == content(H8192)


@pytest.mark.parametrize("name", [preset.name for preset in presets() if not preset.lora])
def test_every_preset_is_chosen_by_the_recipe_it_was_made_for(name: str) -> None:
    preset = load_preset(name)
    choice = plan(
        gpu=preset.gpu,
        hidden_size=preset.hidden_size,
        tp=preset.tensor_model_parallel_size,
        cp=preset.context_parallel_size,
        micro_batch_size=preset.micro_batch_size,
        seq_length=preset.seq_length,
        mixed_precision="bf16_mixed" if preset.precision == "bf16" else "bf16_with_fp8_delayed_scaling_mixed",
    ).preset
    assert (choice.name, choice.match) == (name, "exact")


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"seq_length": 4096}, {"seq_length": (8192, 4096)}),
        ({"micro_batch_size": 2}, {"micro_batch_size": (1, 2)}),
        ({"cp": 2}, {"context_parallel_size": (1, 2)}),
        ({"gpu": "h200"}, {"gpu": ("h100", "h200")}),
        ({"gpu": "h800", "seq_length": 1024}, {"gpu": ("h100", "h800"), "seq_length": (8192, 1024)}),
    ],
)
def test_nearest_says_what_differs(changes: dict[str, Any], differs: dict[str, Any]) -> None:
    choice = plan(**changes).preset
    assert (choice.name, choice.match, choice.differs) == (H8192, "nearest", differs)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 4096},
        {"tp": 8},
        {"gpu": "h20"},
        {"gpu": "a100"},
        {"mixed_precision": "bf16_with_mxfp8_mixed", "tp": 2},
    ],
)
def test_none_where_gpu_precision_tp_or_hidden_size_has_no_preset(changes: dict[str, Any]) -> None:
    choice = plan("auto", **changes).preset
    assert (choice.name, choice.match) == (None, "none")


@pytest.mark.parametrize("missing", ["gpu", "hidden_size", "seq_length", "micro_batch_size"])
def test_none_where_the_recipe_does_not_say_enough(missing: str) -> None:
    found = plan(**{missing: None})
    assert found.preset.match == "none"
    assert any(missing in decision.because for decision in found.decisions if decision.code.startswith("UB1"))


@pytest.mark.parametrize(
    ("gpu", "family"),
    [("h100", "h100"), ("h200", "h100"), ("h800", "h100")]
    + [(gpu, "b200") for gpu in ("b200", "b300", "gb200", "gb300", "vr200")],
)
def test_families(gpu: str, family: str) -> None:
    assert plan(gpu=gpu, tp=2).preset.name == f"userbuffers_bf16_{family}_h8192_tp2_mbs1_seqlen8192"


def test_quantized_recipes_get_the_fp8_preset() -> None:
    for precision in ("bf16_with_fp8_current_scaling_mixed", "bf16_with_fp8_delayed_scaling_mixed"):
        assert plan(mixed_precision=precision).preset.name == "userbuffers_fp8_h100_h8192_tp4_mbs1_seqlen8192"


def test_the_fewest_factors_of_two_of_tokens_decide_then_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {
        f"userbuffers_bf16_h100_h8192_tp4_{name}": replace(
            load_preset(H8192),
            name=f"userbuffers_bf16_h100_h8192_tp4_{name}",
            seq_length=tokens,
            userbuffers={"qkv_fprop": {"x": name}},
        )
        for name, tokens in {"b": 2048, "a": 8192, "c": 1024}.items()
    }
    monkeypatch.setattr(presets_module, "_names", lambda: tuple(sorted(made)))
    monkeypatch.setattr(presets_module, "load_preset", made.__getitem__)
    chosen = {tokens: plan(seq_length=tokens).preset.name for tokens in (512, 1024, 1536, 2048, 4096, 5000, 2**20)}
    assert {tokens: (name or "")[-1] for tokens, name in chosen.items()} == {
        512: "c",
        1024: "c",
        1536: "b",  # log2(2048/1536) = 0.42, log2(1536/1024) = 0.58
        2048: "b",
        4096: "a",  # one factor of two from both: the name decides
        5000: "a",
        2**20: "a",
    }


def test_lora_presets_are_for_lora_recipes() -> None:
    fp8 = {"mixed_precision": "bf16_with_fp8_delayed_scaling_mixed"}
    lora = "userbuffers_fp8_h100_h8192_tp4_mbs1_seqlen4096_lora"
    assert plan(**fp8, seq_length=4096, peft="lora").preset.name == lora
    assert plan(**fp8, seq_length=8192, peft="lora").preset.name == lora  # even where another is nearer in size
    assert plan(**fp8, seq_length=4096).preset.name == "userbuffers_fp8_h100_h8192_tp4_mbs1_seqlen8192"
    assert plan(**fp8, seq_length=4096, tp=2).preset.match == "none"  # its only preset is for LoRA
    assert plan(peft="lora").preset.differs == {"lora": (False, True)}  # there is none for LoRA in BF16


def test_presets_that_transformer_engine_would_refuse_are_not_chosen() -> None:
    """Their reduce-scatter is in FP8, which current scaling does not write; their dgrad is not bulk."""
    tuned = "userbuffers_fp8_h100_h6144_tp2_mbs2_seqlen2048"
    sizes = {"hidden_size": 6144, "tp": 2, "seq_length": 2048, "micro_batch_size": 2}
    assert plan(**sizes, mixed_precision="bf16_with_fp8_delayed_scaling_mixed").preset.name == tuned
    refused = plan(**sizes, mixed_precision="bf16_with_fp8_current_scaling_mixed")
    assert (refused.preset.name, refused.ok) == (None, True)
    delayed = {"fp8": "hybrid", "fp8_recipe": "delayed", "bf16": True}
    ends = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1}
    tuned = "userbuffers_fp8_h100_h8192_tp2_mbs1_seqlen4096_lora"
    lora = {"tp": 2, "seq_length": 4096, "peft": "lora"}
    assert plan(**lora, mixed_precision=delayed).preset.name == tuned
    refused = plan(**lora, mixed_precision={**delayed, **ends})
    errors = {decision.code for decision in refused.decisions if decision.severity == "error"}
    assert (refused.preset.name, errors) == (None, {"CFG022"})  # Core has no BF16 ends beside delayed scaling


# --- given by the user ---------------------------------------------------------------------------


def test_a_name_is_kept_whatever_the_recipe_is() -> None:
    choice = plan(H8192_TP2).preset
    assert (choice.name, choice.match, choice.differs) == (H8192_TP2, "user", {"tensor_model_parallel_size": (2, 4)})
    assert plan(H8192).preset.match == "exact"
    assert plan(H8192, hidden_size=None).preset.match == "exact"  # nothing known differs


def test_a_names_twins_are_its_aliases() -> None:
    assert plan("userbuffers_bf16_h100_h6144_tp2_mbs2_seqlen2048").preset.aliases == (
        "userbuffers_fp8_h100_h6144_tp2_mbs2_seqlen2048",
    )


def test_content_is_recognised() -> None:
    found = plan(content(H8192))
    assert (found.preset.name, found.preset.match, found.preset.provenance) == (H8192, "exact", "bridge")
    assert plan(content(H8192), seq_length=4096).preset.match == "user"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"gpu": "b200", "hidden_size": 6144, "tp": 2}, "userbuffers_bf16_b200_h6144_tp2_mbs1_seqlen4096"),
        (
            {"gpu": "b200", "hidden_size": 18432, "tp": 8, "mixed_precision": "bf16_with_fp8_delayed_scaling_mixed"},
            "userbuffers_fp8_b200_h18432_tp8_mbs1_seqlen4096",
        ),
        (
            {"gpu": "b200", "hidden_size": 16384, "tp": 4, "mixed_precision": "bf16_with_fp8_delayed_scaling_mixed"},
            "userbuffers_fp8_b200_h16384_tp4_cp2_mbs1_seqlen8192",
        ),
    ],
)
def test_of_twins_the_nearest_to_the_recipe_is_named(changes: dict[str, Any], name: str) -> None:
    twins = {
        "userbuffers_bf16_b200_h6144_tp2_mbs1_seqlen4096",
        "userbuffers_fp8_b200_h16384_tp4_cp2_mbs1_seqlen8192",
        "userbuffers_fp8_b200_h18432_tp8_mbs1_seqlen4096",
    }
    choice = plan(content(name), **changes).preset
    assert choice.name == name
    assert choice.aliases == tuple(sorted(twins - {name}))


def test_other_content_is_the_users() -> None:
    found = plan(CONTENT)
    assert (found.preset.name, found.preset.match, found.preset.provenance) == (None, "user", "user")
    assert found.settings["model.tp_comm_overlap_cfg"] == CONTENT


# --- files ---------------------------------------------------------------------------------------


def test_a_file_is_looked_for_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "ub.yaml").write_text("qkv_fprop: {method: ring_exchange, num_sm: 1}\n")
    monkeypatch.chdir(tmp_path)
    for path in ("ub.yaml", "./ub.yaml", "../here/ub.yaml", str(tmp_path / "here" / "ub.yaml")):
        found = plan(path, source=tmp_path / "here" / "recipe.yaml")
        assert (found.preset.match, found.settings["model.tp_comm_overlap_cfg"]) == ("user", CONTENT)
    assert plan("here/ub.yaml").settings["model.tp_comm_overlap_cfg"] == CONTENT  # of a mapping: where we are


def test_a_presets_own_file_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "ub.yaml").write_text(to_yaml(content(H8192)))
    assert plan("ub.yaml", source=tmp_path / "recipe.yaml").preset.name == H8192
    (tmp_path / "ub.yaml").write_text(to_yaml({"name": "x", "userbuffers": content(H8192)}))
    assert plan("ub.yaml", source=tmp_path / "recipe.yaml").preset.name == H8192


def test_a_file_that_is_not_here_is_kept_with_a_warning() -> None:
    found = plan("/opt/training/ub.yaml")
    assert found.settings["model.tp_comm_overlap_cfg"] == "/opt/training/ub.yaml"
    assert found.preset.match == "user"
    about = [decision for decision in found.decisions if decision.subject == "model.tp_comm_overlap_cfg"]
    assert [decision.severity for decision in about] == ["warning"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is empty"),
        ("- 1\n", "a userbuffers configuration is a mapping of layers"),
        ("password: HUSH\n", "not a userbuffers configuration"),
        ("aws: {key: HUSH}\n", "not a userbuffers configuration"),
        ("userbuffers: HUSH\n", "not a userbuffers configuration"),
        ("qkv_fprop: bulk\n", "expected a mapping of options"),
        ("qkv_fprop: {num_sm: {}}\n", "expected a plain value"),
        ("qkv_fprop: [\n", "not YAML"),
    ],
)
def test_a_file_that_holds_something_else(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "ub.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError) as caught:
        plan(str(file))
    assert problem in caught.value.problem
    assert caught.value.source == str(file)
    assert "HUSH" not in str(caught.value)


def test_a_name_that_is_neither_preset_nor_file() -> None:
    with pytest.raises(RecipeError) as caught:
        plan(H8192 + "x")
    assert caught.value.path == "comm_overlap.tp_comm_overlap_cfg"
    assert caught.value.hint == f"did you mean {H8192}?"


def test_with_the_overlap_off_nothing_is_read(tmp_path: Path) -> None:
    (tmp_path / "ub.yaml").write_text("- 1\n")
    found = plan(str(tmp_path / "ub.yaml"), comm_overlap={"tp_comm_overlap": False, "tp_comm_overlap_cfg": "no_such"})
    assert found.preset.match == "none"


def test_without_comm_overlap_the_models_own_counts() -> None:
    found = plan(comm_overlap=None)
    assert found.preset.match == "none"
    model = {
        "tp_comm_overlap": True,
        "tp_comm_overlap_cfg": H8192,
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
    }
    found = plan(comm_overlap=None, model=model)
    assert found.preset.name == H8192
    with pytest.raises(RecipeError) as caught:
        plan(comm_overlap=None, model={**model, "tp_comm_overlap_cfg": "no_such"})
    assert caught.value.path == "model.tp_comm_overlap_cfg"
