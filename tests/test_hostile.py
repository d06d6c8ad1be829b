"""Recipes are untrusted: whatever one holds, there is an answer or one clear error, never a traceback.

Real recipes are mutated, here as mappings and in test_hostile_files.py as the bytes of a file. By default the same
examples run every time; ``OVERLAPKIT_EXPLORE=20000 pytest -n auto tests/test_hostile*.py`` draws as many new ones.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from io import StringIO
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlapkit import Plan, RecipeError, resolve
from overlapkit.presets import preset_names
from overlapkit.recipe.schema import SECTIONS
from overlapkit.render.data import to_json, to_yaml
from overlapkit.render.env import to_env
from overlapkit.render.text import print_plan

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
MEMORY_MB = 500
SECONDS = 2
EXAMPLES = 6_000  # half of them mappings, half files, spread over the bases
EXPLORE = int(os.environ.get("OVERLAPKIT_EXPLORE", "0"))

DUMP = {
    "_target_": "megatron.bridge.training.config.ConfigContainer",
    "cluster": {"gpu": "h100", "num_gpus": 64},
    "model": {
        "_target_": "megatron.bridge.models.llama.llama_provider.Llama3ModelProvider",
        "num_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "seq_length": 8192,
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 5,
        "context_parallel_size": 2,
        "cp_comm_type": None,
        "moe_flex_dispatcher_backend": "deepep",
        "cuda_graph_scope": [{"_target_": "megatron.core.CudaGraphScope", "_name_": "attn"}],
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "params_dtype": {"_target_": "torch.bfloat16", "_call_": False},
    },
    "train": {"_target_": "megatron.bridge.training.config.TrainingConfig", "micro_batch_size": 1},
    "optimizer": {"_target_": "megatron.core.optimizer.OptimizerConfig", "use_distributed_optimizer": True},
    "ddp": {"_target_": "megatron.core.DistributedDataParallelConfig", "use_distributed_optimizer": True},
    "mixed_precision": {"_target_": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig", "bf16": True},
    "comm_overlap": {
        "_target_": "megatron.bridge.training.comm_overlap.CommOverlapConfig",
        "tp_comm_overlap": True,
        "tp_comm_overlap_cfg": {
            "_target_": "megatron.bridge.training.comm_overlap.TransformerLayerTPOverlapCfg",
            "qkv_fprop": {"_target_": "RingExchangeOverlapCfg", "method": "ring_exchange", "aggregate": False},
            "proj_fprop": {"_target_": "PipelineOverlapCfg", "method": "pipeline", "fp8_buf": [False]},
            "qkv_wgrad": None,
        },
        "bucket_size": None,
    },
    "env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": 1, "NCCL_NVLS_ENABLE": 0},
    "logger": {"_target_": "megatron.bridge.training.config.LoggerConfig", "log_interval": 10},
    "peft": None,
}
TRANSFORMER_DUMP = {
    **DUMP,
    "model": {"_target_": "megatron.training.models.gpt.GPTModelConfig", "transformer": DUMP["model"]},
}
BASES: dict[str, dict[str, Any]] = {
    **{path.stem: yaml.safe_load(path.read_text("utf-8")) for path in sorted((ROOT / "recipes").glob("*.yaml"))},
    "dump": DUMP,
    "dump_with_transformer": TRANSFORMER_DUMP,
}


def try_examples(strategy: st.SearchStrategy[Any], answer: Callable[[Any], Plan]) -> None:
    """One base's share of the examples of one of the two tests, each within its time."""
    share = ceil((EXPLORE or EXAMPLES) / 2 / len(BASES))
    tried = 0

    @settings(
        max_examples=share,
        derandomize=not EXPLORE,
        database=None,
        deadline=SECONDS * 1000,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(example: Any) -> None:
        nonlocal tried
        tried += 1
        check(lambda: answer(example))

    run()
    assert tried >= share


@pytest.fixture(scope="module", autouse=True)
def little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_MB * 1024


# --- what may come out ---------------------------------------------------------------------------


def check(answer: Callable[[], Plan]) -> None:
    """A plan that every format can print, or a RecipeError of one printable line that names the place."""
    try:
        plan = answer()
    except RecipeError as error:
        text = str(error)
        assert text.isprintable(), text
        assert error.problem
        assert error.source and text.startswith(("mapping: ", "command line: ", "/")), text
        return
    plain = plan.to_dict()
    assert json.loads(to_json(plain)) == plain
    assert to_yaml(plain).isascii()
    assert to_env(plan.env).count("\n") == len(plan.env)
    stream = StringIO()
    print_plan(plan, stream)
    assert all(line.isprintable() for line in stream.getvalue().split("\n"))


# --- what goes in --------------------------------------------------------------------------------


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def circle() -> dict[str, Any]:
    value: dict[str, Any] = {"a": 1}
    value["b"] = [value]
    return value


INTEGERS = [0, 1, 2, 3, 5, 7, 8, 16, 72, 1000, -1, -8, 2**31, 2**62, 2**63 - 1, 2**63, -(2**63), 10**400]
TEXTS = [
    "", " ", "auto", "null", "true", "none", "detect", "8", "1e3", "2.10", "nan", "Ett|tt|ttL", "(t)*999999", "\n",
    "\t", "\x00", "\x1b[2J\x1b[31m", "\u202e\u200b", "ok\noverlapkit: all is well", "é" * 300, "\ud800", "٣",
    "k" * 20_000, "${model.num_layers}", "${model}", "${.hidden_size}", "${..}", "${", "${}", "${a.b}",
    "${oc.env:HOME}", r"\${x}", r"\\${oc.env:HOME}", '${oc.env:HOME,"{}"}', "${model.num_layers}" * 200,
    "/dev/zero", "../../etc/passwd", "/etc/passwd", "x.yaml", "a/\x00", "$(reboot)", "`id`", "'; rm -rf /", "lora",
    "bf16_mixed", "h100", "gb200", "flex", preset_names()[0], "nemo:26.04", "0.3.1", "0.5.0rc1", "9" * 5000,
    "1." * 50 + "1",
]  # fmt: skip
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(INTEGERS),
    st.integers(-4, 130),
    st.floats(),
    st.sampled_from(TEXTS),
    st.text(max_size=20),
)
keys = st.one_of(st.sampled_from([*SECTIONS, "transformer", "_target_", "method", "qkv_fprop"]), scalars)
collections = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=8,
)
oddities = st.sampled_from(
    [
        lambda: nested(49),
        lambda: nested(60),
        lambda: nested(5000),
        circle,
        lambda: dict.fromkeys(range(11_000), 1),
        lambda: [[1] * 200] * 200,
        lambda: ["x" * 100_000] * 5,
        lambda: {("a", "b"): 1},
        lambda: {"qkv_fprop": {"method": object()}},
        lambda: {"qkv_fprop": {"num_sm": float("nan")}},
        object,
        lambda: b"bytes",
        lambda: {1, 2},
        lambda: (1, 2),
        lambda: datetime.date(2026, 1, 1),
        lambda: print,
    ]
).map(lambda make: make())
hostile = scalars | collections | oddities

