"""Measured steps: their recipes, how near the estimates of a sample are, and the fit of the constants.

`data/estimates.json` holds rows of vTrain (MIT) and of Megatron-Bridge's performance summaries with the band that
predicted over measured must stay in; `scripts/validate_estimate.py` judges with all rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from overlapkit.cost.constants import load

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = json.loads((ROOT / "tests" / "data" / "estimates.json").read_text())


class Scripts(NamedTuple):
    truth: ModuleType
    bridge: ModuleType
    fit: ModuleType
    validate: ModuleType
    cases: ModuleType


@pytest.fixture(scope="module")
def scripts() -> Iterator[Scripts]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import bridge_cases
        import cost_truth
        import fit_cost
        import validate_cases
        import validate_estimate

        yield Scripts(cost_truth, bridge_cases, fit_cost, validate_estimate, validate_cases)
        for name in ("bridge_cases", "cost_truth", "fit_cost", "validate_cases", "validate_estimate"):
            sys.modules.pop(name, None)


def prepared(scripts: Scripts, entries: list[dict[str, Any]]) -> list[Any]:
    make = {"vtrain": scripts.truth.vtrain_case, "bridge": scripts.truth.bridge_case}
    found, refused = scripts.truth.prepare([make[entry["source"]](entry["row"]) for entry in entries])
    assert refused == {}
    return found


def of_source(source: str) -> list[dict[str, Any]]:
    return [entry for entry in SAMPLE if entry["source"] == source]


# ----------------------------------------------------------------------------------------------------------- estimates


@pytest.mark.parametrize("entry", SAMPLE, ids=lambda entry: str(list(entry["row"].values())[:5]))
def test_an_estimate_stays_in_its_band(scripts: Scripts, entry: dict[str, Any]) -> None:
    (case,) = prepared(scripts, [entry])
    low, high = entry["band"]
    assert low <= case.seconds(load()) / case.case.seconds <= high


def test_the_sample_as_a_whole_is_near(scripts: Scripts) -> None:
    errors = [abs(case.seconds(load()) / case.case.seconds - 1) for case in prepared(scripts, SAMPLE)]
    assert sum(errors) / len(errors) < 0.1


def test_the_step_is_the_estimates(scripts: Scripts) -> None:
    for case in prepared(scripts, SAMPLE[::6]):
        assert case.seconds(load()) == case.estimate(load()).step_time_s


# ------------------------------------------------------------------------------------------------------------- recipes


def test_models_have_the_flops_that_their_rows_say(scripts: Scripts) -> None:
    for case in prepared(scripts, of_source("bridge")):
        found = case.estimate(load())
        flops = found.model_tflops_per_gpu * 1e12 / found.tokens_per_s_per_gpu
        # The BF16 rows of GPT-OSS count a fifth less than its MXFP8 rows: another convention for the same model.
        counted = 1.2 if case.case.model == "gpt_oss_120b" and case.case.precision == "bf16" else 1.0
        assert flops / case.case.flops_per_token == pytest.approx(counted, rel=0.02)


def test_vtrain_recomputes_every_layer_and_overlaps_nothing(scripts: Scripts) -> None:
    (case,) = prepared(scripts, of_source("vtrain")[:1])
    assert case.kind == "dense_unfused"
    assert case.facts.recipe.model.recompute_granularity == "full"
    assert case.estimate(load()).saves == {}


def test_hybrid_models_are_named_not_guessed(scripts: Scripts) -> None:
    assert scripts.bridge.sizes_named("Nemotron_3_Nano") is None
    assert scripts.bridge.sizes_named("DeepSeekV3 (w/ MTP)") == "deepseek_v3"


def test_a_release_runs_with_its_own_switches(scripts: Scripts) -> None:
    """Qwen3-30B-A3B in MXFP8 on GB300: parts of layers in CUDA graphs in 26.04, the whole iteration from 26.06."""
    row = next(entry["row"] for entry in SAMPLE if entry["row"].get("model") == "Qwen3_30B_a3B")
    older, newer = (scripts.bridge.recipe_of({**row, "release": release}) for release in ("26.04", "26.06"))
    assert (older["model"]["cuda_graph_impl"], newer["model"]["cuda_graph_impl"]) == ("transformer_engine", "local")
    assert not older["model"]["use_transformer_engine_op_fuser"] and newer["model"]["use_transformer_engine_op_fuser"]
    assert "overlap_moe_expert_parallel_comm" not in older["comm_overlap"]
    assert newer["comm_overlap"]["overlap_moe_expert_parallel_comm"]


def test_dropped_tokens_are_a_capacity(scripts: Scripts) -> None:
    row = next(entry["row"] for entry in SAMPLE if "tokendrop" in str(entry["row"].get("model")))
    model = scripts.bridge.recipe_of(row)["model"]
    assert (model["moe_expert_capacity_factor"], model["moe_pad_expert_input_to_capacity"]) == (1.0, True)


def test_what_is_refused_is_refused_by_name(scripts: Scripts) -> None:
    row = next(entry["row"] for entry in SAMPLE if entry["row"].get("task") == "SFT")
    case = scripts.truth.bridge_case({**row, "task": "LoRA"})
    found, refused = scripts.truth.prepare([case])
    assert found == []
    assert "peft" in refused[case.name]


# ----------------------------------------------------------------------------------------------------------------- fit


def measured_with(scripts: Scripts, cases: list[Any], constants: Any) -> list[Any]:
    """The cases, had they taken what these constants say."""
    return [replace(case, case=replace(case.case, seconds=case.seconds(constants))) for case in cases]


def test_a_fit_finds_the_constants_that_made_the_steps(scripts: Scripts) -> None:
    fit = scripts.fit
    cases = prepared(scripts, of_source("vtrain"))
    wanted = {"gemm_in_situ.a100": 0.9, "host_unfused_s": 6e-4, "hbm_efficiency": 0.7}
    parameters = [parameter for parameter in fit.VTRAIN if parameter.name in wanted]
    truth = load()
    for parameter in parameters:
        truth = parameter.set(truth, wanted[parameter.name])
    found = fit.fit(measured_with(scripts, cases, truth), parameters, load())
    assert fit.values_of(parameters, found) == pytest.approx(wanted, rel=0.05)  # short of them by the pull


def test_a_constant_without_cases_keeps_its_first_guess(scripts: Scripts) -> None:
    fit = scripts.fit
    single = [case for case in prepared(scripts, of_source("vtrain")) if case.case.source == scripts.truth.SINGLE]
    found = fit.values_of(fit.VTRAIN, fit.fit(single, fit.VTRAIN, load()))
    guess = next(parameter.guess for parameter in fit.VTRAIN if parameter.name == "nic_ring_efficiency")
    assert found["nic_ring_efficiency"] == pytest.approx(guess)


def test_no_constant_leaves_its_limits(scripts: Scripts) -> None:
    fit = scripts.fit
    cases = prepared(scripts, of_source("vtrain"))
    slower = [replace(case, case=replace(case.case, seconds=case.case.seconds / 10)) for case in cases]
    found = fit.values_of(fit.VTRAIN, fit.fit(slower, fit.VTRAIN, load()))
    assert found["hbm_efficiency"] <= 1.0


def test_what_is_left_out_is_not_seen(scripts: Scripts) -> None:
    """A model's own steps ten times as long change nothing of how it is predicted, only of how far off that is."""
    fit = scripts.fit
    cases = prepared(scripts, of_source("vtrain"))
    model = cases[0].case.model
    changed = [
        replace(case, case=replace(case.case, seconds=case.case.seconds * (10 if case.case.model == model else 1)))
        for case in cases
    ]

    def predicted(which: list[Any]) -> dict[str, float]:
        found = fit.leave_out(which, fit.VTRAIN[:2], load(), lambda case: case.case.model)
        seconds = {case.case.name: case.case.seconds for case in which if case.case.model == model}
        return {name: 2.718281828459045 ** found[name] * seconds[name] for name in seconds}

    assert predicted(changed) == pytest.approx(predicted(cases), rel=1e-6)


