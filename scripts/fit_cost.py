#!/usr/bin/env python3
"""Fits the constants of the step-time model to measured steps: overlapkit/data/cost.yaml.

    python scripts/fit_cost.py FOLDER               # prints the fitted values
    python scripts/fit_cost.py FOLDER --write       # and writes them into cost.yaml, with what they were fitted on
    python scripts/fit_cost.py FOLDER --intervals   # writes the 10th and 90th percentile of held-out errors by kind

Robust least squares of log(predicted / measured) in the logarithms of the constants, with a pull to round first guesses
(near what earlier fits gave), because what few models have in common does not tell every constant from the others:
Gauss-Newton, damped, each case weighted by Huber's function. The constants of A100 and of memory, host and
NICs come from vTrain; the others from Megatron-Bridge, with the former as they are.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

from cost_truth import MULTI, SINGLE, Prepared, bridge_cases, prepare, vtrain_cases

from overlapkit.cost.constants import Constants, load

YAML = Path(__file__).resolve().parent.parent / "overlapkit" / "data" / "cost.yaml"
HUBER = 0.1  # log error from which a case counts by its size, no longer by its square
PULL = 0.1  # a constant off its first guess by a factor of e weighs like this log error in every case
ROUNDS = 12
STEP = 0.01  # of the numeric derivatives, in logarithms
NOT_MEASURED = "not_measured"  # its interval is for what no case is like, and stays as assumed
REACH = 1.1  # logarithms: a constant stays within a factor of 3 of its first guess


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A constant that is fitted: its name in cost.yaml, with a GPU's behind a dot, and its first guess."""

    name: str
    guess: float
    highest: float | None = None
    matters: Callable[[Prepared], bool] = lambda case: True

    def set(self, constants: Constants, value: float) -> Constants:
        table, _, gpu = self.name.partition(".")
        changed: Any = {**getattr(constants, table), gpu: value} if gpu else value
        return replace(constants, **{table: changed})

    @property
    def limits(self) -> tuple[float, float]:
        """The logarithm of its value over its guess."""
        return -REACH, REACH if self.highest is None else log(self.highest / self.guess)


def _in_situ(gpu: str, guess: float) -> Parameter:
    return Parameter(name=f"gemm_in_situ.{gpu}", guess=guess, matters=lambda case: case.case.gpu == gpu)


VTRAIN = (
    _in_situ("a100", 1.0),
    Parameter(name="host_unfused_s", guess=4e-4),
    Parameter(name="host_tp_s", guess=2e-5, matters=lambda case: case.facts.parallelism.tp > 1),
    Parameter(name="hbm_efficiency", guess=0.8, highest=1.0),
    Parameter(name="nic_ring_efficiency", guess=0.9, highest=1.0, matters=lambda case: case.case.source == MULTI),
)
BRIDGE = (
    *(_in_situ(gpu, 0.85) for gpu in ("h100", "b200", "b300", "gb200", "gb300")),
    Parameter(name="gemm_in_situ_fp4", guess=1.0, matters=lambda case: case.case.precision == "fp4"),
    Parameter(name="host_s", guess=4e-4),
    Parameter(name="sync_all_to_all_s", guess=2e-3, matters=lambda case: case.case.moe),
    Parameter(name="grouped_gemm_short_width", guess=1500, matters=lambda case: case.case.moe),
    Parameter(name="permute_passes", guess=3, matters=lambda case: case.case.moe),
)


def values_of(parameters: Sequence[Parameter], constants: Constants) -> dict[str, float]:
    found = {}
    for parameter in parameters:
        table, _, gpu = parameter.name.partition(".")
        value = getattr(constants, table)
        found[parameter.name] = float(value[gpu] if gpu else value)
    return found


def fit(cases: Sequence[Prepared], parameters: Sequence[Parameter], constants: Constants) -> Constants:
    """The constants with those of ``parameters`` fitted to the cases, from their first guesses."""

    def at(place: Sequence[float]) -> Constants:
        found = constants
        for parameter, x in zip(parameters, place, strict=True):
            found = parameter.set(found, parameter.guess * exp(x))
        return found

    place = [0.0] * len(parameters)
    here = [case.residual(at(place)) for case in cases]
    loss, damping = _loss(here, place), 1e-3
    for _ in range(ROUNDS):
        slopes = [_slopes(cases, parameter, index, place, here, at) for index, parameter in enumerate(parameters)]
        step = _step(slopes, here, place, damping)
        moved = [_within(p, x + d) for p, x, d in zip(parameters, place, step, strict=True)]
        there = [case.residual(at(moved)) for case in cases]
        gain = loss - _loss(there, moved)
        if gain <= 0:
            damping *= 10
            continue
        place, here, loss, damping = moved, there, loss - gain, damping / 3
        if gain < 1e-5 * loss:
            break
    return at(place)


def _within(parameter: Parameter, x: float) -> float:
    low, high = parameter.limits
    return min(max(x, low), high)


def _slopes(
    cases: Sequence[Prepared],
    parameter: Parameter,
    index: int,
    place: Sequence[float],
    here: Sequence[float],
    at: Callable[[Sequence[float]], Constants],
) -> list[float]:
    """The derivative of every case's residual."""
    direction = -STEP if place[index] + STEP > parameter.limits[1] else STEP
    moved = at([x + direction * (i == index) for i, x in enumerate(place)])
    return [
        (case.residual(moved) - residual) / direction if parameter.matters(case) else 0.0
        for case, residual in zip(cases, here, strict=True)
    ]


def _weight(residual: float) -> float:
    return min(1.0, HUBER / abs(residual)) if residual else 1.0


