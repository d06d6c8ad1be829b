"""``resolve`` with ``estimate``: what the plan says of each overlap that is on, and of what is left exposed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from overlapkit import resolve
from overlapkit.cli import app
from overlapkit.cost.estimate import estimate
from overlapkit.cost.result import Saving
from overlapkit.errors import RecipeError
from overlapkit.plan import Decision, Plan
from overlapkit.rules.estimated import exposed_communication, not_estimated, worth_of_overlap

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
CODES = ("CFG031", "CFG032", "CFG033")
# TP 8 on a GPU that computes fast beside its NVLink: there is much to hide.
H800: dict[str, Any] = {
    "cluster": {"gpu": "h800", "num_gpus": 8},
    "software": {"container": "nemo:26.04"},
    "model": {
        "num_layers": 8,
        "hidden_size": 8192,
        "ffn_hidden_size": 28672,
        "num_attention_heads": 64,
        "num_query_groups": 8,
        "vocab_size": 128256,
        "seq_length": 4096,
        "gated_linear_unit": True,
        "tensor_model_parallel_size": 8,
        "sequence_parallel": True,
    },
    "train": {"micro_batch_size": 1, "global_batch_size": 32},
    "ddp": {"use_distributed_optimizer": True},
    "optimizer": {"use_distributed_optimizer": True},
    "mixed_precision": "bf16_mixed",
}


def h800(**sections: Any) -> dict[str, Any]:
    """The recipe with fields of its sections changed."""
    return {**H800, **{name: {**H800.get(name, {}), **fields} for name, fields in sections.items()}}


def said(plan: Plan, *codes: str) -> list[Decision]:
    return [decision for decision in plan.decisions if decision.code in (codes or CODES)]


def share_in(text: str) -> float:
    """The first percentage of a sentence, as a share."""
    return float(text.partition(" %")[0].rpartition(" ")[2]) / 100


# --- the sentences -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "low", "high", "sentence"),
    [
        (0.009, 0.004, 0.015, "legal, of little value: saves 0.9 % (0.4–1.5 %) of the step"),
        (0.0, 0.0, 0.0, "legal, of little value: saves 0.0 % (0.0–0.0 %) of the step"),
        (-1e-17, -2e-17, 0.0, "legal, of little value: saves 0.0 % (0.0–0.0 %) of the step"),
        (0.0499, 0.025, 0.08, "legal, of little value: saves 5.0 % (2.5–8.0 %) of the step"),
        (0.05, 0.025, 0.08, "saves 5.0 % (2.5–8.0 %) of the step, 0.5 s"),
        (0.184, 0.09, 0.25, "saves 18 % (9.0–25 %) of the step, 1.84 s"),
        (
            -0.012,
            -0.03,
            0.001,
            "legal, of no value: the step takes 1.2 % (-0.1 to 3.0 %) longer with it",
        ),
    ],
)
def test_an_overlap_is_worth_what_it_saves(share: float, low: float, high: float, sentence: str) -> None:
    saving = Saving(seconds=10 * share, share=share, low_share=low, high_share=high)
    verdict = worth_of_overlap("model.tp_comm_overlap", saving)
    assert (verdict.severity, verdict.value, verdict.because) == ("info", True, sentence)


def test_exposed_communication_without_a_way_out_is_worth_knowing() -> None:
    verdict = exposed_communication("model.context_parallel_size", 2, "CP", 0.18, (0.15, 0.21))
    assert (verdict.severity, verdict.fix) == ("info", None)
    assert verdict.because == "CP communication is exposed: 18 % of the step (15–21 %)"


@pytest.mark.parametrize(("saved", "severity"), [(0.02, "warning"), (0.012, "info")])
def test_exposed_communication_is_a_warning_where_an_overlap_would_help(saved: float, severity: str) -> None:
    change = "comm_overlap.overlap_grad_reduce=true"
    verdict = exposed_communication(
        "ddp.overlap_grad_reduce", False, "DP", 0.18, (0.15, 0.21), turn_on=change, saved_share=saved
    )
    assert (verdict.severity, verdict.fix) == (
        severity,
        f"set {change}, which saves an estimated {100 * saved:.1f} % of the step",
    )


def test_why_there_is_no_estimate() -> None:
    verdict = not_estimated(RecipeError("estimate needs it", path="model.vocab_size", source="r.yaml", hint="give it"))
    assert (verdict.severity, verdict.subject) == ("info", "model.vocab_size")
    assert (verdict.because, verdict.fix) == ("not estimated: estimate needs it", "give it")


# --- on recipes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_an_estimate_adds_decisions_and_changes_nothing_else(path: Path) -> None:
    plain, with_estimate = resolve(path), resolve(path, estimate=True)
    added = len(plain.decisions)
    assert with_estimate.decisions[:added] == plain.decisions
    assert said(plain) == []
    assert said(with_estimate) == list(with_estimate.decisions[added:]) != []
    assert all(decision.severity != "error" for decision in said(with_estimate))
    assert {**with_estimate.to_dict(), "decisions": []} == {**plain.to_dict(), "decisions": []}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_they_say_what_the_estimate_says(path: Path) -> None:
    plan = resolve(path, estimate=True)
    if said(plan, "CFG033"):
        with pytest.raises(RecipeError):
            estimate(path)
        assert len(said(plan)) == 1
        return
    found = estimate(path)
    worth = {decision.subject.partition(".")[2]: decision for decision in said(plan, "CFG031")}
    assert worth.keys() == found.saves.keys()
    for name, decision in worth.items():
        assert plan.settings[decision.subject]
        assert abs(share_in(decision.because)) == pytest.approx(abs(found.saves[name].share), abs=0.006)
    exposed = [time.exposed_s / found.step_time_s for name, time in found.groups.items() if name != "all"]
    told = [share_in(decision.because) for decision in said(plan, "CFG032")]
    assert told == pytest.approx([share for share in exposed if share >= 0.1], abs=0.006)


def test_a_legal_overlap_that_is_off_is_the_way_out() -> None:
    off = h800(comm_overlap={"tp_comm_overlap": False})
    (decision,) = said(resolve(off, estimate=True), "CFG032")
    assert (decision.severity, decision.subject, decision.value) == ("warning", "model.tp_comm_overlap", False)
    assert decision.because.startswith("TP communication is exposed: ")
    assert decision.fix is not None
    assert decision.fix.startswith("set comm_overlap.tp_comm_overlap=true, which saves an estimated ")
    saved = 1 - estimate(H800).step_time_s / estimate(off).step_time_s
    assert share_in(decision.fix) == pytest.approx(saved, abs=0.006)


def test_an_overlap_that_is_on_is_not_told_again() -> None:
    worth = said(resolve(H800, estimate=True), "CFG031")
    assert "model.tp_comm_overlap" in [decision.subject for decision in worth]
    assert all("tp_comm_overlap" not in (decision.fix or "") for decision in said(resolve(H800, estimate=True)))


def test_an_overlap_that_would_not_be_legal_is_no_way_out() -> None:
    """Userbuffers need sequence parallelism."""
    without = h800(model={"sequence_parallel": False})
    (decision,) = said(resolve(without, estimate=True), "CFG032")
    assert (decision.severity, decision.fix) == ("info", None)
    assert (decision.subject, decision.value) == ("model.tensor_model_parallel_size", 8)


def test_without_the_set_up_of_bridge_the_model_is_asked() -> None:
    off = {**H800, "comm_overlap": None}
    (decision,) = said(resolve(off, estimate=True), "CFG032")
    assert decision.fix is not None and decision.fix.startswith("set model.tp_comm_overlap=true, ")


@pytest.mark.parametrize(
    ("recipe", "subject", "because"),
    [
        (h800(model={"vocab_size": None}), "recipe", "not estimated: estimate needs model.vocab_size"),
        (h800(cluster={"gpu": None}), "cluster.gpu", "not estimated: estimate needs the GPU"),
        (h800(cluster={"gpu": "vr200", "gpus_per_node": 8}), "cluster.gpu", "not estimated: the time on vr200"),
        (h800(model={"num_attention_heads": 4}), "recipe", "not estimated: the plan has an error"),
    ],
    ids=["a size", "no GPU", "its figures", "an error"],
)
def test_what_cannot_be_estimated_is_told_why_and_is_no_failure(
    recipe: dict[str, Any], subject: str, because: str
) -> None:
    plan = resolve(recipe, estimate=True)
    (decision,) = said(plan)
    assert (decision.code, decision.severity, decision.subject) == ("CFG033", "info", subject)
    assert decision.because.startswith(because)
    assert plan.settings == resolve(recipe).settings


# --- on the command line -------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["resolve", *arguments])


@pytest.fixture
def path(tmp_path: Path) -> str:
    written = tmp_path / "recipe.yaml"
    without_userbuffers = h800(cluster={"num_gpus": 16}, comm_overlap={"tp_comm_overlap": False})
    written.write_text(json.dumps(without_userbuffers), "utf-8")
    return str(written)


def test_the_text_has_them_where_other_decisions_stand(path: str) -> None:
    plain, found = run(path).stdout, run(path, "--estimate").stdout
    assert "CFG03" not in plain
    overlaps, _, rest = found.partition("Good to know")
    assert overlaps.splitlines()[1:] == plain.partition("Good to know")[0].partition("Export")[0].splitlines()[1:]
    notes, _, warnings = rest.partition("Warnings")
    assert "CFG031" in notes
    assert "CFG032" in warnings


def test_the_data_has_them_and_a_warning_fails_only_who_asks_for_it(path: str) -> None:
    done = run(path, "--estimate", "--format", "json")
    assert done.exit_code == 0
    assert {"CFG031", "CFG032"} < {decision["code"] for decision in json.loads(done.stdout)["decisions"]}
    assert run(path, "--estimate", "--fail-on", "warning").exit_code == 1
    assert run(path, "--fail-on", "warning").exit_code == 0