def test_values_are_written_and_nothing_else(scripts: Scripts) -> None:
    fit = scripts.fit
    before = fit.YAML.read_text()
    after = fit.with_values(before, {"hbm_efficiency": 0.5, "gemm_in_situ.a100": 1.25}, "vTrain")
    changed = [(a, b) for a, b in zip(before.splitlines(), after.splitlines(), strict=True) if a != b]
    assert [b for _, b in changed] == ["    value: 0.5", "  a100: {value: 1.25, fitted_on: vTrain}"]


def test_intervals_are_written_by_kind(scripts: Scripts) -> None:
    after = scripts.fit.with_intervals(scripts.fit.YAML.read_text(), {"dense": (0.9, 1.1, 45)})
    assert "  dense: {low: 0.90, high: 1.10, cases: 45}" in after.splitlines()


def test_a_name_that_the_file_lacks_is_said(scripts: Scripts) -> None:
    with pytest.raises(SystemExit, match="no_such"):
        scripts.fit.with_values("constants:\n", {"no_such": 1.0}, "vTrain")


def test_percentiles_are_of_measured_over_predicted(scripts: Scripts) -> None:
    """Eleven cases, predicted 0 to 100 % too long: the tenth percentile of the truth is what 90 % too long leaves."""
    from math import log

    low, high = scripts.fit.percentiles([log(1 + share / 10) for share in range(11)])
    assert (low, high) == pytest.approx((1 / 1.9, 1 / 1.1))


# ---------------------------------------------------------------------------------------------------------- validation


def test_a_baseline_is_held_out_as_the_estimate_is(scripts: Scripts) -> None:
    """The MFU of other models never has the model's own cases."""
    bridge = prepared(scripts, of_source("bridge"))
    judged = scripts.validate.judge(bridge, {case.case.name: 0.0 for case in bridge}, bridge)
    alone = [each for each in judged if each.case.case.model == "kimi_k2"]
    assert [each.mfu_of_others is not None for each in alone] == [True]  # Qwen3 has steps on GB300 in MXFP8
    assert all(each.error == 0.0 for each in judged)


def test_ranking_pays_for_the_layout_that_was_chosen(scripts: Scripts) -> None:
    cases = [case for case in prepared(scripts, of_source("vtrain")) if case.case.model == "h 8192 L 48"]
    right = measured_with(scripts, cases, load())
    assert next(scripts.cases.ranking(right, load())).percent == 0.0
    chosen = min(right, key=lambda case: case.seconds(load()))
    wrong = [
        replace(case, case=replace(case.case, seconds=case.case.seconds * (3 if case is chosen else 1)))
        for case in right
    ]
    assert next(scripts.cases.ranking(wrong, load())).percent > 100


def test_what_tp_overlap_saves_is_ordered_by_flops_over_bandwidth(scripts: Scripts) -> None:
    findings = list(scripts.cases.savings(load(), load()))
    assert [finding.name for finding in findings if not finding.held] == []


def test_a_finding_says_whether_its_limit_holds(scripts: Scripts) -> None:
    finding = scripts.cases.Finding
    assert str(finding("a", 1.0, 2.0)) == "- a: 1.0 %, at most 2: held"
    assert str(finding("a", 3.0, 2.0, "b")) == "- a: 3.0 %, at most 2: **missed** (b)"
    assert str(finding("a", None, None, "b")) == "- a: not judged (b)"
