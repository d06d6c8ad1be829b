"""What is a launch, in which environment it runs, and what a script without one is told."""

from __future__ import annotations

import pytest

from overlapkit import RecipeError
from overlapkit.megatron_lm.script import read_script
from overlapkit.megatron_lm.words import Launch

TRAIN = "torchrun pretrain_gpt.py --train-iters 1 --num-layers 2"


def read(text: str) -> tuple[Launch, ...]:
    return read_script(text, "job.sh")


def arguments(launch: Launch) -> list[str | None]:
    return [word.text for word in launch.arguments]


class TestEnvironment:
    @pytest.mark.parametrize(
        ("text", "exports"),
        [
            (f"A=1\n{TRAIN}", {}),
            (f"A=1\nexport A\n{TRAIN}", {"A": "1"}),
            (f"export A=1 B=$((1 + 1))\n{TRAIN}", {"A": "1", "B": "2"}),
            (f"declare -x A=1\nreadonly B=2\n{TRAIN}", {"A": "1"}),
            (f"export A=1\nA=2\n{TRAIN}", {"A": "2"}),
            (f"export A=1\nunset A\n{TRAIN}", {}),
            (f"export A=1\nexport -n A\n{TRAIN}", {}),
            (f"set -a\nA=1\nset +a\nB=2\n{TRAIN}", {"A": "1"}),
            (f"A=1 B='2 3' {TRAIN}", {"A": "1", "B": "2 3"}),
            (f"env A=1 nohup {TRAIN}", {"A": "1"}),
            (f"export A=1\ndocker run -e B=2 -e A --env=C=3 -e D image {TRAIN}", {"A": "1", "B": "2", "C": "3"}),
            (f"export A=1\nsrun --export=ALL,B=2 {TRAIN}", {"A": "1", "B": "2"}),
            (f"export A=1\nsrun --export=B=2 {TRAIN}", {"B": "2"}),
            (f"mpirun -np 8 -x A=1 -x B {TRAIN}", {"A": "1"}),
            (f"export A=1\nbash -c 'export B=2; {TRAIN}'", {"A": "1", "B": "2"}),
            (f"export A=$(hostname)\n{TRAIN}", {"A": None}),
        ],
    )
    def test_exports(self, text: str, exports: dict[str, str | None]):
        (launch,) = read(text)
        assert {name: word.text for name, word in launch.exports.items()} == exports

    def test_a_script_within_the_script_sees_what_is_exported(self):
        (launch,) = read(f"A=1\nexport B=2\nbash -c '{TRAIN} --a $A --b $B'")
        assert arguments(launch)[4:] == ["--a", None, "--b", "2"]
        assert launch.arguments[5].unknown == "$A is not exported to the script of line 3"

    @pytest.mark.parametrize("quotes", ["'$A'", "$'$A'", '\\"$A\\"'])
    def test_what_is_unknown_stays_so_inside_quotes_of_another_script(self, quotes: str):
        (launch,) = read(f'A=$(nproc)\nbash -c "{TRAIN} --a {quotes} --b"')
        assert launch.arguments[5].unknown == "$(nproc) is only known at run time"
        assert arguments(launch)[6:] == ["--b"]


