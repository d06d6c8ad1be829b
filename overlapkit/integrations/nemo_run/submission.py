"""The layouts that a search found, measured: one NeMo-Run experiment with a task for each recipe.

The user's own Python file says where and what: ``executor()`` returns a new executor for one layout, and
``task(recipe)`` what trains the recipe of that path, a ``run.Script`` or ``run.Partial`` of a few steps. ::

    import nemo_run as run

    def executor():
        return run.SlurmExecutor(account="me", partition="batch", nodes=2, ntasks_per_node=8, launcher="torchrun", ...)

    def task(recipe):
        return run.Script(path="/shared/pretrain.py", args=["train.train_iters=5"], entrypoint="python")

The plugin appends the layout and its settings to a script's arguments, and makes the job leave NCCL's logs.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import nemo_run as run

from overlapkit.errors import OverlapkitError, RecipeError, printable, shown
from overlapkit.integrations.nemo_run.plugin import OverlapPlugin

# They run on this machine's GPUs, for which layouts at the same time would compete; others queue their jobs.
_HERE = (run.LocalExecutor, run.DockerExecutor)
_MODULE = "overlapkit_executor_file"  # its name in sys.modules, where dataclasses in it look for it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """A task of the experiment and the recipe that it measures; ``logs`` is a pattern for a shell."""

    task: str
    recipe: Path
    logs: str


def submit(recipe_files: Sequence[Path], executor_file: Path, *, name: str) -> str:
    """Launches an experiment that measures every recipe, and returns its id.

    On an executor of this machine the layouts run one after the other, and this returns when the last has ended;
    elsewhere they are queued. What NeMo-Run says, where each layout's logs will be, and the command that compares them
    with its recipe, go to stderr. ``name`` is the experiment's title.

    Raises:
        RecipeError: the file cannot be used, a recipe does not fit the executor, or a layout did not run to its end.
            Nothing was launched but in the last case.
        PlanError: a recipe's plan has errors.
    """
    if not recipe_files:
        raise RecipeError("there is no recipe to measure", source=str(executor_file))
    own = _load(executor_file)
    with contextlib.redirect_stdout(sys.stderr):
        with run.Experiment(name, enable_goodbye_message=False) as experiment:
            layouts = [_add(experiment, own, recipe.resolve(), executor_file) for recipe in recipe_files]
            print(f"Layouts to measure: {len(layouts)}; what they write goes to {experiment._exp_dir}", flush=True)
            _launch(experiment)
        _tell(layouts)
    _check_ended(experiment)
    return str(experiment._id)


# --- the user's file -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnFile:
    executor: Callable[[], Any]
    task: Callable[[str], Any]


def _load(path: Path) -> _OwnFile:
    """The functions of the user's file, which is executed for them.

    Raises:
        RecipeError: it cannot be read or executed, or lacks one of them.
    """
    if not path.is_file():
        raise RecipeError("there is no such file", source=str(path), hint="name a Python file that has executor()")
    spec = spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise RecipeError("it is no Python file", source=str(path), hint="its name ends in .py")
    module = module_from_spec(spec)
    sys.modules[_MODULE] = module
    with _blaming(path):
        spec.loader.exec_module(module)
    return _OwnFile(executor=_function(module, "executor()", path), task=_function(module, "task(recipe)", path))


def _function(module: ModuleType, signature: str, path: Path) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(module, signature.partition("(")[0], None)
    if found is None or not callable(found):
        problem = f"it defines no function {signature}"
        hint = "executor() returns a NeMo-Run executor, task(recipe) what trains the recipe of that path"
        raise RecipeError(problem, source=str(path), hint=hint)
    return found


@contextlib.contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """What the user's code raises, in one line with the line of the file that it came from.

    Raises:
        RecipeError: it raised something.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError) and error.filename == str(path):
            line = error.lineno
        else:
            frames = traceback.extract_tb(error.__traceback__)
            line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), None)
        said = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}".removesuffix(": ")
        raise RecipeError(printable(said, limit=400), source=str(path), line=line) from None


# --- the experiment ------------------------------------------------------------------------------


def _add(experiment: Any, own: _OwnFile, recipe: Path, executor_file: Path) -> _Layout:
    """Adds a layout's task with the plugin.

    Raises:
        OverlapkitError: the file's functions return something else, or the plugin refuses the task.
    """
    with _blaming(executor_file):
        executor, task = own.executor(), own.task(str(recipe))
    if not isinstance(executor, run.Executor):
        raise RecipeError(f"executor() returned {shown(executor)}, no executor of NeMo-Run", source=str(executor_file))
    if not isinstance(task, (run.Script, run.Partial)):
        problem = f"task(recipe) returned {shown(task)}, no run.Script or run.Partial"
        raise RecipeError(problem, source=str(executor_file))
    names = {job.id for job in experiment.jobs}
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", recipe.stem)[:100]
    unique = stem if stem not in names else f"{stem}_{len(names) + 1}"
    plugin = OverlapPlugin(recipe=str(recipe), measure="nccl-log")
    experiment.add(task, executor=executor, name=unique, plugins=[plugin])
    return _Layout(task=unique, recipe=recipe, logs=_logs(experiment.jobs[-1].executor))


def _logs(executor: Any) -> str:
    """NCCL's logs in the job's folder, on the machine that has it."""
    folder = Path(executor.job_dir)
    if isinstance(executor, run.SlurmExecutor):
        folder = Path(executor.tunnel.job_dir) / folder.name
    return f"{shlex.quote(str(folder))}/nccl.*.log"


def _tell(layouts: Sequence[_Layout]) -> None:
    print("\nOnce a layout has run, this compares what it moved with what was predicted:")
    for layout in layouts:
        print(f"  overlapkit compare {shlex.quote(str(layout.recipe))} {layout.logs}")
    sys.stdout.flush()


def _launch(experiment: Any) -> None:
    """Starts the tasks.

    Raises:
        RecipeError: NeMo-Run or what it submits to refused them.
    """
    here = any(isinstance(job.executor, _HERE) for job in experiment.jobs)
    try:
        experiment.run(sequential=here, detach=not here, tail_logs=False)
    except OverlapkitError:
        raise
    except Exception as error:
        said = printable(" ".join(f"{type(error).__name__}: {error}".split()), limit=400)
        raise RecipeError(f"the experiment could not be launched: {said}", source="NeMo-Run") from None


def _check_ended(experiment: Any) -> None:
    """Raises where a layout that ran on this machine failed.

    Raises:
        RecipeError: one failed; its logs are not worth reading.
    """
    ended = {job.id: job.state.name for job in experiment.jobs if isinstance(job.executor, _HERE)}
    failed = [f"{task} ({state})" for task, state in ended.items() if state != "SUCCEEDED"]
    if failed:
        problem = f"{len(failed)} of {len(experiment.jobs)} layouts did not run to the end: {', '.join(failed)}"
        raise RecipeError(problem, source="NeMo-Run", hint=f"their output is in {experiment._exp_dir}")
