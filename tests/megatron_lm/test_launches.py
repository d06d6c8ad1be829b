"""Launch scripts as their owners have them, each with the diagnosis that it deserves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from overlapkit import RecipeError, load_recipe, resolve
from overlapkit.cli import app
from overlapkit.outcomes import ResolvedOutcome, resolve_launch

SCRIPTS = Path(__file__).parent / "scripts"
RECIPES = Path(__file__).parent.parent.parent / "recipes"
GIVEN = {
    "positional_options.sh": ["1=local", "2=7B"],
    "mixture_of_experts_srun_heredoc.sh": ["cluster.num_gpus=32"],
    "functional_test.yaml": ["cluster.num_gpus=8"],
    "flags.txt": ["cluster.num_gpus=32", "train.global_batch_size=128"],
}


def outcomes(name: str, *overrides: str) -> tuple[ResolvedOutcome, ...]:
    return resolve_launch(SCRIPTS / name, ["cluster.gpu=h800", *GIVEN.get(name, []), *overrides])


def found(outcome: ResolvedOutcome) -> set[str]:
    """Codes of errors and warnings."""
    return {decision.code for decision in outcome.plan.decisions if decision.severity != "info"}


@pytest.mark.parametrize(
    ("name", "taken", "others"),
    [
        # TP overlap is switched on by TP alone; the recipe has no sequence parallelism.
        ("tp_overlap_without_sp.sh", {"TP002"}, [set()]),
        ("param_gather_without_distopt.sh", {"DP008"}, []),
        # One connection, forced on a job that is data-parallel only.
        ("slurm_srun_bash_c.sh", {"ENV012"}, []),
        # FSDP with one connection; the other branch leaves plain data parallelism with one.
        ("fsdp_sbatch_heredoc.sh", {"FSDP001"}, [{"ENV012"}]),
        ("vp_without_pp.sh", {"PP005"}, []),
        ("arguments_only.sh", set(), []),
        ("docker_run.sh", set(), []),
    ],
)
def test_diagnosis(name: str, taken: set[str], others: list[set[str]]) -> None:
    first, *rest = outcomes(name)
    assert found(first) == taken
    assert first.taken and not any(outcome.taken for outcome in rest)
    assert [found(outcome) for outcome in rest] == others


def test_a_loop_runs_them_all() -> None:
    one, four = outcomes("functions_and_loop.sh")
    assert one.taken and four.taken
    assert [outcome.plan.parallelism.tp for outcome in (one, four)] == [1, 4]
    assert found(one) == found(four) == set()


def test_every_script_can_be_resolved() -> None:
    names = [path.name for path in SCRIPTS.iterdir() if path.name != "expected.yaml"]
    assert len([name for name in names if name.endswith(".sh")]) >= 10
    for name in names:
        assert outcomes(name), name


def test_gpus_come_from_the_launcher() -> None:
    (only,) = outcomes("param_gather_without_distopt.sh")
    assert (only.plan.parallelism.world_size, only.recipe.cluster.gpus_per_node) == (16, 8)


def test_what_only_a_run_could_tell_is_named_with_its_line_and_asked_for() -> None:
    with pytest.raises(RecipeError) as refused:
        resolve_launch(SCRIPTS / "flags.txt", ["cluster.gpu=h800", "cluster.num_gpus=32"])
    assert str(refused.value).startswith(
        f"{SCRIPTS / 'flags.txt'}:6: only a run could tell: train.global_batch_size is"
    )
    assert "give train.global_batch_size=..." in str(refused.value)


def test_a_flag_of_another_version_is_judged_by_its_rule() -> None:
    (only,) = resolve_launch(
        SCRIPTS / "flags.txt",
        ["cluster.gpu=h800", "cluster.num_gpus=32", "train.global_batch_size=128", "software.megatron_core=0.12.1"],
    )
    assert only.plan.target.megatron_core == "0.12.1"


# --- the command ------------------------------------------------------------------------------------


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["resolve", *arguments])


def script(name: str) -> list[str]:
    return ["--megatron-lm-args", str(SCRIPTS / name), "cluster.gpu=h800", *GIVEN.get(name, [])]


def test_text_has_every_outcome() -> None:
    shown = run(*script("tp_overlap_without_sp.sh"))
    assert shown.exit_code == 1
    assert "TP002" in shown.stdout and "Or, when" in shown.stdout and "does not hold" in shown.stdout


def test_json_has_every_outcome_and_the_taken_one_as_the_plan() -> None:
    value = json.loads(run(*script("tp_overlap_without_sp.sh"), "--format", "json").stdout)
    assert [outcome["taken"] for outcome in value["outcomes"]] == [True, False]
    assert value["settings"] == value["outcomes"][0]["plan"]["settings"]
    assert [outcome["plan"]["ok"] for outcome in value["outcomes"]] == [False, True]


@pytest.mark.parametrize("name", sorted(path.name for path in SCRIPTS.iterdir() if path.name != "expected.yaml"))
def test_the_saved_recipe_is_the_outcome_taken(name: str, tmp_path: Path) -> None:
    saved = tmp_path / "recipe.yaml"
    assert run(*script(name), "--save", str(saved)).exit_code in (0, 1)
    again, first = resolve(load_recipe(saved)).to_dict(), outcomes(name)[0].plan.to_dict()
    for part in ("settings", "env", "parallelism", "target", "preset"):
        assert again[part] == first[part]


def test_save_goes_with_a_launch_file(tmp_path: Path) -> None:
    refused = run(str(RECIPES / "llama3_8b_8xh100.yaml"), "--save", str(tmp_path / "x"))
    assert isinstance(refused.exception, RecipeError)


def test_flags_that_are_written_read_back(tmp_path: Path) -> None:
    """A recipe to a file of flags, its userbuffers beside it, and that file as a recipe."""
    recipe = RECIPES / "llama3_70b_64xh100.yaml"
    flags = tmp_path / "flags.txt"
    assert run(str(recipe), "--format", "megatron-lm", "--output", str(flags)).exit_code == 0
    beside = tmp_path / "flags.userbuffers.yaml"
    assert yaml.safe_load(beside.read_text())["qkv_fprop"]["method"] == "ring_exchange"
    (again,) = resolve_launch(flags, ["cluster.gpu=h100", "cluster.num_gpus=64", "software.megatron_core=0.19.2"])
    asked: dict[str, Any] = dict(resolve(recipe).settings)
    assert {name: again.plan.settings[name] for name in asked if name != "ddp.delay_wgrad_compute"} == {
        name: value for name, value in asked.items() if name != "ddp.delay_wgrad_compute"
    }


def test_a_file_of_somebody_else_stays(tmp_path: Path) -> None:
    (tmp_path / "flags.userbuffers.yaml").write_text("mine: {}\n")
    recipe = RECIPES / "llama3_70b_64xh100.yaml"
    refused = run(str(recipe), "--format", "megatron-lm", "--output", str(tmp_path / "flags.txt"))
    assert isinstance(refused.exception, RecipeError)
    assert (tmp_path / "flags.userbuffers.yaml").read_text() == "mine: {}\n"


def test_an_outcome_against_the_scripts_own_values_is_told_and_fails_nothing(tmp_path: Path) -> None:
    """TP is 8, so that sequence parallelism is on; that it would be missed at TP 1 is no error of this script."""
    launch = tmp_path / "train.sh"
    launch.write_text(
        'export CUDA_DEVICE_MAX_CONNECTIONS=1\nTP=8\nARGS="--tp-comm-overlap"\n'
        'if [ "$TP" -gt 1 ]; then ARGS+=" --sequence-parallel"; fi\n'
        "torchrun --nproc_per_node 8 pretrain_gpt.py --bf16 --num-layers 2 --hidden-size 1024 --num-attention-heads 8"
        " --seq-length 1024 --micro-batch-size 1 --global-batch-size 8 --tensor-model-parallel-size $TP $ARGS\n"
    )
    shown = run("--megatron-lm-args", str(launch), "cluster.gpu=h800")
    assert shown.exit_code == 0
    assert "does not hold" in shown.stdout and "TP002" in shown.stdout
    checked = CliRunner().invoke(app, ["check", str(launch), "cluster.gpu=h800"])
    assert (checked.exit_code, "TP002" in checked.stdout) == (0, False)


def test_a_flag_that_no_parser_has_is_noted_with_the_one_that_was_meant(tmp_path: Path) -> None:
    launch = tmp_path / "train.sh"
    launch.write_text("torchrun --nproc_per_node 8 pretrain_gpt.py --bf16 --num-layers 2 --overlap-grad-reduc\n")
    (only,) = resolve_launch(launch, ["cluster.gpu=h800"])
    assert any(note.endswith("did you mean --overlap-grad-reduce?") for note in only.notes)


def test_a_value_behind_a_flag_that_takes_none_is_refused(tmp_path: Path) -> None:
    launch = tmp_path / "train.sh"
    launch.write_text("torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --sequence-parallel true\n")
    with pytest.raises(RecipeError, match="'true' belongs to no flag"):
        resolve_launch(launch, ["cluster.gpu=h800"])


def test_a_script_that_goes_none_of_its_ways_is_judged_by_all_of_them(tmp_path: Path) -> None:
    """Its constant says that nothing is launched; the launch that stands there is judged all the same."""
    launch = tmp_path / "train.sh"
    launch.write_text(
        "TRAIN=0\nif [ $TRAIN -gt 0 ]; then\n"
        "torchrun --nproc_per_node 8 pretrain_gpt.py --bf16 --num-layers 3 --overlap-param-gather\nfi\n"
    )
    shown = run("--megatron-lm-args", str(launch), "cluster.gpu=h800")
    assert (shown.exit_code, "DP008" in shown.stdout) == (1, True)
    checked = CliRunner().invoke(app, ["check", str(launch), "cluster.gpu=h800"])
    assert (checked.exit_code, "DP008" in checked.stdout) == (1, True)
