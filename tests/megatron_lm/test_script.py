"""Launch scripts in the styles that people use, and what each of them says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from overlapkit.megatron_lm.script import read_script
from overlapkit.megatron_lm.words import Launch

SCRIPTS = Path(__file__).parent / "scripts"
EXPECTED: dict[str, list[dict[str, Any]]] = yaml.safe_load((SCRIPTS / "expected.yaml").read_text())
TRAIN = "torchrun pretrain_gpt.py --train-iters 1 --num-layers 2"


def read(text: str, **variables: str) -> tuple[Launch, ...]:
    return read_script(text, "job.sh", {name.lstrip("_"): value for name, value in variables.items()})


def arguments(launch: Launch) -> list[str | None]:
    return [word.text for word in launch.arguments]


def added(text: str, **variables: str) -> list[list[str | None]]:
    """What each launch of a script has behind the flags of ``TRAIN``."""
    return [arguments(launch)[4:] for launch in read(text, **variables)]


def test_every_script_has_its_expectation():
    scripts = {path.name for path in SCRIPTS.iterdir() if path.suffix in (".sh", ".txt")}
    assert scripts - {"positional_options.sh"} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_script(name: str):
    launches = read_script((SCRIPTS / name).read_text(), name)
    assert len(launches) == len(EXPECTED[name])
    for launch, expected in zip(launches, EXPECTED[name], strict=True):
        check(launch, expected)


def check(launch: Launch, expected: dict[str, Any]) -> None:
    words = list(launch.arguments)
    texts = [word.text for word in words]
    assert (launch.line, launch.taken, list(launch.when)) == (
        expected["line"],
        expected.get("taken", True),
        expected.get("when", []),
    )
    for flag, (value, line) in expected.get("flags", {}).items():
        position = texts.index(flag)
        assert words[position].line == line, flag
        if value is not None:
            assert texts[position + 1] == value, flag
    assert not set(expected.get("not", ())) & set(texts)
    if "launcher" in expected:
        assert [word.text for word in launch.launcher] == expected["launcher"]
    exports = None if launch.exports is None else {name: word.text for name, word in launch.exports.items()}
    assert exports == expected["exports"]
    if "unknown" in expected:
        assert {word.written: word.unknown for word in words if word.unknown} == expected["unknown"]
    assert list(launch.notes) == expected.get("notes", [])


class TestPositionalOptions:
    """Options collected in strings, all of them decided by the script's own arguments."""

    TEXT = (SCRIPTS / "positional_options.sh").read_text()

    def test_without_arguments_the_model_is_unknown_and_defaults_decide_the_rest(self):
        taken, *others = read(self.TEXT)
        assert taken.taken and not any(launch.taken for launch in others)
        assert "--sequence-parallel" in arguments(taken) and "--recompute-activations" in arguments(taken)
        unknown = {word.written: word.unknown for word in taken.arguments if word.unknown}
        assert unknown["${NUM_LAYERS}"] == "$NUM_LAYERS is not set in this script"

    def test_each_outcome_of_each_branch_is_there(self):
        seen = {entry for launch in read(self.TEXT) for entry in launch.when}
        assert {
            "line 34: [ $MODEL_SIZE = 7B ] holds",
            "line 41: [ $MODEL_SIZE = 13B ] holds",
            "line 54: [ $AC = full ] holds",
            "line 59: [ $AC = sel ] holds",
            "line 62: [ $AC = none ] holds",
            "line 67: [ $DO = true ] holds",
            "line 67: [ $DO = true ] does not hold",
            "line 76: [ $SP = true ] holds",
            "line 76: [ $SP = true ] does not hold",
        } <= seen

    def test_beyond_64_outcomes_a_note_says_where_only_the_way_taken_is_read(self):
        notes = {note for launch in read(self.TEXT) for note in launch.notes}
        assert "line 71: more than 64 outcomes; from here on only the way taken is read" in notes

    def test_given_arguments_settle_their_branches(self):
        launches = read(self.TEXT, _1="local", _2="7B", _7="none", _8="true", _9="false", _10="/out")
        (launch,) = launches
        words = arguments(launch)
        assert words[words.index("--num-layers") + 1] == "32"
        assert launch.when == ()
        assert not {"--sequence-parallel", "--recompute-activations"} & set(words)
        assert [word.text for word in launch.launcher][:5] == ["torchrun", "--nproc_per_node", "8", "--nnodes", "1"]


