"""What a script's words come to: unknown flags, lists, exports and variables from outside, each as bash has them."""

from __future__ import annotations

import pytest

from overlapkit.megatron_lm.script import read_script
from overlapkit.megatron_lm.words import Launch

TRAIN = "torchrun pretrain_gpt.py --train-iters 1 --num-layers 2"


def read(text: str, **variables: str) -> tuple[Launch, ...]:
    return read_script(text, "job.sh", variables)


def added(launch: Launch) -> list[str | None]:
    """What stands behind the flags of ``TRAIN``."""
    return [word.text for word in launch.arguments[4:]]


def exports(launch: Launch) -> dict[str, str | None]:
    return {name: word.text for name, word in (launch.exports or {}).items()}


class TestUnknownWords:
    @pytest.mark.parametrize(
        "words",
        [
            "--bf16 $TP_OVERLAP",
            "--bf16 ${SP}",
            '--bf16 $( [ "$SP" = 1 ] && echo --sequence-parallel )',
            '--bf16 "$SP"',
            "--bf16 $A$B",
            "--bf16 --$KIND",
            "--seq-length 8 ${SP}",
            "--seq-length=8 ${SP}",
            "--tp-comm-overlap-cfg $A $B",
        ],
    )
    def test_one_where_a_flag_could_stand_is_a_note(self, words: str):
        (launch,) = read(f"{TRAIN} {words} --last")
        (note,) = launch.notes
        assert "may hold flags that are not read" in note

    @pytest.mark.parametrize(
        "words", ["--seq-length $S", "--seq-length=$S", '--split "$S"', "--data-path $S", "--no-such-flag $S"]
    )
    def test_one_behind_a_flag_that_takes_a_value_is_its_value(self, words: str):
        (launch,) = read(f"{TRAIN} {words} --last")
        assert launch.notes == () and None in added(launch)

    def test_a_copy_of_a_variable_from_outside_is_not_taken_for_empty(self):
        (launch,) = read(f"SP=$SP\n{TRAIN} --bf16 $SP")
        assert launch.notes == ("line 2: $SP may hold flags that are not read: $SP is not set in this script",)


class TestEnvironment:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (f"for v in A B; do export $v=1; done\n{TRAIN}", {"A": "1", "B": "1"}),
            (f"k=A\nexport ${{k}}_X='1 2'\n{TRAIN}", {"A_X": "1 2"}),
            (f"export A=1 B=2\ndeclare +x A\n{TRAIN}", {"B": "2"}),
            (f"k=A\nexport $k=$(nproc)\n{TRAIN}", {"A": None}),
            (f"export A=1 B=2\nenv -u A {TRAIN}", {"B": "2"}),
            (f"export A=1 B=2\nenv -uA --unset=B C=3 {TRAIN}", {"C": "3"}),
            (f"export A=1 B=2\nenv -i B=$B {TRAIN}", {"B": "2"}),
            (f"export A=1\nenv - {TRAIN}", {}),
            (f"docker run -eA=1 -e B=$(nproc) --env=C=$(nproc) image {TRAIN}", {"A": "1", "B": None, "C": None}),
            (f"export A=1\ndocker run -ite A image {TRAIN}", {"A": "1"}),
            (f"docker run -e A=1 image exec {TRAIN}", {"A": "1"}),
            (
                f"export A=1\nsingularity exec --nv --env B=1,C=2 --env=D=3 x.sif {TRAIN}",
                {"A": "1", "B": "1", "C": "2", "D": "3"},
            ),
            (f"export A=1\napptainer run --cleanenv --env B=1 x.sif {TRAIN}", {"B": "1"}),
            (f"APPTAINERENV_B=2 apptainer exec x.sif {TRAIN}", {"APPTAINERENV_B": "2", "B": "2"}),
            (f"export A=1\nsrun --export=NONE {TRAIN}", {}),
            (f"export A=1\nsrun --export=ALL,B=$(nproc) {TRAIN}", {"A": "1", "B": None}),
            (f"export A=1\nsrun --export A,B=2 {TRAIN}", {"A": "1", "B": "2"}),
            (f"export A=1\nsudo {TRAIN}", {}),
            (f"export A=1\nsudo -E {TRAIN}", {"A": "1"}),
            (f"export A=1 B=2\nsudo --preserve-env=A C=3 {TRAIN}", {"A": "1", "C": "3"}),
            (f"export A=1\nsudo docker run -e A -e B=2 image {TRAIN}", {"B": "2"}),
            (f"export A=1\nssh node {TRAIN}", {}),
        ],
    )
    def test_exports(self, text: str, expected: dict[str, str | None]):
        (launch,) = read(text)
        assert exports(launch) == expected

    @pytest.mark.parametrize(
        ("text", "note"),
        [
            (f"docker run --env-file e.list image {TRAIN}", "line 2: what e.list sets is not read"),
            (f"docker run --env-file=$F image {TRAIN}", "line 2: what $F sets is not read"),
            (f"docker run $DOCKER_ARGS image {TRAIN}", "line 2: what $DOCKER_ARGS sets is not known"),
            (f"docker run -e $E image {TRAIN}", "line 2: what $E sets is not known"),
            (f"env $E {TRAIN}", "line 2: what $E sets is not known"),
            (f"srun --export=NONE {TRAIN}", "line 2: srun --export=NONE does not pass on A"),
            (f"srun --export=$E {TRAIN}", "line 2: what $E sets is not known"),
            (f"sudo {TRAIN}", "line 2: sudo without -E does not pass on A"),
        ],
    )
    def test_what_nobody_can_see_of_it_is_a_note(self, text: str, note: str):
        (launch,) = read(f"export A=1\n{text}")
        assert note in launch.notes

    def test_a_directive_of_the_job_holds_for_its_steps(self):
        (launch,) = read(f"#SBATCH --export=NONE\nexport A=1\nsrun {TRAIN}")
        note = "line 1: #SBATCH --export=NONE holds for srun too, unless that has an --export of its own"
        assert launch.notes == (note,)
        assert read(f"#SBATCH --export=ALL,A=1\nsrun {TRAIN}")[0].notes == ()

    def test_such_a_note_is_of_its_launch_alone(self):
        _, second = read(f"export A=1\nsudo {TRAIN} -a\n{TRAIN} -b")
        assert second.notes == ()