def _loss(residuals: Sequence[float], place: Sequence[float]) -> float:
    cases = sum(r * r if abs(r) <= HUBER else HUBER * (2 * abs(r) - HUBER) for r in residuals)
    return cases + len(residuals) * sum((PULL * x) ** 2 for x in place)


def _step(
    slopes: Sequence[Sequence[float]], residuals: Sequence[float], place: Sequence[float], damping: float
) -> list[float]:
    """The damped step of weighted least squares: (JᵀWJ + pull) d = -JᵀWr - pull x."""
    weights = [_weight(residual) for residual in residuals]
    pull = len(residuals) * PULL**2
    size = len(place)
    matrix = [
        [sum(w * a * b for w, a, b in zip(weights, slopes[i], slopes[j], strict=True)) for j in range(size)]
        for i in range(size)
    ]
    right = [-sum(w * a * r for w, a, r in zip(weights, slopes[i], residuals, strict=True)) for i in range(size)]
    for i in range(size):
        right[i] -= pull * place[i]
        matrix[i][i] = (matrix[i][i] + pull) * (1 + damping)
    return _solved(matrix, right)


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Cholesky; the matrix is symmetric and positive."""
    size = len(right)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            lower[i][j] = sqrt(rest) if i == j else rest / lower[j][j]
    forward: list[float] = []
    for i in range(size):
        forward.append((right[i] - sum(lower[i][k] * forward[k] for k in range(i))) / lower[i][i])
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (forward[i] - sum(lower[k][i] * found[k] for k in range(i + 1, size))) / lower[i][i]
    return found


def leave_out(
    cases: Sequence[Prepared],
    parameters: Sequence[Parameter],
    constants: Constants,
    group: Callable[[Prepared], Any],
) -> dict[str, float]:
    """The residual of every case by its name, predicted with constants fitted without any case of its group."""
    found: dict[str, float] = {}
    for left in sorted({group(case) for case in cases}):
        fitted = fit([case for case in cases if group(case) != left], parameters, constants)
        found |= {case.case.name: case.residual(fitted) for case in cases if group(case) == left}
    return found


def fit_all(folder: Path) -> tuple[Constants, list[Prepared], list[Prepared]]:
    """The constants that ship: those of vTrain on all its cases, then those of Megatron-Bridge."""
    vtrain, _ = prepare(vtrain_cases(folder))
    bridge, _ = prepare(bridge_cases(folder)[0])
    constants = fit(vtrain, VTRAIN, load())
    return fit(bridge, BRIDGE, constants), vtrain, bridge


def percentiles(residuals: Sequence[float]) -> tuple[float, float]:
    """The 10th and 90th of measured over predicted, between the two nearest cases."""
    ordered = sorted(exp(-residual) for residual in residuals)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(0.1), at(0.9)


def intervals(constants: Constants, vtrain: Sequence[Prepared], bridge: Sequence[Prepared]) -> dict[str, Any]:
    """By kind of case: (low, high, cases), of the cases held out by model."""
    single = [case for case in vtrain if case.case.source == SINGLE]
    multi = [case for case in vtrain if case.case.source == MULTI]
    held_out = leave_out(single, VTRAIN, constants, lambda case: case.case.model)
    fitted = fit(single, VTRAIN, constants)
    held_out |= {case.case.name: case.residual(fitted) for case in multi}
    held_out |= leave_out(bridge, BRIDGE, constants, lambda case: case.case.model)
    kinds: dict[str, list[float]] = {}
    for case in (*vtrain, *bridge):
        kinds.setdefault(case.kind, []).append(held_out[case.case.name])
    return {kind: (*percentiles(residuals), len(residuals)) for kind, residuals in kinds.items()}


def with_values(text: str, values: Mapping[str, float], fitted_on: str) -> str:
    """The YAML with these values, and the rest of it as it is."""
    for name, value in values.items():
        table, _, gpu = name.partition(".")
        if gpu:
            head = re.compile(rf"(^{table}:\n(?:.*\n)*?  {gpu}: )\{{.*\}}", re.MULTILINE)
            text, count = head.subn(rf"\g<1>{{value: {value:.4g}, fitted_on: {fitted_on}}}", text, count=1)
        else:
            text, count = re.subn(rf"(^  {name}:\n    value: ).*", rf"\g<1>{value:.4g}", text, count=1, flags=re.M)
        if count != 1:
            sys.exit(f"{YAML.name} has no {name}")
    return text


def with_intervals(text: str, found: Mapping[str, tuple[float, float, int]]) -> str:
    for kind, (low, high, cases) in found.items():
        line = rf"\g<1>{{low: {low:.2f}, high: {high:.2f}, cases: {cases}}}"
        text = re.sub(rf"(^  {kind}: )\{{low: .*\}}", line, text, count=1, flags=re.M)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of measured steps, see cost_truth.py")
    parser.add_argument("--write", action="store_true", help="write the fitted values into cost.yaml")
    parser.add_argument("--intervals", action="store_true", help="write the held-out intervals into cost.yaml")
    arguments = parser.parse_args()
    constants, vtrain, bridge = fit_all(arguments.folder)
    text = YAML.read_text(encoding="utf-8")
    for parameters, name in ((VTRAIN, "vTrain"), (BRIDGE, "Bridge")):
        values = values_of(parameters, constants)
        text = with_values(text, values, name) if arguments.write else text
        print("\n".join(f"{key:32} {value:.4g}  {name}" for key, value in values.items()))
    if arguments.intervals:
        found = intervals(constants, vtrain, bridge)
        print("\n".join(f"{kind:16} {low:.2f} to {high:.2f}  {cases}" for kind, (low, high, cases) in found.items()))
        text = with_intervals(text, {kind: value for kind, value in found.items() if kind != NOT_MEASURED})
    if arguments.write or arguments.intervals:
        YAML.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
