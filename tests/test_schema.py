"""The JSON Schema of a recipe: an editor that checks by it says what the loader says.

``overlapkit schema > recipe.schema.json`` writes the committed file again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from overlapkit import RecipeError
from overlapkit.catalogue import gpu_names
from overlapkit.precision import named_precisions
from overlapkit.recipe import recipe_from_mapping, yaml_source
from overlapkit.recipe.json_schema import recipe_schema, schema_text
from overlapkit.recipe.keys import keys_of
from overlapkit.recipe.known_keys import known_keys
from overlapkit.recipe.schema import OURS, SECTIONS

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = recipe_schema()
VALIDATOR = Draft7Validator(SCHEMA)
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
DUMPS = sorted((ROOT / "tests" / "dumps").glob("*.yaml"))


def test_the_committed_schema_is_the_generated_one() -> None:
    committed = (ROOT / "recipe.schema.json").read_text(encoding="utf-8")
    assert committed == schema_text(), "write it again: overlapkit schema > recipe.schema.json"


def test_it_is_a_schema() -> None:
    Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", [*RECIPES, *DUMPS], ids=lambda path: path.stem)
def test_shipped_recipes_and_dumps_are_valid(path: Path) -> None:
    document = yaml_source.parse(yaml_source.read_text(path), path.name)
    assert [error.message for error in VALIDATOR.iter_errors(document.value)] == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_name_it_for_editors(path: Path) -> None:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    comment, _, schema = first.partition("$schema=")
    assert comment == "# yaml-language-server: "
    assert (path.parent / schema).resolve() == ROOT / "recipe.schema.json"


# --- what an editor shows ------------------------------------------------------------------------


def definition(name: str) -> dict[str, Any]:
    found: dict[str, Any] = SCHEMA["definitions"][name]
    return found


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema:
        return schema
    found: Any = SCHEMA
    for step in schema["$ref"].removeprefix("#/").split("/"):
        found = found[step]
    return resolved(found)


def described() -> Iterator[tuple[str, dict[str, Any]]]:
    for whole in ("recipe", "dump"):
        for name, section in definition(whole)["properties"].items():
            yield f"{whole} {name}", resolved(section)
            for key, field in resolved(section).get("properties", {}).items():
                yield f"{whole} {name}.{key}", resolved(field)


def test_every_section_and_every_key_has_a_description() -> None:
    assert [path for path, schema in described() if len(schema.get("description", "")) < 4] == []


def test_every_known_key_is_offered() -> None:
    for section in (*SECTIONS, *known_keys().sections):
        if section != "env_vars":
            keys = set(SECTIONS[section].__dataclass_fields__) if section in OURS else keys_of(section)
            offered = set(definition(section)["properties"])
            assert keys - {"transformer_engine_absent"} == offered - {"_target_"}, section


def test_gpus_and_precisions_are_offered() -> None:
    assert definition("cluster")["properties"]["gpu"]["examples"] == list(gpu_names())
    assert definition("mixed_precision")["examples"] == list(named_precisions())


# --- the schema and the loader agree ---------------------------------------------------------------


def valid(recipe: Any) -> bool:
    return bool(VALIDATOR.is_valid(recipe))


def accepted(recipe: Any) -> bool:
    try:
        recipe_from_mapping(recipe)
    except RecipeError:
        return False
    return True


BIG = 2**63 - 1
NAMES = ["p2p", "p2p,a2a", "", ["attn", " mlp"], [], [{"_name_": "attn"}], ["CudaGraphScope.attn", ""]]
LAYERS: list[Any] = [
    {},
    {"_target_": "TransformerLayerTPOverlapCfg", "qkv_fprop": None},
    {"qkv_fprop": {"_target_": "x", "method": "ring_exchange", "num_sm": 1, "fp8_buf": [False], "cga": None}},
]
GOOD: dict[str, list[Any]] = {
    "size": [1, BIG],
    "count": [0, BIG],
    "integer": [-BIG, -1, 0, BIG],
    "number": [1, 0.5, BIG],
    "flag": [True, False],
    "text": ["", "h100"],
    "version": ["2.10", "no version"],
    "names": NAMES,
    "sizes": [[], [1, 8], [2] * 16],
    "anything": [0, False, "x" * 4_000, [[1]], {"a": None}],
    "tp_comm_overlap": [True, False, "auto"],
    "tp_comm_overlap_cfg": ["auto", "ub.yaml", *LAYERS],
    "tp_comm_bootstrap_backend": ["nccl", ""],
}
WRONG: dict[str, list[Any]] = {
    "size": [0, -1, 1.5, "8", True, [8], {"a": 1}],
    "count": [-1, 0.5, "0", False, []],
    "integer": [1.5, "1", True, []],
    "number": [0, -1.5, "1", True],
    "flag": [0, 1, "true", "yes", [], {}],
    "text": [1, 1.5, True, [], {}],
    "version": [1, 2.5, True, [], {}],
    "choice": ["no_such", "", 1, True, []],
    "names": [1, True, {"a": 1}, [1], [None], [[]], [{"_name_": 1}], [{}]],
    "sizes": [1, "8", [0], [1.5], ["8"], [True], [None], [2] * 17],
    "anything": ["x" * 4_001],
    "tp_comm_overlap": ["yes", 1, 0, [], {}],
    "tp_comm_overlap_cfg": [5, True, [], {"qkv_fprop": "bulk"}, {"qkv_fprop": {"num_sm": {}}}, {"qkv_fprop": 1}],
    "tp_comm_bootstrap_backend": [1, True, []],
}


@cache
def fields() -> dict[tuple[str, str], tuple[str, list[Any]]]:
    """Section and key -> its kind, and values that are right there."""
    found: dict[tuple[str, str], tuple[str, list[Any]]] = {}
    for section, dataclass in SECTIONS.items():
        for key, spec in dataclass.__dataclass_fields__.items():
            if "doc" in spec.metadata:
                kind = spec.metadata.get("kind", key)
                found[section, key] = kind, GOOD.get(kind) or list(spec.metadata["choices"])
    return found


def test_every_kind_is_tested() -> None:
    assert {kind for kind, _ in fields().values()} == set(WRONG)


@pytest.mark.parametrize(("section", "key"), fields())
def test_what_fits_a_field_is_valid_and_what_does_not_is_not(section: str, key: str) -> None:
    kind, good = fields()[section, key]
    for head in ({}, {"_target_": "megatron.bridge.training.config.ConfigContainer"}):
        for value in (None, *good):
            recipe = {**head, section: {key: value}}
            assert valid(recipe) and accepted(recipe), recipe
            refers = {**head, section: {key: "${logger.log_interval}"}, "logger": {"log_interval": value}}
            assert valid(refers) and accepted(refers), refers
        for value in WRONG[kind]:
            recipe = {**head, section: {key: value}}
            assert not valid(recipe) and not accepted(recipe), recipe


WHOLE: dict[str, tuple[list[Any], list[Any]]] = {
    "cluster": ([None, {}, {"_target_": 5}], [5, True, "h100", []]),
    "comm_overlap": ([None, {}], [True, "auto", []]),
    "mixed_precision": (
        [None, {}, "bf16_mixed", "bf16-with_fp8-delayed-scaling_mixed"],
        ["bf16_mixe", "BF16_mixed", "", 5, []],
    ),
    "peft": ([None, {}, "lora", "LoRA", "canonical_lora", "None", "full"], ["loora", "lora ", "", 5, True, []]),
    "env_vars": (
        [None, {}, {"A": "", "B": 1, "C": 0.5, "D": False, "_target_": None}],
        [{"A": None}, {"A": []}, {"A": {}}, {"": "x"}, "A=1", 5, []],
    ),
    "logger": ([None, {}, {"_target_": []}, 5, "text", []], [{"a": 1}]),  # not read: only its keys are looked at
    "modle": ([], [None, {}, 5]),
}


@pytest.mark.parametrize("section", WHOLE)
def test_forms_of_a_whole_section(section: str) -> None:
    good, wrong = WHOLE[section]
    for value in good:
        assert valid({section: value}) and accepted({section: value}), value
    for value in wrong:
        assert not valid({section: value}) and not accepted({section: value}), value


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 20)
    | st.floats(-2, 20).filter(lambda number: not number.is_integer())
    | st.text("aZ_-.,/ \n<é", max_size=5)
    | st.sampled_from(["auto", "p2p", "1", "true"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["_target_", "_name_", "a", "", "num_layers", "qkv_fprop"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)
KEYS = [
    *fields(),
    *((section, key) for section in known_keys().sections for key in sorted(known_keys().keys(section))[::20]),
]
NO_SUCH = [("model", "num_layer"), ("logger", "a"), ("cluster", "gpus"), ("comm_overlap", "name"), ("modle", "a")]


@st.composite
def values(draw: st.DrawFn, section: str, key: str) -> Any:
    kind, good = fields().get((section, key), ("", [None]))
    if not kind:
        return draw(JSON)
    how = draw(st.integers(0, 9))
    return draw(st.sampled_from(WRONG[kind]) if how == 8 else JSON if how == 9 else st.sampled_from([*good, None]))


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    """A few fields with mostly good values; now and then a key that nobody knows, or a section of another form."""
    recipe: dict[str, Any] = {}
    for section, key in draw(st.lists(st.sampled_from(KEYS), max_size=4, unique=True)):
        body = recipe.setdefault(section, {})
        if section == "model" and key != "transformer" and draw(st.booleans()):
            body = body.setdefault("transformer", {})
        if isinstance(body, dict):
            body[key] = draw(values(section, key))
    if draw(st.integers(0, 7)) == 7:
        section, key = draw(st.sampled_from(NO_SUCH))
        recipe.setdefault(section, {})[key] = draw(JSON)
    if draw(st.integers(0, 3)) == 3:
        section = draw(st.sampled_from(list(WHOLE)))
        good, wrong = WHOLE[section]
        recipe[section] = draw(st.sampled_from([*good, *wrong]) | JSON)
    if draw(st.integers(0, 3)) == 3:
        (recipe if draw(st.booleans()) else recipe.setdefault("model", {}))["_target_"] = "megatron.bridge.AnyClass"
    return recipe


@settings(max_examples=600, deadline=None, derandomize=True)
@given(recipes())
def test_a_recipe_is_valid_when_the_loader_takes_it(recipe: dict[str, Any]) -> None:
    assert valid(recipe) == accepted(recipe)


# --- where they do not agree, and why ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "by_schema", "by_loader"),
    [
        # JSON Schema has one kind of number: 8.0 is a whole one.
        ({"cluster": {"num_gpus": 8.0}}, True, False),
        # A schema cannot look at what a reference refers to, nor at each reference inside a text.
        ({"cluster": {"num_gpus": "${cluster.gpu}", "gpu": "h100"}}, True, False),
        ({"cluster": {"num_gpus": "${cluster.no_such}"}}, True, False),
        ({"cluster": {"gpu": "${oc.env:GPU}"}}, True, False),
        # Nor at two places at once: what stands on the model counts, and the other is not looked at.
        ({"model": {"num_layers": 2, "transformer": {"num_layers": 0}}}, False, True),
        ({"model": {"transformer": {"transformer": 5}}}, False, True),
        # Limits against hostile files are the loader's.
        ({"env_vars": {"A": 2**63}}, True, False),
        ({"env_vars": {"A": "x" * 300_000}}, True, False),
    ],
)
def test_argued_exceptions(recipe: dict[str, Any], by_schema: bool, by_loader: bool) -> None:
    assert (valid(recipe), accepted(recipe)) == (by_schema, by_loader)


@pytest.mark.parametrize(
    "recipe", [{"model": {"num_layers": "${oc.env:N}"}}, {"model": {"bf16": "${"}}, {"ddp": "${a b}"}]
)
def test_what_is_no_reference_is_refused_where_a_typed_value_belongs(recipe: dict[str, Any]) -> None:
    assert not valid(recipe) and not accepted(recipe)