layers = st.sampled_from(["qkv_fprop", "proj_fprop", "fc1_dgrad", "qkv_wgrad", "x", "_target_"])
options = st.sampled_from(["method", "num_sm", "num_splits", "fp8_buf", "aggregate", "x", "_target_"])
MORE_FIELDS = [
    ("comm_overlap", "tp_comm_overlap", st.sampled_from([True, False, "auto", None])),
    ("comm_overlap", "tp_comm_overlap_cfg", st.sampled_from([*preset_names(), "auto", None, {}, "x.yaml"])),
    ("comm_overlap", "tp_comm_overlap_cfg", st.dictionaries(layers, st.dictionaries(options, scalars, max_size=3))),
    ("comm_overlap", "tp_comm_bootstrap_backend", st.sampled_from(["nccl", "gloo", "mpi", "x", None])),
    ("software", "transformer_engine", st.sampled_from([None, "detect", "1.8", "2.2", "2.18"])),
]
VERSIONS = ["0.1.0rc3", "0.3.1", "0.4.0", "0.6.2", "0.12.0", "0.16.1", "0.19.2", "1.13", "2.2.0", "2.10", "9.9"]
GPUS = ["a100", "h100", "h20", "h800", "b200", "gb200", "gb300", "vr200"]
OF_KIND: dict[str, st.SearchStrategy[Any]] = {
    "size": st.sampled_from([1, 2, 3, 4, 6, 8, 16, 64, 80, 128, 4096, 2**40]),
    "count": st.integers(0, 9),
    "integer": st.sampled_from([-1, 0, 1, 2, 3, 4, 8, 40_000_000, -(2**62)]),
    "number": st.floats(0.5, 4000),
    "flag": st.booleans(),
    "text": st.sampled_from([*GPUS, *TEXTS]),
    "version": st.sampled_from(VERSIONS),
    "names": st.lists(st.sampled_from(["a2a+p2p", "p2p", "attn", "moe", "full_iteration", "core_attn"]), max_size=3),
    "sizes": st.lists(st.sampled_from([1, 2, 4, 2**62]), max_size=17),
    "anything": st.sampled_from(["Et|t|tL", [["embedding", "decoder"], ["decoder", "loss"]], [1, 0], {}, True]),
}

