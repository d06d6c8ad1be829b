"""Whether a command succeeds, as far as its text says; and commands that are run for their work, not asked."""

from __future__ import annotations

from overlapkit.megatron_lm.shell.expansion import Expansion
from overlapkit.megatron_lm.shell.splitting import names_in
from overlapkit.megatron_lm.shell.text import known
from overlapkit.megatron_lm.shell.tree import (
    Assignment,
    Command,
    Pipeline,
    Segments,
    ShellWord,
    Simple,
    Substitution,
    Unknown,
)

# Commands whose outcome is taken not to hold, as that of a test which only a run could tell.
_QUESTIONS = frozenset(
    {"grep", "egrep", "command", "which", "type", "hash", "pgrep", "diff", "cmp", "nvidia-smi", "lspci", "ping"}
)
# Steps that set something up: taken to succeed, unless a `||` or an `if` says what happens where they do not.
_STEPS = frozenset(
    {"cd", "pushd", "popd", "mkdir", "cp", "mv", "rm", "ln", "touch", "chmod", "chown", "tar", "unzip", "tee", "sync"}
    | {"source", ".", "module", "ml", "conda", "mamba", "pip", "pip3", "uv", "apt", "apt-get", "yum", "git", "wget"}
    | {"make", "cmake", "ninja", "sleep", "wait", "ulimit", "umask", "modprobe", "enroot", "spack"}
)
_SUCCEED = frozenset(
    {":", "true", "echo", "printf", "export", "declare", "local", "readonly", "typeset", "unset", "set", "shift"}
    | {"trap", "break", "continue"}
)


def begin(command: Simple, before: bool | None, expansion: Expansion) -> bool | None:
    """The status of a simple command, where its text says it; None where only a run could tell.

    ``before`` is that of the command before it. What a function or `eval` runs comes to a status of its own.
    """
    name = name_of(command)
    if not command.words:
        return None if any(_substitutes(assignment) for assignment in command.assignments) else True
    if name in ("return", "exit"):
        words = [word for word in command.words[1:] if isinstance(word, ShellWord)]
        if not words:
            return before
        text = known(expansion.text(words[0].segments)) or ""
        return int(text[-6:]) % 256 == 0 if text.isdecimal() else None
    return True if name in _SUCCEED else False if name == "false" else None


def _substitutes(assignment: Assignment) -> bool:
    words = [assignment.value] if assignment.value else [word for _, word in assignment.elements or ()]
    segments = [segment for word in words for segment in word.segments]
    return any(isinstance(segment, Unknown) and not isinstance(segment, Substitution) for segment in segments)


def is_question(command: Command) -> bool:
    return isinstance(command, Simple) and name_of(command) in _QUESTIONS


def is_step(command: Command) -> bool:
    return isinstance(command, Simple) and (not command.words or name_of(command) in _STEPS)


def name_of(command: Simple) -> str | None:
    first = command.words[0] if command.words else None
    return first.plain if isinstance(first, ShellWord) else None


def label_of(pipeline: Pipeline) -> str:
    """The pipeline as it stands, as far as it is made of commands of one line."""
    parts = [getattr(command, "raw", "") for command in pipeline.commands]
    return " | ".join(parts) if all(parts) else "the condition"


def rests_on(pipeline: Pipeline) -> frozenset[str]:
    """The variables whose values are part of the question that a pipeline asks."""
    words: list[Segments] = []
    for command in pipeline.commands:
        if isinstance(command, Simple):
            words += [word.segments for word in command.words if isinstance(word, ShellWord)]
    return frozenset({"?"}.union(*map(names_in, words)))