class TestWhatIsALaunch:
    @pytest.mark.parametrize(
        "command",
        [
            "python pretrain_gpt.py",
            "/usr/bin/python3 -u $DIR/pretrain_gpt.py",
            "torchrun --nproc_per_node 8 pretrain_gpt.py",
            "python -m torch.distributed.launch --nproc_per_node 8 pretrain_gpt.py",
            "deepspeed --hostfile hosts pretrain_gpt.py",
            "torchrun -m my.training",
            "torchrun --nproc_per_node 8 $SCRIPT",
            "srun -N 2 python pretrain_gpt.py",
            "exec torchrun pretrain_gpt.py",
            "time torchrun pretrain_gpt.py",
            "nsys profile -o out python pretrain_gpt.py",
            "$LAUNCHER pretrain_gpt.py",
        ],
    )
    def test_a_program_behind_its_launcher(self, command: str):
        (launch,) = read(f"true\n{command} --train-iters 1 --num-layers 2 2>&1 | tee log &")
        assert arguments(launch) == ["--train-iters", "1", "--num-layers", "2"]
        assert launch.line == 2

    @pytest.mark.parametrize(
        "script",
        [
            "bash <<EOF\n{}\nEOF",
            "sbatch <<'EOF'\n#!/bin/bash\n#SBATCH -N 2\n{}\nEOF",
            "cat > job.sh <<EOF\n{}\nEOF\nsbatch job.sh",
            "cat <<EOF | bash\n{}\nEOF",
            "bash <<< '{}'",
            "bash -lc '{}'",
            'srun -N 2 sh -c "{}"',
            "sbatch -N 2 --wrap='{}'",
            "ssh node '{}'",
            "CMD='{}'; eval $CMD",
            "CMD='{}'; $CMD",
            "read -r -d '' CMD <<EOF\n{}\nEOF\nsrun bash -c \"$CMD\"",
            "run() {{ {}; }}\nrun",
            "( cd /w && {} )",
            "if {}; then echo done; fi",
        ],
    )
    def test_a_launch_in_a_script_of_its_own(self, script: str):
        (launch,) = read(script.format(TRAIN))
        assert arguments(launch) == ["--train-iters", "1", "--num-layers", "2"]

    def test_tools_beside_the_training_are_none(self):
        text = f"""
            python tools/preprocess_data.py --input x.json --workers 8 --seq-length 4
            python tools/checkpoint/convert.py --num-layers 2 --hidden-size 4
            echo torchrun pretrain_gpt.py --num-layers 2 --train-iters 1
            {TRAIN}"""
        assert [launch.line for launch in read(text)] == [5]

    def test_several_launches_are_told_apart_by_their_lines(self):
        assert [(launch.line, arguments(launch)[4:]) for launch in read(f"{TRAIN} -a\n{TRAIN} -b")] == [
            (1, ["-a"]),
            (2, ["-b"]),
        ]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "echo hello",
                "job.sh: no training launch is found here; a launch is a .py program with flags of Megatron-LM",
            ),
            ("set -e\nbash train.sh 8", "no training launch is found here; line 2 runs train.sh, which is not read"),
            (f"true\nif [ $X = 1 ]; then\n{TRAIN}\n", "job.sh:2: no training launch is found here: fi is missing"),
            ("", "no training launch is found here"),
        ],
    )
    def test_a_script_without_a_launch(self, text: str, message: str):
        with pytest.raises(RecipeError) as error:
            read(text)
        assert message in str(error.value)

    def test_what_stands_before_an_error_counts_as_it_does_for_bash(self):
        (launch,) = read(f"{TRAIN} -a\nif true; then\n{TRAIN} -b\n")
        assert arguments(launch)[4:] == ["-a"]
        assert launch.notes == ("line 2: fi is missing behind this; nothing from here on was read",)

    def test_arguments_alone_export_what_their_file_exports(self):
        (launch,) = read("export A=1\nARGS=(--num-layers 2 --bf16)")
        assert {name: word.text for name, word in launch.exports.items()} == {"A": "1"}
        assert arguments(launch) == ["--num-layers", "2", "--bf16"]

    def test_several_calls_of_a_function_are_told_apart_by_theirs(self):
        launches = read(f"run() {{ {TRAIN} --tp $1; }}\nrun 1\nrun 4")
        assert [(launch.line, launch.when, arguments(launch)[5]) for launch in launches] == [
            (1, ("line 2: run is called",), "1"),
            (1, ("line 3: run is called",), "4"),
        ]
        assert [launch.when for launch in read(f"run() {{ {TRAIN}; }}\nrun")] == [()]

    def test_what_a_here_document_holds_is_read_once(self):
        launches = read(f"srun -N 2 bash <<EOF | tee log\n{TRAIN}\nEOF")
        assert [launch.line for launch in launches] == [2]

    def test_lines_may_end_as_on_windows(self):
        (launch,) = read(f"A=1\r\n{TRAIN} \\\r\n  --a $A\r\n")
        assert arguments(launch)[4:] == ["--a", "1"]
