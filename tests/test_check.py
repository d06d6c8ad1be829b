"""`check`: which files it looks at, what each of them is, and what it makes of them."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from glob import glob
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapkit import RecipeError, load_recipe, resolve
from overlapkit.check import Checked, Report, check
from overlapkit.check_paths import relative_path, select
from overlapkit.findings import exit_code
from overlapkit.megatron_lm.outcome import Outcome
from overlapkit.recipe import Recipe, recipe_from_mapping

ROOT = Path(__file__).resolve().parent.parent
GOOD = """\
cluster: {gpu: h100, num_gpus: 8}
mixed_precision: bf16_mixed
"""
WARNING = """\
cluster: {gpu: h100, num_gpus: 8}
mixed_precision: bf16_mixed
model:
  tensor_model_parallel_size: 2
  sequence_parallel: false
comm_overlap:
  tp_comm_overlap: true
"""
ERROR = WARNING + "software: {framework: megatron-lm}\n"
UNUSABLE = """\
cluster: {gpu: h100, num_gpus: 8}
model:
  tensor_model_parallel_sizes: 2
"""
LAUNCH = "torchrun pretrain_gpt.py --tensor-model-parallel-size 2\n"


def no_scripts(path: str, overrides: Sequence[str]) -> tuple[Outcome, ...]:
    raise AssertionError(f"{path} is read as a launch script")


def of_recipe(text: str, source: str = "recipe.yaml", overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a text, with its lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_text(text, encoding="utf-8")
        return replace(load_recipe(path, overrides), source=source)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(files: dict[str, str]) -> None:
    for name, text in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def paths(*arguments: str) -> list[str]:
    return [found.path for found in select(arguments).files]


def report(*arguments: str) -> Report:
    return check(select(arguments), no_scripts)


def only(result: Report) -> Checked:
    (checked,) = result.files
    return checked


# --- which files -----------------------------------------------------------------------------------


def test_a_folder_stands_for_its_recipes_and_scripts_sorted() -> None:
    write(dict.fromkeys(("b/z.yml", "b/a.yaml", "b/c/d.sh", "b/notes.md", "b/x.json", "b/.late.yaml", "a.yaml"), ""))
    assert paths("b") == ["b/.late.yaml", "b/a.yaml", "b/z.yml", "b/c/d.sh"]
    assert paths(".") == ["a.yaml", "b/.late.yaml", "b/a.yaml", "b/z.yml", "b/c/d.sh"]


def test_hidden_folders_are_not_entered_unless_they_are_named() -> None:
    write({".git/x.yaml": "", "a/.cache/x.yaml": "", "a/b.yaml": ""})
    assert paths(".") == ["a/b.yaml"]
    assert paths("a/.cache") == ["a/.cache/x.yaml"]


def test_links_that_lead_back_end() -> None:
    write({"a/b/x.yaml": ""})
    for name, target in {"a/b/up": "..", "a/b/here": ".", "a/itself": "itself", "a/b/two": "../../a"}.items():
        Path(name).symlink_to(target)
    assert paths("a") == ["a/b/x.yaml"]
    assert paths("a/**/*.yaml") == ["a/b/x.yaml"]


def test_a_link_to_a_folder_is_entered() -> None:
    write({"elsewhere/x.yaml": "", "a/y.yaml": ""})
    Path("a/linked").symlink_to("../elsewhere")
    assert paths("a") == ["a/y.yaml", "a/linked/x.yaml"]


def test_a_file_counts_once_whatever_leads_to_it() -> None:
    write({"a/x.yaml": "", "a/y.yaml": ""})
    Path("a/z.yaml").symlink_to("x.yaml")
    assert paths("a/y.yaml", "./a/y.yaml", "a", "a/*.yaml", str(Path("a/x.yaml").resolve())) == ["a/y.yaml", "a/x.yaml"]


def test_a_file_is_named_if_any_argument_names_it() -> None:
    write({"a/x.yaml": "", "a/y.yaml": ""})
    found = {each.path: each.named for each in select(["a", "a/y.yaml"]).files}
    assert found == {"a/x.yaml": False, "a/y.yaml": True}


NAMES = st.sampled_from(["a", "b", "ab", ".a", "a.yaml", "b.yaml", ".b.yaml", "c.txt"])
PATTERNS = st.lists(
    st.sampled_from(["*", "**", "a*", "*b", "?", "[ab]", "[!a]*", ".*", "*.yaml", "a", "a.yaml"]),
    min_size=1,
    max_size=4,
).filter(lambda parts: any(set(part) & set("*?[") for part in parts))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(NAMES, min_size=1, max_size=4), max_size=8), PATTERNS)
def test_a_glob_matches_what_pythons_does(files: list[list[str]], pattern: list[str]) -> None:
    with tempfile.TemporaryDirectory() as base:
        for parts in files:
            path = Path(base, *parts)
            if not any(above.is_file() for above in path.parents) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        wanted = str(Path(base, *pattern))
        names = glob(wanted, recursive=True)  # noqa: PTH207  Path.glob takes hidden names
        expected = {os.path.normpath(name) for name in names if Path(name).is_file()}
        try:
            found = {each.path for each in select([wanted]).files}
        except RecipeError as error:
            assert error.problem == "matches no file"
            found = set()
        assert found == expected


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("missing.yaml", "check: no file or folder 'missing.yaml'"),
        ("no/*.yaml", "no/*.yaml: matches no file"),
        ("nothing/**/*.yaml", "nothing/**/*.yaml: matches no file"),
        ("empty", "empty: no *.yaml, *.yml or *.sh in this folder"),
        (
            "cluster,gpu=h100",
            "check: no file or folder 'cluster,gpu=h100'; an override is section.key=value, for example"
            " model.tensor_model_parallel_size=4",
        ),
    ],
)
def test_what_matches_nothing_is_one_line(argument: str, line: str) -> None:
    write({"good.yaml": GOOD, "empty/notes.md": ""})
    with pytest.raises(RecipeError) as caught:
        select(["good.yaml", argument])
    assert (str(caught.value), caught.value.exit_code) == (line, 2)


def test_no_path_is_one_line() -> None:
    for arguments in ([], ["cluster.gpu=h100"]):
        with pytest.raises(RecipeError, match="check: no recipe is named"):
            select(arguments)


def test_a_folder_that_cannot_be_listed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    write({"a/b/x.yaml": GOOD, "a/y.yaml": GOOD})
    listing = os.scandir

    def scandir(path: Path) -> Iterator[os.DirEntry[str]]:
        if path.name == "b":
            raise PermissionError(13, "Permission denied")
        return listing(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for argument in ("a", "a/**/*.yaml"):
        result = report(argument)
        assert [(checked.path, str(checked.error)) for checked in result.files] == [
            ("a/y.yaml", "None"),
            ("a/b", "a/b: cannot be read: Permission denied"),
        ]
        assert exit_code(result) == 2


def test_relative_paths(folder: Path) -> None:
    assert relative_path("a/../b/x.yaml") == "b/x.yaml"
    assert relative_path(str(folder / "x.yaml")) == "x.yaml"
    assert relative_path("../x.yaml") is None
    assert relative_path(f"{folder}-else/x.yaml") is None


# --- overrides -------------------------------------------------------------------------------------


def test_overrides_are_told_from_files() -> None:
    write({"tp=8.yaml": GOOD, "model.x=1": GOOD, "good.yaml": GOOD, "tp=8/x.yaml": GOOD})
    arguments = ["good.yaml", "cluster.gpu=h200", "tp=8.yaml", "mixed_precision=bf16_mixed", "model.x=1", "tp=8/*.yaml"]
    selection = select(arguments)
    assert selection.overrides == ("cluster.gpu=h200", "mixed_precision=bf16_mixed")
    assert [found.path for found in selection.files] == ["good.yaml", "tp=8.yaml", "model.x=1", "tp=8/x.yaml"]


def test_overrides_hold_for_every_file() -> None:
    write({"a.yaml": GOOD, "b.yaml": WARNING})
    result = report("cluster.gpu=h200", "a.yaml", "b.yaml", "model.sequence_parallel=true")
    assert [checked.outcomes[0].plan.target.gpu for checked in result.files] == ["h200", "h200"]
    expected = resolve("b.yaml", ["cluster.gpu=h200", "model.sequence_parallel=true"])
    assert result.files[1].outcomes[0].plan == expected


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.tp=8", "command line: model.tp: unknown key; did you mean model.tensor_model_parallel_size?"),
        ("a.b=1", "command line: a: unknown section; sections are "),
        ("model.num_layers=[1", "command line: model.num_layers: not YAML: "),
        ("+model.num_layers=1", "command line: '+model.num_layers=1' is not an override; leave out the +: "),
    ],
)
def test_a_wrong_override_is_one_line_however_many_files(override: str, line: str) -> None:
    write({"a.yaml": GOOD, "b.yaml": GOOD})
    with pytest.raises(RecipeError) as caught:
        report("a.yaml", "b.yaml", override)
    assert str(caught.value).startswith(line)


# --- what a file is --------------------------------------------------------------------------------


def test_a_recipe_has_one_outcome_without_conditions() -> None:
    write({"a.yaml": WARNING})
    checked = only(report("a.yaml"))
    assert (checked.path, checked.ok, checked.error) == ("a.yaml", True, None)
    assert [(outcome.when, outcome.taken, outcome.notes) for outcome in checked.outcomes] == [((), True, ())]
    assert checked.outcomes[0].plan == resolve("a.yaml")


def test_every_shipped_recipe_is_usable() -> None:
    result = report(str(ROOT / "recipes"))
    assert len(result.files) == len(list((ROOT / "recipes").glob("*.yaml")))
    assert [checked.path for checked in result.files if checked.error] == []
    assert result.passed_over == ()


OTHERS = {
    "list.yaml": "- 1\n- 2\n",
    "empty.yaml": "",
    "chart.yaml": "a: {{ .Values.x }}\n",
    "two.yml": "a: 1\n---\nb: 2\n",
    "workflow.yaml": "on: push\njobs: {test: {runs-on: ubuntu}}\n",
    "service.yaml": "model: gpt\ntemperature: 1\n",
    "hydra.yaml": "_target_: a.B\nx: 1\n",
    "lock.yaml": "# " + "x" * 300_000,
    "build.sh": "#!/bin/sh\n# python pretrain_gpt.py --num-layers 2\nmake all\n",
}


def test_what_is_no_recipe_is_passed_over_in_a_folder() -> None:
    write({f"a/{name}": text for name, text in OTHERS.items()})
    write({"a/good.yaml": GOOD})
    for argument in ("a", "a/*", "a/**"):
        result = report(argument, "cluster.gpu=h100", "cluster.num_gpus=8")
        assert [checked.path for checked in result.files] == ["a/good.yaml"]
        assert {passed.path: passed.why for passed in result.passed_over} == {
            **{f"a/{name}": "no section of a recipe" for name in OTHERS},
            "a/lock.yaml": "larger than 256 KB, which no recipe needs",
            "a/build.sh": "no training launch",
        }


@pytest.mark.parametrize("name", [name for name in OTHERS if name.endswith((".yaml", ".yml"))])
def test_what_is_named_is_checked_whatever_it_is(name: str) -> None:
    write({name: OTHERS[name]})
    result = report(name)
    assert only(result).error is not None
    assert (result.passed_over, exit_code(result)) == ((), 2)


def test_a_broken_recipe_in_a_folder_is_not_passed_over() -> None:
    broken = {
        "a/syntax.yaml": "cluster: {gpu: h100\nmodel: 1\n",
        "a/key.yaml": UNUSABLE,
        "a/size.yaml": GOOD.replace("8", "0"),
        "a/bytes.yaml": "",
        "a/gone.yaml": "",
    }
    write(broken)
    Path("a/bytes.yaml").write_bytes(b"cluster: {gpu: h\xff}\n")
    Path("a/gone.yaml").unlink()
    Path("a/gone.yaml").symlink_to("nowhere.yaml")
    result = report("a")
    assert {checked.path for checked in result.files if checked.error} == set(broken)
    assert result.passed_over == ()


def test_a_large_script_of_nothing_is_read_in_time_that_grows_with_its_size() -> None:
    write({"a/blank.sh": "\n" * 250_000, "a/long.sh": "pretrain" * 30_000, "a/dots.sh": "pretrain." * 25_000})
    assert [passed.why for passed in report("a").passed_over] == ["no training launch"] * 3


def test_bytes_of_another_kind_are_passed_over_in_a_glob() -> None:
    write({"a/good.yaml": GOOD})
    Path("a/picture.png").write_bytes(b"\x89PNG\r\n")
    result = report("a/*")
    assert [passed.path for passed in result.passed_over] == ["a/picture.png"]
    assert exit_code(result) == 0
    assert exit_code(report("a/picture.png")) == 2


def test_an_unusable_file_stops_no_other() -> None:
    write({"a.yaml": UNUSABLE, "b.yaml": GOOD, "c.yaml": "", "d.yaml": ERROR})
    result = report("a.yaml", "b.yaml", "c.yaml", "d.yaml")
    assert [checked.error is None for checked in result.files] == [False, True, False, True]
    assert str(result.files[0].error) == (
        "a.yaml:3: model.tensor_model_parallel_sizes: unknown key; did you mean model.tensor_model_parallel_size?"
    )


# --- launch scripts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.sh", LAUNCH),
        ("train.slurm", LAUNCH),
        ("arguments", "--num-layers 2\n--hidden-size 8\n"),
        ("args.yaml", "ENV_VARS: {}\nMODEL_ARGS:\n  --num-layers: 2\n"),
        ("broken.yaml", "MODEL_ARGS:\n  --num-layers: [\n"),
    ],
)
def test_scripts_and_arguments_go_to_their_loader(name: str, text: str) -> None:
    write({f"a/{name}": text})
    seen = []

    def load(path: str, overrides: Sequence[str]) -> tuple[Outcome, ...]:
        seen.append((path, overrides))
        return (Outcome(recipe=of_recipe(WARNING, path), when=("TP > 1",), taken=False, notes=("a note",)),)

    for argument in (f"a/{name}", "a/*"):
        (outcome,) = only(check(select([argument, "train.micro_batch_size=1"]), load)).outcomes
        assert (outcome.when, outcome.taken, outcome.notes) == (("TP > 1",), False, ("a note",))
        assert outcome.plan == resolve(of_recipe(WARNING, f"a/{name}"))
    assert seen == [(f"a/{name}", ("train.micro_batch_size=1",))] * 2


def test_a_recipe_that_only_mentions_model_args_is_a_recipe() -> None:
    write({"a.yaml": f"# not MODEL_ARGS\n{GOOD}", "recipe": GOOD})
    assert exit_code(report("a.yaml", "recipe")) == 0


def test_a_script_that_cannot_be_read_is_unusable() -> None:
    write({"train.sh": LAUNCH, "good.yaml": GOOD})

    def load(path: str, overrides: Sequence[str]) -> tuple[Outcome, ...]:
        raise RecipeError("$TP is not known", source=path, line=1, hint="give it as an override")

    result = check(select(["train.sh", "good.yaml"]), load)
    assert [str(checked.error) for checked in result.files] == [
        "train.sh:1: $TP is not known; give it as an override",
        "None",
    ]


def test_an_outcome_without_a_plan_leaves_the_others() -> None:
    write({"train.sh": LAUNCH})
    wrong = recipe_from_mapping({"cluster": {"gpu": "h100", "num_gpus": 3}, "model": {"tensor_model_parallel_size": 2}})

    def load(path: str, overrides: Sequence[str]) -> tuple[Outcome, ...]:
        good = of_recipe(GOOD, path)
        return (
            Outcome(recipe=good, when=("a",)),
            Outcome(recipe=wrong, when=("b",)),
            Outcome(recipe=wrong, when=("c",)),
            Outcome(recipe=good, when=("d",)),
        )

    checked = only(check(select(["train.sh"]), load))
    assert [outcome.when for outcome in checked.outcomes] == [("a",), ("d",)]
    assert (checked.error is not None, checked.error_when, checked.ok) == (True, ("b",), False)


# --- exit code -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "codes"),  # codes for --fail-on error, warning, info, never
    [
        ([GOOD], (0, 0, 1, 0)),
        ([GOOD, WARNING], (0, 1, 1, 0)),
        ([ERROR, GOOD], (1, 1, 1, 0)),
        ([ERROR, UNUSABLE, GOOD], (2, 2, 2, 2)),
    ],
)
def test_exit_code(files: list[str], codes: tuple[int, ...]) -> None:
    names = [f"{index}.yaml" for index in range(len(files))]
    write(dict(zip(names, files, strict=True)))
    result = report(*names)
    assert tuple(exit_code(result, level) for level in ("error", "warning", "info", "never")) == codes


# --- pre-commit ------------------------------------------------------------------------------------


def test_the_hook_calls_check_on_recipes() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert set(hook) >= {"id", "name", "description", "entry", "language", "files"}
    assert (hook["id"], hook["entry"], hook["language"]) == ("overlapkit-check", "overlapkit check", "python")
    matches = [
        name
        for name in ("recipes/a.yaml", "recipes/a/b.yml", "src/recipes/a.yaml", "recipes/a.py")
        if re.search(hook["files"], name)
    ]
    assert matches == ["recipes/a.yaml", "recipes/a/b.yml"]
