"""The forms of an estimate: figures for people, a table for spreadsheets, a picture."""

from __future__ import annotations

import csv
import importlib.util
import io
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from estimates import estimate_with, stage_of, timeline_of

from overlapkit import load_recipe, resolve
from overlapkit.cost.result import Estimate
from overlapkit.errors import RecipeError
from overlapkit.render.estimate import print_estimate
from overlapkit.render.estimate_csv import to_csv
from overlapkit.render.estimate_parts import AXES, pieces, seconds_text, short_seconds
from overlapkit.volume.placement import AXES as AXES_OF_GROUPS

ROOT = Path(__file__).resolve().parent.parent
PLAIN = estimate_with(timeline_of(2, 4))
PLAN = resolve(load_recipe(ROOT / "recipes" / "llama3_8b_8xh100.yaml"))


def text_of(estimate: Estimate) -> str:
    stream = io.StringIO()
    print_estimate(estimate, PLAN, stream)
    return stream.getvalue()


# --- figures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "step", "text"),
    [
        (27.667, 27.667, "27.67 s"),
        (0.0, 27.667, "0.00 s"),
        (0.004, 27.667, "<0.01 s"),
        (0.005, 27.667, "0.01 s"),
        (-0.123, 2.0, "-0.123 s"),
        (1234.5, 1234.5, "1,234.5 s"),
        (0.2, 0.5, "200.0 ms"),
        (0.0000001, 0.5, "<0.1 ms"),
    ],
)
def test_seconds_have_the_decimals_of_the_step(seconds: float, step: float, text: str) -> None:
    assert seconds_text(seconds, step) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12345.6, "12,346 s"),
        (999.9, "1,000 s"),
        (27.667, "27.7 s"),
        (1.0, "1.00 s"),
        (14.98, "15.0 s"),
        (109.7, "110 s"),
        (0.0123, "12.3 ms"),
        (4.5e-6, "4.50 µs"),
    ],
)
def test_seconds_in_three_digits(seconds: float, text: str) -> None:
    assert short_seconds(seconds) == text


def test_every_axis_of_a_volume_has_a_name() -> None:
    assert set(AXES) == set(AXES_OF_GROUPS.values())


def test_pieces_are_the_step() -> None:
    assert sum(piece.seconds for piece in pieces(PLAIN)) == pytest.approx(20.0)


# --- text ------------------------------------------------------------------------------------------


def test_the_step_and_its_rates_come_first() -> None:
    head = text_of(PLAIN).splitlines()
    assert head[0] == "recipes/by_hand.yaml  an optimizer step, estimated"
    assert head[4:9] == [
        "20.0 s per step",
        "  interval               16.0 s to 25.0 s  80 % of held-out steps of MoE models under CUDA graphs lie in it",
        "  tokens/s per GPU       6,554             2,097,152 tokens in a step",
        "  model TFLOP/s per GPU  412.3             without what is computed twice",
        "  MFU                    41.7 %            of the dense rate of h100 in the precision of the GEMMs",
    ]


def test_communication_by_axis_then_the_rest_adds_up_to_the_step() -> None:
    assert """
Where the time goes                 message   total  hidden  exposed  of the step
  TP                                52.1 GB  6.00 s  3.00 s   3.00 s       15.0 %
  DP                                 3.0 MB  1.50 s  1.00 s   0.50 s        2.5 %
  all ranks                            12 B  0.00 s  0.00 s   0.00 s        0.0 %
  GEMM                                                       11.25 s       56.2 %
  attention                                                   4.00 s       20.0 %
  memory-bound kernels                                       <0.01 s       <0.1 %
  host, the GPU waits for launches                            1.00 s        5.0 %
  pipeline bubble                                             0.00 s        0.0 %
  optimizer                                                   0.25 s        1.2 %
  the step                                                   20.00 s      100.0 %

""" in text_of(PLAIN)


def test_what_overlaps_save_is_said_with_its_interval_and_its_worth() -> None:
    assert re.search(
        r"""What each overlap saves: .*
  tp_comm_overlap +3\.00 s +15 % \(7\.5–24 %\) +worth having
  overlap_grad_reduce +0\.10 s +0\.5 % \(0\.2–0\.8 %\) +of little value
  overlap_moe_expert_parallel_comm +-0\.40 s +-2\.0 % \(-3\.2 to -1\.0 %\) +the step takes longer with it
""",
        text_of(PLAIN),
    )
    assert "No overlap is on that has something to hide" in text_of(replace(PLAIN, saves={}))


def test_doubts_come_last() -> None:
    assert text_of(PLAIN).endswith(
        "\nGood to know\n  note     no step times on h100 were at hand\n  assumed  cluster.nic_gbps=400\n"
    )
    assert "Good to know" not in text_of(replace(PLAIN, notes=(), assumed=()))


def test_an_interval_that_nobody_measured_is_said_to_be_assumed() -> None:
    assert "assumed: no step of this kind was at hand" in text_of(replace(PLAIN, kind="not_measured"))


