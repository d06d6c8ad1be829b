"""What the README shows of presets is what the commands print."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overlapkit.cli import app
from overlapkit.presets import load_preset, preset_names

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"<!-- output: (.+?) -->\n```text\n(.*?)```", flags=re.DOTALL)


def printed(command: str) -> str:
    """What a command prints; of the script the summary, which is what is quoted."""
    program, *arguments = shlex.split(command)
    if program == "overlapkit":
        return CliRunner().invoke(app, arguments).stdout
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    return done.stdout.partition("\nSummary\n")[2]


def test_readme_shows_outputs() -> None:
    assert [command.split()[-1] for command, _ in BLOCK.findall(README)] == [
        "tests/presets/refused.yaml",
        "scripts/validate_presets.py",
    ]


@pytest.mark.parametrize(("command", "shown"), BLOCK.findall(README), ids=lambda text: text.partition("\n")[0])
def test_shown_output_is_what_the_command_prints(
    command: str, shown: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(ROOT)
    text = printed(command)
    if request.config.getoption("--update-golden"):
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        before = f"<!-- output: {command} -->\n```text\n"
        updated = readme.replace(f"{before}{shown}", f"{before}{text}")
        (ROOT / "README.md").write_text(updated, encoding="utf-8", newline="\n")
        return
    assert shown == text


def test_numbers_of_presets() -> None:
    kinds = Counter(load_preset(name).derived for name in preset_names())
    assert f"{kinds[False]} presets\nare NVIDIA's" in README and f" {kinds[True]} are derived" in README


def test_example_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of presets commands, line by line; what they write goes elsewhere."""
    monkeypatch.chdir(ROOT)
    start = README.index("```bash\noverlapkit presets")
    lines = README[start:].split("```")[1].splitlines()[1:]
    assert [line.split()[2] for line in lines] == ["list", "show", "check", "diff", "derive"]
    for line in lines:
        command, _, target = line.partition(" > ")
        words = [str(tmp_path / word) if word == "userbuffers.yaml" else word for word in shlex.split(command)[1:]]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        if target:
            (tmp_path / target).write_text(result.stdout, encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "userbuffers.yaml"]
