"""The texts about a volume: figures for people, stages and nodes that are alike, differences, levers, bars."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import pytest

from overlapkit.render.volume import print_volume
from overlapkit.render.volume_diff import print_diff
from overlapkit.render.volume_plot import plot
from overlapkit.render.volume_table import human, percent, ranks_text
from overlapkit.volume.configuration import Configuration, configure
from overlapkit.volume.levers import Lever, largest_levers

ROOT = Path(__file__).resolve().parent.parent
PLAIN = ("train.global_batch_size=32", "comm_overlap=null")


def llama2(*overrides: str) -> Configuration:
    return configure(ROOT / "recipes" / "llama2_7b_32xh20.yaml", [*PLAIN, *overrides])


def text_of(found: Configuration, levers: tuple[Lever, ...] = ()) -> str:
    stream = io.StringIO()
    print_volume(found, levers, stream, exact=False, phases=False, nodes=False)
    return stream.getvalue()


def difference(before: Configuration, after: Configuration, *, exact: bool = False) -> str:
    stream = io.StringIO()
    print_diff(before, after, after.overrides[len(before.overrides) :], stream, exact=exact)
    return stream.getvalue()


def levers_of(recipe: str, *overrides: str, number: int = 3) -> dict[str, Lever]:
    path = ROOT / "recipes" / f"{recipe}.yaml"
    return {lever.what: lever for lever in largest_levers(path, configure(path, overrides), number=number)}


# --- figures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (7, "7 B"),
        (999, "999 B"),
        (1_000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),  # not 1000.0 kB
        (52_076_478_464, "52.1 GB"),
        (5_000_000_000_000_000_000, "5000.0 PB"),
    ],
)
def test_bytes_for_people(number: int, text: str) -> None:
    assert human(number) == text


def test_a_small_share_is_not_nothing() -> None:
    assert [percent(part, 1_000_000) for part in (0, 1, 499, 500, 983_000)] == [
        "0.0 %",
        "<0.1 %",
        "<0.1 %",
        "0.1 %",
        "98.3 %",
    ]
    assert percent(0, 0) == "0.0 %"


def test_ranks_that_follow_one_another_are_one_range() -> None:
    assert ranks_text([range(8, 16), range(4), range(4, 8), range(20, 21)]) == "0-15, 20"


# --- tables --------------------------------------------------------------------------------------------


def test_stages_that_move_the_same_share_a_table() -> None:
    text = text_of(configure(ROOT / "recipes" / "llama31_405b_h100.yaml"))
    heads = [line.partition(":")[0] for line in text.splitlines() if line.startswith("Stage")]
    assert heads == ["Stage 0, ranks 0-127", "Stages 1 to 6, ranks 128-895", "Stage 7, ranks 896-1023"]


def test_the_group_that_sends_most_stands_first_with_its_share() -> None:
    first = text_of(llama2()).partition("Stage 1")[0].splitlines()
    groups = [line.split() for line in first if "_GROUP" in line]
    assert [group[0].rstrip(",") for group in groups] == [
        "TENSOR_MODEL_PARALLEL_GROUP",
        "DATA_PARALLEL_GROUP_WITH_CP",
        "PIPELINE_MODEL_PARALLEL_GROUP",
        "MODEL_PARALLEL_GROUP",
        "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
    ]
    assert " ".join(groups[0]) == "TENSOR_MODEL_PARALLEL_GROUP, 8 ranks, within a node 76.1 GB 98.3 %"
    assert " ".join(groups[-1][-2:]) == "<0.1 %"


def test_marks_are_explained_where_they_stand() -> None:
    plain = text_of(llama2())
    hidden = text_of(configure(ROOT / "recipes" / "llama2_7b_32xh20.yaml"))
    routed = text_of(configure(ROOT / "recipes" / "mixtral_8x7b_h100.yaml"))
    assert not any(mark in plain for mark in ("not NCCL", "if balanced", "from source"))
    assert "not NCCL, from source" in hidden and "userbuffers, DeepEP or HybridEP move it" in hidden
    assert "if balanced" in routed and "routing decides the bytes" in routed and "userbuffers" not in routed


def test_pairs_of_nodes_with_the_same_bytes_share_a_line() -> None:
    nodes = text_of(llama2()).partition("Between nodes")[2].splitlines()
    assert nodes[0] == " of 8 GPUs: node 2 sends most, 10.7 GB"
    assert [line.split(maxsplit=2) for line in nodes[1:4]] == [
        ["10.1", "GB", "2 ↔ 3, 0 ↔ 1"],
        ["536.9", "MB", "0 ↔ 2, 1 ↔ 3"],
        ["7", "B", "1 → 2, 3 → 0"],
    ]


def test_nodes_that_are_one_or_unknown() -> None:
    one = ("cluster.num_gpus=8", "model.pipeline_model_parallel_size=1")
    assert "Between nodes: nothing, NVLink joins all ranks" in text_of(llama2(*one))
    assert "Between nodes: unknown without cluster.gpu" in text_of(llama2("cluster.gpu=null"))


# --- two configurations ----------------------------------------------------------------------------------


def test_a_difference_shows_what_differs_and_names_the_rest() -> None:
    text = difference(llama2(), llama2("model.sequence_parallel=false"), exact=True)
    assert "→ model.sequence_parallel=false" in text
    assert "67,108,864 → 536,870,912" in text
    assert "1,552 → –" in text and "– → 34,896,609,280" in text
    unchanged = [line.strip() for line in text.splitlines() if "unchanged" in line]
    assert unchanged[0].split(maxsplit=1)[1].startswith("DATA_PARALLEL_GROUP_WITH_CP, INTRA_")
    assert "reduce_scatter  float32" not in text


def test_a_difference_in_stages() -> None:
    text = difference(llama2(), llama2("model.pipeline_model_parallel_size=4"))
    assert "Stage 0, ranks 0-15 → 0-7" in text
    assert "Stages 2 to 3" not in text  # the last has the loss
    assert "Stage 2, ranks – → 16-23" in text


def test_no_difference() -> None:
    text = difference(llama2(), llama2("model.num_layers=32"))
    assert "→ 7" not in text and "none" in text
    assert text.splitlines()[-2].startswith("All ranks together send 2.5 TB")
    assert "%" not in text.splitlines()[-2]


# --- levers ----------------------------------------------------------------------------------------------


def test_the_three_largest_levers_of_llama2() -> None:
    found = levers_of("llama2_7b_32xh20", *PLAIN)
    assert list(found) == ["full recomputation", "sequence parallelism off", "gradients reduced in BF16"]
    assert found["full recomputation"].change == 1024 * 33_554_432 * 7 // 8  # 512 gathers and 512 scatters more
    assert found["sequence parallelism off"].change < 0
    for lever in found.values():
        other, base = llama2(*lever.overrides), llama2()
        assert lever.change == round((other.job_bytes - base.job_bytes) / 32)
        assert other.plan.ok


def test_levers_turn_the_other_way() -> None:
    off = levers_of("llama2_7b_32xh20", *PLAIN, "model.sequence_parallel=false")
    assert (
        off["sequence parallelism on"].change
        == -levers_of("llama2_7b_32xh20", *PLAIN)["sequence parallelism off"].change
    )
    recomputed = levers_of("qwen3_32b_8xh20")
    assert recomputed["no recomputation"].change < 0 and "full recomputation" not in recomputed


def test_a_change_that_brings_an_error_is_no_lever() -> None:
    routed = levers_of("qwen3_235b_a22b_h100", number=9)
    assert "sequence parallelism off" not in routed  # experts need it
    assert "comm_overlap.overlap_moe_expert_parallel_comm=false" in routed["full recomputation"].overrides


def test_a_change_that_needs_another_is_made_with_it() -> None:
    forced = ("comm_overlap.tp_comm_overlap=true",)  # which Megatron-LM refuses without sequence parallelism
    lever = levers_of("llama2_7b_32xh20", *forced)["sequence parallelism off"]
    assert lever.overrides == ("model.sequence_parallel=false", "comm_overlap.tp_comm_overlap=false")


def test_gradients_are_changed_where_the_recipe_says_their_type() -> None:
    lm = levers_of("llama2_7b_32xh20", *PLAIN)["gradients reduced in BF16"]
    assert lm.overrides == ("ddp.grad_reduce_in_fp32=false",)
    bridge = levers_of("nemotron_340b_b200", "mixed_precision=bf16_mixed", number=9)["gradients reduced in BF16"]
    assert bridge.overrides == ("mixed_precision.grad_reduce_in_fp32=false",)


def test_levers_as_text() -> None:
    levers = (
        Lever(what="this", overrides=("model.a=1", "model.b=2"), change=-2_000_000, share=-0.25),
        Lever(what="that", overrides=("model.c=3",), change=1_000, share=0.001),
    )
    lines = [" ".join(line.split()) for line in text_of(llama2(), levers).splitlines()[-2:]]
    assert lines == ["this saves 2.0 MB, 25.0 % model.a=1 model.b=2", "that costs 1.0 kB, 0.1 % model.c=3"]
    assert "No switch of the recipe changes" in text_of(llama2())


# --- bars --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
@pytest.mark.parametrize(("name", "begins"), [("bars.svg", b"<?xml"), ("bars.PNG", b"\x89PNG")])
def test_bars_are_a_picture_that_repeats(name: str, begins: bytes, tmp_path: Path) -> None:
    volumes = {"recipe": llama2().volume, "model.seq_length=${a}$": llama2("model.seq_length=2048").volume}
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        plot(volumes, str(tmp_path / folder / name))
    pictures = [(tmp_path / folder / name).read_bytes() for folder in ("one", "two")]
    assert pictures[0].startswith(begins) and pictures[0] == pictures[1]
    if name.endswith("svg"):
        for text in ("TENSOR_MODEL_PARALLEL_GROUP", "76.1 GB", "7 B", "model.seq_length=${a}$: Stage 1"):
            assert text.encode() in pictures[0]
