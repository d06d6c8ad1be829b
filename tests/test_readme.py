"""The README's plan is the plan."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from overlapkit import resolve
from overlapkit.render.text import print_plan

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLANS = re.findall(r"<!-- plan: (\S+) -->\n```text\n(.*?)```", README, flags=re.DOTALL)


def test_readme_shows_plans() -> None:
    assert [path for path, _ in PLANS] == [
        "recipes/llama2_7b_32xh20.yaml",
        "tests/wrong_recipes/llama3_70b_megatron_lm.yaml",
    ]


@pytest.mark.parametrize(("path", "shown"), PLANS)
def test_shown_plan_is_what_the_command_prints(
    path: str, shown: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(ROOT)
    stream = io.StringIO()
    print_plan(resolve(path), stream)
    if request.config.getoption("--update-golden"):
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        (ROOT / "README.md").write_text(readme.replace(shown, stream.getvalue()), encoding="utf-8", newline="\n")
        return
    assert shown == stream.getvalue()


def test_readme_commands_and_files_exist() -> None:
    for path in re.findall(r"(?:scripts|recipes|tests|presets)/[\w./]+", README):
        assert (ROOT / path).exists(), path
