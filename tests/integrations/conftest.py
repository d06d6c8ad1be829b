"""Tests against the real megatron-core, nemo-run and Slurm.

They run in the environment that scripts/test.sh makes for them; in one without these packages they are not collected,
unless ``--integrations`` says that here they must run.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGES = ("torch", "megatron.core", "nemo_run")


def _missing() -> list[str]:
    def found(name: str) -> bool:
        try:
            return find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return [name for name in PACKAGES if not found(name)]


# They warn when they are imported and used, which is theirs to mend; elsewhere in the tests a warning is an error.
if not _missing():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*PACKAGES, "megatron.core.distributed", "megatron.core.optimizer"):
            import_module(name)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    inside = collection_path.name.startswith("test_") and collection_path.is_relative_to(HERE)
    if inside and not config.getoption("--integrations") and _missing():
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.integrations)
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """With --integrations a component that is missing is a failure."""
    report = yield
    if report.skipped and item.path.is_relative_to(HERE) and item.config.getoption("--integrations"):
        report.outcome = "failed"
    return report
