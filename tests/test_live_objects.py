"""Live objects of any kind: what a recipe reads of them, and a plan's settings written on all of them or none."""

from __future__ import annotations

from collections import UserList
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from comm_overlap_cases import ddp, model, optimizer
from omegaconf import OmegaConf

from overlapkit import RecipeError, resolve
from overlapkit.integrations.megatron import apply, from_megatron
from overlapkit.live_objects import plain, recipe_mapping, write_settings
from overlapkit.plan import Plan


class Whole(int):
    """A class of whole numbers of its own."""


class Scalar:
    """What numpy's booleans and torch's tensors of one element have in common."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        if isinstance(self.value, list):
            raise ValueError("only one element tensors can be converted")
        return self.value


# --- values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Whole(4), 4),
        (Fraction(1, 2), 0.5),
        (Scalar(True), True),
        (Scalar(8), 8),
        (Scalar([1, 2]), None),
        (Scalar(Scalar(8)), None),
        (UserList(["moe"]), ["moe"]),
        (OmegaConf.create(["moe", "core_attn"]), ["moe", "core_attn"]),
        (OmegaConf.create({"qkv_fprop": {"num_sm": 2}}), {"qkv_fprop": {"num_sm": 2}}),
        (b"moe", None),
        (float("nan"), None),
        (object(), None),
    ],
)
def test_a_value_is_read_as_what_it_stands_for(value: Any, expected: Any) -> None:
    found = plain(value)
    assert (found, type(found)) == (expected, type(expected))


def test_what_answers_to_everything_and_what_holds_itself_come_to_an_end() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    assert plain(Mock()) is None
    assert plain(MagicMock()) is None
    assert plain(circle)[0] == 1


def test_a_field_with_a_value_of_no_use_is_not_taken_for_one_that_is_not_set() -> None:
    """Left out it would be TP 1."""
    for owner in (model(tensor_model_parallel_size=object()), Mock(), MagicMock()):
        with pytest.raises(RecipeError, match=r"model\.\w+: expected"):
            from_megatron(owner, gpu="h100", num_gpus=8)


@dataclass
class Model:
    """As Megatron-Core's classes have a size that nobody has set, and fields that no rule reads."""

    tensor_model_parallel_size: int = 1
    hidden_size: int = 0
    layernorm_zero_centered_gamma: bool = True
    layernorm_epsilon: float = 0.1
    activation_func: Any = print


def test_what_no_rule_reads_of_a_dataclass_is_kept_for_the_constructors() -> None:
    recipe = from_megatron(Model(), gpu="h100", num_gpus=8)
    assert recipe.model.hidden_size is None
    assert recipe.others["model"] == {"layernorm_zero_centered_gamma": True, "layernorm_epsilon": 0.1}
    assert resolve(recipe).ok


def test_a_field_that_cannot_be_read_is_named() -> None:
    class Unreadable:
        @property
        def hidden_size(self) -> int:
            raise RuntimeError("not\nyet")

    with pytest.raises(RecipeError, match=r"model\.hidden_size: cannot be read: RuntimeError: not") as caught:
        recipe_mapping(model=Unreadable())
    assert "\n" not in str(caught.value)


# --- writing --------------------------------------------------------------------------------------------


def planned(**overlap: Any) -> Plan:
    layers = {"qkv_fprop": {"method": "ring_exchange", "num_sm": 2}}
    recipe = {
        "cluster": {"gpu": "h100", "num_gpus": 8},
        "software": {"megatron_bridge": "0.6.2"},
        "model": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
        "ddp": {"use_distributed_optimizer": True},
        "comm_overlap": {"tp_comm_overlap": True, "tp_comm_overlap_cfg": layers, **overlap},
    }
    return resolve(recipe)


def test_every_model_gets_userbuffers_of_its_own() -> None:
    plan, first, second = planned(), model(), model()
    apply(plan, first, None, None)
    first.tp_comm_overlap_cfg["qkv_fprop"]["num_sm"] = 9
    apply(plan, second, None, None)
    assert second.tp_comm_overlap_cfg["qkv_fprop"]["num_sm"] == 2
    assert plan.settings["model.tp_comm_overlap_cfg"]["qkv_fprop"]["num_sm"] == 2


class TakesNoBucketSize(SimpleNamespace):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "bucket_size":
            raise RuntimeError("locked\nfor good")
        super().__setattr__(name, value)


def test_where_one_object_takes_no_setting_none_has_changed() -> None:
    found = (model(), optimizer(), TakesNoBucketSize(**vars(ddp())))
    before = [dict(vars(owner)) for owner in found]
    with pytest.raises(RecipeError, match=r"ddp\.bucket_size: a TakesNoBucketSize does not take .*locked") as caught:
        write_settings(planned().settings, model=found[0], optimizer=found[1], ddp=found[2])
    assert "\n" not in str(caught.value)
    assert [dict(vars(owner)) for owner in found] == before


def test_an_attribute_that_was_not_there_is_gone_again() -> None:
    found = model()
    with pytest.raises(RecipeError):
        write_settings(planned().settings, model=found, ddp=TakesNoBucketSize(**vars(ddp())))
    assert vars(found) == vars(model())


# --- apply and from_megatron ----------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"decisions": []}, "plan.yaml", None])
def test_apply_takes_a_plan(given: Any) -> None:
    with pytest.raises(RecipeError, match=r"apply: .*is no plan; overlapkit\.resolve\(recipe\) returns one"):
        apply(given, model(), optimizer(), ddp())


def test_an_object_that_cannot_be_copied_is_refused() -> None:
    class Single(SimpleNamespace):
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("there is one of me")

    with pytest.raises(RecipeError, match=r"a Single cannot be copied.*there is one of me"):
        apply(planned(), Single(**vars(model())), optimizer(), ddp())


@dataclass(frozen=True)
class FrozenModel:
    tensor_model_parallel_size: int = 4
    sequence_parallel: bool = True
    tp_comm_overlap: bool = False


def test_a_frozen_model_is_read_and_not_written() -> None:
    recipe = from_megatron(FrozenModel(), gpu="h100", num_gpus=8)
    assert recipe.model.tensor_model_parallel_size == 4
    with pytest.raises(RecipeError, match=r"FrozenModel"):
        apply(planned(), FrozenModel(), optimizer(), ddp())


@pytest.mark.parametrize("given", [None, {}, ddp(), SimpleNamespace])
def test_what_is_no_model_is_refused(given: Any) -> None:
    with pytest.raises(RecipeError, match=r"model: .* has no tensor_model_parallel_size"):
        from_megatron(given, gpu="h100", num_gpus=8)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"software": "nemo:26.04"}, "software: expected a mapping"),
        ({"comm_overlap": "auto"}, "comm_overlap: expected a mapping"),
        ({"train": 7}, "train: expected a mapping"),
        ({"model": {"hidden_size": 7}}, "model: the objects and environ say it"),
        ({"env_vars": {"A": "b"}}, "env_vars: the objects and environ say it"),
    ],
)
def test_a_section_that_is_none_is_one_clear_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        from_megatron(model(), gpu="h100", num_gpus=8, **given)


def test_a_section_of_none_says_nothing() -> None:
    assert from_megatron(model(), gpu="h100", num_gpus=8, train=None, cluster=None).train.micro_batch_size is None
