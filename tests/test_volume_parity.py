"""overlapkit predicts what the real Megatron-Core issued, integer for integer: ``scripts/parity_volume.py``."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORACLES = sorted((ROOT / "tests" / "oracles" / "collectives").glob("*.jsonl.gz"))


@pytest.fixture(scope="module")
def parity() -> Any:
    spec = importlib.util.spec_from_file_location("parity_volume_script", ROOT / "scripts" / "parity_volume.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_row_and_phase_agrees(parity: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status = parity.main(["--phases"])
    output = capsys.readouterr()
    assert (status, output.err) == (0, "")
    scores = {}
    for line in output.out.splitlines():
        found = re.fullmatch(r"(\d+)/(\d+) rows of (\d+) runs  megatron-core (.+)", line)
        assert found is not None, line
        assert found[1] == found[2]
        scores[found[4]] = int(found[3])
    assert set(scores) == {f"{core}{phase}" for core in ("0.16.1", "0.19.2") for phase in ("", ", by phase")}
    assert all(runs > 90 for runs in scores.values())


def test_the_runs_cover_what_the_prediction_knows(parity: Any) -> None:
    """A layout that nothing in the sample has is one that nothing here checks."""
    runs = [run for path in ORACLES for run in parity.runs_of(path)]
    seen: dict[str, set[Any]] = {}
    for run in runs:
        config = run["config"]
        extra = config.get("xcfg") or {}
        for name, value in {**config, **extra}.items():
            seen.setdefault(name, set()).add(str(value))
    assert {"1", "2", "4", "8"} <= seen["tp"] and {"1", "2", "3", "4", "8"} <= seen["pp"] and "3" in seen["dp"]
    for name in ("sp", "overlap_p2p", "tied", "qk_layernorm", "add_bias", "ce_fusion", "calculate_per_token_loss"):
        assert seen[name] == {"True", "False"}, name
    for name in ("fp16", "expert_bias", "pad_to_capacity", "distribute_saved_activations", "log_num_zeros"):
        assert seen[name] == {"True", "False"}, name
    assert {"full-uniform", "full-block", "selective", "None"} <= seen["recompute"]
    assert {"alltoall", "allgather"} == seen["dispatcher"]
    assert {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"} <= seen["load_balancing"]
    assert {"1", "2"} <= seen["dist_opt_instances"] and {"None", "1", "2", "4"} <= seen["etp"]
    assert {"num_layers_in_first_pipeline_stage", "pipeline_model_parallel_layout"} <= set(seen)


def test_rows_with_bytes_of_the_data_are_marked(parity: Any) -> None:
    """What the recorder marked as dependent on the routing is not called exact."""
    marked = 0
    for run in (run for path in ORACLES for run in parity.runs_of(path)):
        ours = parity.predicted(run)
        of_experts = [key for key in run.get("data_dependent", ()) if key[0].startswith("EXPERT")]
        for group, op, dtype in of_experts:
            marked += 1
            assert not ours[group, op, dtype][1], run["name"]
    assert marked > 20


def test_a_row_that_disagrees_is_told(parity: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gzip.open(ORACLES[0], "rt", encoding="utf-8") as lines:
        run = json.loads(next(lines))
    row = next(row for row in run["totals"] if row["nranks"] > 1)
    row["bytes"] += 1
    changed = tmp_path / "run.jsonl"
    changed.write_text(json.dumps(run))
    assert parity.main([str(changed)]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and run["name"] in told and row["op"] in told


def test_nothing_to_compare_is_a_failure(parity: Any, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert parity.main([str(empty)]) == 1
