"""Where a finding of `check` stands, and under which conditions of a launch script it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_check import ERROR, GOOD, LAUNCH, ROOT, UNUSABLE, WARNING, Outcome, folder, of_recipe, only, report, write  # noqa: F401

from overlapkit import RecipeError, resolve
from overlapkit.check import Checked, ResolvedOutcome, check
from overlapkit.check_paths import select
from overlapkit.findings import Finding, findings, told
from overlapkit.plan import SEVERITIES, Decision
from overlapkit.recipe import Recipe

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def decision(subject: str, fix: str | None = None, *, code: str = "TP002", because: str = "it is so") -> Decision:
    return Decision(code, "error", subject, None, None, because, fix, None, None, "a source")


def place(subject: str, fix: str | None, recipe: Recipe) -> Finding:
    """The finding of one decision about a recipe."""
    plan = replace(resolve(recipe), decisions=(decision(subject, fix),))
    (finding,) = findings(Checked(path="a.yaml", outcomes=(ResolvedOutcome(recipe=recipe, plan=plan),)))
    return finding


# --- lines -----------------------------------------------------------------------------------------

LINES = """\
cluster:
  gpu: h100
  num_gpus: 8
mixed_precision: bf16_mixed
model:
  tensor_model_parallel_size: 2
  overlap_p2p_comm: false
  delay_wgrad_compute: false
comm_overlap:
  tp_comm_overlap: true
  tp_comm_overlap_cfg: null
  bucket_size: null
  delay_wgrad_compute: true
ddp:
  bucket_size: 5
env_vars:
  NCCL_NVLS_ENABLE: 0
