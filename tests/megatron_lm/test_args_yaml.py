"""YAML files of Megatron-LM's functional tests, read as the flags that their runner passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlapkit import RecipeError
from overlapkit.megatron_lm.args_yaml import is_args_yaml, read_args_yaml
from overlapkit.megatron_lm.words import Launch, Word

TEXT = (Path(__file__).parent / "scripts" / "functional_test.yaml").read_text()


def read(text: str, **variables: str) -> Launch:
    return read_args_yaml(text, "test.yaml", variables)


def pairs(launch: Launch) -> list[tuple[str | None, int]]:
    return [(word.text, word.line) for word in launch.arguments]


def test_a_file_is_told_from_a_recipe_by_its_arguments():
    assert is_args_yaml({"MODEL_ARGS": {}, "ENV_VARS": {}})
    assert not is_args_yaml({"model": {"num_layers": 12}})


def test_each_flag_has_its_value_and_line():
    launch = read(TEXT, DATA_PATH="/data")
    words = pairs(launch)
    assert launch.line == 7
    assert words[:2] == [("--num-layers", 8), ("12", 8)]
    assert words[words.index(("--lr", 15)) + 1] == ("0.00015", 15)
    assert words[words.index(("--split", 17)) + 1] == ("949,50,1", 17)
    assert words[words.index(("--data-path", 18)) + 1] == ("/data/text/corpus", 18)
    assert words[words.index(("--moe-layer-freq", 19)) + 1] == ("([0]*3+[1]*9)", 19)


def test_blanks_and_lists_give_several_values():
    words = [text for text, _ in pairs(read(TEXT))]
    position = words.index("--recompute-modules")
    assert words[position : position + 6] == [
        "--recompute-modules",
        "core_attn",
        "mlp",
        "--cuda-graph-scope",
        "attn",
        "moe_router",
    ]


def test_true_is_the_bare_flag_and_false_and_null_leave_it_out():
    words = [text for text, _ in pairs(read(TEXT))]
    assert words[-3:] == ["--use-distributed-optimizer", "--overlap-param-gather", "--bf16"]


def test_what_is_left_out_is_named_as_some_runners_pass_it_on():
    why = "and left out; runners that pass it on start nothing, as the parser refuses it"
    assert read(TEXT, DATA_PATH="/d").notes == (
        f"line 25: --overlap-grad-reduce is false {why}",
        f"line 26: --sequence-parallel is null {why}",
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ('--rampup-batch-size: "[16 16 5]"', ["--rampup-batch-size", "16", "16", "5"]),
        ('--recompute-modules: " [core_attn mlp] "', ["--recompute-modules", "core_attn", "mlp"]),
        ("--recompute-modules: core_attn mlp", ["--recompute-modules", "core_attn", "mlp"]),
        ("--moe-layer-freq: ([0]*3 + [1]*9)", ["--moe-layer-freq", "([0]*3 + [1]*9)"]),
        ("--moe-layer-freq: '[0]*3 + [1]*9'", ["--moe-layer-freq", "[0]*3 + [1]*9"]),
        ("--save: /my data/x", ["--save", "/my data/x"]),
        ("--nobody-knows: a b", ["--nobody-knows", "a", "b"]),
    ],
)
def test_text_with_blanks_is_several_values_in_brackets_or_where_the_flag_takes_them(value: str, words: list[str]):
    assert [text for text, _ in pairs(read(f"MODEL_ARGS:\n  {value}"))] == words


def test_the_environment_is_what_the_file_sets():
    exports = read(TEXT).exports
    assert exports == {
        "CUDA_DEVICE_MAX_CONNECTIONS": Word("1", "1", 3),
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": Word("0", "0", 4),
        "CUBLAS_WORKSPACE_CONFIG": Word(":4096:8", ":4096:8", 5),
    }
    assert read("MODEL_ARGS: {--bf16: true}").exports == {}


def test_a_variable_of_the_runner_is_unknown():
    unknown = [word for word in read(TEXT).arguments if word.unknown]
    assert unknown == [Word(None, "${DATA_PATH}/text/corpus", 18, "$DATA_PATH is not set in this file")]


def test_arguments_may_be_a_list():
    launch = read("MODEL_ARGS:\n  - --num-layers 12\n  - --hidden-size: 512\n    --bf16: true\n")
    assert pairs(launch) == [("--num-layers", 1), ("12", 1), ("--hidden-size", 3), ("512", 3), ("--bf16", 4)]


def test_what_is_not_read_is_named():
    launch = read("MODEL_ARGS: {--bf16: true}\nBEFORE_SCRIPT: mkdir x\nMODEL_ARGS_2: {--fp16: true}\n")
    assert launch.notes == ("line 3: MODEL_ARGS_2 is not read", "line 2: BEFORE_SCRIPT is not read")


def test_nothing_is_expanded_but_variables():
    launch = read("MODEL_ARGS: {--a: $(rm -rf x), --b: '`id`', --c: '${A:-1}'}")
    assert [word.text for word in launch.arguments] == ["--a", "$(rm", "-rf", "x)", "--b", "`id`", "--c", "${A:-1}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {num_layers: 1}", "test.yaml: MODEL_ARGS is missing; it maps each flag to its value"),
        ("MODEL_ARGS: 3", "test.yaml:1: MODEL_ARGS: maps each flag to its value, this is 3"),
        ("MODEL_ARGS: {}", "test.yaml:1: MODEL_ARGS: holds no flags"),
        ("MODEL_ARGS: {num_layers: 1}", "test.yaml:1: MODEL_ARGS.num_layers: 'num_layers' is not a flag"),
        ("MODEL_ARGS:\n  --a: {b: 1}", "test.yaml:2: MODEL_ARGS.--a: a flag has no value such as a mapping of 1 keys"),
        ("MODEL_ARGS: {--a: 1}\nENV_VARS: [A]", "ENV_VARS: maps each variable to its value, this is a list of 1 items"),
        ("MODEL_ARGS: {--a: 1}\nENV_VARS: {A: [1]}", "ENV_VARS.A: a variable has no value such as a list of 1 items"),
        (
            "MODEL_ARGS: {--a: !!python/name:os.system x}",
            "the tag tag:yaml.org,2002:python/name:os.system is not allowed",
        ),
        ("- a", "arguments are a mapping of MODEL_ARGS and ENV_VARS, this is a list"),
    ],
)
def test_what_cannot_be_used_is_one_line(text: str, message: str):
    with pytest.raises(RecipeError) as error:
        read(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
