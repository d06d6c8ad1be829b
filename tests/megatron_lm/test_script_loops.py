"""Loops: exact where their rounds are known, and unknown, not wrong, where they are not."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from overlapkit.megatron_lm.script import read_script
from overlapkit.megatron_lm.words import Launch

BASH = shutil.which("bash")
TRAIN = "torchrun pretrain_gpt.py --train-iters 1 --num-layers 2"
WHY = "$N changes in the loop of line {}, whose rounds are not known"


def read(text: str) -> list[Launch]:
    return list(read_script(text, "job.sh"))


def values(text: str) -> list[str | None]:
    """What `--n $N` comes to in each launch, the one taken first."""
    return [launch.arguments[5].text for launch in read(f"{text}\n{TRAIN} --n $N")]


EXACT = [
    "N=1; for ((i=0;i<3;i++)); do N=$((N*2)); done",
    "N=1; for (( i = 10 ; i > 3 ; i -= 2 )); do ((N++)); done",
    "for ((i=0, j=5; i<j; i++, j--)); do N=$i; done",
    "for ((N=0; N<7; ++N)); do :; done",
    "for ((N=0; ; N++)); do [ $N -ge 5 ] && break; done",
    "N=0; for s in $(seq 1 4); do N=$((N+1)); done",
    "for s in $(seq 4); do N+=$s; done",
    "for s in $(seq 2 3 12) `seq 2`; do N+=$s; done",
    "K=3; for s in $(seq 1 $K); do N+=$s; done",
    'for s in "$(seq 3)"; do N=${#s}; done',
    "N=0; while true; do N=$((N+1)); [ $N -ge 4 ] && break; done",
    "N=0; while :; do N=$((N+1)); if [ $N -ge 4 ]; then break; fi; done",
    "N=0; until false; do let N+=2; [[ $N -gt 5 ]] && break; done",
    "i=0; while [ $i -lt 100 ]; do i=$((i+1)); done; N=$i",
    "N=0; while [ $N -lt 5 ] && [ $N -lt 3 ]; do N=$((N+1)); done",
    "N=0; while [ $N -lt 9 ] && true; do N=$((N+1)); ((N==2)) && continue; [ $N = 6 ] && break; done",
    "N=0; while ! [ $N -ge 3 ]; do N=$((N+1)); done",
    "N=0; while [ $N -lt 5 ]; do i=0; while [ $i -lt 2 ]; do i=$((i+1)); done; N=$((N+i)); done",
    "f() { local i=0; while true; do i=$((i+1)); [ $i = 3 ] && return; N=$i; done; }; f",
    "N=0; for x in a b c d; do N=$((N+1)); [ $N -ge 2 ] && break; done",
    "for x in a b c; do N=$x; done",
    "for ((i=0; i<2; i++)); do A[$i]=$((i+2)); done; N=${A[0]}${A[1]}",
    "while false; do N=1; done; N=${N:-0}",
]


@pytest.mark.skipif(BASH is None, reason="there is no bash to compare with")
@pytest.mark.parametrize("text", EXACT)
def test_a_loop_whose_rounds_are_known_is_followed_to_its_end(text: str):
    done = subprocess.run([BASH, "-c", f'{text}; echo "$N"'], capture_output=True, timeout=20, text=True)
    assert values(text) == [done.stdout.strip()]


@pytest.mark.parametrize(
    "text",
    [
        "N=0; while read -r l; do N=$((N+1)); done <<< x",
        "N=0; cat hosts | while read -r l; do M=1; done; while some_cmd; do N=1; done",
        "N=0; for h in $(cat hosts); do N=$((N+1)); done",
        "N=0; for h in *.json; do N=$((N+1)); done",
        "N=0; for h in $HOSTS; do N=$h; done",
        "N=0; for ((i=0; i<$#; i++)); do N=$((N+1)); done",
        "N=0; for ((i=0; i<K; i++)); do ((N++)); done",
        "N=0; for ((i=0; i<1000000; i++)); do N=$i; done",
        "N=0; while true; do N=$((N+1)); some_cmd && break; done",
        "N=0; while true; do N=$((N+1)); [ -f x ] && break; sleep 1; done",
        "N=0; while true; do N=$((N+1)); done",
        "N=0; until ping -c1 host; do N=1; sleep 1; done",
        "M=0; N=0; while some_cmd; do M=$N; N=$M; N+=x; done",
        "N=4; while some_cmd; do unset N; done",
        "N=4; while some_cmd; do while some_other; do N=5; done; done",
    ],
)
def test_what_a_loop_changes_whose_rounds_are_not_known_is_unknown(text: str):
    for launch in read(f"true\n{text}\n{TRAIN} --n $N"):
        word = launch.arguments[5]
        assert (word.text, word.unknown) == (None, WHY.format(2))


def test_what_it_does_not_change_stays_known():
    assert values("N=4; while some_cmd; do M=$((M+1)); N=4; sleep 1; done") == ["4"]
    assert values("while true; do sleep 1; [ -f x ] && break; done; N=4") == ["4"]


def test_a_cut_has_a_note():
    (launch,) = read(f"i=0\nwhile [ $i -lt 5000 ]; do i=$((i+1)); done\n{TRAIN}")
    assert launch.notes == ("line 2: not all rounds of the loop are read; what further ones change is unknown",)
    assert "line 1: not all rounds" in read(f"for i in {{1..900}}; do N=$i; done\n{TRAIN} --n $N")[0].notes[0]
    assert values("for i in {1..900}; do N=$i; done") == [None]


def test_flags_before_those_that_a_loop_adds_stay_known():
    for text in ('A=(--bf16)\nwhile read -r l; do A+=("$l"); done', 'A="--a 1"\nfor x in $XS; do A="$A --x $x"; done'):
        (launch,) = read(f"{text}\n{TRAIN} ${{A[@]}}")
        assert [word.text for word in launch.arguments[4:]] in (["--bf16"], ["--a", "1"])
        assert "A changes in the loop of line 2, whose rounds are not known" in launch.notes[0]


def test_an_element_that_a_loop_may_have_set_is_unknown_and_not_empty():
    text = f"for ((i=0; i<K; i++)); do A[$i]=$((i+2)); done\n{TRAIN} --n ${{A[0]}} --m ${{A[1]}}"
    assert [word.text for word in read(text)[0].arguments[4:]] == ["--n", None, "--m", None]
    assert [word.text for word in read(f"A[$X]=1\n{TRAIN} --n ${{A[0]}}")[0].arguments[4:]] == ["--n", None]


class TestLaunches:
    def test_each_counted_round_has_its_own(self):
        launches = read(f"for ((tp=1; tp<=4; tp*=2)); do\n{TRAIN} --tp $tp\ndone")
        assert [launch.arguments[5].text for launch in launches] == ["1", "2", "4"]
        assert [launch.when for launch in launches] == [(f"line 1: round {n}",) for n in (1, 2, 3)]

    def test_one_that_is_started_again_and_again_is_one(self):
        (launch,) = read(f"while true; do\n{TRAIN}\nsleep 10\ndone")
        assert (launch.taken, launch.when, launch.notes) == (True, (), ())

    def test_in_rounds_that_are_not_known_it_is_read_once(self):
        (launch,) = read(f"TP=1\nwhile some_cmd; do\n{TRAIN} --tp $TP\nTP=$((TP*2))\ndone")
        assert launch.arguments[5].unknown == "$TP changes in the loop of line 2, whose rounds are not known"

    def test_what_the_user_gives_counts_behind_the_loop(self):
        (launch,) = read_script(f"while read -r N; do :; done\n{TRAIN} --n $N", "job.sh", {"N": "3"})
        assert launch.arguments[5].text == "3"
