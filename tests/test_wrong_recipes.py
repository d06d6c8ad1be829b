"""Two recipes full of mistakes that people make: every mistake is found, with who raises it, where, and what to do.

The plans printed for people are the texts beside the recipes; ``pytest tests/test_wrong_recipes.py --update-golden``
writes them again. In a recipe a comment numbers each mistake.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overlapkit import resolve
from overlapkit.cli import app
from overlapkit.plan import Decision, Plan

ROOT = Path(__file__).resolve().parent.parent
# What each numbered mistake is found by.
MISTAKES = {
    "qwen3_30b_a3b_bridge": {
        1: {"TP001", "TP008"},
        2: {"PP004", "EP006"},
        3: {"EP007", "EP008", "EP009"},
        4: {"DP010"},
        5: {"DP007"},
        6: {"ENV012"},
    },
    "llama3_70b_megatron_lm": {
        1: {"UB001"},
        2: {"TP002"},
        3: {"PP006"},
        4: {"UB102"},
        5: {"DP007", "DP008"},
        6: {"ENV011"},
    },
}
ERRORS = {
    "qwen3_30b_a3b_bridge": {
        "PP004": ("megatron-core", "first_forward"),
        "EP006": ("megatron-bridge", "validation"),
        "EP007": ("megatron-bridge", "validation"),
        "EP008": ("megatron-bridge", "validation"),
        "EP009": ("megatron-bridge", "validation"),
    },
    "llama3_70b_megatron_lm": {
        "TP002": ("megatron-lm", "validation"),
        "PP006": ("megatron-core", "construction"),
        "UB001": ("transformer-engine", "initialize_ub"),
        "DP007": ("megatron-lm", "validation"),
        "DP008": ("megatron-lm", "validation"),
        "ENV011": ("megatron-lm", "validation"),
    },
}
# What mends each mistake; with the old driver and UB_SKIPMC=1 a warning would stay.
REMEDIES = {
    "qwen3_30b_a3b_bridge": (
        "comm_overlap.tp_comm_overlap=false",
        "model.sequence_parallel=false",
        "model.virtual_pipeline_model_parallel_size=12",
        "model.recompute_granularity=selective",
        "model.recompute_method=null",
        "model.recompute_num_layers=null",
        "ddp.grad_reduce_in_fp32=null",
        "mixed_precision.grad_reduce_in_fp32=false",
        "comm_overlap.overlap_grad_reduce=true",
        "env_vars.CUDA_DEVICE_MAX_CONNECTIONS=8",
    ),
    "llama3_70b_megatron_lm": (
        "cluster.driver_version=535.183.06",
        "model.sequence_parallel=true",
        "model.virtual_pipeline_model_parallel_size=5",
        "comm_overlap.tp_comm_overlap_cfg=auto",
        "comm_overlap.overlap_grad_reduce=true",
        "ddp.use_distributed_optimizer=true",
        "env_vars.CUDA_DEVICE_MAX_CONNECTIONS=1",
    ),
}


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan names its recipe as the command did: relative to the checkout."""
    monkeypatch.chdir(ROOT)


def path_of(recipe: str) -> str:
    return f"tests/wrong_recipes/{recipe}.yaml"


def findings(plan: Plan) -> list[Decision]:
    return [decision for decision in plan.decisions if decision.severity != "info"]


def test_every_wrong_recipe_has_its_mistakes() -> None:
    assert {path.stem for path in (ROOT / "tests/wrong_recipes").iterdir()} == set(MISTAKES)


@pytest.mark.parametrize("recipe", MISTAKES)
def test_printed_plan_is_golden(recipe: str, request: pytest.FixtureRequest) -> None:
    """The command prints all that is wrong and exits with 1."""
    done = CliRunner().invoke(app, ["resolve", path_of(recipe)])
    assert done.exit_code == 1, done.output
    golden = ROOT / f"tests/wrong_recipes/{recipe}.txt"
    if request.config.getoption("--update-golden"):
        golden.write_text(done.stdout, encoding="utf-8", newline="\n")
    assert done.stdout == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("recipe", MISTAKES)
def test_comments_number_the_mistakes(recipe: str) -> None:
    text = Path(path_of(recipe)).read_text(encoding="utf-8")
    assert sorted(int(number) for number in re.findall(r"  # (\d)\. ", text)) == list(MISTAKES[recipe])


@pytest.mark.parametrize("recipe", MISTAKES)
def test_all_mistakes_are_found_and_nothing_else_is(recipe: str) -> None:
    assert {decision.code for decision in findings(resolve(path_of(recipe)))} == set().union(*MISTAKES[recipe].values())


@pytest.mark.parametrize("recipe", MISTAKES)
def test_errors_say_who_raises_them_and_where(recipe: str) -> None:
    plan = resolve(path_of(recipe))
    raised = {d.code: (d.raised_by, d.raised_at) for d in plan.decisions if d.severity == "error"}
    assert raised == ERRORS[recipe]
    assert not plan.ok


@pytest.mark.parametrize("recipe", MISTAKES)
def test_every_finding_has_a_fix(recipe: str) -> None:
    assert [decision.code for decision in findings(resolve(path_of(recipe))) if not decision.fix] == []


@pytest.mark.parametrize("recipe", MISTAKES)
def test_remedies_are_all_that_it_needs(recipe: str) -> None:
    assert findings(resolve(path_of(recipe), REMEDIES[recipe])) == []