class TestBranches:
    def test_both_outcomes_are_reported_and_the_one_taken_comes_first(self):
        taken, other = read(f"TP=8\nif [ $TP -gt 1 ]; then A=--sequence-parallel; fi\n{TRAIN} $A")
        assert (taken.taken, taken.when) == (True, ("line 2: [ $TP -gt 1 ] holds",))
        assert (other.taken, other.when) == (False, ("line 2: [ $TP -gt 1 ] does not hold",))
        assert arguments(taken)[4:] == ["--sequence-parallel"] and arguments(other)[4:] == []

    def test_an_undecidable_condition_is_taken_not_to_hold(self):
        taken, other = read(f"if [ $FP8 = 1 ]; then A=--fp8-format; fi\n{TRAIN} $A")
        assert taken.when == ("line 1: [ $FP8 = 1 ] does not hold",) and arguments(taken)[4:] == []
        assert not other.taken and arguments(other)[4:] == ["--fp8-format"]

    @pytest.mark.parametrize(
        "branch",
        [
            "if [ -d ckpt ]; then mkdir -p ckpt; LOAD=1; fi",
            "[ -f log ] && rm log",
            "[ -z $USER ] || echo $USER",
            "if [ $# -lt 1 ]; then echo usage; exit 1; fi",
            '[ -z "$MASTER_ADDR" ] && { echo "who is the master?"; exit 1; }',
            "case $MODE in a) echo a;; *) echo b;; esac",
            "if [ $X = 1 ]; then A=-x; else A=-y; fi; A=",
        ],
    )
    def test_a_branch_that_does_not_touch_the_launch_makes_no_outcome(self, branch: str):
        (launch,) = read(f"{branch}\n{TRAIN} $A")
        assert launch.taken and launch.when == ()

    @pytest.mark.parametrize(
        "default", ["${MBS:-2}", "${MBS-2}", "${MBS:=2}"], ids=["default", "default of unset", "assigned default"]
    )
    def test_defaults_make_no_outcome(self, default: str):
        assert added(f"{TRAIN} --micro-batch-size {default}") == [["--micro-batch-size", "2"]]
        assert added(f"{TRAIN} --micro-batch-size {default}", MBS="4") == [["--micro-batch-size", "4"]]

    @pytest.mark.parametrize("given", ['if [ -z "$MBS" ]; then MBS=2; fi', "[[ -z $MBS ]] && MBS=2"])
    def test_a_default_that_is_written_as_a_branch_makes_none_either(self, given: str):
        assert added(f"{given}\n{TRAIN} --micro-batch-size $MBS") == [["--micro-batch-size", "2"]]

    def test_the_same_question_has_the_same_answer(self):
        text = f"""
            if [ $TP -gt 1 ]; then A=--sequence-parallel; fi
            if [[ "${{TP}}" -gt 1 ]]; then B=--tp-comm-overlap; fi
            {TRAIN} $A $B"""
        assert sorted(map(len, added(text))) == [0, 2]

    def test_what_a_branch_asks_for_is_known_behind_it(self):
        text = f"""
            case $1 in fsdp) A=--use-torch-fsdp2;; esac
            if [ "$1" = fsdp ]; then B=1; else B=2; fi
            {TRAIN} $A --b $B"""
        assert added(text) == [["--b", "2"], ["--use-torch-fsdp2", "--b", "1"]]

    def test_a_variable_has_the_value_that_the_branch_found(self):
        assert added(f'if [ "$1" = 13B ]; then A="--size $1"; fi\n{TRAIN} $A') == [[], ["--size", "13B"]]

    def test_of_elif_only_the_arm_that_holds_is_named(self):
        text = f"if [ $X = a ]; then A=-a\nelif [ $X = b ]; then A=-b\nelse A=-c\nfi\n{TRAIN} $A"
        assert [launch.when for launch in read(text)] == [
            ("line 1: [ $X = a ] does not hold", "line 2: [ $X = b ] does not hold"),
            ("line 1: [ $X = a ] holds",),
            ("line 2: [ $X = b ] holds",),
        ]

    def test_a_launch_inside_a_branch_names_it(self):
        text = f"if [ $NODES = 1 ]; then\n{TRAIN} -a\nelse\n{TRAIN} -b\nfi"
        assert [(launch.line, launch.taken, launch.when) for launch in read(text)] == [
            (4, True, ("line 1: [ $NODES = 1 ] does not hold", "the launch on line 4")),
            (2, False, ("line 1: [ $NODES = 1 ] holds", "the launch on line 2")),
        ]

    def test_exports_make_outcomes_too(self):
        text = f"if [ $TP = 1 ]; then unset C; else export C=1; fi\n{TRAIN}"
        assert [{name: word.text for name, word in launch.exports.items()} for launch in read(text)] == [
            {"C": "1"},
            {},
        ]

    def test_variables_from_outside_settle_their_branches(self):
        text = f"SP=${{SP:-false}}\nif [ $SP = true ]; then A=--sequence-parallel; fi\n{TRAIN} $A"
        assert len(read(text)) == 2
        assert added(text, SP="true") == [["--sequence-parallel"]]


