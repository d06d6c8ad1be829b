"""What to set in a job so that it leaves something to measure: the texts of ``overlapkit measure --how``.

Sources: the NCCL user guide (environment variables), Nsight Systems' user guide (profile, export), NCCL's
ext-profiler/inspector, training/training.py and the arguments of Megatron-LM 0.16 to 0.20, training/profiling.py of
Megatron-Bridge 0.3.1 to 0.6.2, and nemo-run 0.11.1 (core/execution/launcher.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

FRAMEWORKS = {"megatron-lm": "Megatron-LM", "bridge": "Megatron-Bridge", "nemo-run": "NeMo-Run"}
SOURCES = {
    "nccl-log": "NCCL's log: every call with its bytes, no times",
    "torch-trace": "PyTorch profiler traces: calls, bytes, groups, and what was hidden",
    "nsys": "Nsight Systems: kernels and what was hidden, seldom bytes",
    "nccl-inspector": "NCCL Inspector: every call with its bytes and its time",
    "recorder": "the recorder: every call with its group and bytes, no times; needs no GPU",
}
_TABLE = (
    ("input", "bytes", "times", "groups", "cost"),
    ("nccl-log", "all of NCCL", "no", "by ranks", "gigabytes in minutes per node: a few steps"),
    ("torch-trace", "all of NCCL", "hidden and exposed", "by name", "three steps of a few ranks"),
    ("nsys", "seldom", "hidden and exposed", "seldom", "three steps, and an export"),
    ("nccl-inspector", "all of NCCL", "of each call", "by ranks", "a plugin to build; hundreds of bytes per call"),
    ("recorder", "all calls of torch", "no", "by name", "little, and no GPU is needed"),
)
_FOLDER = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of the instructions: ``kind`` is words, shell (for bash) or python."""

    kind: str
    text: str


def instructions(framework: str, source: str) -> tuple[Part, ...]:
    """What to set in a job of ``framework`` to get ``source``; both are keys of the tables above."""
    own = (_words("In a training loop of your own:"), _python(_OWN[source])) if source in _OWN else ()
    return (*_PARTS[source](framework), *_measure(framework, source), *own)


