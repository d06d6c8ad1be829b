"""Derived presets: three shapes fixed, what must hold for every shape, and that the files are what the code gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import yaml

from overlapkit.catalogue import Gpu, find_gpu
from overlapkit.errors import RecipeError
from overlapkit.presets.derivation import MAX_SMS, DerivedLayer, derive
from overlapkit.presets.derived_file import derivation_record, derived_userbuffers, preset_name, preset_text
from overlapkit.presets.times import (
    LAYERS,
    Inputs,
    Precision,
    communication_share,
    forward_ratios,
    inputs_of_hidden_size,
    layer_times,
)

ROOT = Path(__file__).resolve().parent.parent
GPUS = ("a100", "a800", "h100", "h800", "h200", "h20", "h20_141", "b200", "b300", "gb200", "gb300")
HIDDEN_SIZES = (4096, 5120, 6144, 8192, 12288, 16384, 18432)
BULK = ("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad")
CHOSEN = (*BULK, "proj_fprop", "fc2_fprop")


def gpu(name: str) -> Gpu:
    found = find_gpu(name)
    assert found is not None
    return found


def inputs(name: str = "h100", hidden_size: int = 8192, tp: int = 4, precision: Precision = "bf16") -> Inputs:
    return inputs_of_hidden_size(gpu(name), precision, hidden_size=hidden_size, tensor_model_parallel_size=tp)


def every_shape(*names: str) -> Iterator[Inputs]:
    for name, hidden_size, tp, precision in product(names, HIDDEN_SIZES, (2, 4, 8), ("bf16", "fp8")):
        if precision == "bf16" or gpu(name).fp8_tflops is not None:
            yield inputs(name, hidden_size, tp, precision)


def short(derived: dict[str, DerivedLayer]) -> dict[str, str]:
    """Layer -> method and SM count, for the layers where there is a choice."""
    return {layer: f"{derived[layer].options['method']} {derived[layer].options['num_sm']}" for layer in CHOSEN}


# --- the figures themselves ----------------------------------------------------------------------


def test_an_h20() -> None:
    """Long GEMMs: few SMs hide the collectives, and the pipeline's would cost more than a ring does."""
    assert short(derive(inputs("h20", 5120, 8))) == {
        "qkv_dgrad": "bulk 2",
        "qkv_wgrad": "bulk 4",
        "fc1_dgrad": "bulk 2",
        "fc1_wgrad": "bulk 2",
        "proj_fprop": "ring_exchange 1",
        "fc2_fprop": "ring_exchange 1",
    }


def test_an_h800() -> None:
    """NVLink is full at 18 SMs of a bulk reduce-scatter and 12 of a pipeline."""
    derived = derive(inputs("h800", 8192, 4))
    assert short(derived) == {
        "qkv_dgrad": "bulk 8",
        "qkv_wgrad": "bulk 18",
        "fc1_dgrad": "bulk 2",
        "fc1_wgrad": "bulk 4",
        "proj_fprop": "pipeline 12",
        "fc2_fprop": "pipeline 12",
    }
    assert (
        derived["qkv_wgrad"].because == "NVLink can use no more, and the reduce-scatter outlasts the GEMM all the same"
    )


def test_a_gb200_in_fp8() -> None:
    assert short(derive(inputs("gb200", 16384, 8, "fp8"))) == {
        "qkv_dgrad": "bulk 12",
        "qkv_wgrad": "bulk 32",
        "fc1_dgrad": "bulk 2",
        "fc1_wgrad": "bulk 10",
        "proj_fprop": "ring_exchange 1",
        "fc2_fprop": "ring_exchange 1",
    }


def test_times() -> None:
    """8 H100 of 989.4 TFLOPS and 450 GB/s one way: 2*8192*8192*10240/4 FLOP, and 3/4 of 8192*8192*2 bytes."""
    times = layer_times(inputs())["qkv_fprop"]
    assert times.gemm == pytest.approx(2 * 8192 * 8192 * 10240 / 4 / (989.4e12 * 0.65))
    assert times.collective == pytest.approx(3 / 4 * 8192 * 8192 * 2 / (450e9 * 0.8))
    assert times.ratio == pytest.approx(times.gemm / times.collective)


