"""The environment of a process against a plan: missing, different, too late; in Python and from a launch script."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overlapkit import RecipeError, load_recipe, resolve
from overlapkit.integrations.megatron import EnvironmentFinding, check_environment, environment
from overlapkit.integrations.megatron.live_recipe import VARIABLES
from overlapkit.rules import registered

ROOT = Path(__file__).resolve().parent.parent
RECIPE = str(ROOT / "recipes" / "llama2_7b_32xh20.yaml")
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
BASE: dict[str, Any] = {
    "cluster": {"gpu": "h100", "num_gpus": 8},
    "software": {"framework": "megatron-lm", "megatron_core": "0.16.1"},
    "model": {"tensor_model_parallel_size": 8, "sequence_parallel": True},
}


def found(findings: tuple[EnvironmentFinding, ...]) -> dict[str, str]:
    return {finding.name: finding.problem for finding in findings}


# --- missing and different --------------------------------------------------------------------------


def test_the_plans_environment_is_what_a_process_needs() -> None:
    plan = resolve(RECIPE)
    assert check_environment(plan, dict(plan.env)) == ()
    assert check_environment(plan, {**plan.env, "PATH": "/bin"}) == ()


def test_each_variable_that_is_missing_or_different_is_a_finding() -> None:
    plan = resolve(RECIPE)
    assert found(check_environment(plan, {})) == dict.fromkeys(plan.env, "missing")
    (finding,) = check_environment(plan, {**plan.env, CONNECTIONS: "8"})
    assert finding == EnvironmentFinding(name=CONNECTIONS, expected="1", found="8", problem="different")
    assert str(finding) == f"{CONNECTIONS} is '8', the plan wants {CONNECTIONS}=1"


def test_a_recipe_is_resolved_from_a_path_a_mapping_or_loaded() -> None:
    expected = dict.fromkeys(resolve(RECIPE).env, "missing")
    assert found(check_environment(RECIPE, {})) == expected
    assert found(check_environment(load_recipe(RECIPE), {})) == expected
    assert CONNECTIONS in found(check_environment(BASE, {}))
    with pytest.raises(RecipeError, match="number of GPUs is missing"):
        check_environment({"model": {}}, {})


def test_the_recipes_own_variables_are_wanted_too_and_win() -> None:
    recipe = {**BASE, "env_vars": {CONNECTIONS: "1", "NVTE_FWD_LAYERNORM_SM_MARGIN": "8", "MY_OWN": "x"}}
    env = resolve(recipe).env
    assert env["NVTE_FWD_LAYERNORM_SM_MARGIN"] == "16"
    assert found(check_environment(recipe, {**env, "MY_OWN": "x"})) == {"NVTE_FWD_LAYERNORM_SM_MARGIN": "different"}
    assert check_environment(recipe, {**env, "NVTE_FWD_LAYERNORM_SM_MARGIN": "8", "MY_OWN": "x"}) == ()
    assert found(check_environment(recipe, {**env, "NVTE_FWD_LAYERNORM_SM_MARGIN": "8"})) == {"MY_OWN": "missing"}


def test_a_variable_that_the_plan_calls_an_error_is_not_wanted() -> None:
    recipe = {**BASE, "env_vars": {CONNECTIONS: "8"}}
    plan = resolve(recipe)
    assert [decision.code for decision in plan.decisions if decision.severity == "error"] == ["ENV011"]
    assert found(check_environment(recipe, {**plan.env, CONNECTIONS: "8"})) == {CONNECTIONS: "different"}
    assert check_environment(recipe, dict(plan.env)) == ()


# --- too late ---------------------------------------------------------------------------------------


@pytest.fixture
def cuda_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace(is_initialized=lambda: True))


def started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    file = tmp_path / "environ"
    file.write_bytes(first)
    monkeypatch.setattr(environment, "_FIRST_ENVIRONMENT", file)


@pytest.mark.usefixtures("cuda_started")
def test_what_was_set_after_the_start_is_too_late_once_cuda_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = resolve(RECIPE)
    for name, value in plan.env.items():
        monkeypatch.setenv(name, value)
    rest = [f"{name}={value}" for name, value in plan.env.items() if name != CONNECTIONS]
    started_with(tmp_path, monkeypatch, "\0".join([*rest, f"{CONNECTIONS}=8", ""]).encode())
    (finding,) = check_environment(plan)
    assert (finding.name, finding.problem) == (CONNECTIONS, "too late")
    assert str(finding).startswith(f"{CONNECTIONS}=1 was set after this process started, and CUDA has started")
    started_with(tmp_path, monkeypatch, "\0".join([*rest, f"{CONNECTIONS}=1", ""]).encode())
    assert check_environment(plan) == ()


def test_before_cuda_starts_nothing_is_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = resolve(RECIPE)
    for name, value in plan.env.items():
        monkeypatch.setenv(name, value)
    started_with(tmp_path, monkeypatch, b"PATH=/bin\0")
    assert check_environment(plan) == ()
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace(is_initialized=lambda: False))
    assert check_environment(plan) == ()


@pytest.mark.usefixtures("cuda_started")
def test_what_is_missing_cannot_be_mended_once_cuda_has_started() -> None:
    (first, *_) = check_environment(resolve(RECIPE), {})
    assert str(first).endswith("; CUDA has started, so setting it in this process is too late")


@pytest.mark.usefixtures("cuda_started")
@pytest.mark.parametrize("first", [None, b"", b"ray::train\0"], ids=["no /proc", "empty", "a title over it"])
def test_a_system_that_does_not_show_the_first_environment_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, first: bytes | None
) -> None:
    plan = resolve(RECIPE)
    for name, value in plan.env.items():
        monkeypatch.setenv(name, value)
    if first is None:
        monkeypatch.setattr(environment, "_FIRST_ENVIRONMENT", tmp_path / "absent")
    else:
        started_with(tmp_path, monkeypatch, first)
    with caplog.at_level(logging.WARNING, logger="overlapkit"):
        assert check_environment(plan) == ()
    assert "does not show what variables were set before" in caplog.text


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the system does not show it")
def test_the_real_first_environment_is_read() -> None:
    code = (
        "import os, sys, types; sys.modules['torch.cuda'] = types.SimpleNamespace(is_initialized=lambda: True)\n"
        "from overlapkit import resolve; from overlapkit.integrations.megatron import check_environment\n"
        f"plan = resolve({RECIPE!r}); os.environ.update(plan.env)\n"
        "print(*[f'{f.name} {f.problem}' for f in check_environment(plan)], sep='\\n')"
    )
    env = {**os.environ, **resolve(RECIPE).env}
    del env[CONNECTIONS]
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.splitlines() == [f"{CONNECTIONS} too late"]


# --- from a launch script ---------------------------------------------------------------------------


def check(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.run(
        [sys.executable, "-m", "overlapkit.integrations.megatron", *arguments],
        cwd=ROOT,
        env={**clean, **env},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


def test_the_command_is_silent_when_all_is_well() -> None:
    done = check("--check", RECIPE, **resolve(RECIPE).env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_command_says_each_finding_in_a_line_and_ends_with_one() -> None:
    done = check("--check", RECIPE)
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert len(lines) == len(resolve(RECIPE).env)
    assert f"overlapkit: {CONNECTIONS} is not set, the plan wants {CONNECTIONS}=1" in lines


def test_the_command_takes_overrides() -> None:
    one = "model.tensor_model_parallel_size=1"
    plan = resolve(RECIPE, [one])
    assert plan.env[CONNECTIONS] == "8"
    assert check("--check", RECIPE, one, **plan.env).returncode == 0
    assert check("--check", RECIPE, one, **resolve(RECIPE).env).returncode == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--check", "no/such.yaml"], "no/such.yaml"),
        (["--check", RECIPE, "cluster.gpu=h1000"], "not a known GPU"),
        (["--check", RECIPE, "nonsense"], "nonsense"),
        ([], "--check"),
    ],
)
def test_an_unusable_recipe_or_command_ends_with_two(arguments: list[str], text: str) -> None:
    done = check(*arguments)
    assert done.returncode == 2
    assert text in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_values_cannot_forge_lines() -> None:
    done = check("--check", RECIPE, **{**resolve(RECIPE).env, CONNECTIONS: "1\noverlapkit: all is well\x1b[2J"})
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "\x1b" not in done.stderr


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from overlapkit.integrations.megatron.__main__ import main\n"
        f"main(['--check', {RECIPE!r}]); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert not {"torch", "megatron", "nemo_run", "omegaconf", "typer", "rich"} & set(done.stdout.split())


# --- the names that a process's environment is asked for ----------------------------------------------


def test_every_variable_of_a_rule_is_taken_from_a_process() -> None:
    """``VARIABLES`` are the texts in the rules' sources that look like variables."""
    sources = {Path(sys.modules[rule.check.__module__].__file__ or "") for rule in registered().values()}
    quoted = {
        name for path in sources for name in re.findall(r'"(?:env\.)?([A-Z][A-Z0-9]*_[A-Z0-9_]+)"', path.read_text())
    }
    assert {"NCCL_ALGO", "USE_MNNVL"} < quoted
    assert quoted - set(VARIABLES) == set()
    plans = [resolve(path) for path in sorted((ROOT / "recipes").glob("*.yaml"))]
    assert {name for plan in plans for name in plan.env} <= set(VARIABLES)
