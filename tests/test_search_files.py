"""The layouts that a search found, as recipe files: all of them are written, or none."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from test_search import LLAMA, found, quiet

from overlapkit.cli import main
from overlapkit.cost.estimate import estimate_of
from overlapkit.errors import RecipeError
from overlapkit.facts import derive
from overlapkit.recipe import load_recipe, recipe_from_mapping
from overlapkit.resolver import plan
from overlapkit.search.find import Source, read_source, search
from overlapkit.search.saving import layout_name, save_recipes
from overlapkit.search.space import Layout, Point
from overlapkit.whole_files import check_folder, write_whole


def test_recipes_are_saved_by_rank_and_read_back(tmp_path: Path) -> None:
    result = found(LLAMA, top=2, tp="4", pp="2,4", vp="1,5", cp="2", micro_batch_size="1")
    files = save_recipes(str(LLAMA), result.best, tmp_path / "new" / "folder")
    assert [path.name[:23] for path in files] == ["llama3_70b_64xh100_01_6", "llama3_70b_64xh100_02_6"]
    assert sorted(path.name for path in files[0].parent.iterdir()) == [path.name for path in files]
    for path, each in zip(files, result.best, strict=True):
        facts = derive(load_recipe(path))
        decided = plan(facts)
        assert decided.ok and estimate_of(facts, decided).step_time_s == each.seconds


def test_a_file_is_named_by_its_layout() -> None:
    layout = Layout(Point(64, 4, 2, 1, 8, 5, 2), True, "selective")
    assert layout_name(layout) == "64gpus_tp4_pp2_vp5_ep8_sp_mbs2_selective"
    assert layout_name(Layout(Point(8, 1, 1, 1, 1, 1, 1), False, "none")) == "8gpus_mbs1"


def test_a_userbuffers_file_is_still_found_from_another_folder(tmp_path: Path) -> None:
    source = read_source(LLAMA)
    (tmp_path / "own.yaml").write_text("qkv_fprop: {method: ring_exchange}\n")
    values = {**source.values, "comm_overlap": {"tp_comm_overlap_cfg": "own.yaml", "tp_comm_overlap": True}}
    path = str(tmp_path / "recipe.yaml")
    here = Source(recipe=recipe_from_mapping(values, source=path), values=values)
    ranges = {"tp": "4", "pp": "4", "vp": "5", "cp": "2", "micro_batch_size": "1"}
    best = search(here, ranges, top=1, workers=1, report=quiet).best
    (file,) = save_recipes(path, best, tmp_path / "elsewhere")
    assert derive(load_recipe(file)).userbuffers == {"qkv_fprop": {"method": "ring_exchange"}}


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text("what was there\n")
    synced: Counter[int] = Counter()

    def full(descriptor: int) -> None:
        synced["files"] += 1
        if synced["files"] > 1:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecipeError, match="cannot be written: No space left on device"):
        write_whole(tmp_path, {"a.yaml": "new\n", "b.yaml": "new\n"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.yaml": "what was there\n"}


def test_a_folder_that_is_a_file_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="cannot be written: File exists"):
        write_whole(tmp_path / "file", {"a.yaml": ""})


def test_a_name_that_is_a_folder_keeps_the_others_from_being_written(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").mkdir()
    with pytest.raises(RecipeError, match=r"/b\.yaml: cannot be written: Is a directory"):
        write_whole(tmp_path, {"a.yaml": "", "b.yaml": ""})
    assert [path.name for path in tmp_path.iterdir()] == ["b.yaml"]


def test_ctrl_c_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path, {"a.yaml": ""})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "said"),
    [("", "'': cannot be written: No such file"), ("file", "file: cannot"), ("file/new", "file/new: cannot")],
)
def test_a_folder_is_refused_before_the_search(tmp_path: Path, folder: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=said):
        check_folder(f"{tmp_path}/{folder}" if folder else "")
    check_folder(f"{tmp_path}/new/folder")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_submitting_without_nemo_run_is_refused_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "nemo_run", None)
    monkeypatch.delitem(sys.modules, "overlapkit.integrations.nemo_run", raising=False)
    Path("own.py").write_text("def executor(): ...\n", "utf-8")
    monkeypatch.setattr(sys, "argv", ["overlapkit", "search", str(LLAMA), "--submit", "own.py"])
    with pytest.raises(SystemExit) as ended:
        main()
    out, said = capsys.readouterr()
    assert (ended.value.code, out, len(said.splitlines())) == (2, "", 1)
    assert "pip install 'overlapkit[nemo-run]'" in said
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]


def test_one_recipe_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = ["--tp", "4", "--pp", "4", "--cp", "2", "--vp", "5", "--mbs", "1", "--recompute", "none", "--top", "1"]
    argv = ["overlapkit", "search", str(LLAMA), *ranges, "--save-recipes", str(tmp_path / "top")]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == f"1 recipe is written to {tmp_path / 'top'}\n"
