"""One task on one executor: the plan for it, and what it changes on both."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nemo_run as run
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from overlapkit.errors import PlanError, RecipeError, shown
from overlapkit.integrations.nemo_run import environment as environments
from overlapkit.integrations.nemo_run import executors, job_folder
from overlapkit.integrations.nemo_run.executor_state import ExecutorState, set_arguments, state_of
from overlapkit.integrations.nemo_run.live_config import ARGUMENTS, carried_config, check_config, set_on_config
from overlapkit.integrations.nemo_run.measuring import Measuring, measuring, set_recorder
from overlapkit.integrations.nemo_run.script_args import ScriptArgs, Written, written
from overlapkit.plan import Plan, refuse_errors
from overlapkit.recipe import Recipe
from overlapkit.resolver import read_recipe

if TYPE_CHECKING:
    from overlapkit.integrations.nemo_run.plugin import OverlapPlugin

logger = logging.getLogger("overlapkit.nemo_run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """All that is decided for a task before anything is changed. ``words`` are the script's further arguments."""

    task: Any
    executor: Any
    state: ExecutorState
    size: executors.LaunchSize
    args: ScriptArgs
    script: Written
    words: tuple[str, ...]
    measuring: Measuring


def prepare(plugin: OverlapPlugin, task: Any, executor: Any) -> Launch:
    """The launch of a task, checked; the task and the executor stay as they are.

    Raises:
        RecipeError: what the plugin, the recipe, the executor or the task says cannot be used.
        PlanError: the plan has errors, and the plugin refuses them.
    """
    if plugin.on_error not in ("refuse", "warn"):
        raise RecipeError(f"on_error is {shown(plugin.on_error)}", source="OverlapPlugin", hint="use refuse or warn")
    if not isinstance(task, (run.Script, run.Partial, run.Config)):
        raise RecipeError(f"the task is {shown(task)}", source="OverlapPlugin", hint="give a run.Script or run.Partial")
    if isinstance(task, run.Script) and not isinstance(task.args, (list, tuple)):
        raise RecipeError(f"a list of texts, not {shown(task.args)}", source="run.Script.args")
    executors.check_known(executor)
    if executor.experiment_id:
        _check_storable(plugin.recipe)
    state = state_of(executor)
    size = executors.launch_size(executor, group_index=state.index(task))
    if executor.job_dir:
        job_folder.check_writable(executor.job_dir)
    given = environments.users_variables(task, executor, state.variables, group_index=state.index(task))
    recipe, plan = _resolved(plugin, size, executor, given)
    _judge(plan, plugin.on_error)
    exported = {**((recipe.env_vars if recipe else None) or {}), **given}
    measured = measuring(plugin.measure, task, executor, exported)
    environment = environments.environment_of(plan, recipe, given, measured.variables)
    state.check(plugin, task, executor, environment)
    args = ScriptArgs(
        recipe=recipe,
        plan=plan,
        environment=environment,
        manual_gc_interval=_collection_interval(plugin),
        userbuffers_path=job_folder.path_in_job(executor, job_folder.userbuffers_name(executor, plan)),
    )
    script = _script(plugin, task, args) if isinstance(task, run.Script) else Written()
    if script.userbuffers is not None and not executor.job_dir:
        raise RecipeError("the userbuffers have no job folder to lie in", hint="add the task to a run.Experiment")
    carried = None if isinstance(task, run.Script) else carried_config(task)
    if carried is not None:
        check_config(*carried, args)
    words = tuple(executors.shell_words(executor, script.words))
    return Launch(
        task=task,
        executor=executor,
        state=state,
        size=size,
        args=args,
        script=script,
        words=words,
        measuring=measured,
    )


def apply(launch: Launch, plugin: OverlapPlugin) -> None:
    """Changes the task and the executor, and leaves the plan's files to be written when the job's folder is made."""
    task, executor, args = launch.task, launch.executor, launch.args
    said = list(environments.differences(args.plan, args.environment))
    for sentence in said:
        logger.warning(sentence)
    # The task first: the objects that a task carries may refuse.
    said += _set_on_script(launch) if isinstance(task, run.Script) else _set_on_partial(launch)
    said += [launch.measuring.note] if launch.measuring.note else []
    launch.state.set_environment(executor, args.environment)
    if plugin.enable_vboost and isinstance(executor, run.SlurmExecutor):
        launch.state.set_setup_lines(executor, executors.vboost_lines(executor))
    launch.state.add(plugin, task, executor)
    if executor.job_dir:
        folder = launch.state.folder
        index = launch.state.index(task)
        name = job_folder.task_name(executor) + (f"_{index + 1}" if index else "")
        folder.reports.update(job_folder.reports(name, executor, launch.size, args, said))
        if launch.script.userbuffers is not None:
            folder.packed[job_folder.userbuffers_name(executor, args.plan)] = launch.script.userbuffers
        if not executor.experiment_dir or Path(executor.experiment_dir).exists():  # nobody will make it
            folder.write()


