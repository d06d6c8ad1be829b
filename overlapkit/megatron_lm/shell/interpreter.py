"""Follows a script through all its branches without running anything, and keeps the launches that it meets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from overlapkit.errors import printable
from overlapkit.megatron_lm.shell import statuses
from overlapkit.megatron_lm.shell.expansion import Expansion
from overlapkit.megatron_lm.shell.loops import Frame, Loops
from overlapkit.megatron_lm.shell.parser import Parser
from overlapkit.megatron_lm.shell.state import CALL, Call, State, merged, settled
from overlapkit.megatron_lm.shell.statuses import name_of
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
    Simple,
    While,
)

MAX_WORK = 300_000
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
            for number, statement in enumerate(body, 1):
                going = [state for state in states if state.flow is None]
                if not going:
                    break
                stopped = [state for state in states if state.flow is not None]
                with self.asking(*(self.asked, self.avoid) if number == len(body) else (None,)):
                    states = self.and_or(statement, going) + stopped
        return states

    def and_or(self, statement: AndOr, states: list[State]) -> list[State]:
        self.line = statement.line
        self.charge(len(states))
        before = len(states)
        if statement.rest or self.asked is not None:
            chain, asked, avoid = statement.line, self.asked, self.avoid
            holds, fails = self.outcomes(statement, states, chain=chain, asked=asked, avoid=avoid)
            if self.asked is not None:
                _tell(holds, True)
                _tell(fails, False)
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
        return merged(states, {name: self._is_live(name) for name in names}, asked=self.asked is not None)

    def _is_live(self, name: str) -> bool:
        if name in self.function_names:
            return True
        return any(frame.source is not None and frame.source.used_after(name, frame.offset) for frame in self.frames)

    # Commands

    def pipeline(self, pipeline: Pipeline, states: list[State]) -> list[State]:
        if len(pipeline.commands) == 1:
            return self.command(pipeline.commands[0], states)
        piped: tuple[Redirect, ...] = ()
        for number, command in enumerate(pipeline.commands, 1):  # each in a process of its own
            if isinstance(command, Simple):
                command = replace(command, redirects=command.redirects + piped)
                passes_on = name_of(command) == "cat"
                piped = tuple(redirect for redirect in command.redirects if redirect.body and passes_on)
            with self.asking(*(self.asked, self.avoid) if number == len(pipeline.commands) else (None,)):
                states = self._apart(command, states)
        return states

    def _apart(self, command: Command, states: list[State]) -> list[State]:
        """What runs in a process of its own changes nothing here; its status may be asked for."""
        result: list[State] = []
        for state in states:
            ended = len(self.ended)
            inner = [state.copy()]
            ways = self.body(command.body, inner) if isinstance(command, Group) else self.command(command, inner)
            if self.asked is None:
                result.append(state)
                continue
            ways += self.ended[ended:]
            del self.ended[ended:]
            for number, way in enumerate(ways, 1):
                outer = state.copy() if number < len(ways) else state
                outer.path, outer.facts, outer.departed, outer.status = way.path, way.facts, way.departed, way.status
                outer.notes, outer.capped = way.notes, way.capped
                result.append(outer)
        return result

    def command(self, command: Command, states: list[State]) -> list[State]:
        with self.deeper():
            if isinstance(command, Simple):
                return [result for state in states for result in self._simple(command, state)]
            if isinstance(command, Group):
                return self._apart(command, states) if command.subshell else self.body(command.body, states)
            if isinstance(command, If):
                return self.if_command(command, states)
            if isinstance(command, Case):
                return self.case_command(command, states)
            if isinstance(command, (For, CountingFor, While)):
                with self.asking(None):
                    states = self._loop(command, states)
            elif isinstance(command, Function):
                self.function_names |= command.names
                for state in states:
                    state.functions[command.name] = command
            elif isinstance(command, ArithmeticCommand):
                for state in states:
                    self.arithmetic_effects(command, state)
            for state in states:
                if state.flow is None and not isinstance(command, ArithmeticCommand):
                    state.status = True if isinstance(command, Function) else None
        return states

    def _simple(self, command: Simple, state: State) -> list[State]:
        state.status = statuses.begin(command, state.status, self.expansion(state))
        return self.simple(command, state)

    def _loop(self, command: For | CountingFor | While, states: list[State]) -> list[State]:
        if isinstance(command, CountingFor):
            return self.counting_for_loop(command, states)
        if isinstance(command, While):
            return self.while_loop(command, states)
        return [result for state in states for result in self.for_loop(command, state)]

    # Functions and scripts

    def _child(self, script: Text, state: State, environment: dict[str, Text], arguments: tuple[Text, ...]) -> None:
        ended = len(self.ended)
        with self.asking(None):
            super()._child(script, state, environment, arguments)
        del self.ended[ended:]

    def call(self, function: Function, arguments: tuple[Text, ...], fixed: set[str], state: State) -> list[State]:
        if function.name in self.calls:
            state.note(f"line {self.line}: {printable(function.name)} calls itself, which is read once")
            state.status = None
            return [state]
        place = self.place
        self.calls.append(function.name)
        self.place = (*place, f"{CALL}line {self.line}: {printable(function.name)} is called")
        self.frames.append(Frame(None))
        outer = frozenset(name for name in state.fixed if name.isdecimal())
        state.calls.append(Call(state.positional, state.shifted, outer, {}, dict(state.kinds)))
        state.positional, state.shifted, state.status = arguments, 0, True
        state.fixed = (state.fixed - outer) | fixed
        states = settled(self.command(function.body, [state]), ("return",))
        for result in states:
            _give_back(result)
        self.frames.pop()
        self.place = place
        self.calls.pop()
        return states


def _tell(states: list[State], status: bool) -> None:
    for state in states:
        if state.flow is None:  # else `return` has said it
            state.status = status


def _give_back(state: State) -> None:
    call = state.calls.pop()
    state.positional, state.shifted, state.kinds = call.positional, call.shifted, dict(call.kinds)
    state.fixed = {name for name in state.fixed if not name.isdecimal()} | call.fixed
    for name, value in call.saved.items():
        if value is None:
            state.variables.pop(name, None)
        else:
            state.variables[name] = value


def _is_simple(statement: AndOr) -> bool:
    return not statement.rest and all(isinstance(command, Simple) for command in statement.first.commands)
