"""The plugin's module where NeMo-Run is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from overlapkit.errors import MissingPackageError

_WITHOUT = "import sys; sys.modules['nemo_run'] = None; import overlapkit.integrations.nemo_run"


def test_importing_it_names_the_extra_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nemo_run", None)
    for name in [name for name in sys.modules if name.startswith("overlapkit.integrations.nemo_run")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError) as caught:
        __import__("overlapkit.integrations.nemo_run")
    assert isinstance(caught.value, MissingPackageError)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("nemo-run cannot be imported here (")
    assert text.endswith("): pip install 'overlapkit[nemo-run]'")


def test_a_program_that_imports_it_ends_with_that_line() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("overlapkit.errors.MissingPackageError: nemo-run cannot be imported here")


def test_the_package_itself_does_not_import_it() -> None:
    program = "import overlapkit.integrations, overlapkit.cli, sys; print('nemo_run' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
