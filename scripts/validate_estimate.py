#!/usr/bin/env python3
"""Prints how far estimates are from measured steps that the constants were not fitted to, beside baselines.

    python scripts/validate_estimate.py FOLDER            # a few minutes; exit 1 where a limit is missed
    python scripts/validate_estimate.py FOLDER --quick    # one vTrain case in five

FOLDER has `vtrain_truth.jsonl.gz`, `perf_summary.jsonl.gz` and `nccl_truth.jsonl.gz`. The limits are on the means, on
ranking layouts, and on what overlaps save where that was measured (`validate_cases.py`).

Baselines: a constant MFU, the mean of the other models' on the same GPU, precision and kind (dense or MoE), which is
held out as the estimate is, and the mean of all other rows of the cell, which has seen the model; and what others
publish for the same measurements: vTrain (Bang et al., MICRO 2024) and Calculon (Isaev et al., SC 2023).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from statistics import fmean, median

from cost_truth import MULTI, SINGLE, Prepared, bridge_cases, prepare, vtrain_cases
from fit_cost import BRIDGE, VTRAIN, fit, leave_out
from validate_cases import Finding, collective_errors, ranking, savings

from overlapkit.cost.constants import Constants, load

LIMITS = {SINGLE: 9.0, MULTI: 9.0, "Megatron-Bridge": 12.0, "Megatron-Bridge, dense": 10.0}
_PUBLISHED = {SINGLE: "vTrain 8.4, Calculon 38.9", MULTI: "vTrain 14.7, Calculon 14.4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A case and its relative errors: the estimate's, and those of a constant MFU where other cases give one."""

    case: Prepared
    error: float
    mfu_of_others: float | None
    mfu_of_rows: float | None


def judge(cases: Sequence[Prepared], residuals: Mapping[str, float], train: Sequence[Prepared]) -> list[Judged]:
    """``residuals`` by the case's name; the baseline of other models learns from ``train``, as the constants do."""
    mfu = {id(case): _mfu(case) for case in {id(case): case for case in (*cases, *train)}.values()}

    def of_constant_mfu(case: Prepared, seen: Iterable[Prepared]) -> float | None:
        cell = [mfu[id(other)] for other in seen if _cell(other) == _cell(case)]
        return mfu[id(case)] / fmean(cell) - 1 if cell else None

    return [
        Judged(
            case=case,
            error=exp(residuals[case.case.name]) - 1,
            mfu_of_others=of_constant_mfu(case, (other for other in train if other.case.model != case.case.model)),
            mfu_of_rows=of_constant_mfu(case, (other for other in cases if other is not case)),
        )
        for case in cases
    ]


def _mfu(case: Prepared) -> float:
    found = case.estimate(load())
    assert found.mfu is not None
    return found.mfu * found.step_time_s / case.case.seconds


def _cell(case: Prepared) -> tuple[str, str, bool]:
    return case.case.gpu, case.case.precision, case.case.moe


def _percent(errors: Iterable[float | None]) -> str:
    found = [abs(error) for error in errors if error is not None]
    return f"{100 * fmean(found):.1f}" if found else "–"


def _row(name: str, judged: Sequence[Judged], published: str = "–") -> str:
    errors = [100 * each.error for each in judged]
    sizes = [abs(error) for error in errors]
    own = f"**{fmean(sizes):.1f}** | {median(sizes):.1f} | {max(sizes):.0f} | {fmean(errors):+.1f}"
    baselines = f"{_percent(e.mfu_of_others for e in judged)} | {_percent(e.mfu_of_rows for e in judged)}"
    return f"| {name} | {len(judged)} | {own} | {baselines} | {published} |"