FIELDS = [
    (
        section,
        name,
        st.sampled_from(spec.metadata["choices"]) if spec.metadata["choices"] else OF_KIND[spec.metadata["kind"]],
    )
    for section, dataclass in SECTIONS.items()
    for name, spec in dataclass.__dataclass_fields__.items()
    if "kind" in spec.metadata
]


@st.composite
def plausible_field(draw: st.DrawFn) -> tuple[tuple[str, str], Any]:
    """A field of a section, with a value of its kind."""
    section, name, values = draw(st.sampled_from(FIELDS) | st.sampled_from(MORE_FIELDS))
    return (section, name), draw(values)


def paths_of(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of a recipe's keys, down to the options of a userbuffers layer."""
    if not isinstance(value, dict) or len(path) == 4:
        return []
    named = [(key, child) for key, child in value.items() if isinstance(key, str)]
    return [below for key, child in named for below in [(*path, key), *paths_of(child, (*path, key))]]


def put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set ``tree[path]``, making mappings of what is in the way."""
    for key in path[:-1]:
        if not isinstance(tree, dict):
            return
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[path[-1]] = value


@st.composite
def mutated(draw: st.DrawFn, base: dict[str, Any]) -> dict[str, Any]:
    """The base with some fields set to values that make sense, and up to three places that do not."""
    recipe = copy.deepcopy(base)
    for _ in range(draw(st.integers(0, 8))):
        path, value = draw(plausible_field())
        put(recipe, path, value)
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 3]))):
        path = draw(st.sampled_from(paths_of(recipe)))
        what = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "misspell"]))
        if what == "remove":
            put(recipe, path, None)
        else:
            new = {"replace": path, "misspell": (*path[:-1], f"{path[-1]}s")}.get(what) or (*path[:-1], draw(keys))
            put(recipe, new, draw(hostile))
    return recipe


ODD_OVERRIDES = [
    "a." * 600 + "b=1", "model=null", "comm_overlap=null", "=", "+a=1", "model={}", "x=" + "y" * 20_000, "\x1b=1",
    "a", "",
]  # fmt: skip
overrides = st.lists(
    st.builds(
        lambda field, value: f"{field[0]}.{field[1]}={value}",
        st.sampled_from([*FIELDS, *MORE_FIELDS]),
        st.sampled_from([*map(str, INTEGERS), *TEXTS, "[1,2]", "{a: 1}", "[", "&a [*a]", "!!python/none x"]),
    )
    | st.sampled_from(ODD_OVERRIDES),
    max_size=1,
)


@pytest.mark.parametrize("base", BASES)
def test_mapping(base: str) -> None:
    try_examples(st.tuples(mutated(BASES[base]), overrides), lambda example: resolve(*example))


# --- single cases -------------------------------------------------------------------------------

LONG = ["(", "(t)", "t|", "a", "1.", ",", "*1", "=", "-", "[", "/", " ", "\\", "${", "\u0130", "\0"]


@pytest.mark.parametrize("unit", LONG, ids=range(len(LONG)))
def test_no_field_is_slow_to_refuse(unit: str) -> None:
    """A text of 200 KB that a pattern may stumble over, in every field."""
    for section, name, _ in [*FIELDS, *MORE_FIELDS]:
        recipe = copy.deepcopy(DUMP)
        put(recipe, (section, name), unit * (200_000 // len(unit)))
        start = time.process_time()
        check(lambda recipe=recipe: resolve(recipe))
        assert time.process_time() - start < SECONDS, (section, name)


def test_the_recipe_is_not_changed() -> None:
    for name, base in BASES.items():
        recipe = copy.deepcopy(base)
        resolve(recipe, ["model.num_layers=3", "comm_overlap.bucket_size=1"])
        assert recipe == base, name