"""


@pytest.mark.parametrize(
    ("subject", "fix", "line"),
    [
        ("model.tp_comm_overlap", None, 10),  # what the user wrote about it
        ("model.delay_wgrad_compute", None, 13),  # both sections have it: comm_overlap asks
        ("ddp.bucket_size", None, 15),  # null in comm_overlap asks for nothing
        ("model.overlap_p2p_comm", "set model.tensor_model_parallel_size=1", 7),
        ("model.tp_comm_overlap_cfg", None, 11),
        ("preset", None, 11),
        ("comm_overlap.overlap_p2p_comm", None, 7),
        ("env.NCCL_NVLS_ENABLE", None, 17),
        ("env_vars.NCCL_NVLS_ENABLE", None, 17),
        ("env_vars.NCCL_ALGO", None, 16),
        ("model.sequence_parallel", "set model.sequence_parallel=true, or comm_overlap.tp_comm_overlap=false", 10),
        ("model.sequence_parallel", "use another", 5),
        ("cluster.gpu", None, 2),
        ("software", None, 1),
        ("train.global_batch_size", "set train.micro_batch_size=1", 1),
        ("recipe", None, 1),
    ],
)
def test_a_finding_stands_at_the_key_that_the_user_wrote(subject: str, fix: str | None, line: int) -> None:
    finding = place(subject, fix, of_recipe(LINES))
    assert (finding.line, finding.subject, finding.message, finding.fix) == (line, subject, "it is so", fix)


@pytest.mark.parametrize(
    ("override", "subject", "fix", "line", "message"),
    [
        ("comm_overlap.tp_comm_overlap=true", "model.tp_comm_overlap", None, None, "comm_overlap.tp_comm_overlap"),
        ("env_vars.NCCL_ALGO=Ring", "env.NCCL_ALGO", None, None, "env_vars.NCCL_ALGO"),
        ("comm_overlap={bucket_size: 7}", "ddp.bucket_size", None, None, "comm_overlap.bucket_size"),
        ("model.num_layers=8", "model.tp_comm_overlap", "set model.num_layers=4", 10, "model.num_layers"),
    ],
)
def test_what_the_command_line_set_has_no_line_and_is_named(
    override: str, subject: str, fix: str | None, line: int | None, message: str
) -> None:
    finding = place(subject, fix, of_recipe(LINES, overrides=[override]))
    assert (finding.line, finding.message) == (line, f"it is so; from the command line: {message}")


def test_fields_of_a_nested_transformer_have_their_lines() -> None:
    text = (
        "cluster: {gpu: h100, num_gpus: 8}\nmodel:\n  _target_: a.GPTModelConfig\n  transformer:\n    num_layers: 2\n"
    )
    assert place("model.num_layers", None, of_recipe(text)).line == 5


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_finding_of_a_shipped_recipe_has_a_line_of_it(path: Path) -> None:
    count = len(path.read_text(encoding="utf-8").splitlines())
    found = findings(only(report(str(path))))
    assert found
    assert [finding for finding in found if finding.line is None or not 1 <= finding.line <= count] == []


def test_who_raises_is_said() -> None:
    write({"a.yaml": ERROR})
    (finding,) = findings(only(report("a.yaml")), "error")
    assert (finding.line, finding.code) == (7, "TP002")
    assert finding.message == "sequence_parallel is false (megatron-lm raises at validation)"


# --- unusable files --------------------------------------------------------------------------------


def test_an_unusable_file_is_one_finding() -> None:
    write({"a.yaml": UNUSABLE})
    assert findings(only(report("a.yaml"))) == [
        Finding(
            path="a.yaml",
            line=3,
            code="RECIPE",
            severity="error",
            subject="model.tensor_model_parallel_sizes",
            message="unknown key",
            fix="did you mean model.tensor_model_parallel_size?",
        )
    ]


def test_an_error_elsewhere_names_its_place() -> None:
    write({"a.yaml": GOOD, "b.yaml": "model: 1\n"})
    (finding,) = findings(only(report("a.yaml", "cluster.gpu=h1")))
    assert (finding.line, finding.subject) == (None, "cluster.gpu")
    assert finding.message == "command line: 'h1' is not a known GPU"
    other = Checked(path="a.yaml", error=RecipeError("not YAML", source="preset.yaml", line=7))
    assert [(f.line, f.message) for f in findings(other)] == [(None, "preset.yaml:7: not YAML")]


# --- order and severity ----------------------------------------------------------------------------


def test_the_gravest_come_first() -> None:
    write({"a.yaml": WARNING})
    checked = only(report("a.yaml"))
    severities = [finding.severity for finding in findings(checked)]
    assert severities == sorted(severities, key=SEVERITIES.index)
    assert {"warning", "info"} <= set(severities)
    for least in SEVERITIES:
        shown = SEVERITIES[: SEVERITIES.index(least) + 1]
        assert findings(checked, least) == [finding for finding in findings(checked) if finding.severity in shown]


# --- conditions ------------------------------------------------------------------------------------


def script(decisions: Mapping[tuple[str, ...], Sequence[str]]) -> Checked:
    """A script whose outcomes have these conditions and, in their plans, decisions about these subjects."""
    recipe = of_recipe(GOOD)
    plan = resolve(recipe)
    return Checked(
        path="train.sh",
        outcomes=tuple(
            ResolvedOutcome(
                when=when, recipe=recipe, plan=replace(plan, decisions=tuple(decision(subject) for subject in subjects))
            )
            for when, subjects in decisions.items()
        ),
    )


def test_what_holds_in_every_outcome_is_said_once() -> None:
    checked = script({("a", "b"): ["x", "y"], ("a", "not b"): ["x", "y"], ("not a",): ["x"]})
    assert [(finding.subject, finding.when) for finding in findings(checked)] == [("x", ()), ("y", ("a",))]
    assert [told(finding) for finding in findings(checked)] == ["it is so", "when a: it is so"]


def test_what_no_condition_sums_up_is_said_for_each_outcome() -> None:
    checked = script({("a", "b"): ["x"], ("a", "c"): [], ("not a",): ["x"]})
    assert [finding.when for finding in findings(checked)] == [("a", "b"), ("not a",)]
    assert [told(finding) for finding in findings(checked)] == ["when a and b: it is so", "when not a: it is so"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sets(st.sampled_from(["x", "y"])), min_size=8, max_size=8))
def test_conditions_say_exactly_where_a_finding_holds(found: list[set[str]]) -> None:
    whens = [tuple(name if bit else f"not {name}" for name, bit in zip("abc", bits, strict=True)) for bits in BITS]
    checked = script({when: sorted(subjects) for when, subjects in zip(whens, found, strict=True)})
    for subject in ("x", "y"):
        told_of = [finding.when for finding in findings(checked) if finding.subject == subject]
        holds = [when for when in whens if any(set(conditions) <= set(when) for conditions in told_of)]
        assert holds == [when for when, subjects in zip(whens, found, strict=True) if subject in subjects]


BITS = [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]


def test_a_script_is_told_with_its_conditions() -> None:
    write({"train.sh": LAUNCH})

    def load(path: str, overrides: Sequence[str]) -> tuple[Outcome, ...]:
        return (
            Outcome(recipe=of_recipe(ERROR, path), when=("TP > 1",)),
            Outcome(recipe=of_recipe(GOOD, path), when=("not TP > 1",), taken=False),
        )

    checked = only(check(select(["train.sh"]), load))
    assert [(finding.code, finding.when) for finding in findings(checked, "error")] == [("TP002", ("TP > 1",))]
