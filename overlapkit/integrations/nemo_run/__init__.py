"""The executor plugin for NeMo-Run: a plan's environment, arguments and settings on a task that is about to start.

    run.run(task, executor=executor, plugins=[OverlapPlugin(recipe="recipe.yaml")])

On NeMo-Run's own command line the plugin is ``plugins=overlap plugins.recipe=recipe.yaml``.
"""

from __future__ import annotations

from overlapkit.errors import MissingPackageError

try:
    import nemo_run as _nemo_run  # noqa: F401
except ImportError as _error:
    raise MissingPackageError(
        f"nemo-run cannot be imported here ({_error}): pip install 'overlapkit[nemo-run]'"
    ) from None

from overlapkit.integrations.nemo_run.plugin import OverlapPlugin, overlap
from overlapkit.integrations.nemo_run.script_args import ScriptArgs

__all__ = ["OverlapPlugin", "ScriptArgs", "overlap"]
