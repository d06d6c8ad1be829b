"""Which keys a recipe may have: strict when written by hand, lenient in a dump, by version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlapkit import RecipeError, load_recipe, resolve
from overlapkit.recipe import recipe_from_mapping

TEXT = """\
cluster:
  gpu: h100
  num_gpus: 8
model:
  tensor_model_parallel_size: 2
  # a comment
  seqence_parallel: true
"""
HEAD = {"cluster": {"gpu": "h100", "num_gpus": 8}}
DUMP = {
    **HEAD,
    "_target_": "megatron.bridge.training.config.ConfigContainer",
    "model": {"_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider", "tensor_model_parallel_size": 2},
    "comm_overlap": {"_target_": "megatron.bridge.training.comm_overlap.CommOverlapConfig", "tp_comm_overlap": True},
}


def refused(recipe: Any, *overrides: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        resolve(recipe, overrides)
    return caught.value


# --- by hand -------------------------------------------------------------------------------------


def test_an_unknown_key_names_file_line_and_the_nearest_key(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT)
    assert str(refused(path)) == (
        f"{path}:7: model.seqence_parallel: unknown key; did you mean model.sequence_parallel?"
    )


@pytest.mark.parametrize(
    ("recipe", "path", "hint"),
    [
        ({"modle": {}}, "modle", "did you mean model?"),
        ({"cluster": {"num_gpu": 8}}, "cluster.num_gpu", "did you mean cluster.num_gpus?"),
        ({"software": {"pytorch": "2.10"}}, "software.pytorch", "did you mean software.torch?"),
        (
            {"comm_overlap": {"tp_overlap": True}},
            "comm_overlap.tp_overlap",
            "did you mean comm_overlap.tp_comm_overlap?",
        ),
        ({"train": {"tensor_model_parallel_size": 2}}, "train.tensor_model_parallel_size", "it belongs to model"),
        (
            {"model": {"micro_batch_size": 2}},
            "model.micro_batch_size",
            "it belongs to train: write train.micro_batch_size",
        ),
        ({"model": {"overlap_grad_reduce": True}}, "model.overlap_grad_reduce", "it belongs to comm_overlap"),
        ({"model": {"num_gpus": 8}}, "model.num_gpus", "it belongs to cluster"),
        ({"hidden_size": 8}, "hidden_size", "write model.hidden_size"),
        ({"model": {"zzzzzz": 1}}, "model.zzzzzz", None),
        ({"checkpoint": {"sav": 1}}, "checkpoint.sav", "did you mean checkpoint.save?"),  # a section we do not read
        ({1: {}}, "1", "sections are checkpoint, cluster, comm_overlap,"),
        ({"parallelism": {}}, "parallelism", "sections are "),
        ({"model": {"tp": 2}}, "model.tp", "did you mean model.tensor_model_parallel_size?"),
        ({"cluster": {"num_nodes": 2}}, "cluster.num_nodes", "did you mean cluster.num_gpus (the GPUs of all nodes)?"),
        ({"model": {"swiglu": True}}, "model.swiglu", "did you mean model.gated_linear_unit?"),
        # A flag that turns something off is not taken for the field that turns it on.
        ({"model": {"disable_bias_linear": True}}, "model.disable_bias_linear", "write model.add_bias_linear: false"),
        (
            {"model": {"untie_embeddings_and_output_weights": True}},
            "model.untie_embeddings_and_output_weights",
            "write model.share_embeddings_and_output_weights: false",
        ),
    ],
)
def test_unknown_keys(recipe: dict[Any, Any], path: str, hint: str | None) -> None:
    error = refused({**HEAD, **recipe})
    assert error.path == path
    assert error.problem in ("unknown key", "unknown section")
    assert error.hint is None if hint is None else hint in (error.hint or "")


def test_an_unknown_key_in_an_override_names_the_command_line() -> None:
    error = refused(HEAD, "model.tensor_parallel_size=2")
    assert str(error) == (
        "command line: model.tensor_parallel_size: unknown key; did you mean model.tensor_model_parallel_size?"
    )


def test_variables_are_free() -> None:
    assert resolve({**HEAD, "env_vars": {"ANY_NAME_AT_ALL": 1}}).ok


@pytest.mark.parametrize("section", ["logger", "checkpoint", "scheduler", "rng", "tokenizer"])
def test_other_sections_of_bridge_are_known(section: str) -> None:
    assert resolve({**HEAD, section: {}}).ok


# --- by version ----------------------------------------------------------------------------------


def foreign(bridge: str, recipe: dict[str, Any], *overrides: str) -> list[str]:
    plan = resolve({**recipe, "software": {"megatron_bridge": bridge}}, overrides)
    return [decision.subject for decision in plan.decisions if decision.code == "CFG001"]


def test_a_key_of_another_version_is_a_warning() -> None:
    recipe = {**HEAD, "model": {"cuda_graph_modules": ["attn"]}}
    assert foreign("0.3.1", recipe) == ["model.cuda_graph_modules"]
    assert foreign("0.6.2", recipe) == []
    assert foreign("0.4.0", recipe) == []  # between two versions of which one has it


def test_a_dumps_keys_are_its_versions_but_an_override_is_not() -> None:
    dump = {**DUMP, "model": {**DUMP["model"], "cuda_graph_modules": ["attn"]}}
    assert foreign("0.3.1", dump) == []
    assert foreign("0.3.1", DUMP, "model.cuda_graph_modules=[attn]") == ["model.cuda_graph_modules"]


# --- dumps ---------------------------------------------------------------------------------------


def test_a_dumps_other_keys_pass() -> None:
    plan = resolve({**DUMP, "new_section": {"a": 1}, "model": {**DUMP["model"], "new_key": {"b": [1]}}})
    assert plan.parallelism.tp == 2


def test_our_own_sections_are_strict_in_a_dump_too() -> None:
    assert refused({**DUMP, "cluster": {"gpus": 8}}).path == "cluster.gpus"


@pytest.mark.parametrize(
    "override",
    ["model.tensor_model_paralel_size=4", "modle.x=1", "comm_overlap.bucketsize=1", "comm_overlap={bucketsize: 1}"],
)
def test_a_misspelt_override_of_a_dump_does_not_vanish(override: str) -> None:
    error = refused(DUMP, override)
    assert error.source == "command line"
    assert "unknown" in error.problem


def test_a_target_is_data(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    dump = {**DUMP, "model": {"_target_": "os.mkdir", "_args_": [str(proof)], "path": str(proof)}}
    resolve(dump)
    assert not proof.exists()
    assert resolve({**DUMP, "model": {"_target_": 5}}).ok


def test_in_a_dump_the_overrides_are_what_the_user_wrote() -> None:
    assert recipe_from_mapping(DUMP).written == frozenset()
    overrides = ["model={num_layers: 2}", "comm_overlap.tp_comm_overlap_cfg.qkv_fprop.aggregate=true", "train=null"]
    written = recipe_from_mapping(DUMP, overrides).written
    assert "model.num_layers" in written
    assert "comm_overlap.tp_comm_overlap_cfg" in written
    assert "comm_overlap.tp_comm_overlap" not in written


def test_by_hand_everything_is_what_the_user_wrote() -> None:
    assert recipe_from_mapping({**HEAD, "model": {"num_layers": 2, "hidden_size": None}}).written == {
        "cluster.gpu",
        "cluster.num_gpus",
        "model.num_layers",
    }


# --- model.transformer, where newer versions keep the model's core -----------------------------------


def nested(**transformer: Any) -> dict[str, Any]:
    target = "megatron.training.models.gpt.GPTModelConfig"
    model = {"_target_": target, "seq_length": 4096, "transformer": {"_target_": "TransformerConfig", **transformer}}
    return {**DUMP, "model": model}


def test_its_fields_count_as_the_models() -> None:
    plan = resolve(nested(tensor_model_parallel_size=4, sequence_parallel=True))
    assert (plan.parallelism.tp, plan.parallelism.sequence_parallel) == (4, True)
    assert plan.settings["model.tp_comm_overlap"] is True


def test_the_models_own_fields_count_first() -> None:
    recipe = recipe_from_mapping(nested(seq_length=1, num_layers=2))
    assert (recipe.model.seq_length, recipe.model.num_layers) == (4096, 2)


@pytest.mark.parametrize("path", ["model.tensor_model_parallel_size", "model.transformer.tensor_model_parallel_size"])
def test_either_path_overrides(path: str) -> None:
    recipe = recipe_from_mapping(nested(tensor_model_parallel_size=4), [f"{path}=8"])
    assert recipe.model.tensor_model_parallel_size == 8
    assert "model.tensor_model_parallel_size" in recipe.written


def test_a_misspelt_override_below_it_does_not_vanish() -> None:
    assert refused(nested(), "model.transformer.num_layer=2").path == "model.num_layer"


def test_by_hand_it_is_strict_and_has_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("cluster: {num_gpus: 8}\nmodel:\n  transformer:\n    num_layers: 2\n    hidden_sizes: 3\n")
    assert str(refused(path)).startswith(f"{path}:5: model.hidden_sizes: unknown key")
    path.write_text("cluster: {num_gpus: 8}\nmodel:\n  transformer:\n    num_layers: 0\n")
    assert str(refused(path)).startswith(f"{path}:4: model.num_layers: expected a whole number")
    path.write_text("cluster: {num_gpus: 8}\nmodel:\n  transformer: {num_layers: 2}\n")
    assert load_recipe(path).model.num_layers == 2


def test_it_is_a_mapping() -> None:
    assert refused({**DUMP, "model": {"transformer": 5}}).path == "model.transformer"


def test_old_versions_do_not_have_it() -> None:
    recipe = {**HEAD, "model": {"transformer": {"num_layers": 2}}}
    assert foreign("0.3.1", recipe) == ["model.transformer"]
    assert foreign("0.6.2", recipe) == []