class TestUnknown:
    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            ("$GBS", "$GBS is not set in this script"),
            ("$3", "$3 is given to the script at run time"),
            ("$(nproc)", "$(nproc) is only known at run time"),
            ("`nproc`", "`nproc` is only known at run time"),
            ("$SLURM_NNODES", "$SLURM_NNODES is only known at run time"),
            ("$RANDOM", "$RANDOM is only known at run time"),
            ("$((GBS * 2))", "$GBS is not set in this script"),
            ("$((1 / 0))", "$((1 / 0)): a division by 0"),
            ("x${GBS}y", "$GBS is not set in this script"),
        ],
    )
    def test_a_value_says_why_it_is_unknown(self, value: str, reason: str):
        word = read(f"{TRAIN} --value {value} --last")[0].arguments[5]
        assert (word.text, word.written, word.line, word.unknown) == (None, value, 1, reason)

    def test_the_reason_goes_with_the_value(self):
        word = read(f"A=$(nproc)\nB=$A\n{TRAIN} --value $B")[0].arguments[5]
        assert (word.written, word.line, word.unknown) == ("$B", 3, "$(nproc) is only known at run time")

    @pytest.mark.parametrize("place", ["--num-query-groups 8 $EXTRA", "--bf16 $EXTRA_ARGS", '--bf16 "$@"', '"${X[@]}"'])
    def test_where_flags_may_hide_there_is_a_note_and_no_word(self, place: str):
        (launch,) = read(f"true\n{TRAIN} {place}")
        hidden = place.split()[-1].strip('"')
        assert None not in arguments(launch)
        assert [note.split(":")[0] for note in launch.notes] == ["line 2"]
        assert f"{hidden} may hold flags that are not read" in launch.notes[0]

    def test_what_a_sourced_file_sets_is_named(self):
        assert read(f"source env.sh\n. ./more.sh\n{TRAIN}")[0].notes == (
            "line 1: what env.sh sets is not read",
            "line 2: what ./more.sh sets is not read",
        )

    def test_options_of_the_script_are_named_and_not_followed(self):
        text = f"TP=2\nwhile [[ $# -gt 0 ]]; do case $1 in --tp) TP=$2; shift;; esac; shift; done\n{TRAIN} --tp $TP"
        (launch,) = read(text)
        assert arguments(launch)[4:] == ["--tp", "2"]
        assert launch.notes == ("line 2: what the script's own arguments change is not read",)

    def test_a_comment_that_cuts_the_command_short_is_named(self):
        (launch,) = read(f"{TRAIN} \\\n  # --bf16 \\\n  --fp8-format hybrid")
        assert arguments(launch)[4:] == []
        assert launch.notes[0].startswith("line 3: --fp8-format begins a command of its own")
