"""``section.key=value`` after the recipe: what may stand there, and what it does to the recipe."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from overlapkit import Recipe, RecipeError, resolve
from overlapkit.facts import derive
from overlapkit.precision import named_precisions
from overlapkit.presets import load_preset
from overlapkit.recipe import recipe_from_mapping
from overlapkit.recipe.overrides import apply_overrides

BASE: dict[str, Any] = {"cluster": {"gpu": "h100", "num_gpus": 8}, "model": {"tensor_model_parallel_size": 2}}
PRESET = "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"


def loaded(*overrides: str, **sections: Any) -> Recipe:
    return recipe_from_mapping({**BASE, **sections}, overrides)


def refused(*overrides: str, **sections: Any) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        resolve({**BASE, **sections}, overrides)
    assert caught.value.source == "command line"
    return caught.value


def test_an_override_replaces_adds_and_unsets() -> None:
    recipe = loaded("model.tensor_model_parallel_size=4", "train.micro_batch_size=1", "cluster.gpu=null")
    assert recipe.model.tensor_model_parallel_size == 4
    assert recipe.train.micro_batch_size == 1
    assert recipe.cluster.gpu is None
    assert recipe.overridden == {"model.tensor_model_parallel_size", "train.micro_batch_size", "cluster.gpu"}


def test_the_last_one_counts() -> None:
    assert loaded("model.num_layers=2", "model.num_layers=3").model.num_layers == 3


def test_nothing_after_the_equals_sign_is_null() -> None:
    assert loaded("model.tensor_model_parallel_size=").model.tensor_model_parallel_size is None


def test_mappings_merge() -> None:
    recipe = loaded("model={num_layers: 2}", "comm_overlap={bucket_size: 5}", comm_overlap={"align_param_gather": True})
    assert (recipe.model.num_layers, recipe.model.tensor_model_parallel_size) == (2, 2)
    assert recipe.comm_overlap is not None
    assert (recipe.comm_overlap.bucket_size, recipe.comm_overlap.align_param_gather) == (5, True)


def test_a_section_may_be_set_to_null_and_filled_again() -> None:
    recipe = loaded("comm_overlap=null", "comm_overlap.bucket_size=5", comm_overlap={"align_param_gather": True})
    assert recipe.comm_overlap is not None
    assert (recipe.comm_overlap.bucket_size, recipe.comm_overlap.align_param_gather) == (5, None)


def test_keys_that_are_no_text_merge_as_they_are() -> None:
    assert apply_overrides({"a": {1: "x"}}, ["a={1: y}"])[0] == {"a": {1: "y"}}


def test_a_value_may_refer_to_the_recipe() -> None:
    assert loaded("model.pipeline_model_parallel_size=${model.tensor_model_parallel_size}").model == (
        loaded("model.pipeline_model_parallel_size=2").model
    )


def test_the_base_stays_as_it_was() -> None:
    before = copy.deepcopy(BASE)
    loaded("model.tensor_model_parallel_size=4", "cluster={num_gpus: 16}")
    assert before == BASE


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("model.num_layers", "section.key=value"),
        ("=1", "section.key=value"),
        ("", "section.key=value"),
        ("--model.num_layers=1", "section.key=value"),
        ("model..num_layers=1", "section.key=value"),
        ("model.num layers=1", "section.key=value"),
        ("model.num_layers =1", "section.key=value"),
        ("+env_vars.NEW=8", "leave out the +"),
        ("~env_vars.NEW", "leave out the ~"),
    ],
)
def test_what_is_no_override(override: str, hint: str) -> None:
    error = refused(override)
    assert "is not an override" in error.problem
    assert hint in (error.hint or "")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("model.num_layers=[1", "not YAML"),
        ("model.num_layers=*a", "names no anchor"),
        ("model.num_layers=!!python/name:os.system x", "the tag"),
        ("model.num_layers=99999999999999999999", "beyond 64 bits"),
        ("model.num_layers=two", "expected a whole number"),
        ("model.num_layers='2'", "expected a whole number"),
        ("model.num_layers={a: 1}", "expected a whole number"),
        ("cluster.gpu=h200x", "is not a known GPU"),
        ("cluster.num_gpus=0", "expected a whole number of at least 1"),
        ("cluster.num_gpus=7", "cannot be split"),
        ("model=5", "expected a mapping"),
        ("x" * 20_000, "longer than 16 KB"),
    ],
)
def test_a_wrong_value_is_the_command_lines(override: str, problem: str) -> None:
    error = refused(override)
    assert problem in error.problem
    assert error.path is not None


# --- part of what a name stands for --------------------------------------------------------------


@pytest.mark.parametrize("name", named_precisions())
def test_part_of_a_named_precision(name: str) -> None:
    """The rest of it stays: without it the recipe would train in FP32."""
    whole = derive(loaded(mixed_precision=name)).precision
    reduced = derive(loaded("mixed_precision.grad_reduce_in_fp32=false", mixed_precision=name)).precision
    assert reduced == derive(loaded(mixed_precision={**fields_of(name), "grad_reduce_in_fp32": False})).precision
    assert (reduced.compute, reduced.fp8_recipe, reduced.fp4) == (whole.compute, whole.fp8_recipe, whole.fp4)


def fields_of(name: str) -> dict[str, Any]:
    tree, _ = apply_overrides({"mixed_precision": name}, ["mixed_precision.fp16=null"])
    precision: dict[str, Any] = tree["mixed_precision"]
    return {**precision, "fp16": name.startswith("fp16")}


def test_part_of_a_named_precision_is_no_key_of_another_version() -> None:
    for name in named_precisions():
        plan = resolve({**BASE, "mixed_precision": name}, ["mixed_precision.grad_reduce_in_fp32=false"])
        assert "CFG001" not in {decision.code for decision in plan.decisions}


def test_part_of_a_preset() -> None:
    recipe = loaded(
        "comm_overlap.tp_comm_overlap_cfg.qkv_fprop.aggregate=true", comm_overlap={"tp_comm_overlap_cfg": PRESET}
    )
    assert recipe.comm_overlap is not None
    expected = {layer: dict(options) for layer, options in load_preset(PRESET).userbuffers.items()}
    assert expected["qkv_fprop"]["aggregate"] is not True
    expected["qkv_fprop"]["aggregate"] = True
    assert recipe.comm_overlap.tp_comm_overlap_cfg == expected


@pytest.mark.parametrize(
    ("override", "sections"),
    [
        (
            "comm_overlap.tp_comm_overlap_cfg.qkv_fprop.aggregate=true",
            {"comm_overlap": {"tp_comm_overlap_cfg": "auto"}},
        ),
        (
            "comm_overlap.tp_comm_overlap_cfg.qkv_fprop.aggregate=true",
            {"comm_overlap": {"tp_comm_overlap_cfg": "x.yaml"}},
        ),
        ("mixed_precision.fp8=hybrid", {"mixed_precision": "no_such"}),
        ("peft.dim=8", {"peft": "dora"}),
        ("model.tensor_model_parallel_size.x=8", {}),
    ],
)
def test_other_values_have_no_parts(override: str, sections: dict[str, Any]) -> None:
    """Nothing that was written is dropped in silence."""
    assert "which has no parts" in refused(override, **sections).problem
