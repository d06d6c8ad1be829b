"""Versions are text; what a recipe does not name comes from its container, its Bridge, or the newest row."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from overlapkit import RecipeError, resolve
from overlapkit.plan import Target
from overlapkit.software import installed_transformer_engine

BRIDGE_0_4 = ("0.4.0", "0.17.0", "2.14", "2.11.0")  # nemo:26.04
NEWEST = ("0.6.2", "0.19.2", "2.18", "2.13.0")
COMPONENTS = ("megatron_bridge", "megatron_core", "transformer_engine", "torch")


def target(software: dict[str, Any] | None = None, *overrides: str) -> Target:
    recipe = {"cluster": {"gpu": "h100", "num_gpus": 8}, **({} if software is None else {"software": software})}
    return resolve(recipe, overrides).target


def versions(target: Target) -> tuple[Any, ...]:
    return tuple(getattr(target, name) for name in COMPONENTS)


def refused(software: dict[str, Any], *overrides: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        target(software, *overrides)
    return caught.value


# --- where they come from ------------------------------------------------------------------------


def test_without_software_the_newest_row_is_assumed() -> None:
    found = target()
    assert versions(found) == NEWEST
    assert found.framework == "megatron-bridge"
    assert found.assumed == COMPONENTS


@pytest.mark.parametrize("spelling", ["nemo:26.04", "NEMO:26.04", "nvcr.io/nvidia/nemo:26.04", " nemo:26.04 "])
def test_a_container_names_a_row(spelling: str) -> None:
    found = target({"container": spelling})
    assert versions(found) == BRIDGE_0_4
    assert found.assumed == COMPONENTS


def test_what_the_recipe_names_wins_over_the_container() -> None:
    found = target({"container": "nemo:26.04", "transformer_engine": "2.9"})
    assert versions(found) == ("0.4.0", "0.17.0", "2.9", "2.11.0")
    assert found.assumed == ("megatron_bridge", "megatron_core", "torch")


def test_the_container_counts_before_the_bridge() -> None:
    found = target({"container": "nemo:26.04", "megatron_bridge": "0.6.2"})
    assert versions(found) == ("0.6.2", *BRIDGE_0_4[1:])


@pytest.mark.parametrize(
    ("bridge", "core"),
    [
        ("0.3.1", "0.16.1"),  # its own row
        ("0.4.2", "0.17.0"),  # the newest that is not newer
        ("0.5.1rc1", "0.18.0"),
        ("9.0", "0.19.2"),
        ("0.0.1", "0.14.0"),  # older than every row: the oldest
    ],
)
def test_a_bridge_names_a_row(bridge: str, core: str) -> None:
    found = target({"megatron_bridge": bridge})
    assert (found.megatron_bridge, found.megatron_core) == (bridge, core)
    assert found.assumed == COMPONENTS[1:]


def test_megatron_lm_has_no_bridge() -> None:
    found = target({"framework": "megatron-lm"})
    assert versions(found) == (None, *NEWEST[1:])
    assert found.assumed == COMPONENTS[1:]


def test_null_is_no_transformer_engine() -> None:
    found = target({"transformer_engine": None})
    assert found.transformer_engine is None
    assert "transformer_engine" not in found.assumed
    assert target({}, "software.transformer_engine=null").transformer_engine is None


def test_null_of_any_other_component_is_not_set() -> None:
    assert versions(target({"torch": None, "container": None, "megatron_core": None})) == NEWEST


# --- text, not numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2.10, 2, 0.6])
@pytest.mark.parametrize("component", COMPONENTS)
def test_a_number_is_refused(component: str, number: float) -> None:
    error = refused({component: number})
    assert error.path == f"software.{component}"
    assert "as text" in error.problem
    assert "quotes" in (error.hint or "")


def test_a_number_in_a_file_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("cluster: {num_gpus: 8}\nsoftware:\n  torch: 2.10\n")
    with pytest.raises(RecipeError) as caught:
        resolve(path)
    assert str(caught.value).startswith(f"{path}:3: software.torch: expected a version as text")


def test_a_drivers_version_is_text_too() -> None:
    with pytest.raises(RecipeError, match=r"cluster\.driver_version: expected a version as text"):
        resolve({"cluster": {"num_gpus": 8, "driver_version": 535.10}})


@pytest.mark.parametrize("written", ["2.10", "'2.10'", '"2.10"', " 2.10"])
def test_on_the_command_line_the_source_text_counts(written: str) -> None:
    assert target({}, f"software.torch={written}").torch == "2.10"
    assert target({"torch": "2.9"}, f"software.torch={written}").torch == "2.10"


def test_the_source_text_counts_of_a_driver_too() -> None:
    plan = resolve({"cluster": {"gpu": "h100", "num_gpus": 8}}, ["cluster.driver_version=525.10"])
    assert plan.target.gpu == "h100"


def test_local_and_pre_releases_stay_as_written() -> None:
    found = target({"transformer_engine": "2.9.0+70f53666", "torch": "2.11.0a0+eb65b36914.nv26.2"})
    assert (found.transformer_engine, found.torch) == ("2.9.0+70f53666", "2.11.0a0+eb65b36914.nv26.2")


@pytest.mark.parametrize("text", ["latest", "2.x", "", "2..1", "\u0662.\u0661"])
def test_other_text_is_no_version(text: str) -> None:
    assert "is not a version" in refused({"torch": text}).problem


@pytest.mark.parametrize("component", ["megatron_bridge", "megatron_core", "torch"])
def test_only_transformer_engine_can_be_detected(component: str) -> None:
    assert "is not a version" in refused({component: "detect"}).problem


@pytest.mark.parametrize("container", ["nemo:26.05", "pytorch:26.04", "bridge:0.3.1", "nemo"])
def test_an_unknown_container(container: str) -> None:
    error = refused({"container": container})
    assert error.path == "software.container"
    assert "nemo:" in (error.hint or "")


# --- detect --------------------------------------------------------------------------------------


def install(site: Path, name: str, version: str) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({}, None),
        ({"transformer-engine": "2.18.0"}, None),  # the metapackage alone: importing it raises
        ({"transformer-engine": "2.18.0", "transformer-engine-cu12": "2.18.0"}, "2.18.0"),
        ({"transformer-engine-cu13": "2.17.0"}, "2.17.0"),
        ({"transformer-engine-torch": "2.16.0"}, "2.16.0"),
        ({"transformer-engine": "2.14.0+70f53666"}, "2.14.0+70f53666"),  # built from source, as in NGC
        ({"transformer-engine-cu12": "not-a-version"}, None),
    ],
)
def test_detect_reads_metadata(
    installed: dict[str, str], found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in installed.items():
        install(tmp_path, name, version)
    elsewhere = [path for path in sys.path if "site-packages" not in path]  # without one that is really installed
    monkeypatch.setattr("sys.path", [str(tmp_path), *elsewhere])
    here = installed_transformer_engine()
    assert (None if here is None else str(here)) == found


def test_detected_is_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlapkit.software.installed_transformer_engine", lambda: None)
    found = target({"transformer_engine": "detect"})
    assert found.transformer_engine is None
    assert "transformer_engine" not in found.assumed
