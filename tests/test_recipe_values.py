"""A value of the wrong kind, an impossible layout, a recipe beyond the limits: one clear error with its place."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from overlapkit import RecipeError, load_recipe, resolve
from overlapkit.recipe import recipe_from_mapping
from overlapkit.recipe.schema import SECTIONS

HEAD = {"cluster": {"gpu": "h100", "num_gpus": 8}}


def refused(recipe: Any, *overrides: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        resolve(recipe, overrides)
    return caught.value


# --- kinds ---------------------------------------------------------------------------------------

WRONG: dict[str, list[Any]] = {
    "size": [0, -1, 1.0, "8", True, [8], {"a": 1}, float("inf")],
    "count": [-1, 0.5, "0", False, []],
    "integer": [1.5, "1", True, []],
    "number": [0, -1.0, "1", True, float("nan"), float("inf")],
    "flag": [0, 1, "true", "yes", [], {}],
    "text": [1, 1.5, True, [], {}],
    "version": [1, 2.10, True, [], {}],
    "choice": ["no_such", 1, True, []],
    "names": [1, True, {"a": 1}, [1], [None], [[]]],
    "sizes": [1, "8", [0], [1.5], ["8"], [True], [2] * 17],
}
FIELDS = [
    (f"{section}.{name}", spec.metadata["kind"])
    for section, dataclass in SECTIONS.items()
    for name, spec in dataclass.__dataclass_fields__.items()
    if "kind" in spec.metadata
]


@pytest.mark.parametrize(("path", "kind"), [field for field in FIELDS if field[1] != "anything"])
def test_a_wrong_kind_names_the_field(path: str, kind: str) -> None:
    section, name = path.split(".")
    for value in WRONG[kind]:
        error = refused({**HEAD, section: {**HEAD.get(section, {}), name: value}})
        assert error.path == path, value
        assert error.problem.startswith("expected "), value


@pytest.mark.parametrize("path", [path for path, _ in FIELDS])
def test_null_is_not_set(path: str) -> None:
    section, name = path.split(".")
    with_null = {**HEAD, section: {**HEAD.get(section, {}), name: None}}
    without = {**HEAD, section: {key: value for key, value in HEAD.get(section, {}).items() if key != name}}
    if path == "cluster.num_gpus":
        assert str(refused(with_null)) == str(refused(without))
    elif path == "software.transformer_engine":  # null: not installed
        assert resolve(with_null).target.transformer_engine is None
    else:
        assert resolve(with_null) == resolve(without)


@pytest.mark.parametrize("section", [*SECTIONS, "env_vars", "peft", "mixed_precision"])
def test_a_section_is_a_mapping(section: str) -> None:
    for value in (5, True, ["a"]):
        assert refused({**HEAD, section: value}).path == section


@pytest.mark.parametrize(
    ("recipe", "path", "hint"),
    [
        ({"model": {"num_layers": "8"}}, "model.num_layers", "without quotes"),
        ({"software": {"framework": "megatron-bridg"}}, "software.framework", "did you mean megatron-bridge?"),
        (
            {"model": {"moe_token_dispatcher_type": "all2all"}},
            "model.moe_token_dispatcher_type",
            "did you mean alltoall?",
        ),
        ({"mixed_precision": "bf16-mixe"}, "mixed_precision", "did you mean bf16_mixed?"),
        ({"cluster": {"gpu": "h2000", "num_gpus": 8}}, "cluster.gpu", "did you mean h200?"),
        ({"cluster": {"gpu": "tpu", "num_gpus": 8}}, "cluster.gpu", "known are "),
        ({"peft": "loora"}, "peft", None),
        ({"model": {"pipeline_model_parallel_layout": "Etx"}}, "model.pipeline_model_parallel_layout", None),
        ({"model": {"pipeline_model_parallel_layout": "(t)*999999"}}, "model.pipeline_model_parallel_layout", None),
    ],
)
def test_hints(recipe: dict[str, Any], path: str, hint: str | None) -> None:
    error = refused({**HEAD, **recipe})
    assert error.path == path
    assert hint is None or hint in (error.hint or "")


@pytest.mark.parametrize("spelling", ["H100", "h100-sxm", "NVIDIA H100 80GB HBM3", "nvidia h100"])
def test_spellings_of_a_gpu(spelling: str) -> None:
    assert resolve({"cluster": {"gpu": spelling, "num_gpus": 8}}).target.gpu == "h100"


@pytest.mark.parametrize("spelling", ["bf16_mixed", "bf16-mixed"])
def test_spellings_of_a_precision(spelling: str) -> None:
    precision = recipe_from_mapping({**HEAD, "mixed_precision": spelling}).mixed_precision
    assert precision is not None and precision.name == "bf16_mixed"


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("p2p", ("p2p",)),
        ("p2p,a2a", ("p2p", "a2a")),
        (["p2p", " a2a "], ("p2p", "a2a")),
        (["CudaGraphScope.attn"], ("attn",)),
        ([{"_target_": "megatron.core.CudaGraphScope", "_name_": "attn"}], ("attn",)),
        ([], ()),
        ("", ()),
    ],
)
def test_forms_of_a_list_of_names(written: Any, names: tuple[str, ...]) -> None:
    assert recipe_from_mapping({"model": {"cp_comm_type": written}}).model.cp_comm_type == names


# --- layouts -------------------------------------------------------------------------------------


def test_only_the_number_of_gpus_is_needed() -> None:
    assert resolve({"cluster": {"num_gpus": 8}}).parallelism.dp == 8
    error = refused({"model": {}})
    assert (error.path, error.problem) == ("cluster.num_gpus", "the number of GPUs is missing")
    assert "cluster.num_gpus=8" in (error.hint or "")


@pytest.mark.parametrize(("tp", "pp", "cp"), [(3, 1, 1), (1, 16, 1), (2, 2, 4), (2**62, 2**62, 2**62)])
def test_tp_pp_cp_must_divide_the_gpus(tp: int, pp: int, cp: int) -> None:
    model = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "context_parallel_size": cp}
    error = refused({**HEAD, "model": model})
    assert (error.path, error.problem) == ("cluster.num_gpus", "8 GPUs cannot be split")
    assert f"TP {tp} · PP {pp} · CP {cp}" in (error.hint or "")


def test_every_other_combination_is_a_plan_with_its_errors() -> None:
    model = {"expert_model_parallel_size": 3, "num_moe_experts": 5, "virtual_pipeline_model_parallel_size": 2}
    plan = resolve({**HEAD, "model": model})
    assert not plan.ok
    assert len([decision for decision in plan.decisions if decision.severity == "error"]) > 1
    assert plan.settings["ddp.bucket_size"] is None


# --- places --------------------------------------------------------------------------------------


def test_an_error_names_file_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("cluster:\n  num_gpus: 8\nmodel:\n  num_layers: 2\n  hidden_size: -1\n")
    error = refused(path)
    assert (error.source, error.line, error.path) == (str(path), 5, "model.hidden_size")
    assert error.problem == "expected a whole number of at least 1, got -1"
    assert str(error) == f"{path}:5: model.hidden_size: {error.problem}"
    assert error.exit_code == 2


def test_a_field_that_is_missing_has_the_line_of_its_section(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("# a comment\nmodel: {}\ncluster:\n  gpu: h100\n")
    assert refused(path).line == 3


def test_a_mapping_and_the_command_line_are_places() -> None:
    assert str(refused({"cluster": {"num_gpus": -1}})).startswith("mapping: cluster.num_gpus: ")
    assert str(refused(HEAD, "cluster.num_gpus=-1")).startswith("command line: cluster.num_gpus: ")


# --- limits --------------------------------------------------------------------------------------


def test_256_kb_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    text = b"cluster: {num_gpus: 8}\n#"
    path.write_bytes(text.ljust(256 * 1024, b"x"))
    assert load_recipe(path).cluster.num_gpus == 8
    path.write_bytes(text.ljust(256 * 1024 + 1, b"x"))
    assert "larger than 256 KB" in refused(path).problem


def test_256_kb_of_a_mapping() -> None:
    assert resolve({**HEAD, "env_vars": {"A": "x" * 250_000}}).ok
    assert "characters" in refused({**HEAD, "env_vars": {"A": "x" * 140_000, "B" * 140_000: "x"}}).problem


def test_10_000_values(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    head = "_target_: x\ncluster: {num_gpus: 8}\n"  # 7 values: mappings, keys and single values
    path.write_text(f"{head}a: [{'1,' * (10_000 - 9)}]\n")
    assert load_recipe(path).cluster.num_gpus == 8
    path.write_text(f"{head}a: [{'1,' * (10_000 - 8)}]\n")
    assert "more than 10,000 values" in refused(path).problem
    many = {f"V{n}": n for n in range(10_001)}
    assert "more than 10,000 values" in refused({**HEAD, "env_vars": many}).problem


def test_50_levels(tmp_path: Path) -> None:
    def lists(levels: int) -> Any:
        return [lists(levels - 1)] if levels else 1

    path = tmp_path / "recipe.yaml"
    for levels, fits in ((49, True), (50, False)):  # and the recipe itself
        recipe = {"_target_": "x", **HEAD, "a": lists(levels)}
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(recipe)))
        for given in (recipe, path):
            if fits:
                assert resolve(given).ok
            else:
                assert "nested deeper than 50 levels" in refused(given).problem


def test_64_bits() -> None:
    assert resolve({**HEAD, "model": {"num_layers": 2**63 - 1}}).parallelism.dp == 8
    for beyond in (2**63, -(2**63), 10**5000):
        assert "is beyond 64 bits" in refused({**HEAD, "env_vars": {"A": beyond}}).problem
        assert "is beyond 64 bits" in refused({**HEAD, beyond: 1}).problem


def test_a_circle_of_mappings() -> None:
    circle: dict[str, Any] = {**HEAD}
    circle["model"] = circle
    assert "nested deeper" in refused(circle).problem


# --- what a caller may pass ----------------------------------------------------------------------


class Method(str, enum.Enum):
    BULK = "bulk"


class Size(enum.IntEnum):
    EIGHT = 8


def test_derived_classes_are_what_they_derive_from() -> None:
    cfg = {"qkv_fprop": {"method": Method.BULK, "num_sm": Size.EIGHT}}
    recipe = {"cluster": {"num_gpus": Size.EIGHT}, "comm_overlap": {"tp_comm_overlap_cfg": cfg}}
    overlap = recipe_from_mapping(recipe).comm_overlap
    assert overlap is not None and isinstance(overlap.tp_comm_overlap_cfg, dict)
    assert [type(value) for value in overlap.tp_comm_overlap_cfg["qkv_fprop"].values()] == [str, int]


def test_a_path_is_text() -> None:
    overlap = recipe_from_mapping({"comm_overlap": {"tp_comm_overlap_cfg": Path("ub.yaml")}}).comm_overlap
    assert overlap is not None and overlap.tp_comm_overlap_cfg == "ub.yaml"


def test_an_omegaconf_container_is_a_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "HUSH")
    container = OmegaConf.create({**HEAD, "model": {"cp_comm_type": ["p2p"], "num_layers": "${cluster.num_gpus}"}})
    recipe = recipe_from_mapping(container)  # type: ignore[arg-type]
    assert (recipe.model.cp_comm_type, recipe.model.num_layers) == (("p2p",), 8)
    assert "is not run" in refused(OmegaConf.create({"cluster": {"gpu": "${oc.env:SECRET}"}})).problem


@pytest.mark.parametrize("value", [object(), b"h100", {"h100"}, print, 1j])
def test_other_objects_are_refused_without_their_text(value: Any) -> None:
    assert refused({"cluster": {"gpu": value, "num_gpus": 8}}).problem == f"expected text, got a {type(value).__name__}"


def test_a_microbatch_that_no_integer_counts_is_refused() -> None:
    model = {"seq_length": 2**62, "tensor_model_parallel_size": 2, "sequence_parallel": True, "hidden_size": 64}
    recipe = {
        "cluster": {"gpu": "h100", "num_gpus": 2},
        "model": model,
        "train": {"micro_batch_size": 4},
        "comm_overlap": {"tp_comm_overlap": True, "tp_comm_overlap_cfg": {"qkv_fprop": {"method": "ring_exchange"}}},
    }
    with pytest.raises(RecipeError, match=r"^mapping: model\.seq_length: a microbatch of more tokens than 64 bits"):
        resolve(recipe)


def test_fewer_tokens_than_cp_ranks_are_no_crash() -> None:
    model = {"seq_length": 1, "context_parallel_size": 2, "hidden_size": 64}
    recipe = {
        "cluster": {"gpu": "h100", "num_gpus": 4},
        "model": {**model, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        "train": {"micro_batch_size": 1},
        "comm_overlap": {"tp_comm_overlap": True, "tp_comm_overlap_cfg": {"qkv_fprop": {"method": "ring_exchange"}}},
    }
    assert not resolve(recipe).ok
