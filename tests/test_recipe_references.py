"""``${section.key}`` refers to other keys of the recipe; nothing is run, nothing outside is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlapkit import RecipeError, load_recipe, resolve
from overlapkit.recipe import Recipe, recipe_from_mapping

SECRET = "HUSH"


def loaded(env_vars: dict[str, Any], **sections: Any) -> Recipe:
    return recipe_from_mapping({"cluster": {"gpu": "h100", "num_gpus": 8}, **sections, "env_vars": env_vars})


def value(text: str, **sections: Any) -> str:
    """What ``env_vars.A`` becomes."""
    variables = loaded({"A": text, "B": "b", "C": "c"}, **sections).env_vars
    assert variables is not None
    return variables["A"]


def refused(text: str, **sections: Any) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        loaded({"A": text, "B": "b"}, **sections)
    assert SECRET not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("${env_vars.B}", "b"),
        ("<${env_vars.B}${env_vars.C}>", "<bc>"),
        ("${ env_vars.B }", "b"),
        ("${env_vars[B]}", "b"),
        ("${.B}", "b"),  # beside itself
        ("${..cluster.gpu}", "h100"),  # one level up
        ("${cluster.num_gpus}", "8"),  # keeps its type: Bridge writes str(value)
        ("${model.cuda_graph_modules.1}", "mlp"),
        ("${model.cuda_graph_modules[0]}", "attn"),
        ("$", "$"),
        ("$(id) `id` $HOME", "$(id) `id` $HOME"),
        (r"\${env_vars.B}", "${env_vars.B}"),  # escaped
        (r"\\${env_vars.B}", r"\b"),  # an escaped backslash, then a reference
        (r"\\\${env_vars.B}", r"\${env_vars.B}"),
    ],
)
def test_references(text: str, becomes: str) -> None:
    assert value(text, model={"cuda_graph_modules": ["attn", "mlp"]}) == becomes


def test_a_reference_keeps_the_type() -> None:
    recipe = loaded(
        {},
        model={"tensor_model_parallel_size": "${cluster.num_gpus}", "sequence_parallel": "${model.bf16}", "bf16": True},
    )
    assert recipe.model.tensor_model_parallel_size == 8
    assert recipe.model.sequence_parallel is True


def test_a_whole_section_may_be_referred_to() -> None:
    recipe = loaded({}, ddp={"use_distributed_optimizer": True, "overlap_param_gather": False}, optimizer="${ddp}")
    assert recipe.optimizer.use_distributed_optimizer is True


def test_chains() -> None:
    assert value("${env_vars.B}", train={"micro_batch_size": "${cluster.num_gpus}"}) == "b"
    chain = {f"A{n}": f"${{env_vars.A{n - 1}}}" for n in range(1, 20)}
    assert (loaded({"A0": "x", **chain}).env_vars or {})["A19"] == "x"


# --- resolvers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("${oc.env:SECRET}", "oc.env"),
        ("${oc.env:SECRET,x}", "oc.env"),
        ("${ oc.env : SECRET }", "oc.env"),
        ("${\noc.env:SECRET}", "oc.env"),
        ("a ${env_vars.B} ${oc.env:SECRET}", "oc.env"),
        ("${oc.env:'SECRET'}", "oc.env"),
        ('${oc.env:SECRET,"{}"}', "oc.env"),  # a brace in quotes
        ("${oc.env:SECRET,{}}", "oc.env"),
        (r"\\${oc.env:SECRET}", "oc.env"),  # the backslash escapes the other one
        (r"\\\\${oc.env:SECRET}", "oc.env"),
        (r"\${env_vars.B} ${oc.env:SECRET}", "oc.env"),
        ("${oc.decode:${oc.env:SECRET}}", "oc.decode"),
        ("${oc.create:{}}", "oc.create"),
        ("${oc.select:env_vars.B}", "oc.select"),
        ("${oc.deprecated:env_vars.B}", "oc.deprecated"),
        ("${no_such:1}", "no_such"),
    ],
)
def test_resolvers_are_refused_by_name(text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    error = refused(text)
    assert error.path == "env_vars.A"
    assert error.problem == f"the resolver ${{{name}:…}} is not run"


@pytest.mark.parametrize(
    "text", ["${env_vars.${env_vars.B}}", "${env_vars.B", "${", "${env_vars.B${oc.env:SECRET}}", "${}"]
)
def test_nested_unclosed_and_empty_references_are_refused(text: str) -> None:
    assert refused(text).path == "env_vars.A"


@pytest.mark.parametrize("text", ["${'oc.env':SECRET}", "${[oc].env:SECRET}", "${a b}", "${a/b}", "${..}", "${a.}"])
def test_anything_else_is_no_reference(text: str) -> None:
    assert "is not a reference to a key" in refused(text).problem


# --- nothing there -------------------------------------------------------------------------------


def test_an_unknown_key_is_named_with_the_nearest() -> None:
    error = refused("${cluster.num_gpu}")
    assert error.problem == "${cluster.num_gpu} refers to no key"
    assert error.hint == "did you mean ${cluster.num_gpus}?"


@pytest.mark.parametrize(
    "text", ["${no.such}", "${env_vars.B.x}", "${cluster.num_gpus.0}", "${....x}", "${model.x.-1}"]
)
def test_references_to_nothing(text: str) -> None:
    assert "refers to no key" in refused(text).problem


def test_a_reference_does_not_reach_through_another() -> None:
    assert "refer to it directly" in refused("${optimizer.overlap_param_gather}", optimizer="${ddp}", ddp={}).problem


def test_a_mandatory_value_of_omegaconf_is_text() -> None:
    with pytest.raises(RecipeError, match=r"cluster\.num_gpus: expected a whole number of at least 1, got '\?\?\?'"):
        resolve({"cluster": {"num_gpus": "???"}, "env_vars": {"A": "${.B}", "B": "b"}})


# --- circles and bombs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variables",
    [
        {"A": "${env_vars.A}"},
        {"A": "${.A}"},
        {"A": "${env_vars.B}", "B": "x${env_vars.A}"},
        {"A": "${env_vars}"},
    ],
)
def test_circles(variables: dict[str, str]) -> None:
    with pytest.raises(RecipeError, match=r"goes in a circle: env_vars\.A -> "):
        loaded(variables)


def test_bombs() -> None:
    text = {f"A{n}": f"${{env_vars.A{n - 1}}}" * 2 for n in range(1, 40)}
    with pytest.raises(RecipeError, match="no recipe needs"):
        loaded({"A0": "x", **text})
    long = {f"A{n}": "${env_vars.A}" for n in range(20)}
    with pytest.raises(RecipeError, match="expand beyond what any recipe needs"):
        loaded({"A": "x" * 20_000, **long})
    chain = {f"A{n}": f"${{env_vars.A{n + 1}}}" for n in range(21)}
    with pytest.raises(RecipeError, match="a chain of more than 20 references"):
        loaded({**chain, "A21": "x"})
    many = {f"A{n}": "${cluster.gpu}" for n in range(1001)}
    with pytest.raises(RecipeError, match="more than 1,000 references"):
        loaded(many)


def test_keys_with_dots_in_them() -> None:
    variables = loaded({"a.b": "${.C}", "C": "c", "a": "x"}).env_vars
    assert variables == {"a.b": "c", "C": "c", "a": "x"}


# --- in files and overrides ----------------------------------------------------------------------


def test_errors_have_their_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("cluster:\n  num_gpus: 8\n  gpu: ${oc.env:GPU}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}:3: cluster.gpu: the resolver ${{oc.env:…}} is not run; write")
    with pytest.raises(RecipeError, match=r"^command line: cluster\.gpu: the resolver"):
        load_recipe(path, ["cluster.gpu=${oc.env:HOME}"])


def test_a_file_may_use_anchors_and_merges(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "cluster: {gpu: &gpu h100, num_gpus: &size 8}\n"
        "ddp: &flags {use_distributed_optimizer: true}\n"
        "optimizer: {<<: *flags, overlap_param_gather: false}\n"
        "model: {num_layers: *size}\n"
        "env_vars: {GPU: *gpu}\n"
    )
    recipe = load_recipe(path)
    assert recipe.optimizer.use_distributed_optimizer is True
    assert recipe.optimizer.overlap_param_gather is False
    assert recipe.model.num_layers == 8
    assert recipe.env_vars == {"GPU": "h100"}