class TestPrefixAssignments:
    def test_one_before_a_function_ends_with_the_call(self):
        first, second = read(f"export B=1\nrun() {{ {TRAIN} $1; }}\nA=1 B=2 run -a\nrun -b")
        assert (exports(first), exports(second)) == ({"A": "1", "B": "2"}, {"B": "1"})

    def test_one_before_eval_ends_with_it(self):
        first, second = read(f"A=1 eval '{TRAIN}'\n{TRAIN} -b")
        assert (exports(first), exports(second)) == ({"A": "1"}, {})


class TestVariablesFromOutside:
    def test_they_are_exported_as_an_environment_is(self):
        (launch,) = read(f"{TRAIN} --tp $TP", TP="4", CUDA_DEVICE_MAX_CONNECTIONS="1")
        assert exports(launch) == {"TP": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        assert launch.notes == ()

    @pytest.mark.parametrize("text", ["TP=8", "export TP=8", "for TP in 8; do :; done"])
    def test_one_that_the_script_sets_over_is_named(self, text: str):
        (launch,) = read(f"\n{text}\n{TRAIN} --tp $TP", TP="4")
        assert added(launch) == ["--tp", "8"]
        assert launch.notes == ("TP=4 changes nothing: line 2 sets TP",)

    def test_one_that_the_script_does_not_have_is_named(self):
        (launch,) = read(f"{TRAIN} --tp $TP", TPP="4", TP="2")
        assert launch.notes == ("TPP=4: the script has no TPP; it counts as an environment variable alone",)
        (launch,) = read("--num-layers 2", TPP="4")
        assert len(launch.notes) == 1

    @pytest.mark.parametrize("text", ["TP=${TP:-8}", "[ -n $TP ] || TP=8", "[ -v TP ] || TP=8", "TP=$((TP))"])
    def test_one_that_a_default_gives_way_to_changes_something(self, text: str):
        launch, *_ = read(f"{text}\n{TRAIN} --tp $TP", TP="4")
        assert added(launch) == ["--tp", "4"] and launch.notes == ()

    @pytest.mark.parametrize("value", ["$6", "${6}", "$(nproc)", "${6:-$SLURM_NTASKS}"])
    def test_one_counts_where_the_script_sets_an_unknown(self, value: str):
        (launch,) = read(f"TP={value}\nif [ $TP -gt 1 ]; then A=-a; fi\n{TRAIN} --tp $TP $A", TP="4")
        assert added(launch) == ["--tp", "4", "-a"]
        assert launch.notes[0].endswith("which only a run could tell; TP=4 counts")

    def test_a_given_argument_counts_before_it(self):
        (launch,) = read_script(f"TP=$1\n{TRAIN} --tp $TP", "job.sh", {"TP": "4", "1": "2"})
        assert added(launch) == ["--tp", "2"]
        assert launch.notes == ("TP=4 changes nothing: line 1 sets TP",)


class TestOtherMachines:
    @pytest.mark.parametrize(
        "command",
        [
            f'ssh n1 "cd $PWD && export A=1 && {TRAIN} -a"',
            f'ssh $NODE "cd $(pwd); export A=1; {TRAIN} -a"',
            f'for n in n1; do ssh -o X=no $n "export A=1; $SETUP {TRAIN} -a" & done',
            f"ssh n1 bash -s <<'E'\nexport A=1\n{TRAIN} -a\nE",
        ],
    )
    def test_what_a_script_there_says_is_read_though_pieces_of_it_are_unknown(self, command: str):
        (launch,) = read(f"export B=2\n{command}")
        assert (added(launch), exports(launch)) == (["-a"], {"A": "1"})


class TestLists:
    @pytest.mark.parametrize(
        "text",
        [
            "mapfile -t EXTRA < flags.txt",
            "readarray EXTRA < <(cat flags.txt)",
            "read -ra EXTRA < flags.txt",
            "IFS=, read -ra EXTRA <<< $(cat flags.txt)",
        ],
    )
    @pytest.mark.parametrize("use", ['"${EXTRA[@]}"', "${EXTRA[@]}", "--seq-length 8 ${EXTRA[*]}"])
    def test_one_that_is_read_at_run_time_is_a_note(self, text: str, use: str):
        (launch,) = read(f"{text}\n{TRAIN} {use}")
        assert "may hold flags that are not read: $EXTRA is only known at run time" in launch.notes[0]

    def test_an_element_of_such_a_list_is_unknown(self):
        (launch,) = read(f'A=(a "$@")\nmapfile B < x\n{TRAIN} --tp "${{A[1]}}" --pp "${{B[1]}}"')
        assert added(launch) == ["--tp", None, "--pp", None]


class TestArgumentsOfTheScript:
    @pytest.mark.parametrize(
        "test",
        ["[ $# -lt 1 ]", "[[ $# -eq 0 ]]", "(( $# < 1 ))", '[ "$#" = 0 ]', "[[ $# == 0 && x = x ]]"],
    )
    def test_their_number_is_presumed_to_be_none(self, test: str):
        launches = read(f"if {test}; then TP=2; else TP=$1; fi\n{TRAIN} --tp $TP")
        assert [added(launch) for launch in launches] == [["--tp", "2"], ["--tp", None]]
        assert launches[0].when == (f"line 1: {test} holds",)

    def test_so_it_is_in_a_case(self):
        launches = read(f"case $# in 0) TP=2;; *) TP=$1;; esac\n{TRAIN} --tp $TP")
        assert [added(launch) for launch in launches] == [["--tp", "2"], ["--tp", None]]

    def test_those_that_are_given_are_counted(self):
        text = f"if [ $# -ge 2 ]; then A=-a; fi\n{TRAIN} $A"
        assert added(read_script(text, "job.sh", {"1": "x", "2": "y"})[0]) == ["-a"]
        assert added(read_script(text, "job.sh", {"1": "x"})[0]) == []

    def test_a_script_that_ends_without_them_is_taken_to_have_them(self):
        (launch,) = read(f"if [ $# -ne 2 ]; then echo usage; exit 1; fi\n{TRAIN} --tp $1")
        assert added(launch) == ["--tp", None]


class TestBeyondTheReader:
    @pytest.mark.parametrize("test", ["[ $FP8 = 1 ]", "[[ $FP8 = 1 ]]", "(( FP8 == 1 ))", "[ -f x ]"])
    def test_a_test_that_nobody_can_decide_is_taken_not_to_hold(self, test: str):
        assert [added(launch) for launch in read(f"{test} && A=-a\n{TRAIN} $A")] == [[], ["-a"]]
        assert [added(launch) for launch in read(f"{test} || A=-a\n{TRAIN} $A")] == [["-a"], []]

    @pytest.mark.parametrize(
        "text",
        [
            "declare -n R=$X; R=1; A=$R",
            "declare -i A=$X",
            "declare -l A=$X",
            "(( A = X + 1 ))",
            "A=1; (( A = ${X}1 + 1 ))",
            'B=(1 2); i=$X; unset "B[$i]"; A=${B[0]}',
            "read A < file",
            'read -r A B <<< "$X"',
            "read -n 1 A <<< 12",
            "read A <<< 'a\\b'",
            "A={$X}",
        ],
    )
    def test_a_value_is_unknown_and_never_a_wrong_one(self, text: str):
        (launch,) = read(f"{text}\n{TRAIN} --tp $A")
        assert added(launch) == ["--tp", None]

    @pytest.mark.parametrize("expression", ["(a*)*b", "a\\1", "[[:space:]]", "é", ".*.*.*.*", "x" * 200])
    def test_an_expression_that_is_not_tried_decides_nothing(self, expression: str):
        assert len(read(f"[[ aaaa =~ {expression} ]] && A=-a\n{TRAIN} $A")) == 2

    def test_a_name_that_goes_on_behind_braces_is_a_note(self):
        (launch,) = read(f"X=1\n{TRAIN} --bf16 a{{$X,b}}c")
        assert added(launch) == ["--bf16", "abc"] and "a{$X,b}c may hold flags" in launch.notes[0]

    def test_braces_of_too_many_words_are_a_note(self):
        (launch,) = read(f"{TRAIN} --bf16 {'{a,b}' * 12}")
        assert "may hold flags that are not read" in launch.notes[0]


class TestLinesThatEndTooEarly:
    @pytest.mark.parametrize("end", [" \\ ", "\\ ", " \\\t", " \\  "])
    def test_a_blank_behind_the_backslash_is_named(self, end: str):
        (launch,) = read(f"{TRAIN} --bf16{end}\n  --sequence-parallel")
        assert launch.notes[0] == "line 1: a blank stands behind the \\, so that the line is not continued"
        assert "line 2: --sequence-parallel begins a command of its own" in launch.notes[1]

    def test_a_blank_that_is_meant_is_none(self):
        (launch,) = read(f"{TRAIN} --data-path 'a b ' \\\n --bf16")
        assert launch.notes == ()
