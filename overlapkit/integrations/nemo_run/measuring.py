"""What a job is given so that it leaves something to measure, in its own folder beside the plan."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import nemo_run as run

from overlapkit.errors import RecipeError, printable, shown
from overlapkit.integrations.nemo_run.executors import shell_words
from overlapkit.integrations.nemo_run.job_folder import folder_in_job

_MODULE = "overlapkit.record"
# Of ours on a script: what it was before it was recorded.
_ON_SCRIPT = "_overlapkit_recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """``variables`` for the job; ``recorder`` are the words before the script's own; ``note`` says it in the report."""

    variables: Mapping[str, str] = field(default_factory=dict)
    recorder: tuple[str, ...] = ()
    note: str | None = None


def measuring(kind: str | None, task: Any, executor: Any, given: Mapping[str, str]) -> Measuring:
    """What ``OverlapPlugin.measure`` asks for; ``given`` are the variables of the user and of the recipe.

    Raises:
        RecipeError: an unknown kind, a job without a folder, a task that cannot be recorded, or a variable that is
            set to something else.
    """
    if kind is None:
        return Measuring()
    if kind not in _KINDS:
        hint = f"use one of {', '.join(_KINDS)}, or None; the others are told by: overlapkit measure --how"
        raise RecipeError(f"measure is {shown(kind)}", source="OverlapPlugin", hint=hint)
    if not executor.job_dir:
        raise RecipeError("what is measured has no job folder to lie in", hint="add the task to a run.Experiment")
    found = _KINDS[kind](task, executor)
    for name, value in found.variables.items():
        if given.get(name, value) != value:
            problem = f"measure={kind} needs {value}, and it is {printable(given[name])}"
            raise RecipeError(problem, source="OverlapPlugin", path=name, hint="take one of the two out")
    return found


def _nccl_log(_: Any, executor: Any) -> Measuring:
    folder = folder_in_job(executor)
    # INIT too: without it a communicator cannot be told from another.
    variables = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,COLL",
        "NCCL_DEBUG_FILE": f"{folder}/nccl.%h.%p.log",
    }
    return Measuring(variables=variables, note=_note(executor, "nccl.*.log"))


def _recorder(task: Any, executor: Any) -> Measuring:
    if not isinstance(task, run.Script) or task.inline or "python" not in task.entrypoint:
        problem = "only a run.Script of a Python file or module can be recorded"
        raise RecipeError(problem, source="OverlapPlugin", hint="use measure=nccl-log")
    folder = f"{folder_in_job(executor)}/recorded"
    return Measuring(recorder=tuple(shell_words(executor, ("-o", folder, "--"))), note=_note(executor, "recorded"))


def _note(executor: Any, files: str) -> str:
    folder = folder_in_job(executor)
    if isinstance(executor, run.LocalExecutor):
        return f"measured: overlapkit measure {shlex.quote(folder)}/{files}"
    return f"measured: the job writes {folder}/{files}; then, in the job's folder: overlapkit measure {files}"


_KINDS: dict[str, Callable[[Any, Any], Measuring]] = {"nccl-log": _nccl_log, "recorder": _recorder}


def set_recorder(script: Any, words: tuple[str, ...]) -> None:
    """Lets the recorder start the script, with these words; in place of those that this script was given before.

    Without words the script is as the user wrote it.
    """
    before = script.__dict__.pop(_ON_SCRIPT, None)
    if before is not None:
        script.path, script.m, prefix = before
        if script.args[: len(prefix)] == prefix:
            script.args = script.args[len(prefix) :]
    if not words:
        return
    prefix = [*words, *(["-m"] if script.m else []), script.path]
    script.__dict__[_ON_SCRIPT] = script.path, script.m, prefix
    script.path, script.m, script.args = _MODULE, True, [*prefix, *script.args]