def test_the_ratio_that_says_how_much_there_is_to_win() -> None:
    """Qwen3-32B with TP 8: little on 8 H20, much on 8 H100."""
    expected = {"h20": (4.2, 3.3, 20.9, 10.5), "h100": (0.8, 0.7, 4.1, 2.0), "h800": (0.4, 0.3, 1.8, 0.9)}
    for name, ratios in expected.items():
        found = forward_ratios(inputs(name, 5120, 8))
        assert tuple(found) == ("qkv", "proj", "fc1", "fc2")
        assert tuple(found.values()) == pytest.approx(ratios, abs=0.06), name
    shares = {name: communication_share(inputs(name, 5120, 8)) for name in ("h20", "h100", "h800")}
    assert shares == pytest.approx({"h20": 0.09, "h100": 0.44, "h800": 0.98}, abs=0.01)


def test_an_fp8_gather_is_half_as_long() -> None:
    bf16, fp8 = layer_times(inputs()), layer_times(inputs(precision="fp8"))
    for layer, (_, collective) in LAYERS.items():
        assert fp8[layer].collective == bf16[layer].collective / (2 if collective == "all-gather" else 1)
        assert fp8[layer].gemm == pytest.approx(bf16[layer].gemm / 2, rel=1e-3)


# --- what must hold for every shape --------------------------------------------------------------


@pytest.mark.parametrize("name", GPUS)
def test_transformer_engine_can_run_it(name: str) -> None:
    """Sizes within the flags of userbuffers, whole clusters, whole columns in every split, no FP8 reduce-scatter."""
    for shape in every_shape(name):
        derived = derive(shape)
        assert list(derived) == list(LAYERS)
        for layer, chosen in derived.items():
            options = chosen.options
            assert 1 <= options["num_sm"] <= MAX_SMS
            assert options["num_sm"] % options["cga_size"] == 0
            assert shape.hidden_size % (8 * options.get("num_splits", 1)) == 0
            assert not options.get("fp8_buf", False)
            assert options["method"] == ("bulk" if layer in BULK else options["method"])
            assert options["method"] == "ring_exchange" or layer in CHOSEN
            assert all(isinstance(value, (bool, int, str)) for value in options.values())


def test_fp8_reduces_by_ring_exchange() -> None:
    for shape in every_shape("h100", "h800", "h200", "h20", "b200", "gb200"):
        if shape.precision == "fp8":
            assert {derive(shape)[layer].options["method"] for layer in ("proj_fprop", "fc2_fprop")} == {
                "ring_exchange"
            }


@pytest.mark.parametrize("name", ["h20", "h20_141", "h800"])
def test_never_more_sms_than_the_h100(name: str) -> None:
    for shape in every_shape(name):
        here, there = derive(shape), derive(replace(shape, gpu=gpu("h100")))
        for layer in CHOSEN:
            if here[layer].options["method"] == there[layer].options["method"] or layer in BULK:
                assert here[layer].options["num_sm"] <= there[layer].options["num_sm"], (preset_name(shape), layer)


@pytest.mark.parametrize("name", ["h20", "h20_141"])
def test_an_h20_gives_far_fewer(name: str) -> None:
    """One SM is 1.3 % of an H20 and 0.8 % of an H100, so a pipeline costs more there than a ring."""
    for shape in every_shape(name):
        here, there = derive(shape), derive(replace(shape, gpu=gpu("h100")))
        sums = [sum(derived[layer].options["num_sm"] for layer in CHOSEN) for derived in (here, there)]
        assert sums[0] <= (0.5 if shape.precision == "bf16" else 0.7) * sums[1], preset_name(shape)
        if shape.hidden_size in (4096, 5120, 8192):
            assert here["proj_fprop"].options["method"] == here["fc2_fprop"].options["method"] == "ring_exchange"


