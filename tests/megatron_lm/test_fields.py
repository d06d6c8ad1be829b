"""Recipe fields and Megatron-LM's flags, one by one and in both directions."""

from __future__ import annotations

from typing import Any

import pytest

from overlapkit.data import load_yaml
from overlapkit.megatron_lm.arguments import read_arguments
from overlapkit.megatron_lm.fields import pairs, write_flags
from overlapkit.megatron_lm.flags import flags_of
from overlapkit.megatron_lm.words import Word
from overlapkit.recipe.known_keys import known_keys
from overlapkit.recipe.schema import SECTIONS, specs_of
from overlapkit.versions import parse_version

# Megatron-LM versions whose parsers were asked for the flags of ROWS.
CORES = ("0.12.1", "0.14.0", "0.16.1", "0.17.1", "0.19.1", "0.20.0")
ALWAYS, SINCE_14 = CORES, CORES[1:]
# The overlap fields of Megatron-Bridge and Megatron-Core: what makes them true, what false, what takes the value, and
# the versions with that flag. A field without any has no flag in any version.
ROWS: tuple[tuple[tuple[str, ...], str | None, str | None, str | None, tuple[str, ...]], ...] = (
    (("model.tp_comm_overlap",), "--tp-comm-overlap", None, None, ALWAYS),
    (("model.tp_comm_overlap_cfg",), None, None, "--tp-comm-overlap-cfg", ALWAYS),
    (("model.tp_comm_bootstrap_backend",), None, None, "--tp-comm-bootstrap-backend", ALWAYS),
    (("model.tp_comm_overlap_ag",), None, "--disable-tp-comm-overlap-ag", None, ALWAYS),
    (("model.tp_comm_overlap_rs",), None, "--disable-tp-comm-overlap-rs", None, ALWAYS),
    (("model.tp_comm_overlap_rs_dgrad",), "--tp-comm-overlap-rs-dgrad", None, None, ALWAYS),
    (("model.tp_comm_bulk_dgrad",), None, "--disable-tp-comm-bulk-dgrad", None, ALWAYS),
    (("model.tp_comm_bulk_wgrad",), None, "--disable-tp-comm-bulk-wgrad", None, ALWAYS),
    (("model.tp_comm_split_ag",), None, "--disable-tp-comm-split-ag", None, ALWAYS),
    (("model.tp_comm_split_rs",), None, "--disable-tp-comm-split-rs", None, ALWAYS),
    (("model.tp_comm_atomic_ag",), None, None, None, ()),
    (("model.tp_comm_atomic_rs",), None, None, None, ()),
    (("model.tp_comm_overlap_disable_qkv",), None, None, None, ()),
    (("model.tp_comm_overlap_disable_fc1",), None, None, None, ()),
    (("model.sequence_parallel",), "--sequence-parallel", None, None, ALWAYS),
    (("model.overlap_p2p_comm",), None, "--no-overlap-p2p-communication", None, ALWAYS),
    (("model.batch_p2p_comm",), None, None, None, ()),
    (("model.overlap_p2p_comm_warmup_flush",), "--overlap-p2p-communication-warmup-flush", None, None, ALWAYS),
    (
        ("model.microbatch_group_size_per_vp_stage",),
        None,
        None,
        "--microbatch-group-size-per-virtual-pipeline-stage",
        ALWAYS,
    ),
    (("model.virtual_pipeline_model_parallel_size",), None, None, "--num-virtual-stages-per-pipeline-rank", ALWAYS),
    (("model.use_ring_exchange_p2p",), "--use-ring-exchange-p2p", None, None, ALWAYS),
    (("ddp.overlap_grad_reduce",), "--overlap-grad-reduce", None, None, ALWAYS),
    (("ddp.overlap_param_gather", "optimizer.overlap_param_gather"), "--overlap-param-gather", None, None, ALWAYS),
    (
        ("optimizer.overlap_param_gather_with_optimizer_step",),
        "--overlap-param-gather-with-optimizer-step",
        None,
        None,
        ALWAYS,
    ),
    (("ddp.align_param_gather",), None, "--no-align-param-gather", None, ALWAYS),
    (("dist.align_grad_reduce",), None, "--no-align-grad-reduce", None, ALWAYS),
    (("ddp.bucket_size",), None, None, "--ddp-bucket-size", ALWAYS),
    (("ddp.num_buckets",), None, None, "--ddp-num-buckets", ALWAYS),
    (("ddp.average_in_collective",), "--ddp-average-in-collective", None, None, ALWAYS),
    (("ddp.pad_buckets_for_high_nccl_busbw",), "--ddp-pad-buckets-for-high-nccl-busbw", None, None, ALWAYS),
    (
        ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
        "--use-distributed-optimizer",
        None,
        None,
        ALWAYS,
    ),
    (("ddp.grad_reduce_in_fp32",), "--accumulate-allreduce-grads-in-fp32", None, None, ALWAYS),
    (("ddp.nccl_ub",), "--use-nccl-ub", None, None, SINCE_14),
    (("ddp.use_megatron_fsdp",), "--use-megatron-fsdp", None, None, SINCE_14),
    (("dist.use_torch_fsdp2",), "--use-torch-fsdp2", None, None, ALWAYS),
    (("model.defer_embedding_wgrad_compute",), "--defer-embedding-wgrad-compute", None, None, ALWAYS),
    (("model.wgrad_deferral_limit",), None, None, "--wgrad-deferral-limit", ALWAYS),
    (("model.overlap_moe_expert_parallel_comm",), "--overlap-moe-expert-parallel-comm", None, None, SINCE_14),
    (("model.delay_wgrad_compute", "ddp.delay_wgrad_compute"), "--delay-wgrad-compute", None, None, SINCE_14),
    (("model.moe_shared_expert_overlap",), "--moe-shared-expert-overlap", None, None, ALWAYS),
    (("model.gradient_accumulation_fusion",), None, "--no-gradient-accumulation-fusion", None, ALWAYS),
)
TEXTS = {"model.tp_comm_overlap_cfg": "conf/ub.yaml", "model.tp_comm_bootstrap_backend": "gloo"}
AT_ALL = [(row, core) for row in ROWS for core in CORES]
NAMES = [f"{row[0][0]}-{core}" for row, core in AT_ALL]


