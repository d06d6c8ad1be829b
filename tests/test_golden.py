"""Every shipped recipe: its plan is the one in ``golden/``, starts, and follows from its decisions.

``pytest tests/test_golden.py --update-golden`` writes the golden files again, and removes those whose recipe is
gone; review their diff like code.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from overlapkit import load_recipe, resolve
from overlapkit.cli import app
from overlapkit.facts import derive
from overlapkit.plan import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
SUFFIXES = {"text": ".txt", "json": ".json"}
# What `scripts/overlapkit` needs of a checkout.
CHECKOUT = ("LICENSE", "README.md", "overlapkit", "presets", "pyproject.toml", "recipes", "scripts")


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan names its recipe as the command did: relative to the checkout."""
    monkeypatch.chdir(ROOT)


def path_of(recipe: str) -> str:
    return f"recipes/{recipe}.yaml"


def printed(recipe: str, form: str) -> str:
    """What the command writes to a pipe, without the version of overlapkit."""
    result = CliRunner().invoke(app, ["resolve", path_of(recipe), "--format", form])
    assert result.exit_code == 0, result.output
    return re.sub(r'^  "overlapkit_version": .*\n', "", result.stdout, flags=re.MULTILINE)


@pytest.mark.parametrize("form", SUFFIXES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_plan_is_golden(recipe: str, form: str, request: pytest.FixtureRequest) -> None:
    golden = GOLDEN / f"{recipe}{SUFFIXES[form]}"
    plan = printed(recipe, form)
    if request.config.getoption("--update-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(plan, encoding="utf-8", newline="\n")
    assert golden.is_file(), f"no golden plan; {__doc__}"
    assert plan == golden.read_text(encoding="utf-8")


def test_golden_files_are_those_of_the_recipes(request: pytest.FixtureRequest) -> None:
    expected = {f"{recipe}{suffix}" for recipe in RECIPES for suffix in SUFFIXES.values()}
    found = {path.name for path in GOLDEN.iterdir()}
    if request.config.getoption("--update-golden"):
        for name in found - expected:
            (GOLDEN / name).unlink()
        return  # those that are missing are being written
    assert found == expected


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_says_what_it_is(recipe: str) -> None:
    """Two lines or more: what it is, where its sizes and its layout are from."""
    lines = (ROOT / path_of(recipe)).read_text(encoding="utf-8").splitlines()
    comment = [line for line in lines[:4] if line.startswith("# ")]
    assert len(comment) >= 2
    text = " ".join(comment)
    assert "Sizes" in text and "ayout" in text


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_starts_and_hides_nothing(recipe: str) -> None:
    """No errors, every version from the recipe, and no size left open that a check needs."""
    plan = resolve(path_of(recipe))
    assert [d for d in plan.decisions if d.severity == "error"] == []
    assert plan.parallelism.num_microbatches is not None
    assert "CFG011" not in {d.code for d in plan.decisions}
    written = load_recipe(path_of(recipe)).software
    assert written.container is not None or plan.target.assumed == ()


@pytest.mark.parametrize("recipe", RECIPES)
def test_decisions_replayed_are_the_settings(recipe: str) -> None:
    loaded = load_recipe(path_of(recipe))
    plan = resolve(loaded)
    settings: dict[str, Any] = {name: derive(loaded).start[name] for name in SETTINGS}
    env: dict[str, Any] = {}
    for decision in plan.decisions:
        if decision.subject in settings:
            settings[decision.subject] = decision.value
        elif decision.subject.startswith("env."):
            env[decision.subject.removeprefix("env.")] = decision.value
    if not settings["model.tp_comm_overlap"]:
        settings["model.tp_comm_overlap_cfg"] = None
    assert settings == dict(plan.settings)
    assert {name: value for name, value in env.items() if value is not None} == dict(plan.env)


def test_command_in_a_process_of_its_own() -> None:
    """What a pipe gets is the golden text, byte by byte."""
    command = [sys.executable, "-m", "overlapkit.cli", *readme_command()[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == (GOLDEN / f"{Path(readme_command()[-1]).stem}.txt").read_bytes()


@pytest.mark.build
@pytest.mark.network
def test_first_command_of_the_readme(tmp_path: Path) -> None:
    """As written there, in a fresh checkout: it makes .venv and prints the plan."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in CHECKOUT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, checkout / name)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    command = readme_command()
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == (GOLDEN / f"{Path(command[-1]).stem}.txt").read_bytes()
    assert (checkout / ".venv").is_dir()


def readme_command() -> list[str]:
    """The first line of the README's first shell block."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^```bash\n(.*?)$", readme, flags=re.MULTILINE)
    assert block is not None, "the README has no shell block"
    command = shlex.split(block[1], comments=True)
    assert Path(command[0]).name == "overlapkit" and command[1] == "resolve" and len(command) == 3, command
    return command
