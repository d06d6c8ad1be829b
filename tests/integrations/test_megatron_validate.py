"""The installed megatron-core's own word: ``validate``, and what it says without the package."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.transformer import TransformerConfig
from typer.testing import CliRunner

from overlapkit import RecipeError, resolve, resolver
from overlapkit.cli import app
from overlapkit.facts import Facts
from overlapkit.integrations.megatron import from_megatron, validate
from overlapkit.integrations.megatron.packages import megatron_core
from overlapkit.plan import Decision, Plan
from overlapkit.rules import documented

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = megatron.core.__version__
BASE: dict[str, Any] = {
    "cluster": {"gpu": "h100", "num_gpus": 16},
    "software": {"framework": "megatron-lm", "megatron_core": HERE, "transformer_engine": "2.12", "torch": "2.10.0"},
    "model": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "num_layers": 8,
        "hidden_size": 512,
        "num_attention_heads": 8,
    },
}


def with_model(**fields: Any) -> dict[str, Any]:
    recipe = copy.deepcopy(BASE)
    recipe["model"] |= fields
    return recipe


def new(plan: Plan, code: str) -> list[Decision]:
    return [decision for decision in plan.decisions if decision.code == code]


# What a constructor refuses.
RECOMPUTE = {"recompute_granularity": "full"}


@pytest.fixture
def no_rule_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no rule were about how layers are recomputed: what Megatron-Core says then is news."""

    def without(facts: Facts) -> Plan:
        plan = plan_of(facts)
        return replace(plan, decisions=tuple(d for d in plan.decisions if "recompute" not in d.subject))

    plan_of = resolver.plan
    monkeypatch.setattr(resolver, "plan", without)


def test_what_the_constructors_accept_is_the_plan_as_it_was() -> None:
    assert validate(BASE) == resolve(BASE)
    assert validate(BASE, ["model.num_layers=4"]) == resolve(BASE, ["model.num_layers=4"])


@pytest.mark.usefixtures("no_rule_knows")
def test_a_refusal_is_an_error_with_the_real_message_and_place() -> None:
    recipe = with_model(**RECOMPUTE)
    assert resolve(recipe).ok
    plan = validate(recipe)
    (decision,) = new(plan, "CFG018")
    assert not plan.ok
    assert (decision.severity, decision.raised_by, decision.raised_at) == ("error", "megatron-core", "validation")
    assert decision.subject == "model"
    assert 'recompute_method must be "block" or "uniform"' in decision.because
    assert decision.source.startswith(f"megatron-core {HERE} transformer/transformer_config.py:")
    assert plan.decisions[:-1] == resolve(recipe).decisions
    assert plan.settings == resolve(recipe).settings


def test_the_codes_have_pages() -> None:
    assert {"CFG018", "CFG019"} < set(documented())


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"num_query_groups": 3}, "CFG006", "num_query_groups (3) must be a multiple or divisor of tensor_model"),
        (
            {"wgrad_deferral_limit": -1, "defer_embedding_wgrad_compute": True},
            "PP011",
            "Wgrad deferral limit should be greater",
        ),
    ],
)
def test_what_a_rule_says_already_is_told_in_megatron_cores_words_too(
    fields: dict[str, Any], code: str, said: str
) -> None:
    plan = validate(with_model(**fields))
    assert [decision.code for decision in plan.decisions if decision.severity == "error"][-2:] == [code, "CFG018"]
    (decision,) = new(plan, "CFG018")
    assert said in decision.because
    assert decision.raised_by == "megatron-core"