def read(*texts: str, core: str) -> dict[str, Any]:
    arguments = read_arguments([Word(text, text, 1) for text in texts], core=core, source="test")
    assert not arguments.strangers and not arguments.unknown
    return dict(arguments.values)


def write(core: str, **values: Any) -> tuple[tuple[str, ...], list[str]]:
    words, lacking = write_flags(values, parse_version(core))
    return words, [item.field for item in lacking]


@pytest.mark.parametrize(("row", "core"), AT_ALL, ids=NAMES)
def test_overlap_fields_are_written(row: Any, core: str) -> None:
    fields, sets, clears, value, versions = row
    if not (sets or clears or value):
        assert write(core, **{fields[0]: True}) == ((), [fields[0]])
        assert write(core, **{fields[0]: False}) == ((), [])
    elif value:
        said = TEXTS.get(fields[0], 7)
        assert write(core, **{fields[0]: said}) == ((value, str(said)), [])
    else:
        needed, wanted = (sets, True) if sets else (clears, False)
        expected = ((needed,), []) if core in versions else ((), list(fields))
        assert write(core, **dict.fromkeys(fields, wanted)) == expected
        assert write(core, **dict.fromkeys(fields, not wanted)) == ((), [])


@pytest.mark.parametrize(("row", "core"), AT_ALL, ids=NAMES)
def test_overlap_flags_are_read(row: Any, core: str) -> None:
    fields, sets, clears, value, versions = row
    flag = sets or clears or value
    if flag is None:
        assert fields[0] not in pairs()
        return
    if core not in versions:
        assert flag not in flags_of(parse_version(core), doubtful=True)
        return
    said = TEXTS.get(fields[0], 7) if value else flag == sets
    found = read(flag, *([str(said)] if value else []), core=core)
    assert {field: found.get(field) for field in fields} == dict.fromkeys(fields, said)
    assert not set(fields) & set(read(core=core))


@pytest.mark.parametrize("core", CORES)
def test_every_field_of_the_table_comes_back(core: str) -> None:
    """For each flag of each field: what is written of the field is read as the same."""
    samples = {"int": 4, "float": 4, "str": "word", None: "word"}
    for pair in pairs().values():
        if pair.field.startswith("parts."):
            continue
        for name, kind in pair.flags[:1]:
            flag = flags_of(parse_version(core), doubtful=False).get(name)
            if flag is None or kind == "given":
                continue
            value: Any = {"sets": True, "clears": False, "path": "a/b"}.get(kind, samples[flag.kind])
            if kind in ("value", "values") and flag.choices:
                value = next(choice for choice in flag.choices if choice != pair.default)
            if kind == "values":
                value = [value] * (flag.values if isinstance(flag.values, int) else 2)
            if pair.field == "model.moe_layer_freq":
                value = 4
            words, lacking = write_flags({pair.field: value}, parse_version(core))
            assert words and not lacking, pair.field
            if pair.field.startswith("model.cuda_graph_") and kind == "values":  # one of two names for the same
                read_back = read(*words, core=core)
                found = read_back.get("model.cuda_graph_modules", read_back.get("model.cuda_graph_scope"))
                assert found == ["word"]
                continue
            assert read(*words, core=core)[pair.field] == value, pair.field


def test_the_table_holds_what_it_should() -> None:
    every = flags_of(None, doubtful=True)
    for field, entry in load_yaml("megatron_lm_fields.yaml").items():
        assert set(entry) <= {"value", "values", "path", "sets", "clears", "given", "default"}, field
        assert pairs()[field].flags, field
        for name, kind in pairs()[field].flags:
            assert name in every, name
            assert (every[name].values == 0) == (kind in ("sets", "clears")), name


