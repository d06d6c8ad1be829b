"""What the text of a loop counts."""

from __future__ import annotations

from collections.abc import Iterator

from overlapkit.megatron_lm.shell.arithmetic import changed_by
from overlapkit.megatron_lm.shell.splitting import names_in
from overlapkit.megatron_lm.shell.tree import (
    ArithmeticCommand,
    Assignment,
    Body,
    Case,
    Command,
    CountingFor,
    For,
    Group,
    If,
    ShellWord,
    Simple,
    While,
)


def counted(body: Body) -> frozenset[str]:
    """The variables that a round makes from their own values: conditions on them are no choice of anybody."""
    names: set[str] = set()
    for command in _commands(body):
        if isinstance(command, ArithmeticCommand):
            names |= changed_by(command.raw)
        elif isinstance(command, Simple):
            words = [word for word in command.words if isinstance(word, ShellWord)]
            if words and words[0].plain == "let":
                names.update(*(changed_by(word.raw) for word in words[1:]))
            named = (word for word in command.words if isinstance(word, Assignment))
            names.update(assignment.name for assignment in (*command.assignments, *named) if _is_counted(assignment))
    return frozenset(names)


def _is_counted(assignment: Assignment) -> bool:
    value = assignment.value
    return assignment.append or (value is not None and assignment.name in names_in(value.segments))


def _commands(body: Body) -> Iterator[Command]:
    """Every command of a body but those that its functions and scripts hold."""
    for statement in body:
        for pipeline in (statement.first, *(pipeline for _, pipeline in statement.rest)):
            for command in pipeline.commands:
                yield command
                for inner in _bodies(command):
                    yield from _commands(inner)


def _bodies(command: Command) -> list[Body]:
    if isinstance(command, If):
        return [*(part for arm in command.arms for part in arm), command.otherwise]
    if isinstance(command, Case):
        return [inner for _, inner, _ in command.items]
    if isinstance(command, While):
        return [command.condition, command.body]
    return [command.body] if isinstance(command, (Group, For, CountingFor)) else []
