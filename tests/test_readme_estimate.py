"""What the README shows of estimate and search is what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overlapkit.cli import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"<!-- run: (\w+ [^\n]+?) -->\n```text\n(.*?)```", README, flags=re.DOTALL)


def test_readme_shows_an_estimate_and_a_search() -> None:
    assert [command.split()[0] for command, _ in SHOWN] == ["estimate", "search"]


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_shown_output_is_what_the_command_prints(
    command: str, shown: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output
    if request.config.getoption("--update-golden"):
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        (ROOT / "README.md").write_text(readme.replace(shown, result.stdout), encoding="utf-8", newline="\n")
        return
    assert shown == result.stdout
