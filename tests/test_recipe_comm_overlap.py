"""What absent and null mean: in ``comm_overlap`` and ``env_vars``, hand-written and in a dump."""

from __future__ import annotations

from typing import Any

import pytest

from overlapkit import Plan, RecipeError, resolve
from overlapkit.recipe import recipe_from_mapping
from overlapkit.recipe.sections import CommOverlap

ABSENT = object()
PRESET = "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"


def recipe(comm_overlap: Any = ABSENT, *, dump: bool = False, **sections: Any) -> dict[str, Any]:
    """A recipe for which TP overlap is legal, with a preset made for it."""
    value: dict[str, Any] = {
        "cluster": {"gpu": "h100", "num_gpus": 8},
        "model": {
            "tensor_model_parallel_size": 4,
            "sequence_parallel": True,
            "hidden_size": 8192,
            "seq_length": 8192,
        },
        "train": {"micro_batch_size": 1},
        "ddp": {"use_distributed_optimizer": True},
        **sections,
    }
    if dump:
        value["_target_"] = "megatron.bridge.training.config.ConfigContainer"
    if comm_overlap is not ABSENT:
        value["comm_overlap"] = comm_overlap
    return value


def plan(*arguments: Any, **keywords: Any) -> Plan:
    return resolve(recipe(*arguments, **keywords))


def written(*arguments: Any, **keywords: Any) -> CommOverlap | None:
    return recipe_from_mapping(recipe(*arguments, **keywords)).comm_overlap


@pytest.mark.parametrize("comm_overlap", [ABSENT, {}, {"tp_comm_overlap": "auto", "tp_comm_overlap_cfg": "auto"}])
def test_hand_written_and_absent_are_auto(comm_overlap: Any) -> None:
    assert written(comm_overlap) == CommOverlap(tp_comm_overlap="auto", tp_comm_overlap_cfg="auto")
    found = plan(comm_overlap)
    assert found.settings["model.tp_comm_overlap"] is True
    assert found.preset.name == PRESET


def test_auto_is_off_where_it_is_not_legal() -> None:
    found = resolve(recipe(), ["model.sequence_parallel=false"])
    assert found.settings["model.tp_comm_overlap"] is False
    assert found.ok and all(decision.severity == "info" for decision in found.decisions if decision.code == "TP002")


def test_null_cfg_is_transformer_engines_defaults() -> None:
    found = plan({"tp_comm_overlap_cfg": None})
    assert found.settings["model.tp_comm_overlap"] is True
    assert found.settings["model.tp_comm_overlap_cfg"] is None
    assert found.preset.match == "none"


@pytest.mark.parametrize("off", [False, None])
def test_false_and_null_are_off(off: bool | None) -> None:
    found = plan({"tp_comm_overlap": off, "tp_comm_overlap_cfg": PRESET})
    assert found.settings["model.tp_comm_overlap"] is False
    assert found.settings["model.tp_comm_overlap_cfg"] is None  # whatever was left lying there
    assert found.preset.match == "none"


def test_the_bootstrap_is_nccl_when_absent_and_none_when_null() -> None:
    assert plan().settings["model.tp_comm_bootstrap_backend"] == "nccl"
    assert plan({}).settings["model.tp_comm_bootstrap_backend"] == "nccl"
    assert plan({"tp_comm_bootstrap_backend": "mpi"}).settings["model.tp_comm_bootstrap_backend"] == "mpi"
    assert plan({"tp_comm_bootstrap_backend": None}).settings["model.tp_comm_bootstrap_backend"] is None


def test_any_other_null_is_not_set() -> None:
    fields = {name: None for name in CommOverlap.__dataclass_fields__ if not name.startswith("tp_comm")}
    assert written(fields) == written({})
    assert plan(fields).settings == plan({}).settings


def test_null_comm_overlap_resolves_nothing() -> None:
    raw = {
        "model": {"tensor_model_parallel_size": 4, "overlap_p2p_comm": True, "wgrad_deferral_limit": 7},
        "ddp": {"use_distributed_optimizer": True, "bucket_size": 5, "overlap_grad_reduce": False},
        "optimizer": {"overlap_param_gather": True},
    }
    settings = plan(None, **raw).settings
    assert settings["model.overlap_p2p_comm"] is True
    assert settings["model.wgrad_deferral_limit"] == 7
    assert settings["ddp.bucket_size"] == 5
    assert settings["ddp.overlap_grad_reduce"] is False
    assert settings["optimizer.overlap_param_gather"] is True
    assert settings["model.tp_comm_overlap"] is False
    assert resolve(recipe(), ["comm_overlap=null"]).settings["ddp.overlap_grad_reduce"] is False


def test_a_dump_without_the_section_has_none() -> None:
    assert written(dump=True) is None
    assert plan(dump=True).settings["ddp.overlap_grad_reduce"] is False


