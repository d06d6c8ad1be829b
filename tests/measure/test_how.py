"""What ``measure --how`` prints can be copied as it stands: bash reads it, Python compiles it."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from overlapkit.measure.how import FRAMEWORKS, SOURCES, Part, instructions, page

EVERY = [(framework, source) for framework in FRAMEWORKS for source in SOURCES]
PARTS = [part for pair in EVERY for part in instructions(*pair)]
BASH = shutil.which("bash") or "bash"


def of_kind(framework: str, source: str, kind: str) -> str:
    return "".join(part.text for part in instructions(framework, source) if part.kind == kind)


@pytest.mark.parametrize("text", sorted({part.text for part in PARTS if part.kind == "shell"}))
def test_bash_reads_it(text: str) -> None:
    done = subprocess.run([BASH, "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("text", sorted({part.text for part in PARTS if part.kind == "python"}))
def test_python_compiles_it(text: str) -> None:
    assert ast.parse(text).body


@pytest.mark.parametrize(("framework", "source"), EVERY)
def test_every_job_has_something_to_copy_and_ends_in_measure(framework: str, source: str) -> None:
    parts = instructions(framework, source)
    assert {part.kind for part in parts} <= {"words", "shell", "python"}
    assert any(part.kind != "words" for part in parts)
    assert all(part.text.isascii() and part.text.strip() for part in parts)
    assert any("overlapkit measure" in part.text or "the job's folder" in part.text for part in parts)


@pytest.mark.parametrize("framework", ["megatron-lm", "bridge"])
def test_the_log_has_the_lines_that_tell_communicators_apart(framework: str, tmp_path: Path) -> None:
    """bash, not this test, says what the variables come to."""
    text = of_kind(framework, "nccl-log", "shell").replace("torchrun", "env; :").replace("overlapkit", ":")
    done = subprocess.run([BASH, "-ec", text], capture_output=True, text=True, check=True, cwd=tmp_path)
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines() if line.startswith("NCCL_"))
    assert variables == {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,COLL",
        "NCCL_DEBUG_FILE": f"{tmp_path}/measured/nccl.%h.%p.log",
    }


def test_a_page_is_for_one_job_or_for_all() -> None:
    assert page("bridge", "nsys").count("## ") == 1
    assert page("bridge").count("## ") == len(SOURCES)
    assert page(None, "nsys").count("## ") == len(FRAMEWORKS)
    assert page().count("## ") == len(EVERY)
    assert page("bridge", "nsys") in page()


def test_words_are_comments_among_what_is_copied() -> None:
    words = [part for part in PARTS if part.kind == "words"]
    assert Part(kind="words", text=words[0].text) in words
    for line in page().splitlines():
        assert not any(line == text for part in words for text in part.text.splitlines())


def test_traces_have_shapes_and_exports_are_sqlite() -> None:
    for framework in FRAMEWORKS:
        assert "record_shapes=True" in of_kind(framework, "torch-trace", "python")
        assert "nsys export --type sqlite" in of_kind(framework, "nsys", "shell")
    assert "--pytorch-profiler-collect-shapes" in of_kind("megatron-lm", "torch-trace", "words")
    assert "profiling.pytorch_profiler_collect_shapes=true" in of_kind("bridge", "torch-trace", "shell")
