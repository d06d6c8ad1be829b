"""The table of Megatron-LM's flags: what each parser has, and what is taken for granted between known ones."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from overlapkit.data import load_json
from overlapkit.megatron_lm.flags import all_choices, flags_of
from overlapkit.versions import parse_version

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "megatron_lm_flags.py"


def flags(core: str | None, *, doubtful: bool = False) -> Any:
    return flags_of(None if core is None else parse_version(core), doubtful=doubtful)


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("megatron_lm_flags_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# The sizes of the parsers' own option lists, -h apart.
@pytest.mark.parametrize(
    ("core", "count"),
    [("0.16.1", 681), ("0.17.0", 732), ("0.18.2", 786), ("0.19.1", 846), ("0.19.2", 846), ("0.20.0", 877)],
)
def test_a_known_parser_has_its_own_flags_and_no_other(core: str, count: int) -> None:
    assert len(flags(core)) == count
    assert flags(core) == flags(core, doubtful=True)


def test_a_flag_says_what_it_takes() -> None:
    table = flags("0.19.2")
    assert table["--tensor-model-parallel-size"].kind == "int" and table["--tensor-model-parallel-size"].values == 1
    assert table["--recompute-modules"].values == "+"
    assert table["--rampup-batch-size"].values == 3
    assert table["--swiglu"].do == "true" and table["--swiglu"].values == 0
    assert table["--fp8-format"].choices == ("e4m3", "hybrid")
    assert table["--no-overlap-p2p-communication"].dest == "overlap_p2p_comm"


def test_aliases_mean_the_same() -> None:
    table = flags("0.16.1")
    assert table["--no-tp-comm-bulk-wgrad"].meaning == table["--disable-tp-comm-bulk-wgrad"].meaning


def test_a_flag_changes_with_its_parser() -> None:
    backend = "--moe-flex-dispatcher-backend"
    assert "ncclep" not in flags("0.18.2")[backend].choices
    assert "ncclep" in flags("0.19.1")[backend].choices
    assert all_choices()[backend] == {"deepep", "hybridep", "ncclep"}
    assert "--save" not in all_choices()


@pytest.mark.parametrize(
    ("flag", "core", "certain", "doubtful"),
    [
        ("--cuda-graph-modules", "0.17.0", False, False),
        ("--cuda-graph-modules", "0.17.1", False, True),  # 0.17.0 has it not, 0.18.2 has it
        ("--cuda-graph-modules", "0.18.2", True, True),
        ("--moe-use-legacy-grouped-gemm", "0.16.1", True, True),
        ("--moe-use-legacy-grouped-gemm", "0.16.2", False, True),  # 0.16.1 has it, 0.17.0 has it not
        ("--moe-use-legacy-grouped-gemm", "0.17.0", False, False),
        ("--tp-comm-overlap", "0.12.1", True, True),
        ("--overlap-moe-expert-parallel-comm", "0.13.1", False, False),
        ("--overlap-moe-expert-parallel-comm", "0.14.0", True, True),
        ("--use-nccl-ub", "0.12.1", False, False),
        ("--use-nccl-ub", "0.13.0", True, True),
        ("--moe-flex-dispatcher-backend", "0.15.3", False, False),
        ("--moe-flex-dispatcher-backend", "0.16.0", True, True),
        ("--no-tp-comm-overlap-ag", "0.15.3", False, False),
        ("--disable-tp-comm-overlap-ag", "0.15.3", True, True),
        ("--use-custom-fsdp", "0.13.1", True, True),
        ("--use-custom-fsdp", "0.14.0", False, False),
        ("--batch-invariant-backend", "0.20.0", True, True),
        ("--batch-invariant-backend", "0.21.0", True, True),  # the newest known parser stands for what follows
    ],
)
def test_between_and_before_known_parsers(flag: str, core: str, certain: bool, doubtful: bool) -> None:
    assert (flag in flags(core)) == certain
    assert (flag in flags(core, doubtful=True)) == doubtful


def test_without_a_version_every_flag_counts() -> None:
    every = flags(None, doubtful=True)
    assert {"--use-custom-fsdp", "--moe-use-legacy-grouped-gemm", "--batch-invariant-backend"} <= set(every)
    assert len(every) == len(load_json("megatron_lm_flags.json")["flags"]) + 1


def test_what_came_later_is_in_the_oldest_parser() -> None:
    data = load_json("megatron_lm_flags.json")
    assert set(data["newer"]) <= set(flags(data["snapshots"][0]))
    assert not set(data["older"]) & set(data["flags"])


def test_dumps_make_the_file(script: Any, tmp_path: Path) -> None:
    """Variants by position, nargs from another version, enum members by name."""
    store = {"dest": "x", "cls": "_StoreAction", "default": "None", "choices": None, "type": "int"}
    old = {"--x": store, "-h": store, "--mode": {**store, "dest": "mode", "type": "f", "choices": ["Mode.a", "Mode.b"]}}
    new = {
        "--x": {**store, "nargs": "+"},
        "--y": {**store, "dest": "why", "cls": "_StoreTrueAction", "default": "False"},
    }
    (tmp_path / "flags_1.9.0.json.gz").write_bytes(gzip.compress(json.dumps(old).encode()))
    (tmp_path / "flags_1.10.0.json").write_text(json.dumps(new))
    data = script.build(script.read_dumps(tmp_path))
    assert data["snapshots"] == ["1.9.0", "1.10.0"]
    assert data["flags"] == {
        "--mode": [{"in": [0], "do": "store", "choices": ["a", "b"]}],
        "--x": [{"do": "store", "n": "+", "type": "int"}],
        "--y": [{"in": [1], "dest": "why", "do": "true"}],
    }
    assert json.loads(script.as_text(data)) == data


def test_check_sees_a_difference(script: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "flags_1.0.0.json").write_text("{}")
    monkeypatch.setattr(script, "DATA", tmp_path / "data.json")
    assert script.main(["build", str(tmp_path)]) == 0
    assert script.main(["build", str(tmp_path), "--check"]) == 0
    (tmp_path / "data.json").write_text("{}")
    assert script.main(["build", str(tmp_path), "--check"]) == 1
    assert "differs" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert script.main(["build", str(tmp_path / "empty")]) == 2


def test_the_file_has_the_form_that_the_script_writes(script: Any) -> None:
    text = script.DATA.read_text("utf-8")
    data = json.loads(text)
    assert script.as_text(data) == text
    assert data["newer"] == {flag: since for since, names in script.NEWER.items() for flag in names.split()}
    assert data["older"] == script.OLDER
