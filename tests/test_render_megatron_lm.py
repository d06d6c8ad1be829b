"""Plans as Megatron-LM's flags: what they say, that they mean the same when read back, that nothing breaks out."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from generated_recipes import CORES, recipes
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapkit import Plan, load_recipe, resolve
from overlapkit.megatron_lm.arguments import read_arguments, recipe_of
from overlapkit.megatron_lm.fields import write_flags
from overlapkit.megatron_lm.flags import flags_of
from overlapkit.megatron_lm.words import Word
from overlapkit.recipe import Recipe, recipe_from_mapping
from overlapkit.render.data import to_yaml
from overlapkit.render.megatron_lm import MegatronLmArguments, to_megatron_lm, to_text
from overlapkit.versions import parse_version

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))
ELSEWHERE = "there/is/no/such/file.yaml"


def loaded(value: dict[str, Any] | Path) -> Recipe:
    return load_recipe(value) if isinstance(value, Path) else recipe_from_mapping(value)


def written(value: dict[str, Any] | Path, **options: str) -> tuple[Plan, MegatronLmArguments]:
    recipe = loaded(value)
    plan = resolve(recipe)
    return plan, to_megatron_lm(recipe, plan, **options)


def of(framework: str = "megatron-lm", core: str = "0.19.2", **sections: Any) -> dict[str, Any]:
    model = {"tensor_model_parallel_size": 4, "sequence_parallel": True, **sections.pop("model", {})}
    software = {"framework": framework, "megatron_core": core}
    return {"cluster": {"gpu": "h100", "num_gpus": 16}, "software": software, "model": model, **sections}


def read_back(plan: Plan, words: tuple[str, ...]) -> Plan:
    """The plan of the flags on the same machine with the same software."""
    target = plan.target
    found = read_arguments([Word(word, word, 1) for word in words], core=target.megatron_core, source="flags")
    assert (found.strangers, found.unknown, found.ignored, found.notes) == ((), (), 0, ())
    software = {
        "megatron_core": target.megatron_core,
        "transformer_engine": target.transformer_engine,
        "torch": target.torch,
    }
    recipe = recipe_of(found, cluster={"gpu": target.gpu, "num_gpus": plan.parallelism.world_size}, software=software)
    return resolve(recipe)


def compared(plan: Plan) -> dict[str, Any]:
    """Settings of a plan, where Bridge's null is the parser's false, and an empty configuration means none."""
    values = dict(plan.settings)
    values["ddp.delay_wgrad_compute"] = bool(values["ddp.delay_wgrad_compute"])
    values["model.tp_comm_overlap_cfg"] = values["model.tp_comm_overlap_cfg"] or None
    return values


def check_round_trip(value: Any, directory: Path) -> tuple[Plan, MegatronLmArguments]:
    """What is written of a recipe, the file beside it included, gives its settings again."""
    file = directory / "userbuffers.yaml"
    plan, result = written(value, userbuffers_path=str(file))
    file.write_text(to_yaml(dict(result.userbuffers or {})))
    assert shlex.split(to_text(result.arguments)) == list(result.arguments)
    again = read_back(plan, result.arguments)
    excused = {sentence.partition(" ")[0] for sentence in result.cannot_express}
    before, after = compared(plan), compared(again)
    assert {name: after[name] for name in before if name not in excused} == {
        name: value for name, value in before.items() if name not in excused
    }
    own, other = plan.parallelism, again.parallelism
    assert (own.tp, own.pp, own.cp, own.ep, own.dp) == (other.tp, other.pp, other.cp, other.ep, other.dp)
    assert own.etp == other.etp and own.num_microbatches == other.num_microbatches
    return plan, result


# --- round trips --------------------------------------------------------------------------------

# What Megatron-LM cannot say of the shipped recipes' settings: only Bridge's lack of any p2p choice at PP 1.
EXCUSED = {"model.batch_p2p_comm"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_come_back(path: Path, tmp_path: Path) -> None:
    plan, result = check_round_trip(path, tmp_path)
    about = {sentence.partition(" ")[0] for sentence in result.cannot_express} & set(plan.settings)
    assert about <= (EXCUSED if plan.parallelism.pp == 1 else set())


@st.composite
def plenty(draw: st.DrawFn) -> dict[str, Any]:
    """A generated recipe with what only flags and their neighbours care for."""
    recipe = draw(recipes())
    recipe["model"] = dict(recipe["model"]) | draw(
        st.fixed_dictionaries(
            {},
            optional={
                "num_query_groups": st.sampled_from([8, 32]),
                "gated_linear_unit": st.booleans(),
                "add_bias_linear": st.booleans(),
                "share_embeddings_and_output_weights": st.booleans(),
                "should_pad_vocab": st.booleans(),
                "moe_layer_freq": st.sampled_from([2, [0, 1], "[0]*2"]),
                "moe_flex_dispatcher_backend": st.sampled_from(["deepep", "hybridep", "ncclep"]),
                "cuda_graph_impl": st.sampled_from(["none", "local", "transformer_engine", "full_iteration"]),
                "overlap_p2p_comm_warmup_flush": st.booleans(),
                "first_last_layers_bf16": st.booleans(),
                "variable_seq_lengths": st.booleans(),
            },
        )
    )
    recipe["train"] = {**recipe["train"], **draw(st.sampled_from([{}, {"rampup_batch_size": [8, 8, 64]}]))}
    if recipe["software"]["framework"] == "megatron-bridge" and draw(st.booleans()):
        recipe["software"]["megatron_core"] = draw(st.sampled_from(CORES))
    return recipe


@settings(deadline=None, max_examples=300)
@given(plenty())
def test_generated_recipes_come_back(tmp_path_factory: pytest.TempPathFactory, value: dict[str, Any]) -> None:
    """For both frameworks and many versions: the same settings, and no flag that the parser lacks."""
    plan, result = check_round_trip(value, tmp_path_factory.getbasetemp())
    parser = flags_of(parse_version(plan.target.megatron_core), doubtful=False)
    names = [word.partition("=")[0] for word in result.arguments if word.startswith("--")]
    assert set(names) <= set(parser)
    assert len(names) == len(set(names))


# --- what the flags say -------------------------------------------------------------------------


def test_a_plan_in_flags() -> None:
    value = of(
        model={"num_layers": 32, "hidden_size": 4096, "bf16": True, "pipeline_model_parallel_size": 2},
        train={"micro_batch_size": 1, "global_batch_size": 64},
        ddp={"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    )
    assert to_text(written(value)[1].arguments) == (
        "--tensor-model-parallel-size 4\n"
        "--sequence-parallel\n"
        "--pipeline-model-parallel-size 2\n"
        "--num-layers 32\n"
        "--hidden-size 4096\n"
        "--micro-batch-size 1\n"
        "--global-batch-size 64\n"
        "--bf16\n"
        "--use-distributed-optimizer\n"
        "--overlap-grad-reduce\n"
        "--overlap-param-gather\n"
    )


def test_the_plan_counts_not_what_was_asked_for() -> None:
    """auto became off, and what Megatron-LM turns off by itself needs no flag."""
    overlap = {"tp_comm_overlap": "auto", "overlap_p2p_comm": True, "align_param_gather": True}
    value = of(model={"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}, comm_overlap=overlap)
    plan, result = written(value)
    assert plan.settings["model.tp_comm_overlap"] is False
    assert not {"--tp-comm-overlap", "--no-overlap-p2p-communication", "--no-align-param-gather"} & set(
        result.arguments
    )
    assert result.cannot_express == ()


def test_what_is_on_by_default_is_turned_off() -> None:
    model = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
    value = of(model=model, comm_overlap={"overlap_p2p_comm": False, "align_param_gather": False})
    words = written(value)[1].arguments
    assert {"--no-overlap-p2p-communication", "--no-align-param-gather"} <= set(words)
    assert not {"--no-overlap-p2p-communication", "--no-align-param-gather"} & set(
        written(of(model=model))[1].arguments
    )


def test_a_configuration_goes_to_the_file(tmp_path: Path) -> None:
    """And from there through the flag into the plan."""
    overlap = {"tp_comm_overlap": True, "tp_comm_overlap_cfg": {"qkv_fprop": {"method": "ring_exchange", "num_sm": 1}}}
    file = tmp_path / "ub.yaml"
    plan, result = written(of(comm_overlap=overlap), userbuffers_path=str(file))
    assert result.userbuffers == overlap["tp_comm_overlap_cfg"]
    file.write_text(to_yaml(result.userbuffers))
    assert result.arguments[result.arguments.index("--tp-comm-overlap-cfg") + 1] == str(file)
    again = read_back(plan, result.arguments)
    assert again.settings["model.tp_comm_overlap_cfg"] == result.userbuffers


def test_a_path_stays_a_path() -> None:
    overlap = {"tp_comm_overlap": True, "tp_comm_overlap_cfg": ELSEWHERE}
    result = written(of(comm_overlap=overlap))[1]
    assert result.userbuffers is None
    assert result.arguments[result.arguments.index("--tp-comm-overlap-cfg") + 1] == ELSEWHERE


def test_precision_by_name() -> None:
    """Bridge's names become flags, and layers at the ends are said where the parser's defaults differ."""
    value = of("megatron-bridge", mixed_precision="bf16_with_fp8_current_scaling_mixed")
    words = shlex.join(written(value)[1].arguments)
    assert "--bf16 --fp8-format hybrid --fp8-recipe tensorwise" in words
    assert "--fp8-param-gather --first-last-layers-bf16" in words
    section = {"bf16": True, "fp8": "hybrid", "first_last_layers_bf16": True, "grad_reduce_in_fp32": False}
    words = shlex.join(written(of("megatron-bridge", mixed_precision=section))[1].arguments)
    assert "--num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 0" in words
    assert "--grad-reduce-in-bf16" in words


def test_bridge_gives_experts_no_tensor_parallelism() -> None:
    """From 0.6, where Megatron-LM gives them the model's."""
    model = {"expert_model_parallel_size": 4, "num_moe_experts": 8}
    bridge = {**of("megatron-bridge", model=model), "software": {"megatron_bridge": "0.6.2"}}
    assert "--expert-tensor-parallel-size 1" in shlex.join(written(bridge)[1].arguments)
    assert "--expert-tensor-parallel-size" not in written(of(model=model))[1].arguments


