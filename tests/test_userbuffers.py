"""The model of Transformer Engine's initialize_ub: against what the real one did, and what must hold of any input."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapkit import RecipeError
from overlapkit.data import load_yaml
from overlapkit.presets import check_userbuffers
from overlapkit.userbuffers import fp8_reduce_scatters
from overlapkit.userbuffers.check import LayerFlags, Report
from overlapkit.userbuffers.layers import DEFAULT_METHODS, EXTERNAL_METHODS

ROOT = Path(__file__).resolve().parent.parent
RELEASES = [row["since"] for row in load_yaml("userbuffers_releases.yaml")]
LAYERS = (*DEFAULT_METHODS, *EXTERNAL_METHODS)
MIB = 2**20


def check(
    ub_cfgs: Any = None, te: str = "2.14", *, tp: Any = 4, tokens: Any = 8192, hidden: Any = 8192, **more: Any
) -> Report:
    return check_userbuffers(
        ub_cfgs,
        transformer_engine=te,
        tensor_model_parallel_size=tp,
        tokens=tokens,
        hidden_size=hidden,
        quantization_modes=more.pop("modes", ("none",)),
        **more,
    )


def codes(report: Report) -> list[tuple[str, str]]:
    return [(problem.code, problem.severity) for problem in report.problems]


# --- the real one --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parity() -> Any:
    spec = importlib.util.spec_from_file_location("parity_userbuffers", ROOT / "scripts" / "parity_userbuffers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_recorded_case_agrees(parity: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status = parity.main()
    output = capsys.readouterr()
    assert (status, output.err) == (0, "")
    counts = re.findall(r"^ *(\d+)/(\d+) +Transformer Engine (\S+)$", output.out, flags=re.MULTILINE)
    recorded = {"1.13", "2.2", "2.5", "2.7", "2.8", "2.9", "2.12", "2.14", "2.18", "HEAD"}
    assert {release for _, _, release in counts} == recorded
    assert all(agree == total and int(total) >= 80 for agree, total, _ in counts)


def test_a_case_that_disagrees_is_told(parity: Any) -> None:
    """In each thing that is compared."""
    accepted, refused = (
        next(case for case in parity.read(parity.ORACLE) if case["out"]["ok"] is ok) for ok in (True, False)
    )
    assert parity.difference(accepted) is None and parity.difference(refused) is None
    layer = next(iter(accepted["out"]["buffers"]))
    for field in parity.FIELDS:
        buffers = {**accepted["out"]["buffers"], layer: {**accepted["out"]["buffers"][layer], field: "other"}}
        assert parity.difference({**accepted, "out": {**accepted["out"], "buffers": buffers}}) is not None, field
    for out in ({"bytes": 1}, {"buffers": {}}, {"ok": False, "exc": "ValueError"}):
        assert parity.difference({**accepted, "out": {**accepted["out"], **out}}) is not None, out
    for out in ({"exc": "other"}, {"msg": "other"}, {"layer": "other"}, {"ok": True}):
        assert parity.difference({**refused, "out": {**refused["out"], **out}}) is not None, out


# --- the buffers ---------------------------------------------------------------------------------


def test_defaults_are_those_of_the_layers_own_method() -> None:
    """Whatever method the configuration gives the layer instead."""
    ring = check({"proj_fprop": {"method": "ring_exchange"}}).buffers["proj_fprop"]
    assert (ring["method"], ring["num_sm"], ring["cga_size"], ring["set_sm_margin"]) == ("ring_exchange", 16, 2, True)


@pytest.mark.parametrize(
    ("te", "modes", "count", "mib"),
    [
        ("2.6", ("none",), 10, 1280),
        ("2.6", ("fp8",), 10, 896),
        ("2.7", ("none",), 12, 1536),
        ("2.7", ("fp8",), 12, 1024),
        ("2.8", ("fp8", "none"), 24, 2560),
    ],
)
def test_memory(te: str, modes: tuple[str, ...], count: int, mib: int) -> None:
    report = check(te=te, modes=modes)
    assert (len(report.buffers), report.bytes) == (count, mib * MIB)


def test_a_rings_reduce_scatter_keeps_what_it_receives() -> None:
    """Of TP chunks it sends, TP - 1 come in."""
    ring = check({"proj_fprop": {"method": "ring_exchange"}, "fc2_fprop": {"method": "ring_exchange"}})
    assert ring.bytes == (1536 + 2 * 96) * MIB


def test_sizes_that_are_not_known_leave_the_memory_open() -> None:
    report = check(tokens=None)
    assert (len(report.buffers), report.bytes, report.ok) == (12, None, True)
    assert check(hidden=None).bytes is None


def test_a_refusal_has_no_buffers() -> None:
    report = check({"qkv_fprop": {"method": "pipeline"}}).to_dict()
    assert (report["buffers"], report["bytes"]) == ({}, None)
    assert report["decisions"] == [
        {
            "code": "UB007",
            "severity": "error",
            "subject": "tp_comm_overlap_cfg.qkv_fprop",
            "requested": None,
            "value": None,
            "fix": None,
            "because": "qkv_fprop gathers, and only a reduce-scatter is pipelined",
            "raised_by": "transformer-engine",
            "raised_at": "initialize_ub",
            "exception": "ValueError",
            "message": "At qkv_fprop, `pipeline` overlap method is not supported for AllGather.",
            "source": "transformer-engine pytorch/module/base.py initialize_ub",
        }
    ]


def test_a_list_has_a_configuration_per_mode() -> None:
    report = check([{"qkv_fprop": {"num_sm": 2}}, {"qkv_fprop": {"num_sm": 3}}], modes=("fp8", "none"))
    found = {name: buffer["num_sm"] for name, buffer in report.buffers.items() if name.startswith("qkv_fprop")}
    assert found == {"qkv_fprop@fp8": 2, "qkv_fprop@none": 3}
    refused = check([None], modes=("fp8", "none"))
    assert [(problem.code, problem.exception) for problem in refused.problems] == [("UB036", "ValueError")]
    passed_over = check([{"qkv_fprop": {"num_sm": 2}}], te="2.7")
    assert codes(passed_over) == [("UB036", "warning")]
    assert passed_over.buffers == check(te="2.7").buffers


def test_a_second_mode_begins_where_the_first_ended() -> None:
    """So that a dgrad that is not bulk is refused twice, and in one of them is not."""
    ring = {"qkv_dgrad": {"method": "pipeline", "fp8_buf": True}}
    assert codes(check(ring, modes=("fp8", "none"))) == [("UB009", "error")]
    once = check([None, ring], modes=("fp8", "none"))
    assert once.ok
    assert (
        once.buffers["qkv_wgrad@fp8"]["is_reduce_scatter"],
        once.buffers["qkv_wgrad@none"]["is_reduce_scatter"],
    ) == (True, False)


# --- what comes later ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ub_cfgs", "flags", "expected"),
    [
        ({"qkv_fprop": {"method": "bulk"}}, {}, [("UB016", "error")]),
        ({"qkv_fprop": {"method": "bulk"}}, {"tp_comm_overlap_ag": False}, []),
        ({"proj_fprop": {"num_sm": 40}}, {}, [("UB020", "error")]),
        ({"proj_fprop": {"num_sm": 40}}, {"tp_comm_overlap_rs": False}, []),
        ({"fc1_dgrad": {"method": "ring_exchange"}}, {}, [("UB017", "error")]),
        ({"fc1_dgrad": {"method": "ring_exchange"}}, {"tp_comm_overlap_rs_dgrad": True}, []),
        ({"fc1_dgrad": {"num_splits": 3}}, {}, []),
        ({"fc1_dgrad": {"num_splits": 3}}, {"tp_comm_overlap_rs_dgrad": True}, [("UB022", "error")]),
        ({"fc1_wgrad": {"method": "ring_exchange"}}, {}, [("UB018", "error")]),
        ({"fc1_wgrad": {"method": "ring_exchange"}}, {"tp_comm_bulk_wgrad": False}, []),
    ],
)
def test_only_a_buffer_that_is_used_is_judged(
    ub_cfgs: dict[str, Any], flags: dict[str, bool], expected: list[tuple[str, str]]
) -> None:
    assert codes(check(ub_cfgs, flags=LayerFlags(**flags))) == expected


def test_tokens_that_do_not_split_over_the_tp_group_fail_at_first_use() -> None:
    report = check(tp=8, tokens=8190, hidden=8192)
    assert [(each.code, each.raised_at) for each in report.problems] == [("UB023", "first_forward")]
    assert report.buffers  # initialize_ub itself takes them
    assert codes(check(tp=8, tokens=8192, hidden=8192)) == codes(check(tp=8, tokens=None, hidden=8192)) == []


def test_a_tp_size_without_kernels_is_told_once() -> None:
    assert codes(check(tp=6, tokens=6144)) == [("UB019", "error")]
    assert codes(check(tp=16, te="2.1")) == [("UB019", "error")]
    assert codes(check(tp=16, te="2.2")) == []


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "path", "problem"),
    [
        ({"te": "two"}, "transformer_engine", "'two' is not a version"),
        ({"te": 2.1}, "transformer_engine", "2.1 is not a version"),
        ({"tp": 0}, "tensor_model_parallel_size", "at least 1, got 0"),
        ({"tp": None}, "tensor_model_parallel_size", "at least 1, got null"),
        ({"tp": True}, "tensor_model_parallel_size", "got true"),
        ({"tokens": "8192"}, "tokens", "got '8192'"),
        ({"tokens": -1}, "tokens", "got -1"),
        ({"hidden": 2**63}, "hidden_size", "at least 1"),
        ({"modes": "fp8"}, "quantization_modes", "expected fp8, none or both"),
        ({"modes": ()}, "quantization_modes", "expected fp8, none or both"),
        ({"modes": ("fp8", "fp8")}, "quantization_modes", "expected fp8, none or both"),
        ({"modes": ("mxfp8",)}, "quantization_modes", "expected fp8, none or both, got 'mxfp8'"),
        ({"te": "2.7", "modes": ("fp8", "none")}, "quantization_modes", "known from Transformer Engine 2.8"),
        ({"ub_cfgs": "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"}, "ub_cfgs", "expected a mapping of layers"),
        ({"ub_cfgs": 5}, "ub_cfgs", "got 5"),
        ({"ub_cfgs": {"qkv_fprop": 5}}, "ub_cfgs.qkv_fprop", "expected a mapping of options, got 5"),
        ({"ub_cfgs": {"qkv_fprop": {"num_sm": "4"}}}, "ub_cfgs.qkv_fprop.num_sm", "expected a whole number, got '4'"),
        ({"ub_cfgs": {"qkv_fprop": {"num_sm": 2**40}}}, "ub_cfgs.qkv_fprop.num_sm", "expected a whole number"),
        ({"ub_cfgs": {"qkv_fprop": {"method": {}}}}, "ub_cfgs.qkv_fprop.method", "expected a plain value"),
        ({"ub_cfgs": {"qkv_fprop": {"aggregate": "no"}}}, "ub_cfgs.qkv_fprop.aggregate", "true or false, got 'no'"),
        ({"ub_cfgs": {"qkv_fprop": {True: 1}}}, "ub_cfgs.qkv_fprop", "an option's name is text, got true"),
        ({"ub_cfgs": {1: {"num_sm": 1}}}, "ub_cfgs", "a layer's name is text, got 1"),
        ({"ub_cfgs": [{"qkv_fprop": 5}]}, "ub_cfgs.qkv_fprop", "expected a mapping of options"),
    ],
)
def test_arguments_that_are_none(changes: dict[str, Any], path: str, problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check(**changes)
    assert caught.value.path == path
    assert problem in str(caught.value)


# --- any input -----------------------------------------------------------------------------------

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "method": st.sampled_from(["ring_exchange", "pipeline", "bulk", "external"]),
        "num_sm": st.integers(0, 40),
        "cga_size": st.integers(1, 2),
        "num_splits": st.integers(-1, 8),
        "is_reduce_scatter": st.booleans(),
        "fp8_buf": st.booleans(),
        "atomic_gemm": st.booleans(),
        "use_ce": st.booleans(),
        "set_sm_margin": st.booleans(),
    },
)
CONFIGURATIONS = st.dictionaries(st.sampled_from(LAYERS), OPTIONS, max_size=5)
MODES = st.sampled_from([("none",), ("fp8",), ("fp8", "none"), ("none", "fp8")])
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(LAYERS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.sampled_from(LAYERS), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN, PLAIN, PLAIN, PLAIN)
@settings(max_examples=300, deadline=None)
def test_plain_data_is_judged_or_refused_by_name(ub_cfgs: Any, tp: Any, tokens: Any, hidden: Any) -> None:
    for sizes in ({}, {"tp": tp, "tokens": tokens, "hidden": hidden}):
        try:
            check(ub_cfgs, **sizes)
        except RecipeError as error:
            assert error.path is not None
            assert str(error).isprintable()


@given(
    st.dictionaries(
        st.sampled_from(LAYERS) | st.text(max_size=4),
        st.none() | st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2),
        max_size=4,
    ),
    MODES,
)
@settings(max_examples=200, deadline=None)
def test_names_from_outside_are_shown_on_one_line(ub_cfgs: dict[str, Any], modes: tuple[str, ...]) -> None:
    assert all(problem.because.isprintable() for problem in check(ub_cfgs, modes=modes).problems)


@given(CONFIGURATIONS, MODES, st.sampled_from([2, 4, 8]))
@settings(max_examples=300, deadline=None)
def test_what_is_accepted_has_every_buffer(ub_cfgs: dict[str, Any], modes: tuple[str, ...], tp: int) -> None:
    report = check(ub_cfgs, modes=modes, tp=tp)
    refusals = [problem for problem in report.problems if problem.raised_at == "initialize_ub"]
    if refusals:
        assert (len(refusals), report.buffers, report.bytes) == (1, {}, None)
        return
    names = {f"{layer}@{mode}" for layer in LAYERS for mode in modes} if len(modes) == 2 else set(LAYERS)
    assert set(report.buffers) == names
    assert report.bytes is not None
    assert len(names) * 8192 * 8192 <= report.bytes <= 4 * len(names) * 8192 * 8192


@given(CONFIGURATIONS)
@settings(max_examples=200, deadline=None)
def test_a_mapping_stands_for_both_modes(ub_cfgs: dict[str, Any]) -> None:
    once, twice = (check(each, modes=("fp8", "none")) for each in (ub_cfgs, [ub_cfgs, ub_cfgs]))
    assert once == twice


@given(CONFIGURATIONS, MODES)
@settings(max_examples=100, deadline=None)
def test_a_version_between_two_rows_is_like_the_row(ub_cfgs: dict[str, Any], modes: tuple[str, ...]) -> None:
    for te, row in {
        "1.10": "1.9",
        "2.1.3": "2.0",
        "2.3": "2.2",
        "2.7.2+cu13": "2.7",
        "2.13": "2.8",
        "2.20": "2.14",
    }.items():
        if len(modes) == 1 or row in ("2.8", "2.14"):
            assert check(ub_cfgs, te, modes=modes) == check(ub_cfgs, row, modes=modes), te


@given(CONFIGURATIONS, st.sampled_from(RELEASES), st.booleans())
@settings(max_examples=300, deadline=None)
def test_fp8_reduce_scatters_are_those_of_the_buffers(ub_cfgs: dict[str, Any], te: str, rs_dgrad: bool) -> None:
    """What rules and selection say without building the buffers."""
    plain = {
        layer: {**options, "is_reduce_scatter": True} for layer, options in ub_cfgs.items() if layer.endswith("prop")
    }
    plain = {layer: options for layer, options in {**ub_cfgs, **plain}.items() if layer not in EXTERNAL_METHODS}
    buffers = check(plain, te, modes=("fp8",)).buffers
    flags = LayerFlags(tp_comm_overlap_rs_dgrad=rs_dgrad)
    found = {
        layer
        for layer, buffer in buffers.items()
        if flags.reduces(layer) and buffer["dtype"] == "u8" and plain.get(layer, {}).get("fp8_buf")
    }
    if buffers:
        ours = set(fp8_reduce_scatters(plain, rs_dgrad=rs_dgrad))
        bulk = {layer for layer in found if buffers[layer]["method"] == "bulk" and layer.endswith("dgrad")}
        assert ours == found - bulk
