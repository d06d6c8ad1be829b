"""Options of the tests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hypothesis import settings

if TYPE_CHECKING:
    import pytest


# The same examples every time, so that a run means the same everywhere; OVERLAPKIT_EXPLORE draws new ones.
settings.register_profile("same", derandomize=True, database=None, deadline=None)
# The same again, fewer: what many examples say on one Python, these say on another.
settings.register_profile("few", settings.get_profile("same"), max_examples=15)
if not os.environ.get("OVERLAPKIT_EXPLORE"):
    settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden again from recipes/")
    parser.addoption("--integrations", action="store_true", help="a test of tests/integrations that skips is a failure")
