"""What Transformer Engine's real initialize_ub did against what check_userbuffers says: agree/total per release.

    python scripts/parity_userbuffers.py [FILE ...]

FILE is an oracle of the form of ``tests/oracles/userbuffers_te.jsonl.gz`` (the README beside it says what it holds);
without one that is used. Exits 1 when a case disagrees, and names the first of each release.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from overlapkit.presets import check_userbuffers

ORACLE = Path(__file__).resolve().parent.parent / "tests" / "oracles" / "userbuffers_te.jsonl.gz"
DEVELOPMENT = {"HEAD": "2.20"}  # the release that the recorded development version became
MESSAGE_LENGTH = 110  # to which the oracle cuts messages
FIELDS = (
    *("method", "is_reduce_scatter", "num_sm", "cga_size", "num_splits", "set_sm_margin", "fp8_buf", "aggregate"),
    *("atomic_gemm", "use_ce", "dtype"),
)


def read(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


def difference(case: Mapping[str, Any]) -> str | None:
    """What of a case differs, None where all agrees."""
    given, recorded = case["in"], case["out"]
    tokens, hidden_size = given["shape"]
    report = check_userbuffers(
        given["ub_cfgs"],
        transformer_engine=DEVELOPMENT.get(case["te"], case["te"]),
        tensor_model_parallel_size=given["tp"],
        tokens=tokens,
        hidden_size=hidden_size,
        quantization_modes=given["modes"],
    ).to_dict()
    refusals = [each for each in report["decisions"] if each["raised_at"] == "initialize_ub"]
    if recorded["ok"]:
        return _of_buffers(report, recorded) if not refusals else f"refused: {refusals[0]['because']}"
    if len(refusals) != 1 or report["buffers"] or report["bytes"] is not None:
        return f"not refused as it must be: {recorded['exc']}"
    return _of_refusal(refusals[0], recorded)


def _of_buffers(report: Mapping[str, Any], recorded: Mapping[str, Any]) -> str | None:
    ours, theirs = report["buffers"], recorded["buffers"]
    if set(ours) != set(theirs):
        return f"buffers {sorted(ours)}, recorded {sorted(theirs)}"
    for name, buffer in theirs.items():
        values = {field: ours[name][field] for field in FIELDS}
        if values != {field: buffer[field] for field in FIELDS}:
            return f"{name} {values}, recorded {buffer}"
    return None if report["bytes"] == recorded["bytes"] else f"{report['bytes']} bytes, recorded {recorded['bytes']}"


def _of_refusal(refusal: Mapping[str, Any], recorded: Mapping[str, Any]) -> str | None:
    # A bare assert has no text; the oracle says in brackets which it was.
    message = None if recorded["msg"].startswith("<assert ") else recorded["msg"]
    ours = refusal["message"] if refusal["message"] is None else refusal["message"][:MESSAGE_LENGTH]
    layer = refusal["subject"].removeprefix("tp_comm_overlap_cfg").removeprefix(".") or None
    said = (refusal["exception"], ours, layer)
    expected = (recorded["exc"], message, recorded.get("layer"))
    return None if said == expected else f"{said}, recorded {expected}"


def main(*paths: Path) -> int:
    agree: dict[str, int] = {}
    total: dict[str, int] = {}
    for path in paths or (ORACLE,):
        for case in read(path):
            release, found = case["te"], difference(case)
            total[release] = total.get(release, 0) + 1
            agree[release] = agree.get(release, 0) + (found is None)
            if found is not None and total[release] - agree[release] == 1:
                print(f"{release} {case['id']}: {found}", file=sys.stderr)
    for release, count in total.items():
        print(f"{agree[release]:>5}/{count:<5} Transformer Engine {release}")
    print(f"{sum(agree.values()):>5}/{sum(total.values()):<5} all")
    return 0 if total and agree == total else 1


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
