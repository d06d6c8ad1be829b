"""Whether a command succeeds: what is known of it, and both outcomes where only a run could tell."""

from __future__ import annotations

import pytest

from overlapkit.megatron_lm.script import read_script

TRAIN = "torchrun pretrain_gpt.py --train-iters 1 --num-layers 2"


def added(text: str, **variables: str) -> list[list[str | None]]:
    """What each launch of a script has behind the flags of ``TRAIN``; the one taken first."""
    launches = read_script(text, "job.sh", {name.lstrip("_"): value for name, value in variables.items()})
    assert [launch.taken for launch in launches] == [True] + [False] * (len(launches) - 1)
    return [[word.text for word in launch.arguments][4:] for launch in launches]


class TestCommands:
    @pytest.mark.parametrize(
        "command",
        [
            'echo "$GPU" | grep -q H100',
            "grep -q H100 gpus",
            'python3 -c "import transformer_engine"',
            "some_cmd",
            "some_cmd --flag | some_other",
            "(some_cmd)",
            "{ cd x; some_cmd; }",
            "cd /data",
            "A=$(some_cmd)",
            "! some_cmd",
            "eval some_cmd",
            "f() { some_cmd; }; f",
            "f() { local x=1; return $x1; }; f",
            "f() { some_cmd; return; }; f",
            "f() { some_cmd; return $?; }; f",
        ],
    )
    def test_both_outcomes_of_a_choice_are_there(self, command: str):
        assert sorted(added(f"{command} && TP=4 || TP=2\n{TRAIN} --tp $TP")) == [["--tp", "2"], ["--tp", "4"]]
        before, _, asked = command.rpartition("; ") if command.startswith("f()") else ("true", "", command)
        text = f"{before}\nif {asked}; then TP=4; else TP=2; fi\n{TRAIN} --tp $TP"
        assert sorted(added(text)) == [["--tp", "2"], ["--tp", "4"]]

    @pytest.mark.parametrize("command", ["cat hosts | grep -q big", "nvidia-smi -L | grep H100", "test -f x"])
    def test_both_outcomes_of_a_question_are_there(self, command: str):
        assert sorted(added(f"TP=2\n{command} && TP=8\n{TRAIN} --tp $TP")) == [["--tp", "2"], ["--tp", "8"]]

    def test_the_label_is_the_whole_pipeline(self):
        taken, other = read_script(f"cat hosts | grep -q big && A=-a\n{TRAIN} $A", "job.sh")
        assert taken.when == ("line 1: cat hosts | grep -q big does not hold",)
        assert other.when == ("line 1: cat hosts | grep -q big holds",)

    @pytest.mark.parametrize(
        ("chain", "value"),
        [
            ("true && TP=4 || TP=2", "4"),
            ("false && TP=4 || TP=2", "2"),
            ("echo | true && TP=4 || TP=2", "4"),
            ("true | false && TP=4 || TP=2", "2"),
            ("echo x && TP=4 || TP=2", "4"),
            ("export A=$(x) && TP=4 || TP=2", "4"),
            ("A=1 && TP=4 || TP=2", "4"),
            ("( exit 1 ) && TP=4 || TP=2", "2"),
            ("{ true; false; } && TP=4 || TP=2", "2"),
            ("if false; then false; fi && TP=4 || TP=2", "4"),
        ],
    )
    def test_what_is_known_to_succeed_or_to_fail_has_one_outcome(self, chain: str, value: str):
        assert added(f"{chain}\n{TRAIN} --tp $TP") == [["--tp", value]]

    @pytest.mark.parametrize("step", ["cd x", "mkdir -p x", "source env.sh", "module load cuda", "pip install x"])
    def test_steps_before_what_follows_them_are_taken_to_succeed(self, step: str):
        assert added(f"{step} && A=-a && {TRAIN} $A") == [["-a"]]

    @pytest.mark.parametrize(
        "text",
        [
            "cd x || exit 1",
            "command -v nvcc >/dev/null || { echo no nvcc; exit 1; }",
            "if ! command -v nvcc; then exit 1; fi",
            "[ -f x ] || exit 1",
            "need() { command -v $1; }; need nvcc || exit 1",
        ],
    )
    def test_where_the_script_would_end_the_other_outcome_is_the_one_taken(self, text: str):
        (launch,) = read_script(f"{text}\n{TRAIN}", "job.sh")
        assert launch.taken and launch.when == ()


class TestFunctions:
    def test_a_test_at_the_end_is_its_status(self):
        text = f"""
            TP=1
            is_tp() {{ [[ $TP -gt 1 ]]; }}
            is_tp && OV="--sequence-parallel --tp-comm-overlap" || OV=""
            {TRAIN} $OV"""
        assert added(text) == [[], ["--sequence-parallel", "--tp-comm-overlap"]]

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("f() { return 1; }; f || TP=4", "4"),
            ("f() { return 0; }; f || TP=4", "2"),
            ("f() { return 0; false; }; f || TP=4", "2"),
            ("f() { false; }; f && TP=4 || TP=2", "2"),
            ("f() { false; return; }; f && TP=4 || TP=2", "2"),
            ('f() { [ "$1" = a ]; }; if f a; then TP=1; else TP=2; fi', "1"),
            ('f() { [ "$1" = a ]; }; if f b; then TP=1; else TP=2; fi', "2"),
            ('f() { [ "$1" = a ]; }; if ! f b; then TP=1; else TP=2; fi', "1"),
            ('f() { [ "$1" = a ] && return 1; return 0; }; f a && TP=4', "2"),
            ('f() { if [ "$1" = a ]; then return 1; fi; }; f a && TP=4', "2"),
            ('f() { if [ "$1" = a ]; then return 1; fi; }; f b && TP=4', "4"),
            ("f() { case $1 in a) true;; *) false;; esac; }; f a && TP=4", "4"),
            ("f() { case $1 in a) true;; *) false;; esac; }; f b && TP=4", "2"),
            ('f() { g "$@"; }; g() { [ $# -gt 1 ]; }; f a && TP=4; f a b && TP=8', "8"),
            ("f() { for i in a b; do [ $i = $1 ] && return 0; done; return 1; }; f b && TP=4", "4"),
            ("f() { for i in a b; do [ $i = $1 ] && return 0; done; return 1; }; f c && TP=4", "2"),
            ("f() { TP=3; false; }; f", "3"),
        ],
    )
    def test_the_status_is_that_of_its_last_command(self, text: str, value: str):
        assert added(f"{text}\n{TRAIN} --tp ${{TP:-2}}") == [["--tp", value]]

    def test_what_it_sets_on_the_way_counts_in_both_outcomes(self):
        text = f"f() {{ N=3; some_cmd; }}\nf && TP=4 || TP=2\n{TRAIN} --tp $TP --n $N"
        assert sorted(added(text)) == [["--tp", "2", "--n", "3"], ["--tp", "4", "--n", "3"]]

    def test_in_a_process_of_its_own_only_the_outcome_counts(self):
        assert added(f"TP=2\n(TP=8; false) || N=1\n{TRAIN} --tp $TP --n $N") == [["--tp", "2", "--n", "1"]]