@pytest.mark.usefixtures("no_rule_knows")
def test_an_error_about_something_else_hides_no_refusal() -> None:
    recipe = {**with_model(**RECOMPUTE), "env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}}
    found = {decision.code for decision in validate(recipe).decisions if decision.severity == "error"}
    assert {"ENV011", "CFG018"} <= found


# --- fields that no rule reads ------------------------------------------------------------------------

MOE = {
    "num_moe_experts": 8,
    "expert_model_parallel_size": 2,
    "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall",
    "recompute_granularity": "selective",
    "recompute_modules": ["moe_act"],
}


def test_they_are_constructed_with_too() -> None:
    assert "only supported with moe_grouped_gemm" in new(validate(with_model(**MOE)), "CFG018")[0].because
    recipe = with_model(**MOE, moe_grouped_gemm=True)
    assert validate(recipe) == resolve(recipe)
    (refused,) = new(validate(with_model(cpu_offloading=True, cpu_offloading_num_layers=9)), "CFG018")
    assert "CPU offloading" in refused.because
    optimizer = {**BASE, "optimizer": {"optimizer_cpu_offload": True, "lr": 1e-4}}
    assert validate(optimizer) == resolve(optimizer)


def test_so_are_those_of_live_objects() -> None:
    sizes = {**BASE["model"], "bf16": True, "pipeline_dtype": torch.bfloat16}
    made = TransformerConfig(**sizes, **MOE, moe_grouped_gemm=True)
    software = BASE["software"]
    recipe = from_megatron(made, gpu="h100", num_gpus=16, software=software, environ={})
    assert recipe.model.moe_grouped_gemm is True
    assert new(validate(recipe), "CFG018") == []


@pytest.mark.parametrize(("flag", "code"), [("--moe-grouped-gemm", 0), ("", 1), ("--attention-dropout $UNKNOWN", 1)])
def test_so_are_the_flags_of_a_launch_script(flag: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "pretrain.sh"
    moe = "--num-experts 8 --disable-bias-linear --recompute-granularity selective --recompute-modules moe_act"
    sizes = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 1 --global-batch-size 8"
    script.write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 {sizes} {moe} {flag}\n")
    done = command("--megatron-lm-args", str(script), "cluster.gpu=h100", "cluster.num_gpus=8")
    assert done.exit_code == code
    assert ("only supported with moe_grouped_gemm" in " ".join(done.stdout.split())) is bool(code)


@pytest.mark.parametrize(
    "field",
    [
        {"apply_rope_fusion": True},  # kernels of this machine's Transformer Engine
        {"moe_permute_fusion": True, **MOE, "moe_grouped_gemm": True},
        {"activation_func_fp8_input_store": True},  # asks for an activation function, which no recipe holds
        {"attention_backend": "AttnBackend.auto"},  # a form of its class
        {"activation_func": "silu"},
        {"init_method_std": "0.02"},
        {"moe_router_dtype": None},
    ],
)
def test_but_not_those_whose_check_is_about_something_else(field: dict[str, Any]) -> None:
    assert new(validate(with_model(**field)), "CFG018") == []


# --- other releases -----------------------------------------------------------------------------------


def test_another_release_is_told_and_its_refusal_is_a_warning() -> None:
    """cuda_graph_impl=full_iteration came with 0.18: the plan's release accepts it."""
    recipe = with_model(cuda_graph_impl="full_iteration")
    recipe["software"]["megatron_core"] = "0.19.2"
    plan = validate(recipe)
    (refused,) = new(plan, "CFG018")
    assert refused.severity == "warning"
    assert "Invalid cuda graph implementation" in refused.because
    assert refused.fix is not None and refused.fix.endswith("or validate where megatron-core 0.19.2 is installed")
    (told,) = new(plan, "CFG019")
    assert f"megatron-core {HERE} is installed here, and the plan is for 0.19.2" in told.because
    assert plan.ok


@pytest.mark.usefixtures("no_rule_knows")
def test_where_the_recipe_names_no_release_the_installed_one_counts() -> None:
    recipe = {**with_model(**RECOMPUTE), "software": {"framework": "megatron-lm"}}
    plan = validate(recipe)
    assert [decision.severity for decision in new(plan, "CFG018")] == ["error"]
    assert len(new(plan, "CFG019")) == 1


@pytest.mark.parametrize("value", ["a\0b", "a\udc80b"])
def test_a_variable_that_no_process_can_have_is_not_megatron_cores_refusal(value: str) -> None:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_CUDA_ALLOC_CONF": value + "\0"}
    before = dict(os.environ)
    plan = validate({**BASE, "env_vars": environment})
    (told,) = new(plan, "CFG019")
    assert "nothing was constructed: no variable can have this value" in told.because
    assert new(plan, "CFG018") == []
    assert dict(os.environ) == before


# --- sizes that are not given -------------------------------------------------------------------------


@pytest.mark.usefixtures("no_rule_knows")
@pytest.mark.parametrize("fields", [{}, {"virtual_pipeline_model_parallel_size": 3}, {"num_query_groups": 6}])
def test_sizes_that_are_missing_are_filled_in_such_that_they_decide_nothing(fields: dict[str, Any]) -> None:
    recipe = with_model(**fields)
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        del recipe["model"][name]
    assert validate(recipe) == resolve(recipe)
    recipe["model"] |= RECOMPUTE
    assert len(new(validate(recipe), "CFG018")) == 1


def test_where_no_number_of_layers_is_neutral_it_says_that_nothing_was_constructed() -> None:
    recipe = with_model(num_layers_in_first_pipeline_stage=3)
    del recipe["model"]["num_layers"]
    (told,) = new(validate(recipe), "CFG019")
    assert "nothing was constructed: model.num_layers is not given" in told.because


def test_an_unusable_recipe_is_one_line() -> None:
    with pytest.raises(RecipeError, match="not a known GPU"):
        validate(BASE, ["cluster.gpu=h1000"])


# --- without the package ------------------------------------------------------------------------------


def test_the_package_is_the_installed_one() -> None:
    assert megatron_core().__version__ == HERE


def in_another_process(tmp_path: Path, package: str, text: str) -> subprocess.CompletedProcess[str]:
    """``validate`` where importing ``package`` runs ``text``."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(text)
    code = (
        "from overlapkit.errors import MissingPackageError\nfrom overlapkit.integrations.megatron import validate\n"
        f"try: validate({str(ROOT / 'recipes' / 'llama2_7b_32xh20.yaml')!r})\n"
        "except MissingPackageError as error: print(error)"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_a_missing_package_is_one_line_that_names_the_extra(tmp_path: Path) -> None:
    done = in_another_process(tmp_path, "megatron", "raise ModuleNotFoundError(\"No module named 'megatron'\")")
    expected = "megatron-core cannot be imported here (No module named 'megatron'): pip install 'overlapkit[megatron]'"
    assert done.stdout.splitlines() == [expected]


def test_transformer_engines_bare_metapackage_is_named(tmp_path: Path) -> None:
    """It raises what megatron-core does not catch."""
    text = "raise RuntimeError('Found empty `transformer-engine` meta package installed.\\nInstall it with extras')"
    (line,) = in_another_process(tmp_path, "transformer_engine", text).stdout.splitlines()
    assert line.startswith("megatron-core cannot be imported here (RuntimeError: Found empty `transformer-engine` meta")
    assert line.endswith("a broken Transformer Engine keeps it from importing: pip uninstall transformer-engine")


def test_what_a_package_prints_is_no_part_of_the_answer(tmp_path: Path) -> None:
    done = in_another_process(tmp_path, "megatron", "print('welcome'); raise ImportError('not today')")
    expected = "megatron-core cannot be imported here (not today): pip install 'overlapkit[megatron]'"
    assert done.stdout.splitlines() == [expected]
    assert "welcome" in done.stderr


def test_nor_is_what_its_constructors_print(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def talkative(self: Any) -> None:
        print("welcome")
        constructed(self)

    constructed = TransformerConfig.__post_init__
    monkeypatch.setattr(TransformerConfig, "__post_init__", talkative)
    validate(BASE)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "welcome\n")


# --- the command --------------------------------------------------------------------------------------


RECIPE = str(ROOT / "recipes" / "llama2_7b_32xh20.yaml")
FULL = "model.recompute_granularity=full"


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["resolve", *arguments, "--validate"])


def test_the_command_is_content_with_what_the_package_accepts() -> None:
    done = command(RECIPE)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "CFG018" not in done.stdout


@pytest.mark.usefixtures("no_rule_knows")
def test_the_command_ends_with_one_at_a_refusal() -> None:
    done = command(RECIPE, FULL)
    assert done.exit_code == 1
    assert "CFG018" in done.stdout and "(megatron-core raises at validation)" in " ".join(done.stdout.split())
    decisions = json.loads(command(RECIPE, FULL, "--format", "json").stdout)["decisions"]
    assert [d["raised_by"] for d in decisions if d["code"] == "CFG018"] == ["megatron-core"]


@pytest.mark.usefixtures("no_rule_knows")
def test_every_outcome_of_a_launch_script_is_validated(tmp_path: Path) -> None:
    script = tmp_path / "pretrain.sh"
    sizes = "--num-layers 8 --hidden-size 512 --num-attention-heads 8"
    script.write_text(
        f'[ "$1" = full ] && MORE="--recompute-granularity full"\n'
        f"torchrun --nproc-per-node 8 pretrain_gpt.py {sizes} --micro-batch-size 1 --global-batch-size 8 $MORE\n"
    )
    arguments = ("--megatron-lm-args", str(script), "cluster.gpu=h100", "cluster.num_gpus=8")
    done = command(*arguments, "1=full")
    assert done.exit_code == 1
    assert "recompute_method must be" in " ".join(done.stdout.split())
    assert command(*arguments, "1=no").exit_code == 0
