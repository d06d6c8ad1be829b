"""OverlapPlugin against what Bridge's own PerfEnvPlugin did: tests/oracles/README.md says how that was recorded."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from nemo_run_launches import local, script, slurm

from overlapkit.integrations.nemo_run import OverlapPlugin

ROOT = Path(__file__).parent.parent.parent
ORACLE = ROOT / "tests" / "oracles" / "env_plugin_bridge_v0.5.1.jsonl.gz"
_SPEC = importlib.util.spec_from_file_location("parity_of_nemo_run", ROOT / "scripts" / "parity.py")
assert _SPEC is not None
assert _SPEC.loader is not None
parity = importlib.util.module_from_spec(_SPEC)
# Its dataclasses look their module up.
sys.modules[_SPEC.name] = parity
_SPEC.loader.exec_module(parity)


def cases() -> list[dict[str, Any]]:
    """The library's cases that a job can have, and that set nothing beyond what a recipe says."""
    found = []
    for case in parity.read(ORACLE):
        given = case.get("in", {})
        if case["kind"] != "lib" or set(given) != parity._PLUGIN_FIELDS:
            continue
        if given["num_gpus"] % (given["tp_size"] * given["cp_size"] * given["pp_size"]) == 0:
            found.append(case)
    return found


def test_environment_and_arguments_are_those_of_perf_env_plugin(tmp_path: Path) -> None:
    compared = cases()
    assert len(compared) > 100
    wrong = []
    for case in compared:
        gpus = case["in"]["num_gpus"]
        per_node = 8 if gpus % 8 == 0 else gpus
        size = {"nodes": gpus // per_node, "ntasks_per_node": per_node}
        for executor in (local(**size), slurm(tmp_path, **size)):
            task = script()
            # Those inputs overlap EP without experts, which that plugin does not look at.
            on_error = "warn" if case["in"]["a2a_overlap"] else "refuse"
            plugin = OverlapPlugin(
                recipe=parity.library_recipe(case["in"]), script_args=None, manual_gc=True, on_error=on_error
            )
            plugin.setup(task, executor)
            if (executor.env_vars, task.args) != (case["env"], case["args"]):
                wrong.append((case["in"], executor.env_vars, task.args))
    assert wrong == []
