"""``overlapkit.measure`` from end to end: samples with known totals, logs of whole jobs against their prediction."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from jobs_to_log import LAYOUTS, SPELLINGS, STEPS, predicted
from recorded_runs import recipe_of, runs
from write_nccl_log import write_logs

import overlapkit
from overlapkit.measure.events import Reading
from overlapkit.measure.inputs import InputError, read_inputs, select_inputs
from overlapkit.measure.measured import RankMeasured
from overlapkit.measure.measuring import measured
from overlapkit.measure.mesh import mesh_of
from overlapkit.volume import Volume

HERE = Path(__file__).parent
SAMPLES = ("dp2_pp2_buckets_overlap.r0", "moe_ep2_a2a.r0", "tied_pp2.r0", "tied_pp2.r4")
Totals = dict[tuple[str, str, str], tuple[int, int, int]]


def totals(found: RankMeasured) -> Totals:
    rows = (*found.rows, *found.single_rank)
    return {(row.group, row.op, row.dtype): (row.size, row.count, row.message_bytes) for row in rows}


def known(sample: str) -> Totals:
    """(group, operation, type) -> ranks, calls and message bytes that the run issued, groups of one rank among them."""
    rows = json.loads((HERE / "nccl" / f"{sample}.expected.json").read_text())["totals"]
    return {(row["group"], row["op"], row["dtype"]): (row["nranks"], row["count"], row["bytes"]) for row in rows}


def recipe(sample: str) -> dict[str, Any]:
    name, _, rank = sample.rpartition(".r")
    return recipe_of(next(run for run, _ in runs() if run["name"] == name and run["rank"] == int(rank)))


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("kind", ["nccl_log", "torch_trace"])
@pytest.mark.parametrize("with_recipe", [True, False], ids=["with its recipe", "without a recipe"])
def test_a_sample_with_known_totals_comes_out_exactly(sample: str, kind: str, with_recipe: bool) -> None:
    path = HERE / {"nccl_log": f"nccl/{sample}.log.gz", "torch_trace": f"traces/{sample}.trace.json.gz"}[kind]
    found = overlapkit.measure(path, recipe(sample) if with_recipe else None)
    (rank,) = found.ranks
    assert (rank.kind, rank.rank) == (kind, int(sample.rpartition(".r")[2]))
    assert totals(rank) == known(sample)
    assert rank.unattributed == () and found.problems == ()
    assert all(row.wire_bytes == 0 for row in rank.single_rank)
    if kind == "torch_trace":
        assert {row.confidence for row in rank.rows} == {"exact"}


def test_a_log_with_one_mark_is_one_step() -> None:
    (rank,) = overlapkit.measure(HERE / "nccl" / "tied_pp2.r0.log.gz", recipe("tied_pp2.r0")).ranks
    stage = overlapkit.volume(recipe("tied_pp2.r0")).stages[0]
    assert rank.steps_by is not None and rank.steps == 0
    assert per_step(rank) == {(row.group, row.op, row.dtype): (row.count, row.message_bytes) for row in stage.rows}


def test_a_folder_of_both_kinds_gives_every_process_of_each() -> None:
    found = overlapkit.measure([HERE / "nccl", str(HERE / "traces" / "tied_pp2.*.json.gz")])
    assert sorted((rank.kind, rank.rank) for rank in found.ranks) == [
        ("nccl_log", 0),
        ("nccl_log", 0),
        ("nccl_log", 0),
        ("nccl_log", 4),
        ("torch_trace", 0),
        ("torch_trace", 4),
    ]
    assert found.notes[0].startswith("5 files hold no measurement of a kind that is read: README.md, ")


# --- whole jobs ------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def job(layout: str) -> Volume:
    return predicted(layout)


def per_step(found: RankMeasured) -> dict[tuple[str, str, str], tuple[Any, Any]]:
    return {
        (row.group, row.op, row.dtype): (row.per_step.count, row.per_step.message_bytes)
        for row in found.rows
        if row.per_step is not None and row.per_step.count
    }


def expected(volume: Volume, stage: int | None) -> dict[tuple[str, str, str], tuple[int, int]]:
    """What NCCL can show of it: booleans are bytes there."""
    assert stage is not None
    rows = volume.stages[stage].rows
    return {(row.group, row.op, row.dtype.replace("bool", "uint8")): (row.count, row.message_bytes) for row in rows}


def read(layout: str, folder: Path, spelling: dict[str, Any]) -> Reading:
    return read_inputs(select_inputs(write_logs(job(layout), folder, steps=STEPS, **spelling)))


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: ".".join(map(str, spelling["version"])))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_logs_of_a_job_return_its_predicted_volume(layout: str, spelling: dict[str, Any], tmp_path: Path) -> None:
    volume = job(layout)
    found = measured(read(layout, tmp_path, spelling), mesh_of(volume))
    assert [rank.rank for rank in found.ranks] == list(range(32))
    for rank in found.ranks:
        assert rank.steps == STEPS and rank.unattributed == ()
        assert per_step(rank) == expected(volume, rank.pipeline_rank), rank.rank


DENSE = [layout for layout in LAYOUTS if "EP" not in layout]


@pytest.mark.parametrize("layout", DENSE)
def test_a_dense_job_is_told_apart_without_a_recipe(layout: str, tmp_path: Path) -> None:
    volume = job(layout)
    found = measured(read(layout, tmp_path, SPELLINGS[0]))
    for rank in found.ranks:
        assert per_step(rank) == expected(volume, rank.pipeline_rank), rank.rank
        assert all(row.confidence != "exact" for row in rank.rows)


def test_one_log_of_a_job_suffices_with_its_recipe(tmp_path: Path) -> None:
    """Without the other ranks' lines nothing says which global ranks a communicator joins: sizes and calls decide."""
    layout = "TP 8, PP 2, DP 2"
    read(layout, tmp_path, {"version": (2, 20), "split": False})
    for rank in (0, 31):
        alone = read_inputs(select_inputs([f"{tmp_path}/nccl.*.{1000 + rank}.log"]))
        (found,) = measured(alone, mesh_of(job(layout))).ranks
        assert per_step(found) == expected(job(layout), found.pipeline_rank)
        steady = [row for row in found.rows if row.per_step is not None and row.per_step.count]
        assert {row.confidence for row in steady} <= {"exact", "likely"}


def test_what_cannot_be_read_is_an_error_and_bad_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file or folder"):
        overlapkit.measure(tmp_path / "none")
    with pytest.raises(ValueError, match="steps"):
        overlapkit.measure(HERE / "nccl", steps=0)
    with pytest.raises(overlapkit.RecipeError):
        overlapkit.measure(HERE / "nccl", {"model": {"hidden_size": 0}})
