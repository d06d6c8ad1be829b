"""Files of ours in the folder of a job."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import nemo_run as run

from overlapkit.errors import RecipeError, printable
from overlapkit.plan import Plan

if TYPE_CHECKING:
    from overlapkit.integrations.nemo_run.executors import LaunchSize
    from overlapkit.integrations.nemo_run.script_args import ScriptArgs

_CONFIGS = "configs"  # where executors keep what they pack for the job
_LONGEST_NAME = 150  # of a task in a file's name, which holds 255 bytes


@dataclass(slots=True)
class JobFolder:
    """Texts that are written when NeMo-Run makes the folder, which it insists on making itself, before it submits.

    ``reports`` maps a name to its text; where another task has such a file in the same folder, a number is put into
    the name, and ``paths`` remembers it, as a launch makes its folder twice. ``packed`` goes beside the
    configurations that NeMo-Run packs, by names that are used nowhere else.
    """

    executor: Any
    reports: dict[str, str] = field(default_factory=dict)
    packed: dict[str, str] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    def follow(self) -> None:
        """Lets the executor write the files when it makes the folder."""
        # Methods of ours, not closures: a deep copy of the executor then has a copy of this beside it.
        self.executor.create_job_dir = self._create_job_dir
        self.executor.package_configs = self._package_configs

    def _create_job_dir(self) -> None:
        type(self.executor).create_job_dir(self.executor)
        self.write()

    def _package_configs(self, *configs: tuple[str, str]) -> Any:
        """In a group of local tasks only the first makes the folder; the others pack into it."""
        packed = type(self.executor).package_configs(self.executor, *configs)
        self.write()
        return packed

    def write(self) -> None:
        """Writes the files.

        Raises:
            RecipeError: the folder cannot be written.
        """
        folder = Path(self.executor.job_dir)
        for name, text in self.reports.items():
            path = self.paths.get(name)
            if path is None or path.parent != folder:
                path = self.paths[name] = _free(folder / name)
            _write(path, text)
        for name, text in self.packed.items():
            _write(folder / _CONFIGS / name, text)


def check_writable(folder: str) -> None:
    """Raises where the job's folder cannot be made. Nothing of it is there yet.

    Raises:
        RecipeError: what is there is no folder, or one that may not be written.
    """
    there = Path(folder)
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise RecipeError("the job's folder cannot be made in it: it is no folder", source=str(there))
    try:  # What may be written is found out by writing: not every file system tells. NeMo-Run wants to make it itself.
        with TemporaryDirectory(prefix=".overlapkit-", dir=there) as made:
            (Path(made) / Path(folder).relative_to(there)).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise RecipeError(f"the job's folder cannot be made in it: {why}", source=str(there)) from None


def path_in_job(executor: Any, name: str) -> str:
    """Where the job finds a packed file, as the executors' package_configs have it."""
    return f"{folder_in_job(executor)}/{_CONFIGS}/{name}"


def folder_in_job(executor: Any) -> str:
    """The job's folder as the job sees it."""
    if isinstance(executor, run.LocalExecutor):
        return str(Path(executor.job_dir))
    if isinstance(executor, run.KubeflowExecutor):
        return str(executor.code_dir)
    return "/nemo_run"  # also of a Slurm job without a container: NeMo-Run puts its folder there


def userbuffers_name(executor: Any, plan: Plan) -> str:
    """The name of a packed file of userbuffers: one for each content, as tasks may share a folder."""
    content = json.dumps(plan.settings["model.tp_comm_overlap_cfg"], sort_keys=True)
    return f"{task_name(executor)}.userbuffers.{hashlib.sha256(content.encode()).hexdigest()[:8]}.yaml"


def task_name(executor: Any) -> str:
    """The name of the task that an experiment gave the executor, fit for a file's name."""
    local = isinstance(executor, run.LocalExecutor)
    name = Path(executor.job_dir).name if local else getattr(executor, "job_name", "")
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:_LONGEST_NAME] or "task"


def reports(task: str, executor: Any, size: LaunchSize, args: ScriptArgs, said: Sequence[str]) -> dict[str, str]:
    """File name -> text: the page that a person reads, and the plan's JSON with the launch that it was made for.

    Of the environment they hold the variables of the plan and of the recipe, not what else the user set.
    """
    launch = {
        "task": task,
        "executor": type(executor).__name__,
        "nodes": size.nodes,
        "devices_per_node": size.devices_per_node,
        "environment": args.env,
        "kept": sorted(args.environment.kept),
        "notes": list(said),
    }
    value = {**args.plan.to_dict(), "launch": launch}
    return {
        f"{task}.overlap_plan.txt": _page(launch, args.plan),
        f"{task}.overlap_plan.json": json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
    }


def _page(launch: dict[str, Any], plan: Plan) -> str:
    from overlapkit.render.text import print_plan

    stream = StringIO()
    print_plan(plan, stream)
    lines = [f"Launched as {launch['task']}"]
    lines.append(f"  {launch['executor']}, {launch['nodes']} × {launch['devices_per_node']} devices")
    for name, value in launch["environment"].items():
        lines.append(f"  {name}={value}{'  set by the user' if name in launch['kept'] else ''}")
    lines += [f"  {note}" for note in launch["notes"]]
    return stream.getvalue() + "\n" + "".join(f"{printable(line, limit=1000)}\n" for line in lines)


def _free(path: Path) -> Path:
    stem, dot, rest = path.name.partition(".overlap_plan")
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{stem}_{number}{dot}{rest}")
    return candidate


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"cannot be written: {error.strerror}", source=str(path)) from None
