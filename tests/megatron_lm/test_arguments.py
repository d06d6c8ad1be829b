"""Arguments as Megatron-LM's parser reads them, and the recipe that they are."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapkit import RecipeError, resolve
from overlapkit.facts import derive
from overlapkit.megatron_lm.arguments import Arguments, read_arguments, recipe_of
from overlapkit.megatron_lm.flags import flags_of
from overlapkit.megatron_lm.words import Word
from overlapkit.recipe import recipe_from_mapping
from overlapkit.versions import parse_version

CORE = "0.16.1"
TP, PP = "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"
EACH = "model.num_layers_per_virtual_pipeline_stage"
VP = "model.virtual_pipeline_model_parallel_size"


def words(text: str) -> list[Word]:
    """Shell text to words, one on each line; ``$NAME`` is what only a run could tell."""
    return [
        Word(None if "$" in token else token, token, line, "not set here" if "$" in token else None)
        for line, token in enumerate(shlex.split(text), 1)
    ]


def read(text: str, core: str | None = CORE) -> Arguments:
    return read_arguments(words(text), core=core, source="run.sh")


def value(text: str, field: str, core: str | None = CORE) -> Any:
    return read(text, core).values.get(field)


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        ("--tensor-model-parallel-size 8", TP, 8),
        ("--tensor-model-parallel-size=8", TP, 8),
        ("--tensor-model-parallel-size 8 --tensor-model-parallel-size 4", TP, 4),
        ("--cp-comm-type p2p a2a --bf16", "model.cp_comm_type", ["p2p", "a2a"]),
        ("--cp-comm-type=p2p", "model.cp_comm_type", ["p2p"]),
        ("--cp-comm-type p2p --cp-comm-type a2a", "model.cp_comm_type", ["a2a"]),
        ("--rampup-batch-size 16 16 1000", "train.rampup_batch_size", [16, 16, 1000]),
        ("--wgrad-deferral-limit -1", "model.wgrad_deferral_limit", -1),
        ("--save=", "checkpoint.save", ""),
        ("--save '-a b'", "checkpoint.save", "-a b"),
        ("--save=--load", "checkpoint.save", "--load"),
        ("--no-tp-comm-bulk-wgrad", "model.tp_comm_bulk_wgrad", False),
        ("--disable-tp-comm-bulk-wgrad", "model.tp_comm_bulk_wgrad", False),
        ("--recompute-activations", "model.recompute_granularity", "selective"),
        ("--recompute-granularity full --recompute-activations", "model.recompute_granularity", "selective"),
        ("--num-query-groups 8", "model.num_query_groups", None),  # not without --group-query-attention
        ("--group-query-attention --num-query-groups 8", "model.num_query_groups", 8),
        ("--group-query-attention", "model.num_query_groups", 1),
        ("--encoder-seq-length 1024", "model.seq_length", 1024),
        ("--hybrid-override-pattern MM*-", "model.is_hybrid_model", True),
        ("--heterogeneous-layers-config-path a.json", "model.heterogeneous_block_specs", True),
        ("--quick-geglu", "model.gated_linear_unit", True),
        ("--swiglu --hidden-size 4096", "model.ffn_hidden_size", 10880),
        ("--swiglu --hidden-size 4096 --ffn-hidden-size 11008", "model.ffn_hidden_size", 11008),
        ("--padded-vocab-size 1024 --vocab-size 1000", "model.vocab_size", 1024),
        ("--padded-vocab-size 1024", "model.should_pad_vocab", False),
        ("--vocab-size 1000", "model.should_pad_vocab", True),
        ("--untie-embeddings-and-output-weights", "model.share_embeddings_and_output_weights", False),
        ("", "model.share_embeddings_and_output_weights", True),
        ("", "model.bf16", False),
        ("--fp16", "model.bf16", None),
        ("--first-last-layers-bf16", "model.num_layers_at_start_in_bf16", 1),
        ("--first-last-layers-bf16 --num-layers-at-start-in-bf16 0", "model.num_layers_at_start_in_bf16", 0),
        ("--bf16 --grad-reduce-in-bf16", "ddp.grad_reduce_in_fp32", False),
        ("--bf16 --main-grads-dtype bf16", "ddp.grad_reduce_in_fp32", False),
        ("--bf16 --main-grads-dtype fp32", "ddp.grad_reduce_in_fp32", None),
        ("--grad-reduce-in-bf16", "ddp.grad_reduce_in_fp32", None),  # passed over without --bf16
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "ddp.grad_reduce_in_fp32", True),
        ("--tp-comm-overlap-cfg conf/ub.yaml", "model.tp_comm_overlap_cfg", "conf/ub.yaml"),
        ("--tp-comm-overlap-cfg auto", "model.tp_comm_overlap_cfg", "./auto"),  # a file, not our word
        ("--moe-layer-freq 2", "model.moe_layer_freq", 2),
        ("--moe-layer-freq [0,1,1]", "model.moe_layer_freq", [0, 1, 1]),
        ("--moe-layer-freq ([0]*3+[1]*58)", "model.moe_layer_freq", "([0]*3+[1]*58)"),
        ("--cuda-graph-scope attn", "model.cuda_graph_scope", ["attn"]),
        ("--num-virtual-stages-per-pipeline-rank 3", VP, 3),
        ("--num-layers-per-virtual-pipeline-stage 2", EACH, 2),
    ],
)
def test_what_flags_say(text: str, field: str, expected: Any) -> None:
    assert value(text.replace("(", "'(").replace(")", ")'"), field) == expected


def test_captured_parts_from_core_0_18_on() -> None:
    """--cuda-graph-scope is there, as another name of --cuda-graph-modules."""
    found = read("--cuda-graph-scope attn mlp", "0.18.2").values
    assert found["model.cuda_graph_modules"] == ["attn", "mlp"] and "model.cuda_graph_scope" not in found


def test_one_flag_for_two_sections() -> None:
    found = read("--overlap-param-gather --use-distributed-optimizer --delay-wgrad-compute").values
    for field in (
        *("ddp.overlap_param_gather", "optimizer.overlap_param_gather"),
        *("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
        *("model.delay_wgrad_compute", "ddp.delay_wgrad_compute"),
    ):
        assert found[field] is True


def test_lines_are_those_of_the_values() -> None:
    found = read("--bf16 --num-layers 32 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2")
    assert found.lines == {"model.bf16": 1, "model.num_layers": 3, PP: 5, EACH: 7}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("--tensor-model-parallel-size $TP", TP),
        ("--tensor-model-parallel-size=$TP", TP),
        ("--tensor-model-parallel-size 8 --tensor-model-parallel-size $TP", TP),
        ("--cp-comm-type p2p $TYPE", "model.cp_comm_type"),
        ("--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage $N", EACH),
        ("--bf16 --main-grads-dtype $TYPE", "ddp.grad_reduce_in_fp32"),
    ],
)
def test_what_only_a_run_could_tell(text: str, field: str) -> None:
    found = read(text)
    assert field not in found.values
    assert [(name, word.unknown is not None) for name, word in found.unknown] == [(field, True)]


def test_a_later_known_value_counts() -> None:
    found = read("--tensor-model-parallel-size $TP --tensor-model-parallel-size 4")
    assert found.values[TP] == 4 and not found.unknown


def test_an_unknown_path_is_its_text() -> None:
    assert value("--save $OUT/ckpt", "checkpoint.save") == "$OUT/ckpt"


def test_a_word_that_may_be_any_flag() -> None:
    """It is named without a field, and absent flags say nothing beside it."""
    found = read("--swiglu $MORE --hidden-size 64")
    assert [(field, word.written) for field, word in found.unknown] == [("", "$MORE")]
    assert set(found.values) == {"model.gated_linear_unit", "model.hidden_size"}


@pytest.mark.parametrize(
    ("text", "strangers"),
    [
        ("--tensor-model-parallel 8", ["--tensor-model-parallel"]),  # no abbreviations
        ("--my-flag 3 --bf16", ["--my-flag"]),
        ("--my-flag=3 --bf16", ["--my-flag=3"]),
        ("--my-list a b -1 --bf16", ["--my-list"]),
        ("--bf16 train", ["train"]),
        ("--bf16 -- --fp16", ["--fp16"]),
        ("--seq-length 1 -v", ["-v"]),
        ("--cuda-graph-modules attn", ["--cuda-graph-modules"]),  # of a later version
        ("--yaml-cfg x.yaml", ["--yaml-cfg"]),
    ],
)
def test_strangers(text: str, strangers: list[str]) -> None:
    found = read(text)
    assert [word.text for word in found.strangers] == strangers
    assert "model.fp16" not in found.values


def test_flags_of_no_field_are_counted() -> None:
    found = read("--lr 1e-4 --data-path a b c --norm-epsilon 1e-5 --bf16")
    assert (found.ignored, found.strangers, found.unknown) == (3, (), ())


def test_a_configuration_that_lies_elsewhere_is_noted() -> None:
    found = read("--bf16 --yaml-cfg x.yaml")
    assert found.notes == ("line 2: the configuration is in the file that --yaml-cfg names, not in these flags",)
    assert "model.share_embeddings_and_output_weights" not in found.values
    assert "from the checkpoint" in read("--use-checkpoint-args").notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--tensor-model-parallel-size", "run.sh:1: --tensor-model-parallel-size: takes a value, and there is none"),
        ("--bf16 --lr --fp16", "run.sh:2: --lr: takes a value, and there is none"),
        ("--cp-comm-type --bf16", "run.sh:1: --cp-comm-type: takes a value, and there is none"),
        ("--rampup-batch-size 1 2", "run.sh:1: --rampup-batch-size: takes 3 values, and has fewer"),
        ("--num-layers many", "run.sh:2: --num-layers: takes a whole number, not 'many'"),
        ("--num-layers 1.5", "takes a whole number, not '1.5'"),
        (f"--num-layers {'9' * 5000}", "takes a whole number, not "),
        ("--num-layers 0", "run.sh:2: --num-layers: takes a whole number of at least 1, not 0"),
        ("--hierarchical-context-parallel-sizes 2 -2", "takes a whole number of at least 1, not -2"),
        ("--bf16=true", "run.sh:1: --bf16: takes no value"),
        ("--fp8-format e5m2", "run.sh:2: --fp8-format: takes e4m3, hybrid, not 'e5m2'"),
        ("--num-layers-per-virtual-pipeline-stage 0", "run.sh:2: --num-layers-per-virtual-pipeline-stage"),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(text)
    assert message in str(caught.value)


def test_a_value_of_another_version_is_for_the_rules() -> None:
    """They say what that parser does with it; only what no version takes is refused here."""
    assert value("--moe-flex-dispatcher-backend ncclep", "model.moe_flex_dispatcher_backend") == "ncclep"
    assert value("--moe-token-dispatcher-type alltoall_seq", "model.moe_token_dispatcher_type") == "alltoall_seq"


# --- beside argparse ------------------------------------------------------------------------------

_TOKENS = [
    *("--bf16", "--num-layers", "--num-layers=3", "--cp-comm-type", "--rampup-batch-size", "--save", "--save=x"),
    *("--no-overlap-p2p-communication", "--lr", "--spec", "--swiglu", "--bf16=1", "--wgrad-deferral-limit"),
    *("1", "2", "-1", "-.5", "a", "", "-", "a b", "-a b", "--a b", "--num-layers=", "--cp-comm-type=a", "1_0", " 7 "),
]


def _argparse(tokens: list[str]) -> dict[str, Any] | None:
    """What the real parser makes of them, with the flags of the table; None for an error."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    names = {token.partition("=")[0] for token in _TOKENS if token.startswith("--")} - {"--a b"}
    for name in names:
        flag = flags_of(parse_version(CORE), doubtful=False)[name]
        if flag.do == "store":
            kind: Any = {"int": int, "float": float}.get(flag.kind or "", str)
            parser.add_argument(name, dest=flag.dest, type=kind, nargs=None if flag.values == 1 else flag.values)  # type: ignore[arg-type]
        else:
            parser.add_argument(name, dest=flag.dest, action=f"store_{flag.do}", default=None)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            known, rest = parser.parse_known_args(tokens)
    except SystemExit:
        return None
    found = {name: item for name, item in vars(known).items() if item is not None}
    return {**found, "rest": bool(rest)}