@pytest.mark.parametrize(
    ("core", "flag"),
    [("0.13.0", "--use-custom-fsdp"), ("0.14.0", "--use-megatron-fsdp"), ("0.19.2", "--use-megatron-fsdp")],
)
def test_fsdp_goes_by_the_name_of_the_version(core: str, flag: str) -> None:
    assert flag in written(of(core=core, ddp={"use_megatron_fsdp": True}))[1].arguments


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            of("megatron-bridge"),
            "model.batch_p2p_comm is false: Megatron-LM makes it the opposite of overlap_p2p_comm; at PP 1 there are "
            "no messages",
        ),
        (
            of("megatron-bridge", comm_overlap={"overlap_p2p_comm": True}),
            "model.overlap_p2p_comm is true: without virtual stages Megatron-LM turns it off",
        ),
        (
            of("megatron-bridge", ddp={"align_param_gather": True}),
            "ddp.align_param_gather is true: without virtual stages Megatron-LM turns it off",
        ),
        (
            of("megatron-bridge", comm_overlap={"tp_comm_bootstrap_backend": None}),
            "model.tp_comm_bootstrap_backend is null: without the flag Megatron-LM takes nccl",
        ),
        (
            of(core="0.12.1", comm_overlap={"overlap_moe_expert_parallel_comm": True}),
            "model.overlap_moe_expert_parallel_comm is true: the parser of this version has no "
            "--overlap-moe-expert-parallel-comm",
        ),
        (
            of("megatron-bridge", model={"delay_wgrad_compute": True}, comm_overlap=None),
            "ddp.delay_wgrad_compute is false and model.delay_wgrad_compute is not: --delay-wgrad-compute sets both",
        ),
        (
            {
                **of("megatron-bridge", ddp={"overlap_param_gather": True}, comm_overlap=None),
                "software": {"megatron_bridge": "0.4.0"},  # later ones make both true
            },
            "optimizer.overlap_param_gather is false and ddp.overlap_param_gather is not: --overlap-param-gather sets "
            "both",
        ),
        (
            of(model={"variable_seq_lengths": True}),
            "model.variable_seq_lengths is true: Megatron-LM has no flag for it",
        ),
        (
            of(core="0.16.1", model={"moe_flex_dispatcher_backend": "ncclep"}),
            "model.moe_flex_dispatcher_backend is ncclep: --moe-flex-dispatcher-backend takes deepep, hybridep, not "
            "'ncclep'",
        ),
        (
            of(model={"pipeline_model_parallel_layout": "Et|t|t|tL", "virtual_pipeline_model_parallel_size": 2}),
            "model.virtual_pipeline_model_parallel_size is 2: the layout makes it 4",
        ),
        (
            of(model={"rotary_base": 500_000}),
            "model.rotary_base (--rotary-base): not read by overlapkit, so give the flags yourself",
        ),
        (
            of(model={"cpu_offloading_weights": True}),
            "model.cpu_offloading_weights: not read by overlapkit, and no flag of Megatron-LM has the name",
        ),
        (of("megatron-bridge", peft="lora"), "peft is lora: Megatron-LM trains no adapters"),
        (of(env_vars={"A": 1}), "env_vars is the environment, not arguments: --format env prints what to export"),
        (
            of(dataset={"pack_sequences_in_batch": True}),
            "dataset.pack_sequences_in_batch is true: Megatron-LM has no flag for it",
        ),
        (
            of("megatron-bridge"),
            "software.framework is megatron-bridge: what the recipe leaves to Bridge takes Megatron-LM's defaults",
        ),
    ],
    ids=lambda item: item.partition(":")[0].partition(" ")[0] if isinstance(item, str) else "",
)
def test_what_flags_cannot_say_is_said(value: dict[str, Any], sentence: str) -> None:
    assert sentence in written(value)[1].cannot_express


