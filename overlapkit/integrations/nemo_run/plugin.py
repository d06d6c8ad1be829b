"""OverlapPlugin and its factory."""

# No `from __future__ import annotations`: NeMo-Run's command line reads the types of fields as they stand, and it
# knows Optional[X] but not X | None.

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

import nemo_run as run

from overlapkit.integrations.nemo_run.launch import apply, prepare
from overlapkit.integrations.nemo_run.script_args import ScriptArgs


@dataclass(kw_only=True)
class OverlapPlugin(run.Plugin):  # type: ignore[misc]
    """Resolves a recipe for the executor of a task, and puts the plan on both.

    Attributes:
        recipe: the path of a recipe, a mapping of the same form, or a loaded ``Recipe``. The executor's nodes and
            devices are its cluster.
        plan: a ``Plan`` instead, which must be for as many devices.
        overrides: ``section.key=value`` texts for the recipe.
        on_error: a plan with errors is refused before anything is submitted, or logged ("warn").
        script_args: what is appended to a ``run.Script``: "bridge" (Hydra overrides), "megatron-lm" (its flags), None
            (nothing), "auto" (by the recipe's framework; nothing for a plan alone).
        script_args_converter_fn: returns what to append instead, as texts that the program is to get.
        manual_gc: garbage collection by hand, as Bridge's PerfEnvPlugin had it.
        manual_gc_interval: steps between collections.
        enable_vboost: power steered to the tensor cores, on SlurmExecutor.
        measure: what the job is to leave in its folder for ``overlapkit measure``: "nccl-log" (NCCL's log of every
            call) or "recorder" (the script runs under ``overlapkit.record``, which must be installed there).
    """

    recipe: Any = None
    plan: Any = None
    overrides: list[str] = field(default_factory=list)
    on_error: Literal["refuse", "warn"] = "refuse"
    script_args: Optional[Literal["auto", "bridge", "megatron-lm"]] = "auto"  # noqa: UP045
    # Not a field: NeMo-Run stores the fields, and of functions it can store only those of a module.
    script_args_converter_fn: InitVar[Optional[Callable[[ScriptArgs], list[str]]]] = None  # noqa: UP045
    manual_gc: bool = False
    manual_gc_interval: int = 100
    enable_vboost: bool = False
    measure: Optional[Literal["nccl-log", "recorder"]] = None  # noqa: UP045

    def __post_init__(self, script_args_converter_fn: Optional[Callable[[ScriptArgs], list[str]]]) -> None:  # noqa: UP045
        self.script_args_converter_fn = script_args_converter_fn
        if isinstance(self.recipe, Path):  # which NeMo-Run does not store
            self.recipe = str(self.recipe)

    def setup(self, task: Any, executor: Any) -> None:
        """Called by NeMo-Run for each task with its executor, before anything is submitted.

        Raises:
            OverlapkitError: nothing was changed, on neither of them.
        """
        apply(prepare(self, task, executor), self)


# On NeMo-Run's command line: plugins=overlap plugins.recipe=recipe.yaml
@run.cli.factory(target=run.Plugin)  # type: ignore[untyped-decorator]
def overlap() -> run.Config[OverlapPlugin]:
    """The plugin without a recipe, which ``plugins.recipe=...`` gives it."""
    return run.Config(OverlapPlugin)
