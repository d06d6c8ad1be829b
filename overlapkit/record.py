"""Runs a training script as ``python`` does and records what it calls of torch.distributed.

    python -m overlapkit.record -o DIR [--steps A-B] -- pretrain_gpt.py …
    torchrun --nproc-per-node 8 -m overlapkit.record -o DIR -- pretrain_gpt.py …

Each process writes a file into DIR, which ``overlapkit measure DIR`` reads. In a script of one's own: ``record`` and
``step`` of this module.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from overlapkit.errors import OverlapkitError, printable

if TYPE_CHECKING:
    from overlapkit.integrations.torch_recorder import Recorder

__all__ = ["record", "step"]


def record(folder: str | Path, *, steps: tuple[int, int] | None = None) -> AbstractContextManager[Recorder]:
    """See :func:`overlapkit.integrations.torch_recorder.record`."""
    from overlapkit.integrations import torch_recorder

    return torch_recorder.record(folder, steps=steps)


def step() -> None:
    """Marks the end of an optimizer step, in a script that may be recorded; where it is not, nothing happens."""
    recorders = sys.modules.get("overlapkit.integrations.torch_recorder")
    recorder = recorders.running() if recorders else None
    if recorder is not None:
        recorder.step()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"overlapkit.record: {printable(message)}; see python -m overlapkit.record --help\n")


def _steps(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"no steps '{printable(text)}': write 3-5 or 3")
    return int(found[1]), int(found[2] or found[1])


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m overlapkit.record",
        usage="%(prog)s -o DIR [--steps A-B] -- SCRIPT.py ARGUMENTS…   (or -- -m MODULE ARGUMENTS…)",
        description="Runs a training script and records its collectives, one file per process.",
    )
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="where the files go")
    parser.add_argument("--steps", type=_steps, metavar="A-B", help="the optimizer steps to record, from 1")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.command[:1] == ["--"]:
        parsed.command = parsed.command[1:]
    if parsed.module is not None:  # a launcher has taken the -- for its own
        parsed.command = ["-m", *parsed.module]
    if not parsed.command or (parsed.command[0] == "-m" and len(parsed.command) < 2):
        parser.error("name the script to run after --")
    return parsed


def main(arguments: list[str] | None = None) -> None:
    """Never returns before the script has ended; its exit status and its exceptions are those of this process."""
    parsed = _parsed(sys.argv[1:] if arguments is None else arguments)
    script, *rest = parsed.command
    path = str(Path(script).absolute())  # what python makes of it
    code = None if script == "-m" else _compiled(path, script)
    try:
        from overlapkit.integrations.torch_recorder import start

        start(parsed.output, steps=parsed.steps)  # it stops at exit, after the script's own end
    except OverlapkitError as error:
        sys.exit(_told(error))
    if code is None:
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = parsed.command
        _run(code, path)


def _compiled(path: str, script: str) -> CodeType:
    """The script's code; a file that is none ends the process as it ends python."""
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        print(f"overlapkit.record: can't open file '{printable(script)}': {error.strerror}", file=sys.stderr)
        sys.exit(2)
    return compile(source, path, "exec", dont_inherit=True)


def _run(code: CodeType, path: str) -> None:
    """As ``python path`` does: the module __main__ is the script's, and stays so until the end."""
    main_module = ModuleType("__main__")
    names: dict[str, Any] = vars(main_module)
    names.update(__file__=path, __builtins__=sys.modules["builtins"], __cached__=None)
    sys.modules["__main__"] = main_module
    if not getattr(sys.flags, "safe_path", False):
        # `python -m` put the current folder here, where `python SCRIPT` has the script's.
        sys.path[0] = str(Path(path).resolve().parent)
    exec(code, names)


def _told(error: OverlapkitError) -> int:
    print(f"overlapkit.record: {error}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    main()
