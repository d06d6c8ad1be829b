"""Scripts that a script writes, texts that are none, and several launches in one file."""

from __future__ import annotations

import pytest

from overlapkit import RecipeError
from overlapkit.megatron_lm.script import read_script
from overlapkit.megatron_lm.words import Launch

TRAIN = "torchrun pretrain_gpt.py --train-iters 1 --num-layers 2"


def read(text: str) -> tuple[Launch, ...]:
    return read_script(text, "job.sh")


def told(text: str) -> list[tuple[int, list[str | None], tuple[str, ...]]]:
    return [(launch.line, [word.text for word in launch.arguments][4:], launch.when) for launch in read(text)]


class TestTexts:
    @pytest.mark.parametrize(
        "redirect", [">&2", "1>&2", ">/dev/null", "> /dev/stderr", ">/dev/stdout", ">/dev/tty", "", "| tee /dev/stderr"]
    )
    def test_a_usage_is_no_launch(self, redirect: str):
        text = f"usage() {{\ncat <<U {redirect}\n{TRAIN} -a\nU\n}}\n[ -z $1 ] && usage\n{TRAIN} -b"
        assert told(text) == [(7, ["-b"], ())]


class TestWrittenScripts:
    WRITTEN = f"cat > run.sh <<EOF\n{TRAIN} -a\nEOF\n"

    def test_one_that_is_only_written_comes_behind_those_that_are_started(self):
        assert told(f"{self.WRITTEN}{TRAIN} -b") == [
            (4, ["-b"], ("the launch on line 4",)),
            (2, ["-a"], ("the launch on line 2",)),
        ]

    def test_alone_it_is_the_launch(self):
        assert told(self.WRITTEN) == [(2, ["-a"], ())]

    @pytest.mark.parametrize(
        "started",
        [
            "sbatch run.sh",
            "sbatch -N 2 ./run.sh",
            "bash run.sh",
            "bash -x $PWD/run.sh",
            "chmod +x run.sh; ./run.sh",
            "srun -N 2 run.sh",
            "exec /w/run.sh",
        ],
    )
    def test_one_that_is_run_is_followed_there(self, started: str):
        assert told(f"{self.WRITTEN}TP=2\n{started}") == [(2, ["-a"], ())]
        assert [line for line, _, _ in told(f"{self.WRITTEN}{started}\n{TRAIN} -b")] == [2, 5]

    def test_it_sees_the_environment_and_the_arguments_of_the_place_that_runs_it(self):
        text = f"cat > run.sh <<'EOF'\n{TRAIN} --tp $1 --a $A --b $B\nEOF\nexport A=3\nB=4\nbash run.sh 8"
        (launch,) = read(text)
        assert [word.text for word in launch.arguments][4:] == ["--tp", "8", "--a", "3", "--b", None]

    def test_a_command_line_counts_before_the_lines_of_the_script(self):
        (launch,) = read(f"cat > run.sh <<EOF\n#SBATCH -N 4\n{TRAIN}\nEOF\nsbatch -N 2 run.sh")
        assert [word.text for word in launch.launcher] == [
            "sbatch",
            "-N",
            "4",
            "sbatch",
            "-N",
            "2",
            "run.sh",
            "torchrun",
        ]

    def test_each_run_is_a_launch(self):
        text = f"cat > run.sh <<'EOF'\n{TRAIN} --tp $1\nEOF\nfor tp in 1 2; do bash run.sh $tp; done"
        assert told(text) == [(2, ["--tp", "1"], ("line 4: tp is 1",)), (2, ["--tp", "2"], ("line 4: tp is 2",))]

    def test_parts_that_are_appended_are_one_script(self):
        text = f"cat > run.sh <<EOF\nexport A=1\nEOF\ncat >> run.sh <<EOF\n{TRAIN}\nEOF\nbash run.sh"
        assert {name: word.text for name, word in (read(text)[0].exports or {}).items()} == {"A": "1"}

    def test_one_that_a_branch_writes_names_it(self):
        assert told(f"{self.WRITTEN}if [ $X = 1 ]; then\n{self.WRITTEN}fi\nbash run.sh") == [
            (2, ["-a"], ("the launch on line 2",)),
            (6, ["-a"], ("line 4: [ $X = 1 ] holds", "the launch on line 6")),
        ]


class TestSeveral:
    def test_each_names_its_line(self):
        assert told(f"{TRAIN} -a\n{TRAIN} -b") == [
            (1, ["-a"], ("the launch on line 1",)),
            (2, ["-b"], ("the launch on line 2",)),
        ]

    def test_behind_its_branches(self):
        assert told(f"if [ $X = 1 ]; then A=-a; fi\n{TRAIN} $A\n{TRAIN} -b") == [
            (2, [], ("line 1: [ $X = 1 ] does not hold", "the launch on line 2")),
            (3, ["-b"], ("the launch on line 3",)),
            (2, ["-a"], ("line 1: [ $X = 1 ] holds", "the launch on line 2")),
        ]

    def test_of_one_line_each_says_which_it_is(self):
        assert told(f"{TRAIN} -a; {TRAIN} -b") == [
            (1, ["-a"], ("launch 1 of 2 on line 1",)),
            (1, ["-b"], ("launch 2 of 2 on line 1",)),
        ]


class TestSubstitutions:
    @pytest.mark.parametrize(
        "text",
        [
            'CMD=$(cat <<EOF\n{}\nEOF\n)\neval "$CMD"',
            "CMD=$(cat <<EOF\n{}\nEOF\n)\n$CMD",
            "CMD=$(cat <<'EOF'\n{}\nEOF\n); bash -c \"$CMD\"",
            'CMD="$(cat <<-EOF\n\t{} \\\n\nEOF\n)"\neval $CMD',
            'CMD=$(cat <<EOF\n# don\'t (\n{}\nEOF\n)\neval "$CMD"',
            'CMD=`cat <<EOF\n{}\nEOF\n`; eval "$CMD"',
        ],
    )
    def test_a_here_document_is_its_text(self, text: str):
        assert told(text.format(f"{TRAIN} -a"))[0][1] == ["-a"]

    def test_its_variables_are_filled_in_with_their_lines(self):
        (launch,) = read(f"TP=4\nCMD=$(cat <<EOF\n{TRAIN} \\\n  --tp $TP\nEOF\n)\n$CMD")
        assert [(word.text, word.line) for word in launch.arguments[4:]] == [("--tp", 4), ("4", 4)]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("CMD=$(make_cmd)\n$CMD", "job.sh:2: no training launch is found here; line 2 runs $CMD: $(make_cmd) is"),
            ('CMD=$(make_cmd)\neval "$CMD"', "job.sh:2: no training launch is found here; line 2 runs $CMD: $(make"),
            (
                "true\n$(make_cmd --tp 2)",
                "line 2 runs $(make_cmd --tp 2): $(make_cmd --tp 2) is only known at run time",
            ),
        ],
    )
    def test_where_one_hides_the_launch_it_is_named(self, text: str, message: str):
        with pytest.raises(RecipeError) as error:
            read(text)
        assert message in str(error.value)


@pytest.mark.parametrize(
    "coprocess",
    ["coproc x { echo; }", "coproc { echo; }", "coproc cat", "coproc X (cat)", "coproc while read l; do :; done"],
)
def test_a_coprocess_changes_nothing(coprocess: str):
    assert told(f"A=-a\n{coprocess}\n{TRAIN} $A") == [(3, ["-a"], ())]
    (launch,) = read(f"coproc x {{ A=1; {TRAIN} $A; }}\ntrue")
    assert launch.line == 1