def test_a_recipe_for_megatron_lm_is_said_whole() -> None:
    """Nothing is held back of one that uses only what its parser has."""
    assert written(ROOT / "recipes" / "llama2_7b_32xh20.yaml")[1].cannot_express == ()


# --- hostile values -----------------------------------------------------------------------------

HOSTILE = (
    *("'", '"', "`id`", "$(touch broken)", "${HOME}", "\\", "a\nb", "a b", ";id", "|", "&", "*", "~", "#", "!x"),
    *("", "-x", "--save", "--", "é☃", "'\"'\"'", "\\\n", "$'\\n'", "\t"),
)
texts = st.one_of(
    st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
)


def through_bash(text: str, directory: Path) -> list[str]:
    script = 'eval "MODEL_ARGS=( $1 )"; printf "%s\\0" "${MODEL_ARGS[@]}"'
    command = ["bash", "--norc", "-c", script, "bash", text.rstrip("\n")]
    result = subprocess.run(command, check=True, capture_output=True, cwd=directory)
    assert result.stderr == b""
    return result.stdout.decode().split("\0")[:-1]


@settings(deadline=None, max_examples=40)
@given(st.lists(texts, min_size=2, max_size=2), st.lists(texts, min_size=1, max_size=3))
def test_values_cannot_break_out(tmp_path_factory: pytest.TempPathFactory, paths: list[str], names: list[str]) -> None:
    directory = tmp_path_factory.mktemp("bash")
    values = {"checkpoint.save": paths[0], "checkpoint.load": paths[1], "model.recompute_modules": names}
    words, lacking = write_flags(values, parse_version("0.19.2"))
    assert {item.field for item in lacking} <= {"model.recompute_modules"}
    assert shlex.split(to_text(words)) == list(words)
    assert through_bash(to_text(words), directory) == list(words)
    assert not list(directory.iterdir())
    found = read_arguments([Word(word, word, 1) for word in words], core="0.19.2", source="t")
    assert (found.values["checkpoint.save"], found.values["checkpoint.load"]) == tuple(paths)


def test_hostile_recipes_are_written_too() -> None:
    value = of(
        checkpoint={"save": "$(touch a)'\n`b`", "load": "-x"},
        comm_overlap={"tp_comm_overlap": True, "tp_comm_overlap_cfg": {"qkv_fprop": {"method": "ring_exchange"}}},
    )
    result = written(value, userbuffers_path="--it's $(here).yaml")[1]
    assert "--load=-x" in result.arguments
    assert "--tp-comm-overlap-cfg=--it's $(here).yaml" in result.arguments
    assert shlex.split(to_text(result.arguments)) == list(result.arguments)
