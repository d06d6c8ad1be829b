"""Scripts are untrusted: whatever one holds, there are launches or one clear line, within bounds.

Real ones are mutated. By default the same examples run every time; ``OVERLAPKIT_EXPLORE=20000`` draws as many new ones.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapkit import RecipeError
from overlapkit.megatron_lm.script import read_script
from overlapkit.megatron_lm.words import Launch

EXPLORE = int(os.environ.get("OVERLAPKIT_EXPLORE", "0"))
SCRIPTS = [path.read_text() for path in sorted((Path(__file__).parent / "scripts").iterdir())]
LAUNCH = "\ntorchrun pretrain_gpt.py --num-layers 2 --train-iters 2 $A\n"
SIZE = 250 * 1024
FRAGMENTS = [
    *[
        "$(",
        "${",
        "`",
        '"',
        "'",
        "((",
        "))",
        "[[",
        "]]",
        "(",
        ")",
        "{",
        "}",
        "#",
        "!",
        "\\",
        "\\\n",
        "\n",
        "\u2028",
        "é",
    ],
    *["if ", "fi\n", "for i in 1 2; do ", "done\n", "case $X in ", "esac\n", "while true; do ", "<<EOF\n", "EOF\n"],
    *["&&", "||", "|", ";", ";;", "eval ", "bash -c ", "export ", "local x=1\n", "exit 1\n", "unset A\n", "shift\n"],
    *["$@", "$1", "${A[@]}", "${!A}", "${A:1:2}", ":-", "=", "+=", "A=$A$A\n", "A+=(", "{1..9}", "$((1/0))"],
    *["f() { f; }; f\n", "[ -z $X ] && ", LAUNCH],
]


def read(text: str) -> tuple[Launch, ...] | str:
    """The launches, or the error as a line."""
    try:
        launches = read_script(text, "job.sh")
    except RecipeError as error:
        return str(error)
    assert launches
    for launch in launches:
        for word in (*launch.launcher, *launch.arguments, *(launch.exports or {}).values()):
            assert (word.text is None) == (word.unknown is not None)
            assert word.line >= 1
            assert word.written.isprintable()
            assert word.unknown is None or word.unknown.isprintable()
        assert all(text.isprintable() for text in (*launch.when, *launch.notes))
    return launches


@pytest.mark.parametrize("written", ["${A[\x1b$B]}", "${A:-\x1b$(b)}", "${A/\x1b/$B}", "$(a\x1b)", "$((\x1b))"])
def test_why_a_word_is_unknown_is_printable(written: str) -> None:
    outcome = read(f"python pretrain_gpt.py --a 1 {written} --b {written}\n")
    assert isinstance(outcome, str) or any(word.unknown for word in outcome[0].arguments) or outcome[0].notes


_change = st.tuples(
    st.integers(0, 10_000), st.integers(0, 40), st.sampled_from(FRAGMENTS) | st.text(max_size=8), st.integers(1, 20)
)


@settings(max_examples=EXPLORE or 400, deadline=None, derandomize=not EXPLORE)
@given(st.sampled_from(SCRIPTS), st.lists(_change, min_size=1, max_size=8))
def test_mutated_scripts_end_in_launches_or_one_line(script: str, changes: list[tuple[int, int, str, int]]):
    for place, removed, fragment, times in changes:
        place %= len(script) + 1
        script = script[:place] + fragment * times + script[place + removed :]
    outcome = read(script)
    if isinstance(outcome, str):
        assert outcome.isprintable() and outcome.startswith("job.sh")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=xy\n" + "A=$A$A\n" * 64 + LAUNCH, "job.sh:19: $A grows beyond 256 KB"),
        ("A=$(x)\n" + "A=$A$A\n" * 64 + LAUNCH, "$A grows beyond 256 KB"),
        ("A=(x y)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 64 + LAUNCH, "$A grows beyond 256 KB"),
        (
            "for a in {1..60}; do " * 4 + "A=$A$a" + "; done" * 4 + LAUNCH,
            "too many branches, rounds and words to follow",
        ),
        ('A=\'eval "$A"\'\neval "$A"' + LAUNCH, "nested too deep to follow"),
        ('export A=\'bash -c "$A"\'\nbash -c "$A"' + LAUNCH, "nested too deep to follow"),
        (
            "".join(f"f{i}() {{ f{i + 1}; f{i + 1}; }}\n" for i in range(60)) + "f0" + LAUNCH,
            "nested too deep to follow",
        ),
        ("if a; then " * (SIZE // 11), "nested deeper than 40 levels"),
        ("${A:-" * (SIZE // 5), "nested deeper than 40 levels"),
        ("[ " + "\\( " * 9_000 + "a ] && b" + LAUNCH, "nested deeper than 40 levels"),
        ("(" * SIZE, "a ( is never closed"),
        ("$(" * (SIZE // 2), "a ( is never closed"),
        ("<<A\n" * (SIZE // 4), "no training launch is found here"),
        ("a|" * (SIZE // 2), "job.sh:1: more than 5,000 commands in a pipeline"),
        ("\n" + "a&&" * (SIZE // 3), "job.sh:2: more than 5,000 commands in a list"),
        ("eval " * 19_000 + LAUNCH[1:], "too many branches, rounds and words to follow"),
        ("A=(" + "x " * 120_000 + ")" + LAUNCH, "job.sh:1: more than 20,000 elements in an array"),
        (LAUNCH[:-1] + " --x 1" * 41_000, "job.sh:2: more than 20,000 words in a command"),
        ("a{1..900} " * 20_000 + LAUNCH, "too many branches, rounds and words to follow"),
        ("while a; do b=$b; " * 38 + "done; " * 38 + LAUNCH, "nested too deep to follow"),
        ("true\necho 'a\n", "job.sh:2: no training launch is found here: a ' is never closed"),
        ('--num-layers 2 --split "9', 'job.sh:1: a " is never closed'),
        ("a" * 300_000, "job.sh: larger than 256 KB, which no launch script needs"),
        ("é" * 150_000, "job.sh: larger than 256 KB, which no launch script needs"),
        ("true\na\0b", "job.sh:2: the character U+0000 is not allowed in a script"),
        ("a\ud800", "job.sh:1: the character U+D800 is not allowed in a script"),
        ("\U000f0001", "job.sh:1: the character U+F0001 is not allowed in a script"),
    ],
    ids=lambda value: value[:24].replace("\n", " ") if isinstance(value, str) else None,
)
def test_what_is_too_large_or_too_deep_is_one_line(text: str, message: str):
    outcome = read(text)
    assert isinstance(outcome, str) and message in outcome


@pytest.mark.parametrize(
    "text",
    [
        "f() { f; f; }; g() { f; g; }; g" + LAUNCH,
        "while true; do A=$A1; done" + LAUNCH,
        "while [ $i -gt 0 ]; do i=$((i + 1)); done" + LAUNCH,
        "i=1; while [ $i -gt 0 ]; do i=$((i + 1)); done" + LAUNCH,
        "for i in {1..900}; do B=$i; done" + LAUNCH,
        "for ((i = 0; i < 1000000; i++)); do B=$i; done" + LAUNCH,
        "for ((i = 0; i < 300; i++)); do " * 5 + "B=$((B+1)); " + "done; " * 5 + LAUNCH,
        "while true; do n=$((n+1)); a && break; " * 8 + "done; " * 8 + LAUNCH,
        "while a; do b=$((b+1)); " * 9 + "done; " * 9 + LAUNCH,
        "a && X=1 || X=2\n" * 3_000 + LAUNCH,
        "f() { a; }\n" + "f && " * 4_000 + "b" + LAUNCH,
        'x "$(seq 1000)" ' * 9_000 + LAUNCH,
        "(a && b || c) && d || e\n" * 1_000 + LAUNCH,
        LAUNCH[:-1] + " --x 1" * 9_000,
        "A=$((9**9**9**9))" + LAUNCH,
        "A=$((" + "(" * 2_000 + "1" + ")" * 2_000 + "))" + LAUNCH,
        "A=" + "a" * 100_000 + "\nB=${A%%*a*b*}\nC=${A//a/bbbbbbbbb}\nA=" + LAUNCH,
        "[[ " + "a" * 1_000 + " == " + "*a" * 500 + "b ]] && B=1" + LAUNCH,
        "".join(f"if [ $V{i} = 1 ]; then B{i}=2; fi\n" for i in range(500)) + LAUNCH,
        "#" * SIZE + LAUNCH,
    ],
    ids=lambda text: text[:24],
)
def test_what_looks_endless_is_read(text: str):
    assert isinstance(read(text), tuple)


def test_the_number_of_outcomes_is_bounded():
    branches = "".join(f"if [ $V{i} = 1 ]; then A+=' --f{i}'; fi\n" for i in range(40))
    launches = read(branches + LAUNCH)
    assert isinstance(launches, tuple) and 64 < len(launches) <= 192
    assert [launch.taken for launch in launches].count(True) == 1
    words = {word.text for launch in launches for word in launch.arguments}
    assert {f"--f{i}" for i in range(40)} <= words  # each branch is still seen from the way taken