@given(st.lists(st.sampled_from(_TOKENS), max_size=8))
def test_words_are_read_as_argparse_reads_them(tokens: list[str]) -> None:
    """Including what is refused; a float or a negative number of layers, which no recipe has, apart."""
    expected = _argparse(tokens)
    try:
        found = read_arguments([Word(token, token, 1) for token in tokens], core=CORE, source="t")
    except RecipeError as error:
        assert expected is None or "at least" in str(error)
        return
    if expected is None:  # a flag that no field stands for keeps its value unread
        assert "--lr" in tokens
        return
    values = found.values
    assert values.get("model.num_layers") == expected.get("num_layers")
    assert values.get("model.cp_comm_type") == expected.get("cp_comm_type")
    assert values.get("train.rampup_batch_size") == expected.get("rampup_batch_size")
    assert values.get("checkpoint.save") == expected.get("save")
    assert values.get("model.wgrad_deferral_limit") == expected.get("wgrad_deferral_limit")
    assert values.get("model.overlap_p2p_comm") == expected.get("overlap_p2p_comm")
    assert values.get("model.gated_linear_unit") == expected.get("swiglu")
    assert values["model.bf16"] == bool(expected.get("bf16"))
    assert bool(found.strangers) == expected["rest"]


# --- the recipe -----------------------------------------------------------------------------------