def overview() -> str:
    """What each input has and costs, as a table, and how to ask for the instructions of one."""
    widths = [max(map(len, column)) for column in zip(*_TABLE, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in _TABLE]
    words = f"frameworks: {', '.join(FRAMEWORKS)}; any unique beginning of a word will do"
    return "\n".join([*lines, "", "What to set for one: overlapkit measure --how bridge nsys", words, ""])


def page(framework: str | None = None, source: str | None = None) -> str:
    """The instructions as one text, for all frameworks and sources where None.

    Shell and Python stand flush left, to be copied; words are comments.
    """
    return "\n".join(_page(framework, source))


def _page(framework: str | None, source: str | None) -> Iterator[str]:
    for each in FRAMEWORKS if framework is None else (framework,):
        for input_kind in SOURCES if source is None else (source,):
            yield f"## {FRAMEWORKS[each]}, {SOURCES[input_kind]}\n"
            for part in instructions(each, input_kind):
                yield "".join(f"# {line}\n" for line in part.text.splitlines()) if part.kind == "words" else part.text


def _words(text: str) -> Part:
    return Part(kind="words", text=text)


def _shell(text: str) -> Part:
    return Part(kind="shell", text=text)


def _python(text: str) -> Part:
    return Part(kind="python", text=text)


def _launch(framework: str, arguments: str = "") -> str:
    """The command that starts the job; its own arguments are the user's."""
    script = "pretrain_gpt.py" if framework == "megatron-lm" else "train.py"
    return f'torchrun --nproc-per-node 8 {script} "$@"{arguments}'


def _plugin(measure: str) -> Part:
    return _python(
        "from overlapkit.integrations.nemo_run import OverlapPlugin\n\n"
        f'plugin = OverlapPlugin(recipe="recipe.yaml", measure="{measure}")\n'
        "run.run(task, executor=executor, plugins=[plugin])\n"
    )


def _measure(framework: str, source: str) -> tuple[Part, ...]:
    if framework != "nemo-run":
        return (_shell(f"overlapkit measure {_FOLDER}\n"),)
    if source in ("nccl-log", "recorder"):
        return (_words("The files are in the job's folder; the plan that the plugin leaves there names it."),)
    return (_words("Then, on the folder with the files: overlapkit measure FOLDER"),)


_IN_CONTAINER = (
    "/nemo_run is the job's folder in a container of Slurm. With a LocalExecutor it does not exist: name a folder."
)


# --- NCCL's log ----------------------------------------------------------------------------------


def _nccl_log(framework: str) -> tuple[Part, ...]:
    why = _words(
        "INIT beside COLL: without the lines of INIT no communicator can be told from another. A file per process, %h\n"
        "and %p are NCCL's own. A few steps are enough: full logging of a node writes gigabytes in minutes."
    )
    if framework == "nemo-run":
        return why, _plugin("nccl-log")
    variables = (
        f"mkdir -p {_FOLDER}  # on every node: NCCL makes no folder\n"
        "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL\n"
        f'export NCCL_DEBUG_FILE="$PWD/{_FOLDER}/nccl.%h.%p.log"\n'
    )
    return why, _shell(f"{variables}{_launch(framework)}\n")


# --- PyTorch's profiler --------------------------------------------------------------------------

_FLAGS = "--profile --profile-step-start 10 --profile-step-end 13 --profile-ranks 0"
_OVERRIDES = ("profile_step_start=10", "profile_step_end=13", "profile_ranks=[0]")


def _profiling(*values: str) -> list[str]:
    """Bridge's overrides for three steps of rank 0."""
    return [f"profiling.{value}" for value in (*_OVERRIDES, *values)]


def _task_args(overrides: list[str]) -> str:
    lines = "".join(f'    "{override}",\n' for override in overrides)
    return f"task.args += [\n{lines}]\nrun.run(task, executor=executor)\n"


def _torch_trace(framework: str) -> tuple[Part, ...]:
    words = _words(
        "Three steps after the first ones. More ranks show the skew: one of each pipeline stage at least. The traces\n"
        "are in tensorboard or, from Core 0.17 and Bridge 0.4 on, in torch_profile beside it."
    )
    if framework == "megatron-lm":
        shapes = _words("From Core 0.17 on add --pytorch-profiler-collect-shapes; 0.16 records shapes by itself.")
        flags = f" \\\n  {_FLAGS} --use-pytorch-profiler \\\n  --tensorboard-dir {_FOLDER}/tensorboard"
        return words, shapes, _shell(f"{_launch(framework, flags)}\n")
    shapes = _words("With Bridge 0.3 it is profiling.record_shapes=true instead of pytorch_profiler_collect_shapes.")
    profiling = _profiling("use_pytorch_profiler=true", "pytorch_profiler_collect_shapes=true")
    if framework == "bridge":
        overrides = [*profiling, f"logger.tensorboard_dir={_FOLDER}/tensorboard"]
        quoted = " \\\n".join(f"  '{override}'" for override in overrides)
        return words, shapes, _shell(f"{_launch(framework)} \\\n{quoted}\n")
    overrides = [*profiling, "logger.tensorboard_dir=/nemo_run/tensorboard"]
    return words, shapes, _words(_IN_CONTAINER), _python(_task_args(overrides))


_PROFILER = f'''\
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule


def save(profiler):
    Path("{_FOLDER}").mkdir(exist_ok=True)
    profiler.export_chrome_trace(f"{_FOLDER}/rank{{dist.get_rank()}}.json.gz")


with profile(
    activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
    schedule=schedule(wait=8, warmup=1, active=3, repeat=1),
    record_shapes=True,
    on_trace_ready=save,
) as profiler:
    for batch in batches:
        train_step(batch)
        profiler.step()
'''


# --- Nsight Systems ------------------------------------------------------------------------------


def _nsys(framework: str) -> tuple[Part, ...]:
    words = _words(
        "A report per process, of three steps, and its export: overlapkit reads the sqlite file, not the report.\n"
        "The script starts and stops the capture (cudaProfilerStart and cudaProfilerStop)."
    )
    overrides = _profiling("use_nsys_profiler=true")
    if framework == "nemo-run":
        launcher = 'executor.launcher = run.Torchrun(nsys_profile=True, nsys_trace=["nvtx", "cuda"])\n'
        code = _python(launcher + _task_args(overrides))
        return (
            words,
            code,
            _words("Afterwards, in the folder nsys_profile of the job's folder:"),
            _shell(_exported(".")),
        )
    if framework == "megatron-lm":
        program = f'pretrain_gpt.py "$@" {_FLAGS}'
    else:
        program = 'train.py "$@" ' + " ".join(f"'{override}'" for override in overrides)
    command = (
        f"mkdir -p {_FOLDER}\n"
        "torchrun --nproc-per-node 8 --no-python \\\n"
        "  nsys profile -s none -t nvtx,cuda --force-overwrite=true --cuda-graph-trace=node \\\n"
        "  --capture-range=cudaProfilerApi --capture-range-end=stop \\\n"
        f"  -o '{_FOLDER}/rank%q{{RANK}}' \\\n"
        f"  python {program}\n"
    )
    return words, _shell(command + _exported(_FOLDER))


def _exported(folder: str) -> str:
    return (
        f"for report in {folder}/*.nsys-rep; do\n"
        '  nsys export --type sqlite --force-overwrite=true -o "${report%.nsys-rep}.sqlite" "$report"\n'
        "done\n"
    )


# --- NCCL Inspector ------------------------------------------------------------------------------


def _inspector(framework: str) -> tuple[Part, ...]:
    words = _words(
        "NCCL's profiler plugin, built from ext-profiler/inspector of NCCL's sources. A file per process, which grows\n"
        "by hundreds of bytes with every call: a few steps are enough."
    )
    variables = {
        "NCCL_PROFILER_PLUGIN": "/opt/nccl/libnccl-profiler-inspector.so",
        "NCCL_INSPECTOR_ENABLE": "1",
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "500",
        "NCCL_INSPECTOR_DUMP_VERBOSE": "1",
    }
    if framework == "nemo-run":
        variables["NCCL_INSPECTOR_DUMP_DIR"] = f"/nemo_run/{_FOLDER}"
        where = _words(_IN_CONTAINER)
        lines = "".join(f'    "{name}": "{value}",\n' for name, value in variables.items())
        named = (
            "if isinstance(executor, run.SlurmExecutor):  # its container must keep them\n"
            "    executor.container_env = [*(executor.container_env or []), *variables]\n"
        )
        code = f"variables = {{\n{lines}}}\nexecutor.env_vars |= variables\n{named}run.run(task, executor=executor)\n"
        return words, where, _python(code)
    exports = "".join(f"export {name}={value}\n" for name, value in variables.items())
    exports += f'export NCCL_INSPECTOR_DUMP_DIR="$PWD/{_FOLDER}"\n'
    return words, _shell(f"mkdir -p {_FOLDER}\n{exports}{_launch(framework)}\n")


# --- the recorder --------------------------------------------------------------------------------


def _recorder(framework: str) -> tuple[Part, ...]:
    words = _words("A file per process, of a few kilobytes a step; --steps 3-5 records these optimizer steps alone.")
    if framework == "nemo-run":
        return words, _words("overlapkit must be installed where the job runs."), _plugin("recorder")
    script = "pretrain_gpt.py" if framework == "megatron-lm" else "train.py"
    return words, _shell(f'torchrun --nproc-per-node 8 -m overlapkit.record -o {_FOLDER} -- {script} "$@"\n')


_RECORDED = f'''\
from overlapkit.record import record

with record("{_FOLDER}") as recorder:
    for batch in batches:
        train_step(batch)
        recorder.step()
'''

_PARTS = {
    "nccl-log": _nccl_log,
    "torch-trace": _torch_trace,
    "nsys": _nsys,
    "nccl-inspector": _inspector,
    "recorder": _recorder,
}
_OWN = {"torch-trace": _PROFILER, "recorder": _RECORDED}
