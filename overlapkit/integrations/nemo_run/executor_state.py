"""What the plugin has put on an executor and a script, so that it can be told from what the user set there."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from overlapkit.errors import RecipeError
from overlapkit.integrations.nemo_run.environment import Environment, owners, without
from overlapkit.integrations.nemo_run.job_folder import JobFolder

# Attributes of ours on NeMo-Run's objects: its own copies and serialised forms hold the dataclass's fields alone.
_ON_EXECUTOR = "_overlapkit"
_ON_SCRIPT = "_overlapkit_args"


@dataclass(slots=True)
class ExecutorState:
    """``variables``, ``container_env`` and ``setup_lines`` are those that a plugin added; ``tasks`` are on it."""

    folder: JobFolder
    plugin: Any = None
    tasks: list[Any] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    container_env: frozenset[str] = frozenset()
    setup_lines: str = ""

    def index(self, task: Any) -> int:
        """The task's number among those that share the executor."""
        return next((number for number, other in enumerate(self.tasks) if other is task), len(self.tasks))

    def check(self, plugin: Any, task: Any, executor: Any, environment: Environment) -> None:
        """What a task may not have on an executor that others are on: outside an experiment it replaces them.

        Raises:
            RecipeError: another plugin has set this task up, or the tasks of a group would differ in variables that
                they share.
        """
        if not executor.experiment_id or not self.tasks:
            return
        if any(other is task for other in self.tasks):
            if plugin is not self.plugin:
                raise RecipeError("the task has two of them, and one plan", source="OverlapPlugin")
            return
        added = environment.added
        names = sorted(name for name in {*added, *self.variables} if added.get(name) != self.variables.get(name))
        if names:
            problem = f"{', '.join(names)} would differ between tasks of a group, which share one environment"
            hint = "add the tasks one by one"
            raise RecipeError(problem, source="OverlapPlugin", hint=hint)

    def set_environment(self, executor: Any, environment: Environment) -> None:
        """Sets the variables on the executor, in place of those that were set for an earlier task.

        They are named to containers too: pyxis prefers the image's value of a variable that is not.
        """
        added, names = environment.added, list(environment.variables)
        named: set[str] = set()
        for owner in owners(executor):
            own = without(owner.env_vars, self.variables)
            owner.env_vars = {**added, **own}
            if hasattr(owner, "container_env"):
                own_names = [name for name in owner.container_env or [] if name not in self.container_env]
                new = [name for name in names if name not in own_names]
                owner.container_env = [*own_names, *new] or None
                named |= set(new)
        self.variables, self.container_env = added, frozenset(named)

    def set_setup_lines(self, executor: Any, lines: str) -> None:
        """Appends to the lines that a Slurm job runs first, once."""
        own = (executor.setup_lines or "").removesuffix(self.setup_lines)
        executor.setup_lines, self.setup_lines = own + lines, lines

    def add(self, plugin: Any, task: Any, executor: Any) -> None:
        """Remembers the task, and the state on the executor; outside an experiment that is one task's at a time."""
        executor.__dict__[_ON_EXECUTOR] = self
        self.folder.follow()
        if not executor.experiment_id:
            self.tasks = []
        if self.index(task) == len(self.tasks):
            self.tasks.append(task)
        self.plugin = plugin


def state_of(executor: Any) -> ExecutorState:
    """The state of an executor, which ``add`` puts there; a copy of an executor has one of its own."""
    state: ExecutorState | None = executor.__dict__.get(_ON_EXECUTOR)
    if state is None or state.folder.executor is not executor:
        return ExecutorState(JobFolder(executor))
    return state


def set_arguments(script: Any, words: list[str], *, without_a_shell: bool) -> None:
    """Appends the arguments, in place of those that were appended to this script or to what it is a copy of.

    Those for a program that starts ``without_a_shell`` have no quotes: they get some where a shell reads them after
    all, in an experiment that is run with ``direct=True``.
    """
    before = script.__dict__.get(_ON_SCRIPT, [])
    kept = script.args
    if before and script.args[-len(before) :] == before:
        kept = script.args[: -len(before)]
    script.args = [*kept, *words]
    script.__dict__[_ON_SCRIPT] = words
    script.__dict__.pop("to_command", None)
    if without_a_shell:
        script.to_command = partial(_command, script)


def _command(script: Any, **options: Any) -> list[str]:
    """NeMo-Run names a file for the command of a job, and none where it hands the command to a shell of its own."""
    command: list[str] = type(script).to_command(script, **options)
    if options.get("filename"):
        return command
    ours = script.__dict__[_ON_SCRIPT]
    return [shlex.quote(word) if word in ours else word for word in command]