@pytest.mark.parametrize(("name", "like"), [("h800", "h100"), ("a800", "a100")])
def test_nvlink_limits(name: str, like: str) -> None:
    """The SMs that fill a link are fewer by the ratio of the links; rounded up to whole clusters."""
    share = (gpu(name).nvlink_gb_per_s or 0) / (gpu(like).nvlink_gb_per_s or 1)
    for tp, rate in product((2, 4, 8), (3.0, 5.0)):
        fills = (gpu(like).nvlink_gb_per_s or 0) / 2 * 0.8 / (tp - 1) / rate
        for hidden_size in HIDDEN_SIZES:
            derived = derive(inputs(name, hidden_size, tp))
            layers = ("qkv_wgrad", "fc1_wgrad") if rate == 3.0 else ("proj_fprop", "fc2_fprop")
            for layer in layers:
                options = derived[layer].options
                assert options["method"] == "ring_exchange" or options["num_sm"] < share * fills + 2


@pytest.mark.parametrize("name", GPUS)
def test_longer_gemms_want_fewer_sms(name: str) -> None:
    """A wider model of the same hidden size never takes more SMs for its bulk collectives."""
    narrow = inputs(name, 8192, 4)
    wide = replace(narrow, ffn_hidden_size=2 * narrow.ffn_hidden_size, num_query_groups=64)
    for layer in BULK:
        assert derive(wide)[layer].options["num_sm"] <= derive(narrow)[layer].options["num_sm"]


@pytest.mark.parametrize("field", ["seq_length", "micro_batch_size"])
def test_tokens_change_nothing(field: str) -> None:
    """All times grow with them alike, which is why one sequence length is shipped per shape."""
    for shape in every_shape("h100", "h20", "a800", "gb200"):
        more = replace(shape, **{field: 4 * getattr(shape, field)})
        assert derived_userbuffers(derive(more)) == derived_userbuffers(derive(shape))
    assert inputs().tokens == replace(inputs(), context_parallel_size=2, micro_batch_size=2).tokens


@pytest.mark.parametrize(
    ("name", "tp", "precision", "changes", "problem"),
    [
        ("h100", 6, "bf16", {}, "kernels for TP 2, 4, 8, 16, 32, not 6"),
        ("h100", 16, "bf16", {}, "TP 16 does not fit into an NVLink domain of 8 h100"),
        ("h100_pcie", 4, "bf16", {}, "TP 4 does not fit into an NVLink domain of 2 h100_pcie"),
        ("vr200", 4, "bf16", {}, "sm_count, bf16_tflops, nvlink_gb_per_s, hbm_gb_per_s, nvlink_domain_size unknown"),
        ("a800", 4, "fp8", {}, "a800 has no FP8"),
        ("h100", 8, "bf16", {"seq_length": 1001}, "1001 tokens per CP rank are not divisible by TP 8"),
    ],
)
def test_what_cannot_be_derived(
    name: str, tp: int, precision: Precision, changes: dict[str, int], problem: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        derive(replace(inputs(name, 8192, tp, precision), **changes))
    assert problem in caught.value.problem
    assert caught.value.path


def test_a_hidden_size_without_a_model_has_gpts_widths() -> None:
    made = inputs(hidden_size=3072)
    assert (made.ffn_hidden_size, made.num_attention_heads, made.num_query_groups) == (12288, 24, 24)


# --- the files -----------------------------------------------------------------------------------


def test_a_file_says_all_that_it_rests_on() -> None:
    shape = inputs("h20", 5120, 8)
    text = preset_text(shape, beside=inputs("h100", 5120, 8))
    document = yaml.safe_load(text)
    assert document["name"] == preset_name(shape) == "userbuffers_bf16_h20_h5120_tp8_mbs1_seqlen8192"
    assert document["provenance"] == "derived"
    assert document["userbuffers"] == derived_userbuffers(derive(shape))
    assert document["derivation"] == derivation_record(shape, derive(shape))
    assert document["derivation"]["layers"]["fc1_fprop"]["ratio"] == 20.9
    assert "at most 4 of 78 (5 %)" in text and "for the H100: qkv_dgrad 8" in text
    assert all(entry["because"] for entry in document["derivation"]["layers"].values())


def test_the_name_of_a_gpu_with_an_underscore_is_still_a_spelling_of_it() -> None:
    name = preset_name(inputs("h20_141", 5120, 8))
    assert find_gpu(name.split("_")[2]) == gpu("h20_141")


@pytest.mark.parametrize("script", ["derive_presets.py --check", "validate_presets.py --fit"])
def test_the_scripts_agree_with_what_is_committed(script: str) -> None:
    file, *arguments = script.split()
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / file), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