_HEAD = (
    "| {} | cases | mean | median | max | bias | MFU of other models | MFU of other rows | {} |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def single_node(cases: Sequence[Prepared]) -> list[Judged]:
    """Each pair of width and depth, with constants fitted on the others."""
    return judge(cases, leave_out(cases, VTRAIN, load(), lambda case: case.case.model), cases)


def multi_node(single: Sequence[Prepared], multi: Sequence[Prepared]) -> tuple[list[Judged], Constants]:
    """Constants fitted on a single node; the MFU is that of a single node too."""
    constants = fit(single, VTRAIN, load())
    return judge(multi, {case.case.name: case.residual(constants) for case in multi}, single), constants


def of_bridge(cases: Sequence[Prepared], constants: Constants) -> list[Judged]:
    """Each model, with constants fitted on the others; those of A100 and memory come from vTrain."""
    return judge(cases, leave_out(cases, BRIDGE, constants, lambda case: case.case.model), cases)


def cells(judged: Sequence[Judged]) -> list[str]:
    """By GPU, precision and kind; a baseline that is nearer is named."""
    lines = []
    for cell in sorted({_cell(each.case) for each in judged}, key=lambda cell: (cell[2], cell)):
        members = [each for each in judged if _cell(each.case) == cell]
        precision = "NVFP4" if cell[1] == "fp4" else cell[1].upper()
        name = f"{'MoE' if cell[2] else 'dense'} {cell[0].upper()} {precision}"
        own = fmean(abs(each.error) for each in members)
        lost = [
            label
            for label, errors in (
                ("other models", [each.mfu_of_others for each in members]),
                ("other rows", [each.mfu_of_rows for each in members]),
            )
            if None not in errors and fmean(abs(error or 0.0) for error in errors) < own
        ]
        lines.append(_row(name, members, f"MFU of {' and '.join(lost)}" if lost else "–"))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of measured steps, see cost_truth.py")
    parser.add_argument("--package", type=Path, help="aiconfigurator-core's wheel or folder; downloaded when absent")
    parser.add_argument("--quick", action="store_true", help="one vTrain case in five")
    arguments = parser.parse_args()
    vtrain, refused = prepare(vtrain_cases(arguments.folder))
    rows, unknown = bridge_cases(arguments.folder)
    bridge, refused_rows = prepare(rows)
    single = [case for case in vtrain if case.case.source == SINGLE][:: 5 if arguments.quick else 1]
    multi = [case for case in vtrain if case.case.source == MULTI]

    on_single = single_node(single)
    on_multi, from_single = multi_node(single, multi)
    constants = fit([*single, *multi], VTRAIN, load())
    on_bridge = of_bridge(bridge, constants)
    sets = {
        SINGLE: on_single,
        MULTI: on_multi,
        "Megatron-Bridge": on_bridge,
        "Megatron-Bridge, dense": [each for each in on_bridge if not each.case.case.moe],
        "Megatron-Bridge, MoE": [each for each in on_bridge if each.case.case.moe],
    }
    print("Relative error of the step time in %, with constants fitted without what is judged:\n")
    print(_HEAD.format("set, model", "published"))
    for name, judged in sets.items():
        print(_row(name, judged, _PUBLISHED.get(name, "–")))
    for model in sorted({each.case.case.model for each in on_bridge}):
        print(_row(model, [each for each in on_bridge if each.case.case.model == model]))
    print(f"\nMegatron-Bridge by cell:\n\n{_HEAD.format('cell', 'nearer than this')}")
    print("\n".join(cells(on_bridge)))
    left_out = len(unknown) + len(refused_rows) + len(refused)
    print(f"\nNot modelled and not counted: {left_out} rows ({len(unknown)} of hybrid models).\n")

    without = fit([case for case in bridge if case.case.model != "qwen3_30b_a3b"], BRIDGE, constants)
    findings = [
        *(
            Finding(f"{name}: mean error", fmean(abs(e.error) for e in sets[name]) * 100, limit)
            for name, limit in LIMITS.items()
        ),
        *collective_errors(arguments.folder, arguments.package),
        *ranking(multi, from_single),
        *savings(fit(bridge, BRIDGE, constants), without),
    ]
    for finding in findings:
        print(finding)
    return 0 if all(finding.held for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