# --- the plan ------------------------------------------------------------------------------------


def _resolved(
    plugin: OverlapPlugin, size: executors.LaunchSize, executor: Any, given: Mapping[str, str]
) -> tuple[Recipe | None, Plan]:
    if (plugin.recipe is None) == (plugin.plan is None):
        both = "neither" if plugin.recipe is None else "both"
        raise RecipeError(f"it takes a recipe or a plan, and has {both}", source="OverlapPlugin")
    if plugin.plan is not None:
        return None, _plan_given(plugin, size)
    recipe = executors.with_size(_loaded(plugin.recipe, plugin.overrides or ()), size)
    executors.check_exports(executor, recipe)
    return recipe, environments.plan_for(recipe, given)


def _plan_given(plugin: OverlapPlugin, size: executors.LaunchSize) -> Plan:
    plan = plugin.plan
    if not isinstance(plan, Plan):
        raise RecipeError(f"plan is {shown(plan)}", source="OverlapPlugin", hint="give a plan that resolve returned")
    if plugin.overrides:
        raise RecipeError("overrides are for a recipe, not for a plan", source="OverlapPlugin")
    if plan.parallelism.world_size != size.devices:
        problem = f"a plan for {plan.parallelism.world_size} devices, but the executor has {size}"
        raise RecipeError(problem, source=plan.recipe)
    return plan


def _loaded(recipe: Any, overrides: Any) -> Recipe:
    if isinstance(recipe, Recipe) and overrides:
        raise RecipeError("give the overrides to load_recipe: this recipe is loaded", source="OverlapPlugin")
    return read_recipe(recipe, overrides)


def _judge(plan: Plan, on_error: str) -> None:
    try:
        refuse_errors(plan)
    except PlanError as error:
        if on_error == "refuse":
            raise
        logger.warning(str(error))


def _check_storable(recipe: Any) -> None:
    """NeMo-Run stores an experiment with its plugins, after it has made the folders."""
    if not isinstance(recipe, Mapping):
        return
    try:
        ZlibJSONSerializer().serialize(recipe)
    except Exception:  # whatever its serialisation raises
        problem = f"NeMo-Run cannot store the recipe, a {type(recipe).__name__}, with the experiment"
        hint = "give its path, or a dict of plain values"
        raise RecipeError(problem, source="OverlapPlugin", hint=hint) from None


def _collection_interval(plugin: OverlapPlugin) -> int | None:
    interval = plugin.manual_gc_interval
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        hint = "give steps between collections, 1 or more"
        raise RecipeError(f"manual_gc_interval is {shown(interval)}", source="OverlapPlugin", hint=hint)
    return interval if plugin.manual_gc else None


# --- the task ------------------------------------------------------------------------------------


def _script(plugin: OverlapPlugin, script: Any, args: ScriptArgs) -> Written:
    found = written(plugin.script_args, args, plugin.script_args_converter_fn)
    if found.words and script.inline:  # of an inline script NeMo-Run drops them
        sentence = "an inline script takes no arguments: the plan's are not appended"
        return Written(cannot_express=(sentence,))
    return found


def _set_on_script(launch: Launch) -> list[str]:
    set_recorder(launch.task, launch.measuring.recorder)
    set_arguments(launch.task, list(launch.words), without_a_shell=executors.without_a_shell(launch.executor))
    if launch.words:
        logger.info("appended to the script: %s", " ".join(launch.words))
    for sentence in launch.script.cannot_express:
        logger.info("not expressed: %s", sentence)
    return [f"not expressed: {sentence}" for sentence in launch.script.cannot_express]


def _set_on_partial(launch: Launch) -> list[str]:
    carried = carried_config(launch.task)
    if carried is None:
        sentence = (
            f"no argument {', '.join(ARGUMENTS)} of the task is a configuration with sections model and ddp, optimizer "
            "or comm_overlap: only the environment is set"
        )
        logger.warning(sentence)
        return [sentence]
    name, config = carried
    said = [f"set on the task's {name}: {done}" for done in set_on_config(config, launch.args)]
    for sentence in said:
        logger.info(sentence)
    return said
