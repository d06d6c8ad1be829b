"""What a command with its arguments is: a training launch, a script of its own, or neither."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from overlapkit.megatron_lm.shell.environment import WRAPPERS, Change, begin, option, without
from overlapkit.megatron_lm.shell.splitting import may_be_several
from overlapkit.megatron_lm.shell.text import Text, known
from overlapkit.megatron_lm.shell.written import base

# Flags that Megatron-LM's training programs share and hardly any other program has.
TRAINING_FLAGS = frozenset(
    {
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--context-parallel-size",
        "--expert-model-parallel-size",
        "--sequence-parallel",
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--seq-length",
        "--micro-batch-size",
        "--global-batch-size",
        "--train-iters",
        "--train-samples",
        "--lr-decay-style",
        "--use-mcore-models",
        "--use-distributed-optimizer",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        "--tp-comm-overlap",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
    }
)
# Those without which nothing is trained: tools take some of the flags above as well.
_STEP_FLAGS = frozenset({"--train-iters", "--train-samples", "--micro-batch-size", "--global-batch-size"})
LAUNCHER_FLAGS = re.compile(r"--(nproc[-_]per[-_]node|nnodes|node[-_]rank|master[-_](addr|port)|rdzv[-_]\w+)(=|\Z)")
_TRAINING_NAME = re.compile(r"train|tune|sft|dpo|rlhf|grpo", re.IGNORECASE)
_TOOL_NAME = re.compile(
    r"preprocess|convert|checkpoint/|ckpt|generat|server|infer|eval|hf2|2hf|to_hf|merge|split", re.IGNORECASE
)
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
_REMOTE = frozenset({"ssh", "pdsh", "clush", "su", "tmux", "screen"})
_PROGRAMS = re.compile(r"python[\d.]*|torchrun|deepspeed|accelerate|torchx|colossalai|ft_launcher")
_LAUNCHER_MODULES = ("torch.distributed", "deepspeed", "accelerate", "torchx", "nvidia_resiliency_ext")


@dataclass(slots=True)
class Found:
    """``program`` is the index of the training program, ``script`` the shell text that is run instead.

    ``changes`` are what the command does to its environment, ``notes`` what nobody could see of that.
    ``reads_input``: a shell that takes its script from a here-document. ``file``: a script that was not given.
    """

    kind: Literal["launch", "script", "input", "file", "other"] = "other"
    program: int = 0
    script: Text = ()
    script_arguments: tuple[Text, ...] = ()
    file: str = ""
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def examine(fields: Sequence[Text], files: Collection[str] = ()) -> Found:
    """What is run behind `srun`, `env`, `docker run` and the like, and what they set; ``files`` are known scripts."""
    return _Examination(fields, files).result()


class _Examination:
    def __init__(self, fields: Sequence[Text], files: Collection[str]) -> None:
        self.fields = fields
        self.files = files
        self.found = Found()
        self.wrapper = ""
        self.launcher = False

    def result(self) -> Found:
        index = 0
        while index < len(self.fields) and self.found.kind == "other":
            index += self._argument(index)
        if self.found.kind == "other" and self.launcher:
            self._guess_program()
        return self.found

    def _text(self, index: int) -> str | None:
        return known(self.fields[index]) if index < len(self.fields) else None

    def _argument(self, index: int) -> int:
        """Looks at one argument; returns how many were used up."""
        text = self._text(index)
        if (index == 0 or self.wrapper) and base(self.fields[index]) in self.files:
            return self._file(index)
        if _is_program(self.fields[index]):
            if not (following := self._text(index + 1)) or not _PROGRAMS.fullmatch(_base(following)):
                self.found.kind, self.found.program = "launch", index
            return 1
        if text is None:
            return self._environment(index)
        name = _base(text)
        if name in _SHELLS:
            return self._shell(index)
        if name in WRAPPERS | _REMOTE and not text.startswith("-"):
            self.wrapper = name
            self.found.changes += begin(name, self.fields[index][0].line)
            if name in _REMOTE:
                return self._remote(index)
            if name == "sbatch":
                return self._sbatch(index)
            return 1
        if _PROGRAMS.fullmatch(name):
            self.launcher = True
        elif text == "-m" and self.launcher:
            module = self._text(index + 1)
            if module and not module.startswith(_LAUNCHER_MODULES):
                self.found.kind, self.found.program = "launch", index + 1
            return 2
        return self._environment(index)

    def _environment(self, index: int) -> int:
        if self.launcher:
            return 1
        found = option(self.wrapper, self.fields, index)
        self.found.changes += found.changes
        self.found.notes += found.notes
        self.wrapper = "" if found.ends else self.wrapper
        return found.used

    def _shell(self, index: int) -> int:
        position, command = index + 1, False
        while (option := self._text(position)) is not None and option[:1] in ("-", "+"):
            command |= bool(re.fullmatch(r"-[A-Za-z]*c[A-Za-z]*", option))
            position += 2 if option in ("-o", "-O", "+o", "+O", "--rcfile", "--init-file") else 1
            if option == "--":
                break
        if position >= len(self.fields):
            self.found.kind = "input"
        elif command:
            self.found.kind, self.found.script = "script", self.fields[position]
            self.found.script_arguments = tuple(self.fields[position + 2 :])
        elif base(self.fields[position]) in self.files:
            return self._file(position)
        elif (file := self._text(position)) is not None and not _is_program(self.fields[position]):
            self.found.kind, self.found.file = "file", file
        return 1

    def _file(self, index: int) -> int:
        self.found.kind, self.found.file = "file", base(self.fields[index])
        self.found.script_arguments = tuple(self.fields[index + 1 :])
        return 1

    def _sbatch(self, index: int) -> int:
        for position in range(index + 1, len(self.fields)):
            text = self._text(position) or ""
            first = self.fields[position][0].text or ""
            if text == "--wrap" and position + 1 < len(self.fields):
                self.found.kind, self.found.script = "script", self.fields[position + 1]
            elif first.startswith("--wrap="):
                self.found.kind, self.found.script = "script", without(self.fields[position], "--wrap=")
            elif base(self.fields[position]) in self.files:
                return self._file(position)
            elif text.endswith((".sh", ".slurm", ".sbatch")) and not text.startswith("-"):
                self.found.kind, self.found.file = "file", text
            else:
                self._environment(position)
        if self.found.kind == "other":
            self.found.kind = "input"
        return 1

    def _remote(self, index: int) -> int:
        last = self.fields[-1]
        if self.wrapper not in ("su", "tmux", "screen"):  # another machine
            self.found.changes.append(Change("clear"))
        if len(self.fields) > index + 2 and any(c in (piece.text or "") for piece in last for c in " \n"):
            self.found.kind, self.found.script = "script", last
        return 1

    def _guess_program(self) -> None:
        """The program is unknown, yet what follows are flags of Megatron-LM."""
        flags = [number for number in range(len(self.fields)) if self._text(number) in TRAINING_FLAGS]
        if not flags:
            return
        program = flags[0] - 1
        for number in range(1, flags[0]):
            before = self._text(number - 1) or ""
            if self._text(number) is None and not before.startswith("-"):
                program = number
                break
        self.found.kind, self.found.program = "launch", program


def _base(text: str) -> str:
    return text.rsplit("/", 1)[-1]


def _is_program(text: Text) -> bool:
    last, first = text[-1].text or "", text[0].text or ""
    return last.endswith(".py") and not first.startswith("-") and not any(c in " \n" for c in known(text) or "")


def likelihood(program: str, arguments: Sequence[Text]) -> int:
    """How sure it is that this trains with Megatron-LM: 2 surely, 1 perhaps, 0 not."""
    texts = {(known(argument) or "").partition("=")[0] for argument in arguments}
    if _TOOL_NAME.search(program) and not _TRAINING_NAME.search(_base(program)):
        return 0
    if texts & _STEP_FLAGS and texts & TRAINING_FLAGS:
        return 2
    if texts & TRAINING_FLAGS:
        return 1
    open_ended = any(may_be_several(argument) for argument in arguments)
    return 1 if open_ended and _TRAINING_NAME.search(_base(program)) else 0