def test_an_mfu_that_is_unknown_is_not_a_figure() -> None:
    assert re.search(r"MFU +unknown", text_of(replace(PLAIN, mfu=None)))


def test_a_recipe_cannot_write_on_the_terminal() -> None:
    assert "\x1b" not in text_of(replace(PLAIN, recipe="a\x1b[2Jb", notes=("c\x1b[1md",)))


# --- csv -------------------------------------------------------------------------------------------


def lines_of(estimate: Estimate) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(to_csv(estimate))))


def test_csv_has_a_line_per_figure() -> None:
    lines = lines_of(PLAIN)
    assert [(line["kind"], line["name"]) for line in lines] == [
        ("step", "step_time"),
        ("rate", "tokens_per_s_per_gpu"),
        ("rate", "model_tflops_per_gpu"),
        ("rate", "mfu"),
        *(("part", name) for name in ("gemm", "attention", "memory_bound", "host", "bubble", "optimizer")),
        *(("exposed", axis) for axis in ("tp", "dp", "all")),
        *(("saves", name) for name in PLAIN.saves),
        ("note", "no step times on h100 were at hand"),
        ("assumed", "cluster.nic_gbps=400"),
    ]
    assert {(line["recipe"], line["gpu"]) for line in lines} == {("recipes/by_hand.yaml", "h100")}


def test_parts_and_exposed_make_the_step() -> None:
    lines = [line for line in lines_of(PLAIN) if line["kind"] in ("part", "exposed")]
    assert sum(float(line["value"]) for line in lines) == pytest.approx(20.0)
    assert sum(float(line["share_of_step"]) for line in lines) == pytest.approx(1.0)


def test_communication_has_its_bytes_and_what_is_hidden() -> None:
    tp = next(line for line in lines_of(PLAIN) if line["name"] == "tp")
    assert (tp["message_bytes"], tp["total_s"], tp["hidden_s"], tp["value"]) == ("52076478464", "6.0", "3.0", "3.0")


def test_intervals_are_in_the_unit_of_the_value() -> None:
    by_name = {line["name"]: line for line in lines_of(PLAIN)}
    assert (by_name["step_time"]["low"], by_name["step_time"]["high"]) == ("16.0", "25.0")
    assert (by_name["tp_comm_overlap"]["low"], by_name["tp_comm_overlap"]["high"]) == ("1.5", "4.8")


# --- pictures --------------------------------------------------------------------------------------

with_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")


def svg_of(estimate: Estimate, folder: Path) -> list[str]:
    """The texts in the picture."""
    from overlapkit.render.estimate_plot import plot

    path = folder / "step.svg"
    plot(estimate, str(path))
    return re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))


@with_matplotlib
def test_a_picture_has_the_step_its_parts_and_every_pass(tmp_path: Path) -> None:
    texts = svg_of(PLAIN, tmp_path)
    assert "recipes/by_hand.yaml: 20.0 s per step (16.0 s to 25.0 s)" in texts
    assert {"GEMM 11.2 s", "attention 4.00 s", "TP exposed 3.00 s", "DP exposed 500 ms", "56 %", "20 %"} <= set(texts)
    assert "4 microbatches on 2 stages" in texts
    assert [texts.count(str(microbatch)) for microbatch in (2, 3)] == [4, 4]  # forward and backward on two stages


@with_matplotlib
def test_a_picture_says_what_it_leaves_out(tmp_path: Path) -> None:
    many = estimate_with(timeline_of(70, 1_000), step_time_s=4_000.0)
    assert (
        "1,000 microbatches on 70 stages, start and end, 700 microbatches between them are left out, "
        "6 stages in the middle are left out"
    ) in svg_of(many, tmp_path)
    assert (tmp_path / "step.svg").stat().st_size < 2_000_000


@with_matplotlib
@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_picture_is_the_same_every_time(ending: str, tmp_path: Path) -> None:
    from overlapkit.render.estimate_plot import plot

    estimate = replace(estimate_with(timeline_of(4, 8, vp=2)), recipe="$x^2$ & <b>.yaml")
    one, other = tmp_path / f"one.{ending}", tmp_path / f"other.{ending}"
    for path in (one, other):
        plot(estimate, str(path))
    assert one.read_bytes() == other.read_bytes()
    assert sorted(tmp_path.iterdir()) == [one, other]


@with_matplotlib
def test_a_full_disk_leaves_the_picture_that_was_there(tmp_path: Path) -> None:
    from overlapkit.render.estimate_plot import plot

    path = tmp_path / "step.svg"
    path.write_text("before")
    plot(PLAIN, str(tmp_path / "first.svg"))  # fonts are cached by now
    (tmp_path / "first.svg").unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limits[1]))
    try:
        with pytest.raises(RecipeError, match=r"step\.svg: cannot be written: File too large"):
            plot(PLAIN, str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@with_matplotlib
def test_a_schedule_that_megatron_core_refuses_has_no_picture(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--plot cannot show 5 microbatches on 4 stages of 3 chunks"):
        svg_of(estimate_with(timeline_of([stage_of(1.0, 2.0)] * 4, 5, vp=3)), tmp_path)
