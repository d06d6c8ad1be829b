"""What a command with its arguments is: a training launch, a script of its own, or neither."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from overlapkit.megatron_lm.shell.splitting import may_be_several
from overlapkit.megatron_lm.shell.text import Piece, Text, known

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
_CONTAINERS = frozenset({"docker", "podman", "nvidia-docker"})
_SLURM = frozenset({"srun", "sbatch", "salloc"})
_MPI = frozenset({"mpirun", "mpiexec", "orterun", "horovodrun"})
_REMOTE = frozenset({"ssh", "pdsh", "clush", "su", "tmux", "screen"})
_PROGRAMS = re.compile(r"python[\d.]*|torchrun|deepspeed|accelerate|torchx|colossalai|ft_launcher")
_LAUNCHER_MODULES = ("torch.distributed", "deepspeed", "accelerate", "torchx", "nvidia_resiliency_ext")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=")


@dataclass(slots=True)
class Found:
    """``program`` is the index of the training program, ``script`` the shell text that is run instead.

    ``environment`` are variables that the command sets; None passes one on. ``isolated``: nothing else is passed on.
    ``reads_input``: a shell that takes its script from a here-document. ``file``: a script that was not given.
    """

    kind: Literal["launch", "script", "input", "file", "other"] = "other"
    program: int = 0
    script: Text = ()
    script_arguments: tuple[Text, ...] = ()
    file: str = ""
    environment: list[tuple[str, Text | None]] = field(default_factory=list)
    isolated: bool = False


def split_assignment(text: Text) -> tuple[str, Text] | None:
    """``NAME=value`` as one argument."""
    first = text[0].text if text else None
    found = _ASSIGNMENT.match(first) if first else None
    if not found or first is None:
        return None
    rest = first[found.end() :]
    value = (replace(text[0], text=rest, written=rest), *text[1:]) if rest else text[1:]
    return found.group(1), value


def examine(fields: Sequence[Text]) -> Found:
    """What is run behind `srun`, `env`, `docker run` and the like, and what they set."""
    return _Examination(fields).result()


class _Examination:
    def __init__(self, fields: Sequence[Text]) -> None:
        self.fields = fields
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
        if _is_program(self.fields[index]):
            if not (following := self._text(index + 1)) or not _PROGRAMS.fullmatch(_base(following)):
                self.found.kind, self.found.program = "launch", index
            return 1
        if text is None:
            return 1
        base = _base(text)
        if base in _SHELLS:
            return self._shell(index)
        if base in _CONTAINERS | _SLURM | _MPI | _REMOTE | {"env", "sudo"} and not text.startswith("-"):
            self.wrapper = base
            if base in _REMOTE:
                return self._remote(index)
            if base == "sbatch":
                return self._sbatch(index)
        elif _PROGRAMS.fullmatch(base):
            self.launcher = True
        elif text == "-m" and self.launcher:
            module = self._text(index + 1)
            if module and not module.startswith(_LAUNCHER_MODULES):
                self.found.kind, self.found.program = "launch", index + 1
            return 2
        return self._environment(index, text)

    def _environment(self, index: int, text: str) -> int:
        following = self.fields[index + 1] if index + 1 < len(self.fields) else ()
        if self.wrapper in ("env", "sudo") and not self.launcher:
            self._set(self.fields[index])
        elif self.wrapper in _CONTAINERS:
            if text in ("run", "exec"):
                self.found.isolated = True
            elif text in ("-e", "--env"):
                self._set(following, passes=True)
                return 2
            elif text.startswith("--env="):
                self._set(_without(self.fields[index], len("--env=")), passes=True)
        elif self.wrapper in _SLURM and (text == "--export" or text.startswith("--export=")):
            self._slurm_exports(text.partition("=")[2] if "=" in text else known(following) or "", index)
            return 1 if "=" in text else 2
        elif self.wrapper in _MPI and text in ("-x", "-env", "--env", "-genv"):
            if text in ("-env", "-genv"):
                name = known(following)
                if name and index + 2 < len(self.fields):
                    self.found.environment.append((name, self.fields[index + 2]))
                return 3
            self._set(following, passes=True)
            return 2
        return 1

    def _set(self, argument: Text, *, passes: bool = False) -> None:
        pair = split_assignment(argument)
        name = known(argument)
        if pair:
            self.found.environment.append(pair)
        elif passes and name and name.isidentifier():
            self.found.environment.append((name, None))

    def _slurm_exports(self, names: str, index: int) -> None:
        line = self.fields[index][0].line
        parts = names.split(",")
        self.found.isolated = "ALL" not in parts
        for part in parts:
            name, equals, value = part.partition("=")
            if name.isidentifier() and name not in ("ALL", "NONE", "NIL"):
                self.found.environment.append((name, (Piece(value, value, line),) if equals else None))

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
        elif (file := self._text(position)) is not None and not _is_program(self.fields[position]):
            self.found.kind, self.found.file = "file", file
        return 1

    def _sbatch(self, index: int) -> int:
        for position in range(index + 1, len(self.fields)):
            text = self._text(position) or ""
            first = self.fields[position][0].text or ""
            if text == "--wrap" and position + 1 < len(self.fields):
                self.found.kind, self.found.script = "script", self.fields[position + 1]
            elif first.startswith("--wrap="):
                self.found.kind, self.found.script = "script", _without(self.fields[position], len("--wrap="))
            elif text.endswith((".sh", ".slurm", ".sbatch")) and not text.startswith("-"):
                self.found.kind, self.found.file = "file", text
            elif text.startswith("--export="):
                self._slurm_exports(text.partition("=")[2], position)
        if self.found.kind == "other":
            self.found.kind = "input"
        return 1

    def _remote(self, index: int) -> int:
        last = self.fields[-1]
        if len(self.fields) > index + 2 and any(character in (known(last) or "") for character in " \n"):
            self.found.kind, self.found.script, self.found.isolated = "script", last, self.wrapper in ("ssh", "pdsh")
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


def _without(text: Text, characters: int) -> Text:
    rest = (text[0].text or "")[characters:]
    return (replace(text[0], text=rest, written=rest), *text[1:])


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