def test_what_a_dumps_section_lacks_has_bridges_default() -> None:
    found = written({"tp_comm_overlap": True}, dump=True)
    assert found == CommOverlap(tp_comm_overlap=True, tp_comm_overlap_cfg=None, tp_comm_bootstrap_backend="nccl")
    assert plan({"tp_comm_overlap": True}, dump=True).preset.match == "none"
    assert resolve(recipe(dump=True), ["comm_overlap.bucket_size=5"]).settings["model.tp_comm_overlap"] is False


def test_a_dump_may_ask_for_auto_by_an_override() -> None:
    found = resolve(recipe({"tp_comm_overlap": True}, dump=True), ["comm_overlap.tp_comm_overlap_cfg=auto"])
    assert found.preset.name == PRESET


def test_bridges_tuple_is_true() -> None:
    cfg = {
        "_target_": "megatron.bridge.training.comm_overlap.TransformerLayerTPOverlapCfg",
        "proj_fprop": {"_target_": "PipelineOverlapCfg", "method": "pipeline", "fp8_buf": [False]},
        "qkv_fprop": {"_target_": "RingExchangeOverlapCfg", "method": "ring_exchange", "fp8_buf": False},
        "qkv_wgrad": None,
    }
    found = plan({"tp_comm_overlap": True, "tp_comm_overlap_cfg": cfg}, dump=True)
    assert found.settings["model.tp_comm_overlap_cfg"] == {
        "proj_fprop": {"method": "pipeline", "fp8_buf": True},
        "qkv_fprop": {"method": "ring_exchange", "fp8_buf": False},
    }


@pytest.mark.parametrize(
    ("comm_overlap", "path"),
    [
        (True, "comm_overlap"),
        ([], "comm_overlap"),
        ({"tp_comm_overlap": "yes"}, "comm_overlap.tp_comm_overlap"),
        ({"tp_comm_overlap": 1}, "comm_overlap.tp_comm_overlap"),
        ({"tp_comm_overlap_cfg": 5}, "comm_overlap.tp_comm_overlap_cfg"),
        ({"tp_comm_overlap_cfg": {"qkv_fprop": "bulk"}}, "comm_overlap.tp_comm_overlap_cfg.qkv_fprop"),
        ({"tp_comm_overlap_cfg": {"qkv_fprop": {"num_sm": {}}}}, "comm_overlap.tp_comm_overlap_cfg.qkv_fprop.num_sm"),
        (
            {"tp_comm_overlap_cfg": {"qkv_fprop": {"num_sm": 1e999}}},
            "comm_overlap.tp_comm_overlap_cfg.qkv_fprop.num_sm",
        ),
        ({"tp_comm_bootstrap_backend": 1}, "comm_overlap.tp_comm_bootstrap_backend"),
        ({"bucket_size": 1.5}, "comm_overlap.bucket_size"),
        ({"overlap_grad_reduce": "true"}, "comm_overlap.overlap_grad_reduce"),
    ],
)
def test_wrong_values(comm_overlap: Any, path: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan(comm_overlap)
    assert caught.value.path == path


# --- env_vars ------------------------------------------------------------------------------------


def judged(found: Plan) -> list[str]:
    return [decision.code for decision in found.decisions if decision.subject.startswith("env_vars")]


@pytest.mark.parametrize("sections", [{}, {"env_vars": None}])
def test_without_env_vars_the_plans_own_are_taken_to_be_exported(sections: dict[str, Any]) -> None:
    found = plan(software={"framework": "megatron-lm"}, **sections)
    assert found.ok and judged(found) == []
    assert found.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_empty_env_vars_are_the_environment_and_judged() -> None:
    found = plan(software={"framework": "megatron-lm"}, env_vars={})
    assert not found.ok and "ENV011" in judged(found)
    assert found.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_the_users_variables_never_go_into_the_plans_env() -> None:
    found = plan(env_vars={"CUDA_DEVICE_MAX_CONNECTIONS": 8, "MINE": "x"})
    assert "MINE" not in found.env
    assert found.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_values_are_what_bridge_writes_into_the_environment() -> None:
    values = {"A": 1, "B": True, "C": 0.5, "D": "text", "E": ""}
    assert recipe_from_mapping(recipe(env_vars=values)).env_vars == {
        "A": "1", "B": "True", "C": "0.5", "D": "text", "E": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("env_vars", "path"),
    [
        ([], "env_vars"),
        ("A=1", "env_vars"),
        ({"A": None}, "env_vars.A"),
        ({"A": []}, "env_vars.A"),
        ({1: "x"}, "env_vars"),
        ({"": "x"}, "env_vars"),
    ],
)
def test_wrong_variables(env_vars: Any, path: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan(env_vars=env_vars)
    assert caught.value.path == path