TEXTS = st.text(alphabet=st.sampled_from("ab${}\\:.\n'\" é"), max_size=12)


@given(TEXTS, TEXTS)
def test_texts_reach_the_recipe_unchanged(save: str, value: str) -> None:
    """Also ``${…}``, which a recipe would take for a reference to another key."""
    arguments = read_arguments([Word(f"--save={save}", "", 1)], core=CORE, source="t")
    recipe = recipe_from_mapping(recipe_of(arguments, env_vars={"A": value}))
    assert recipe.checkpoint.save == save
    assert recipe.env_vars == {"A": value}


def test_the_recipe_of_a_launch() -> None:
    arguments = read(
        "--tensor-model-parallel-size 8 --sequence-parallel --bf16 --tp-comm-overlap --no-align-grad-reduce"
        " --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1"
    )
    recipe = recipe_of(arguments, cluster={"gpu": "h20", "num_gpus": 8}, software={"megatron_core": CORE})
    assert recipe["software"] == {"framework": "megatron-lm", "megatron_core": CORE}
    assert "env_vars" not in recipe
    plan = resolve(recipe)
    assert plan.settings["model.tp_comm_overlap"] is True
    assert "CFG001" not in {decision.code for decision in plan.decisions}


def test_no_precision_flag_is_fp32() -> None:
    """A recipe that says nothing is taken to be in BF16; a launch that says nothing is not."""
    cluster = {"gpu": "h100", "num_gpus": 1}
    assert derive(recipe_from_mapping(recipe_of(read(""), cluster=cluster))).precision.compute == "fp32"
    assert derive(recipe_from_mapping(recipe_of(read("--bf16"), cluster=cluster))).precision.grad_reduce_in_fp32


def test_any_version_is_read_without_one() -> None:
    found = read("--use-custom-fsdp --cuda-graph-modules attn --moe-use-legacy-grouped-gemm", None)
    assert not found.strangers
    assert found.values["ddp.use_custom_fsdp"] is True