def test_its_fields_are_those_of_recipes() -> None:
    """All but one, which Bridge has no field for: it says VP by its number."""
    own = [field.partition(".")[::2] for field in pairs() if not field.startswith("parts.")]
    assert [f"{s}.{key}" for s, key in own if key not in known_keys().keys(s)] == [
        "model.num_layers_per_virtual_pipeline_stage"
    ]


def test_every_field_that_has_a_flag_has_it_here() -> None:
    """A field that overlapkit reads, and a flag of the same name: they belong together."""
    sections = ("model", "train", "validation", "optimizer", "ddp", "dist", "checkpoint")
    fields = {f"{section}.{name}" for section in sections for name in specs_of(section)}
    from_parts = {
        *("model.num_query_groups", "model.vocab_size", "model.should_pad_vocab", "ddp.grad_reduce_in_fp32"),
        "dist.use_megatron_fsdp",  # ddp's
    }
    named = {flag.dest for flag in flags_of(None, doubtful=True).values()}
    assert {field for field in fields - set(pairs()) - from_parts if field.partition(".")[2] in named} == set()
    assert "model.variable_seq_lengths" in fields - set(pairs())
    assert set(sections) < set(SECTIONS)


def test_choices_of_a_field_cover_the_parsers() -> None:
    """What a parser takes is never refused as a recipe's value."""
    every = flags_of(None, doubtful=True)
    for pair in pairs().values():
        section, _, name = pair.field.partition(".")
        kind, choices = specs_of(section).get(name, ("", ())) if section in SECTIONS else ("", ())
        if kind == "choice":
            assert set(every[pair.flags[0][0]].choices) <= set(choices), pair.field


def test_what_takes_more_than_a_pair() -> None:
    core = "0.19.2"
    assert write(core, **{"model.num_query_groups": 8}) == (("--group-query-attention", "--num-query-groups", "8"), [])
    assert write(core, **{"model.vocab_size": 9}) == (("--vocab-size", "9"), [])
    padded = {"model.vocab_size": 9, "model.should_pad_vocab": False}
    assert write(core, **padded) == (("--padded-vocab-size", "9"), [])
    assert write(core, **{"ddp.grad_reduce_in_fp32": False, "model.bf16": True})[0] == (
        "--bf16",
        "--grad-reduce-in-bf16",
    )
    assert write(core, **{"ddp.grad_reduce_in_fp32": False}) == ((), [])
    layout = {"model.pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder", "loss"]]}
    virtual = {"model.virtual_pipeline_model_parallel_size": 2}
    assert write(core, **layout, **virtual) == (("--pipeline-model-parallel-layout", "Et|tL"), [])
    assert write(core, **{"model.moe_layer_freq": [0, 1, 1]}) == (("--moe-layer-freq", "[0,1,1]"), [])


@pytest.mark.parametrize(
    ("core", "value", "words"),
    [
        ("0.17.0", {"model.cuda_graph_modules": ("attn",)}, ("--cuda-graph-scope", "attn")),
        ("0.18.2", {"model.cuda_graph_scope": ("attn", "mlp")}, ("--cuda-graph-modules", "attn", "mlp")),
    ],
)
def test_captured_parts_go_by_the_name_of_the_version(core: str, value: Any, words: Any) -> None:
    assert write(core, **value) == (words, [])


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"model.moe_flex_dispatcher_backend": "ncclep"}, "takes deepep, hybridep, not 'ncclep'"),
        ({"train.rampup_batch_size": [1, 2]}, "takes 3 values"),
        ({"train.rampup_batch_size": [1, 2, "x"]}, "takes whole numbers"),
        ({"train.rampup_batch_size": {"a": 1}}, "does not take a mapping"),
        ({"checkpoint.save": "a\0b"}, "no argument can hold a NUL"),
        ({"checkpoint.save": "a\ud800"}, "half of a surrogate pair"),
        ({"model.recompute_modules": ["-x", "y"]}, "would take a value that starts with a minus for a flag"),
        ({"model.heterogeneous_block_specs": True}, "Megatron-LM has no flag for it"),
        ({"model.pipeline_model_parallel_layout": [["moe"]]}, "is not a layer"),
        ({"ddp.use_custom_fsdp": True}, "the parser of this version has no --use-custom-fsdp"),
    ],
)
def test_what_cannot_be_said_is_told(value: Any, why: str) -> None:
    words, lacking = write_flags(value, parse_version("0.16.1"))
    assert words == ()
    assert [item.field for item in lacking] == list(value) and why in lacking[0].why


@pytest.mark.parametrize("text", ["-x", "--save", "--", "-1x", "-"])
def test_a_value_that_looks_like_a_flag_stays_a_value(text: str) -> None:
    words, _ = write_flags({"checkpoint.save": text}, parse_version("0.19.2"))
    assert read(*words, core="0.19.2")["checkpoint.save"] == text
