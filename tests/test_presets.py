"""Userbuffers presets: the one that fits a recipe is chosen, and what the user gives is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from overlapkit import Plan, RecipeError, resolve
from overlapkit.plan import PresetChoice
from overlapkit.presets import Preset, load_preset, preset_names, selection
from overlapkit.render.data import to_yaml

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


# --- auto: the nearest ---------------------------------------------------------------------------


def test_exact() -> None:
    choice = plan().preset
    assert (choice.name, choice.match, choice.differs, choice.provenance) == (H8192, "exact", {}, "bridge")
    assert plan().settings["model.tp_comm_overlap_cfg"] == content(H8192)


def made_for(preset: Preset) -> PresetChoice:
    """What auto chooses for the recipe that a preset was made for."""
    return plan(
        gpu=preset.gpu,
        hidden_size=preset.hidden_size,
        tp=preset.tensor_model_parallel_size,
        cp=preset.context_parallel_size,
        micro_batch_size=preset.micro_batch_size,
        seq_length=preset.seq_length,
        mixed_precision="bf16_mixed" if preset.precision == "bf16" else "bf16_with_fp8_delayed_scaling_mixed",
    ).preset


@pytest.mark.parametrize("preset", [preset for preset in presets() if not preset.lora], ids=lambda preset: preset.name)
def test_every_preset_is_chosen_by_the_recipe_it_was_made_for(preset: Preset) -> None:
    """Unless another comes first: the one that it is a variant of, or a tuned one before one that is derived."""
    choice = made_for(preset)
    if preset.variant is not None:
        expected = preset.name.removesuffix(f"_{preset.variant}")
    elif preset.derived and choice.provenance != "derived":
        expected = choice.name or ""
        tuned = load_preset(expected)
        sizes = (preset.precision, preset.hidden_size, preset.tensor_model_parallel_size)
        assert (tuned.precision, tuned.hidden_size, tuned.tensor_model_parallel_size) == sizes
        assert tuned.gpu == plan(gpu=preset.gpu, tp=2).preset.name.split("_")[2]  # the family's
    else:
        expected = preset.name
    assert choice.name == expected
    assert (choice.match == "exact") == (choice.differs == {})


def test_a_derived_preset_is_chosen_where_none_was_tuned() -> None:
    """For the GPU itself rather than for its family; a variant never."""
    assert made_for(load_preset("userbuffers_bf16_h20_h8192_tp8_mbs1_seqlen8192")).provenance == "derived"
    h200 = plan(gpu="h200", hidden_size=8192, tp=8).preset
    assert (h200.name, h200.match) == ("userbuffers_bf16_h200_h8192_tp8_mbs1_seqlen8192", "exact")
    chosen = {made_for(preset).name for preset in presets() if not preset.lora}
    assert not {preset.name for preset in presets() if preset.variant} & chosen


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
        {"gpu": "h20", "tp": 2},
        {"gpu": "a100"},
        {"gpu": "h100_pcie"},
        {"mixed_precision": "bf16_with_mxfp8_mixed", "hidden_size": 6144},
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
    assert plan(mixed_precision="bf16_with_mxfp8_mixed", gpu="b200", tp=2).preset.name == (
        "userbuffers_fp8_b200_h8192_tp2_mbs1_seqlen8192"
    )


def test_the_fewest_factors_of_two_of_tokens_decide_then_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {
        f"userbuffers_bf16_h100_h8192_tp4_{name}": replace(
            load_preset(H8192),
            name=f"userbuffers_bf16_h100_h8192_tp4_{name}",
            seq_length=tokens,
            userbuffers={"qkv_fprop": {"num_sm": ord(name)}},
        )
        for name, tokens in {"b": 2048, "a": 8192, "c": 1024}.items()
    }
    monkeypatch.setattr(selection, "preset_names", lambda: tuple(sorted(made)))
    monkeypatch.setattr(selection, "load_preset", made.__getitem__)
    monkeypatch.setattr(selection, "tuned_presets", lambda: tuple(made.values()))
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
    assert plan(**fp8, seq_length=4096).preset.name == "userbuffers_fp8_h100_h8192_tp4_mbs1_seqlen4096"
    h16384 = {"hidden_size": 16384, "seq_length": 2048}
    lora = "userbuffers_fp8_h100_h16384_tp4_mbs1_seqlen2048_lora"
    assert plan(**fp8, **h16384, peft="lora").preset.name == lora
    assert plan(**fp8, **h16384).preset.match == "none"  # its only preset is for LoRA
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
    tuned = "userbuffers_fp8_h100_h16384_tp4_mbs1_seqlen2048_lora"
    lora = {"hidden_size": 16384, "seq_length": 2048, "peft": "lora"}
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


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_presets_own_file_is_nothing_to_megatron_lm(wrapped: bool, tmp_path: Path) -> None:
    held = {"name": "x", "userbuffers": content(H8192)} if wrapped else content(H8192)
    (tmp_path / "ub.yaml").write_text(to_yaml(held))
    megatron_lm = {"framework": "megatron-lm", "megatron_core": "0.19.2"}
    found = plan(str(tmp_path / "ub.yaml"), software=megatron_lm, mixed_precision=None)
    warned = [decision.code for decision in found.decisions if decision.severity == "warning"]
    assert ("UB107" in warned) == wrapped


def test_what_derivation_gives_many_shapes_is_recognised_for_its_own_alone() -> None:
    derived = "userbuffers_bf16_h200_h8192_tp4_mbs1_seqlen8192"
    assert plan(content(derived), gpu="h200").preset.name == derived
    found = plan(content(derived), gpu="h100")
    assert (found.preset.name, found.preset.provenance) == (None, "user")
    assert [decision for decision in found.decisions if decision.severity == "warning"] == []


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
