"""The built wheel, alone in an empty environment, has everything: presets, data, commands."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from overlapkit.presets import preset_names
from overlapkit.rules import documented

pytestmark = [pytest.mark.build, pytest.mark.network]

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "llama2_7b_32xh20"
# Runs in the wheel's environment: what the interpreter could import from, and what it did.
PROBE = f"""
import json, sys, sysconfig
import overlapkit, overlapkit.cli
from overlapkit.presets import load_preset, preset_names
from overlapkit.rules import documented
for name in preset_names():
    load_preset(name)
overlapkit.resolve("{RECIPE}.yaml").to_dict()
documented()
paths = sysconfig.get_paths()
print(json.dumps({{
    "path": sys.path,
    "site": [paths["purelib"], paths["platlib"]],
    "standard": [paths["stdlib"], paths["platstdlib"]],
    "files": {{name: module.__file__ for name, module in sys.modules.items() if getattr(module, "__file__", None)}},
}}))
"""


@dataclass(frozen=True)
class Installed:
    """An environment that holds the wheel, and a folder with one recipe to run in."""

    sdist: Path
    wheel: Path
    bin: Path
    folder: Path

    def run(self, command: str, *arguments: str) -> str:
        return run([str(self.bin / command), *arguments], self.folder)


def run(command: list[str], folder: Path) -> str:
    """Standard output; an error and anything that the command says beside it fails the test."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8", check=False, timeout=600
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Built once, also where the tests are spread over several processes."""
    temporary = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        temporary = temporary.parent
    base = temporary / "wheel"
    with (temporary / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / "done").exists():
            shutil.rmtree(base, ignore_errors=True)
            build_and_install(base)
            (base / "done").touch()
    (sdist,), (wheel,) = base.glob("dist/*.tar.gz"), base.glob("dist/*.whl")
    return Installed(sdist, wheel, base / "venv" / "bin", base / "empty")


def build_and_install(base: Path) -> None:
    dist, venv, folder = base / "dist", base / "venv", base / "empty"
    folder.mkdir(parents=True)
    run([sys.executable, "-m", "build", "--outdir", str(dist), str(ROOT)], base)  # the wheel is built from the sdist
    (wheel,) = dist.glob("*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)], base)
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-input", str(wheel)], base)
    shutil.copy2(ROOT / "recipes" / f"{RECIPE}.yaml", folder)


def test_files(installed: Installed) -> None:
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "overlapkit").rglob("*") if path.is_file()}
    expected = {name for name in sources if "__pycache__" not in name}
    expected |= {f"overlapkit/_presets/userbuffers/{name}.yaml" for name in preset_names()}
    with zipfile.ZipFile(installed.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    assert names == expected
    assert metadata


def test_sdist_can_run_its_tests(installed: Installed) -> None:
    with tarfile.open(installed.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ("recipes/*.yaml", "tests/golden/*", "tests/oracles/*.gz", "presets/userbuffers/*.yaml", "scripts/*.py")
    files = {path.relative_to(ROOT).as_posix() for pattern in wanted for path in ROOT.glob(pattern)}
    files |= {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", "scripts/overlapkit"}
    assert files - names == set()
    assert [name for name in names if name.startswith(".venv") or "__pycache__" in name] == []


def test_presets(installed: Installed) -> None:
    listed = json.loads(installed.run("overlapkit", "presets", "list", "--format", "json"))
    assert [preset["name"] for preset in listed] == list(preset_names())
    text = installed.run("overlapkit", "presets", "list")
    assert all(name in text for name in preset_names())
    shown = json.loads(installed.run("overlapkit", "presets", "show", listed[0]["name"], "--format", "json"))
    assert shown["userbuffers"]["qkv_fprop"]["method"]


def test_explanations(installed: Installed) -> None:
    pages = installed.run("overlapkit", "explain", "--all")
    assert [code for code in documented() if f"{code}  " not in pages] == []


def test_plan(installed: Installed) -> None:
    golden = (ROOT / "tests" / "golden" / f"{RECIPE}.txt").read_text(encoding="utf-8")
    plan = installed.run("overlapkit", "resolve", f"{RECIPE}.yaml")
    assert plan == golden.replace(f"recipes/{RECIPE}.yaml", f"{RECIPE}.yaml")


def test_data_files_are_read(installed: Installed) -> None:
    """GPU table, software rows, known keys and named precisions: each changes this plan."""
    overrides = ["cluster.gpu=H20-3e", "software.framework=megatron-bridge", "software.container=nemo:26.04"]
    overrides += ["software.megatron_core=null", "mixed_precision=bf16_mixed"]
    plan = json.loads(installed.run("overlapkit", "resolve", f"{RECIPE}.yaml", *overrides, "--format", "json"))
    assert plan["target"]["gpu"] == "h20_141"
    assert plan["target"]["megatron_bridge"] == "0.4.0"


def test_nothing_outside_the_environment_is_used(installed: Installed) -> None:
    found: dict[str, Any] = json.loads(installed.run("python", "-c", PROBE))
    site = [Path(path).resolve() for path in found["site"]]
    allowed = [*site, *(Path(path).resolve() for path in found["standard"])]
    outside = {
        name: file
        for name, file in found["files"].items()
        if name != "__main__" and not any(Path(file).resolve().is_relative_to(folder) for folder in allowed)
    }
    assert outside == {}
    ours = [Path(file) for name, file in found["files"].items() if name.partition(".")[0] == "overlapkit"]
    assert len(ours) > 20 and all(any(file.resolve().is_relative_to(folder) for folder in site) for file in ours)
    for entry in found["path"]:
        assert not Path(entry or installed.folder).resolve().is_relative_to(ROOT), entry
