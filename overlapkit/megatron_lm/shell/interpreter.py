"""Follows a script through all its branches without running anything, and keeps the launches that it meets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from overlapkit.errors import printable
from overlapkit.megatron_lm.shell.expansion import Expansion
from overlapkit.megatron_lm.shell.loops import Frame, Loops
from overlapkit.megatron_lm.shell.parser import Parser
from overlapkit.megatron_lm.shell.state import CALL, Call, State, merged, settled
from overlapkit.megatron_lm.shell.text import ShellError, Source, Text
from overlapkit.megatron_lm.shell.tree import (
    AndOr,
    ArithmeticCommand,
    Body,
    Case,
    Command,
    CountingFor,
    For,
    Function,
    Group,
    If,
    Pipeline,
    Redirect,
    ShellWord,
    Simple,
    While,
)

MAX_WORK = 400_000
_MAX_DEPTH = 45


class Interpreter(Loops):
    """One walk through a script. ``records`` are the launches met, in the order in which they were."""

    def __init__(self) -> None:
        super().__init__()
        self.work = 0
        self.depth = 0
        self.line = 1
        self.calls: list[str] = []

    def charge(self, amount: int) -> None:
        self.work += amount
        if self.work > MAX_WORK:
            raise ShellError("too many branches, rounds and words to follow", self.line, fatal=True)

    @contextmanager
    def deeper(self) -> Iterator[None]:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ShellError("nested too deep to follow", self.line, fatal=True)
        yield
        self.depth -= 1

    def expansion(self, state: State) -> Expansion:
        return Expansion(state, self.charge)

    # Sources and lists

    def run(self, source: Source, states: list[State]) -> list[State]:
        """Follows a source to its end, or to the first place that is not shell text."""
        self.charge(len(source.text) // 50)
        parser = Parser(source)
        self.frames.append(Frame(source))
        with self.deeper():
            while states:
                try:
                    statement = parser.statement()
                except ShellError as error:
                    if error.fatal:
                        raise
                    note = f"line {error.line}: {error.problem}; nothing from here on was read"
                    self.unread.append((error.line, note))
                    break
                if statement is None:
                    break
                states = self.and_or(statement, states)
        self.frames.pop()
        return states

    def body(self, body: Body, states: list[State]) -> list[State]:
        with self.deeper():
            for statement in body:
                going = [state for state in states if state.flow is None]
                if not going:
                    break
                stopped = [state for state in states if state.flow is not None]
                states = self.and_or(statement, going) + stopped
        return states

    def and_or(self, statement: AndOr, states: list[State]) -> list[State]:
        self.line = statement.line
        self.charge(len(states))
        before = len(states)
        if statement.rest:
            holds, fails = self.outcomes(statement, states, chain=statement.line, strict=False)
            states = holds + fails
        else:
            states = self.pipeline(statement.first, states)
        if self.frames[-1].source is not None:
            self.frames[-1].offset = statement.end
        if len(states) > 1 and (len(states) > before or not _is_simple(statement)):
            states = self.merge(states)
        return states

    def merge(self, states: list[State]) -> list[State]:
        self.charge(sum(len(state.variables) for state in states))
        names = {name for state in states for name in state.variables}
        return merged(states, {name: self._is_live(name) for name in names})

    def _is_live(self, name: str) -> bool:
        if name in self.function_names:
            return True
        return any(frame.source is not None and frame.source.used_after(name, frame.offset) for frame in self.frames)

    # Commands

    def pipeline(self, pipeline: Pipeline, states: list[State]) -> list[State]:
        if len(pipeline.commands) == 1:
            return self.command(pipeline.commands[0], states)
        piped: tuple[Redirect, ...] = ()
        for command in pipeline.commands:  # each in a process of its own
            if isinstance(command, Simple):
                command = replace(command, redirects=command.redirects + piped)
                first = command.words[0] if command.words else None
                passes_on = isinstance(first, ShellWord) and first.plain == "cat"
                piped = tuple(redirect for redirect in command.redirects if redirect.body and passes_on)
            self.command(command, [state.copy() for state in states])
        return states

    def command(self, command: Command, states: list[State]) -> list[State]:
        with self.deeper():
            if isinstance(command, Simple):
                return [result for state in states for result in self.simple(command, state)]
            if isinstance(command, Group):
                if not command.subshell:
                    return self.body(command.body, states)
                self.body(command.body, [state.copy() for state in states])
            elif isinstance(command, If):
                return self.if_command(command, states)
            elif isinstance(command, Case):
                return self.case_command(command, states)
            elif isinstance(command, For):
                return [result for state in states for result in self.for_loop(command, state)]
            elif isinstance(command, CountingFor):
                return self.counting_for_loop(command, states)
            elif isinstance(command, While):
                return self.while_loop(command, states)
            elif isinstance(command, Function):
                self.function_names |= command.names
                for state in states:
                    state.functions[command.name] = command
            elif isinstance(command, ArithmeticCommand):
                for state in states:
                    self.arithmetic_effects(command, state)
        return states

    # Functions

    def call(self, function: Function, arguments: tuple[Text, ...], fixed: set[str], state: State) -> list[State]:
        if function.name in self.calls:
            state.note(f"line {self.line}: {printable(function.name)} calls itself, which is read once")
            return [state]
        place = self.place
        self.calls.append(function.name)
        self.place = (*place, f"{CALL}line {self.line}: {printable(function.name)} is called")
        self.frames.append(Frame(None))
        outer = frozenset(name for name in state.fixed if name.isdecimal())
        state.calls.append(Call(state.positional, state.shifted, outer, {}))
        state.positional, state.shifted = arguments, 0
        state.fixed = (state.fixed - outer) | fixed
        states = settled(self.command(function.body, [state]), ("return",))
        for result in states:
            _give_back(result)
        self.frames.pop()
        self.place = place
        self.calls.pop()
        return states


def _give_back(state: State) -> None:
    call = state.calls.pop()
    state.positional, state.shifted = call.positional, call.shifted
    state.fixed = {name for name in state.fixed if not name.isdecimal()} | call.fixed
    for name, value in call.saved.items():
        if value is None:
            state.variables.pop(name, None)
        else:
            state.variables[name] = value


def _is_simple(statement: AndOr) -> bool:
    return not statement.rest and all(isinstance(command, Simple) for command in statement.first.commands)
