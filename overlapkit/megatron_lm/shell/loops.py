"""Loops: round after round while it is known that there is one, else what any number of rounds may leave behind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from overlapkit.megatron_lm.shell import conditions
from overlapkit.megatron_lm.shell.arithmetic import changed_by
from overlapkit.megatron_lm.shell.branches import Branches
from overlapkit.megatron_lm.shell.counting import counted
from overlapkit.megatron_lm.shell.forks import short
from overlapkit.megatron_lm.shell.rounds import any_value, changed
from overlapkit.megatron_lm.shell.splitting import may_be_several, names_asked
from overlapkit.megatron_lm.shell.state import CALL, State, settled
from overlapkit.megatron_lm.shell.text import Array, Source, Text, Value, known, written
from overlapkit.megatron_lm.shell.tree import AndOr, ArithmeticCommand, Body, CountingFor, For, While

MAX_ROUNDS = 256
_MAX_WORK = 50_000  # of the rounds of one loop
_MAX_PASSES = 3  # to find what any number of rounds changes

_Walk = Callable[[list[State]], list[State]]


@dataclass(slots=True)
class Frame:
    """Where a source has been followed to; ``source`` is None in a function, whose names always count."""

    source: Source | None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class _Loop:
    """``test`` says whether there is another round, None where only a run could tell; ``ask`` does what asking does."""

    line: int
    ask: _Walk
    test: Callable[[State], bool | None]
    once: Callable[[list[State], str], list[State]]


class Loops(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []
        self.work = 0

    def for_loop(self, command: For, state: State) -> list[State]:
        over_arguments = command.words is None
        words = None if command.words is None else self.expansion(state).fields(command.words)
        values = list(state.positional or ()) if words is None else words
        if (over_arguments and state.positional is None) or any(re.search(r"\$[@*]", written(v)) for v in values):
            return self._arguments_loop(command.line, [state])
        rounds = values[:MAX_ROUNDS]
        with self._counting(counted(command.body)):
            if any(map(_is_open, values)):
                return self._any_number(command.line, lambda states: self._rounds(command, rounds, states), [state])
            states = self._rounds(command, rounds, [state])
            if len(values) > MAX_ROUNDS:
                states = self._cut(command.line, lambda states: self._rounds(command, values[-1:], states), states)
        return states

    def _rounds(self, command: For, rounds: list[Text], states: list[State]) -> list[State]:
        left: list[State] = []
        for value in rounds:
            label = f"line {command.line}: {command.name} is {short(known(value) or written(value))}"
            for state in states:
                state.set(command.name, tuple(replace(p, quoted=False, expanded=False) for p in value), command.line)
                (state.fixed.add if known(value) is not None else state.fixed.discard)(command.name)
            states = self._round(command.body, states, command.start, label if len(rounds) > 1 else "")
            left += [state for state in states if state.flow == "break"]
            states = settled((state for state in states if state.flow != "break"), ("continue",))
        return settled(left, ("break",)) + states

    def _round(self, body: Body, states: list[State], start: int, label: str = "") -> list[State]:
        """The body once. What it sets counts from the loop's beginning, where the next round reads it."""
        frame, place = self.frames[-1], self.place
        self.frames.append(Frame(frame.source, start))
        self.frames.append(Frame(None))
        self.place = (*place, label) if label else place
        states = self.body(body, states)
        self.place = place
        del self.frames[-2:]
        return states

    def counting_for_loop(self, command: CountingFor, states: list[State]) -> list[State]:
        parts = command.header if len(command.header) == 3 else ((), (), ())
        first, asked, behind = parts
        self._count_all(first, states)

        def test(state: State) -> bool | None:
            if len(asked) == 1:
                verdict = conditions.judge_arithmetic(asked[0], self.expansion(state))
                return None if verdict.presumed else verdict.value
            return True if parts is command.header and not asked else None

        def once(states: list[State], label: str) -> list[State]:
            states = settled(self._round(command.body, states, command.start, label), ("continue",))
            self._count_all(behind, [state for state in states if state.flow is None])
            return states

        with self._counting(counted(command.body) | changed_by(command.raw)):
            return self._follow(_Loop(command.line, lambda states: states, test, once), states)

    def _count_all(self, commands: tuple[ArithmeticCommand, ...], states: list[State]) -> None:
        for command in commands:
            for state in states:
                self.arithmetic_effects(command, state)

    def while_loop(self, command: While, states: list[State]) -> list[State]:
        names = names_asked(command.condition)
        unknown_arguments = any(state.positional is None for state in states)
        if unknown_arguments and (names & {"#", "@", "*", "1"} or "getopts" in names):
            return self._arguments_loop(command.line, states)

        def test(state: State) -> bool | None:
            value = self._verdict(command.condition[-1], state)
            return value if value is None else value is not command.until

        def once(states: list[State], label: str) -> list[State]:
            return settled(self._round(command.body, states, command.start, label), ("continue",))

        with self._counting(counted(command.condition + command.body)):
            return self._follow(_Loop(command.line, lambda s: self.body(command.condition, s), test, once), states)

    def _verdict(self, statement: AndOr, state: State) -> bool | None:
        """What a list of tests comes to, None where one of them is no test or only a run could tell."""
        value: bool | None = None
        for operator, pipeline in (("", statement.first), *statement.rest):
            if (value is False and operator == "&&") or (value is True and operator == "||"):
                continue
            command = pipeline.commands[0]
            judge = self.judge(command) if len(pipeline.commands) == 1 else None
            value = judge(self.expansion(state)).value if judge else None
            if isinstance(command, ArithmeticCommand) and changed_by(command.raw):  # already done, so not asked again
                value = None if statement.rest else state.status
            if value is None:
                return None
            value ^= pipeline.negated
        return value

    def _arguments_loop(self, line: int, states: list[State]) -> list[State]:
        for state in states:
            state.note(f"line {line}: what the script's own arguments change is not read")
        return states

    # Rounds

    @contextmanager
    def _counting(self, names: frozenset[str]) -> Iterator[None]:
        before, self.counters = self.counters, self.counters | names
        yield
        self.counters = before

    def _follow(self, loop: _Loop, states: list[State]) -> list[State]:
        done: list[State] = []
        most = self.work + _MAX_WORK
        for number in range(1, MAX_ROUNDS + 1):
            going: list[State] = []
            undecided: list[State] = []
            for state in loop.ask(states):
                more = loop.test(state)
                (undecided if more is None else going if more else done).append(state)
            states = []
            for state in going:
                before = state.copy()
                kept = self._marks()
                ways = loop.once([state], f"{CALL}line {loop.line}: round {number}")
                leaving = [way for way in ways if way.flow is not None]
                if leaving and len(leaving) < len(ways):  # a branch decides how many rounds there are
                    self._drop_behind(kept)
                    undecided.append(before)
                elif leaving or (len(ways) == 1 and not changed(before, ways)):
                    done += ways  # the last round, or one that repeats itself for ever
                else:
                    states += ways
            done += self._any_number(loop.line, lambda s: loop.ask(loop.once(s, "")), undecided)
            if not states or self.work > most:
                break
        return settled(done, ("break",)) + self._cut(loop.line, lambda s: loop.ask(loop.once(s, "")), states)

    def _cut(self, line: int, once: _Walk, states: list[State]) -> list[State]:
        for state in states:
            state.note(f"line {line}: not all rounds of the loop are read; what further ones change is unknown")
        return self._any_number(line, once, states)

    def _any_number(self, line: int, once: _Walk, states: list[State]) -> list[State]:
        """The body in a state that any number of rounds has led to: what they change is unknown there and behind."""
        result: list[State] = []
        for state in states:
            unknown: dict[str, Value] = {}
            ways: list[State] = []
            for number in range(_MAX_PASSES):
                start = state.copy()
                self._forget(unknown, start, line)
                kept = self._marks()
                ways = settled(once([start.copy()]), ("break", "continue"))
                self.charge(len(start.variables) * len(ways) // 10)
                found = changed(start, ways)
                new = {name: any_value(name, start, ways, line) for name in found if name not in unknown}
                unknown |= new
                if not new or number == _MAX_PASSES - 1:
                    break
                self._drop_behind(kept)
            if all(way.flow is not None for way in ways):
                ways.append(state)  # no round at all
            for way in ways:
                self._forget(unknown, way, line)
            result += ways
        return result

    def _forget(self, values: dict[str, Value], state: State, line: int) -> None:
        for name, value in values.items():
            given = None if isinstance(value, Array) else self.expansion(state).or_given(name, value, line)
            state.set(name, value if given is None else given, line)
            (state.fixed.discard if given is None else state.fixed.add)(name)

    def _marks(self) -> tuple[int, ...]:
        return tuple(map(len, self._met()))

    def _drop_behind(self, marks: tuple[int, ...]) -> None:
        """Forgets what a round has met that is followed in another way."""
        for met, mark in zip(self._met(), marks, strict=True):
            del met[mark:]

    def _met(self) -> tuple[list[object], ...]:
        return (self.records, self.unread, self.other_files, self.ended)  # type: ignore[return-value]


def _is_open(value: Text) -> bool:
    """Whether a word of a loop may be any number of them: an unknown, or a pattern of file names."""
    return may_be_several(value) or any(
        not piece.quoted and re.search(r"[*?]|\[.+\]", piece.text or "") for piece in value
    )
