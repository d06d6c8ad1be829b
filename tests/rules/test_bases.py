"""The cases' starting points say nothing by themselves."""

from __future__ import annotations

import pytest
from test_cases import BASES

from overlapkit import resolve


@pytest.mark.parametrize("name", BASES)
def test_base_is_quiet(name: str) -> None:
    assert [d for d in resolve(BASES[name]).decisions if d.severity != "info"] == []
