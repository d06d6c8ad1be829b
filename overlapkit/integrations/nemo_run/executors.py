"""What the plugin has to know of NeMo-Run's executors: how many devices they run on, and who reads an argument."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import nemo_run as run
from nemo_run.core.execution.launcher import SlurmTemplate

from overlapkit.errors import RecipeError, printable, shown
from overlapkit.recipe.place import Place
from overlapkit.recipe.sections import Recipe

# All of nemo-run 0.11. A derived class counts as the one that it derives from.
EXECUTORS = (
    run.LocalExecutor,
    run.SlurmExecutor,
    run.DockerExecutor,
    run.SkypilotExecutor,
    run.SkypilotJobsExecutor,
    run.LeptonExecutor,
    run.DGXCloudExecutor,
    run.KubeflowExecutor,
)
# Their job scripts have lines `export NAME=value`, the value unquoted and the name in capitals, except Kubeflow's.
_UNQUOTED_EXPORTS = (run.SlurmExecutor, run.DGXCloudExecutor, run.KubeflowExecutor)
_SAFE_VALUE = re.compile(r"[A-Za-z0-9_@%+=:,./^-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What NeMo-Run's and TorchX's string templates replace, in arguments and in the values of variables.
_REPLACED = re.compile(
    r"\$(\$|\{?(head_node_ip_var|nproc_per_node_var|num_nodes_var|node_rank_var|het_group_host_var"
    r"|ft_launcher_cfg_path_var|img_root|base_img_root|app_id|replica_id|rank0_env)\b)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSize:
    """Devices of a launch: one process runs on each."""

    nodes: int
    devices_per_node: int

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def __str__(self) -> str:
        return f"{self.nodes} node{'' if self.nodes == 1 else 's'} × {self.devices_per_node} = {self.devices}"


def check_known(executor: Any) -> None:
    """Raises for an executor of which it is not known where it says its size and its environment.

    Raises:
        RecipeError: it is of such a type.
    """
    if not (isinstance(executor, EXECUTORS) or _is_kuberay(executor)):
        known = ", ".join([*(each.__name__ for each in EXECUTORS), "KubeRayExecutor"])
        problem = f"{type(executor).__name__} is no executor whose size and environment are known"
        raise RecipeError(problem, source="OverlapPlugin", hint=f"known are {known}")


def launch_size(executor: Any, *, group_index: int = 0) -> LaunchSize:
    """Nodes and devices per node of an executor; ``group_index`` is the task's place in a group with own resources.

    Raises:
        RecipeError: it has none, or workers of Ray that differ.
    """
    nodes, per_node = _nodes_and_devices(executor, group_index)
    for number, unit in ((nodes, "nodes"), (per_node, "processes per node")):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise RecipeError(f"{shown(number)} {unit}, which is no number of them", source=type(executor).__name__)
    return LaunchSize(nodes=nodes, devices_per_node=per_node)


def _nodes_and_devices(executor: Any, group_index: int) -> tuple[Any, Any]:
    if _is_kuberay(executor):
        return _ray_workers(executor)
    if not isinstance(executor, run.SlurmExecutor):
        return executor.nnodes(), executor.nproc_per_node()
    if group_index < len(executor.resource_group):
        request = executor.resource_group[group_index]
        return request.nodes, _slurm_devices(request, None, executor.launcher)
    return executor.nnodes(), _slurm_devices(executor, executor.torchrun_nproc_per_node, executor.launcher)


def _is_kuberay(executor: Any) -> bool:
    """By name: its module needs the package kubernetes, which is there when somebody made such an executor."""
    names = {f"{each.__module__}.{each.__name__}" for each in type(executor).__mro__}
    return "nemo_run.core.execution.kuberay.KubeRayExecutor" in names


def _ray_workers(executor: Any) -> tuple[Any, Any]:
    per_worker = {group.gpus_per_worker for group in executor.worker_groups}
    if len(per_worker) != 1 or None in per_worker:
        raise RecipeError("its worker groups need gpus_per_worker, the same in all", source="KubeRayExecutor")
    return sum(group.replicas for group in executor.worker_groups), per_worker.pop()


def _slurm_devices(request: Any, torchrun_nproc_per_node: int | None, launcher: Any) -> Any:
    """As SlurmExecutor.nproc_per_node, before and after it prepares its launcher, which moves the tasks to torchrun.

    It takes gpus_per_task for the number where srun starts several tasks of a GPU each: the tasks are the processes.
    """
    if torchrun_nproc_per_node:
        return torchrun_nproc_per_node
    if request.ntasks_per_node != 1 or is_torchrun(launcher):
        return request.ntasks_per_node
    return request.gpus_per_node or request.gpus_per_task or 1


def is_torchrun(launcher: Any) -> bool:
    """torchrun or the fault-tolerance launcher, as an object or by the name that an executor takes."""
    return launcher in ("torchrun", "ft") or isinstance(launcher, (run.Torchrun, run.FaultTolerance))


def with_size(recipe: Recipe, size: LaunchSize) -> Recipe:
    """The recipe for the devices that it will run on.

    Raises:
        RecipeError: the recipe says another number.
    """
    place = Place(recipe.source, recipe.lines, recipe.overridden)
    cluster = recipe.cluster
    if cluster.num_gpus not in (None, size.devices):
        raise place.error("cluster.num_gpus", f"{cluster.num_gpus}, but the executor has {size}")
    if cluster.gpus_per_node not in (None, size.devices_per_node):
        problem = f"{cluster.gpus_per_node}, but the executor has {size.devices_per_node} on a node"
        raise place.error("cluster.gpus_per_node", problem)
    return replace(recipe, cluster=replace(cluster, num_gpus=size.devices, gpus_per_node=size.devices_per_node))


def check_exports(executor: Any, recipe: Recipe) -> None:
    """A recipe is a file of somebody: what it exports must not become a command of the job's script.

    Raises:
        RecipeError: a variable that the executor's script would not hold as it is.
    """
    place = Place(recipe.source, recipe.lines, recipe.overridden)
    for name, value in (recipe.env_vars or {}).items():
        path = f"env_vars.{printable(name)}"
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise place.error(path, "no environment can hold it")
        if _REPLACED.search(value):
            raise place.error(path, "NeMo-Run would replace what begins with $")
        if not isinstance(executor, _UNQUOTED_EXPORTS):
            continue
        kind = type(executor).__name__
        if not _SAFE_VALUE.fullmatch(value):
            hint = "set it in executor.env_vars, quoted for a shell"
            raise place.error(path, f"{kind} writes the value into a shell script without quotes", hint)
        if name != name.upper() and not isinstance(executor, run.KubeflowExecutor):
            raise place.error(path, f"{kind} would export it as {printable(name.upper())}", "name it in capitals")


def shell_words(executor: Any, words: Iterable[str]) -> list[str]:
    """Arguments of a run.Script as they have to stand there so that the program gets ``words``.

    NeMo-Run quotes them for torchrun, starts a local process (and a container of Kubeflow without a volume of its
    own) with them as they are, and joins them with spaces into the shell command of every other job.

    Raises:
        RecipeError: the program would get an argument otherwise.
    """
    torchrun, shell = is_torchrun(executor.launcher), _starts_a_shell(executor)
    found = []
    for word in words:
        if _REPLACED.search(word):
            raise _cannot_pass(executor, word, "NeMo-Run would replace what begins with $")
        if torchrun and not shell and shlex.quote(word) != word:
            raise _cannot_pass(executor, word, "NeMo-Run puts quotes around it for torchrun, which gets them too")
        if _quotes_the_command(executor) and shlex.quote(word) != word:
            raise _cannot_pass(executor, word, "the launcher puts quotes of its own around the command")
        quoted = word if torchrun or not shell else shlex.quote(word)
        if isinstance(executor, run.DockerExecutor):  # which puts the whole command between double quotes
            if torchrun and "'" in word:
                raise _cannot_pass(executor, word, "NeMo-Run's quotes for torchrun would end those of the command")
            quoted = quoted.replace("\\", "\\\\").replace('"', '\\"')
        found.append(quoted)
    return found


def without_a_shell(executor: Any) -> bool:
    """Whether the job's program is started with a run.Script's arguments as they are."""
    return not is_torchrun(executor.launcher) and not _starts_a_shell(executor)


def _starts_a_shell(executor: Any) -> bool:
    return not isinstance(executor, run.LocalExecutor) and getattr(executor, "workdir_pvc", "") is not None


def _quotes_the_command(executor: Any) -> bool:
    """Slurm's: a template is somebody's text (escaped as HTML), and nsys with GPU metrics is quoted for bash -c."""
    launcher = executor.launcher
    if not isinstance(executor, run.SlurmExecutor) or launcher is None:
        return False
    if launcher == "slurm_ray" or isinstance(launcher, SlurmTemplate):
        return True
    return not isinstance(launcher, str) and launcher.nsys_profile and launcher.nsys_gpu_metrics


def _cannot_pass(executor: Any, word: str, problem: str) -> RecipeError:
    hint = "set script_args=None, or a script_args_converter_fn that writes it otherwise"
    return RecipeError(f"it cannot pass {printable(word)}: {problem}", source=type(executor).__name__, hint=hint)


def vboost_lines(executor: Any) -> str:
    """A step that steers power to the tensor cores, before the job's own; it needs sudo on the nodes.

    The lines are those of Bridge's PerfEnvPlugin (0.5.1, recipes/run_plugins.py).
    """
    folder = executor.tunnel.job_dir
    words = [f"--ntasks={executor.nodes}", "--output", f"{folder}/vboost.out", "--error", f"{folder}/vboost.err"]
    command = shlex.quote("sudo nvidia-smi boost-slider --vboost 1")
    return f"\n# Command 0: enable vboost\n\n srun {' '.join(map(shlex.quote, words))} bash -c  {command}"
