"""Loops: each round of a loop over known words, every other loop once."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from overlapkit.megatron_lm.shell.branches import Branches, short
from overlapkit.megatron_lm.shell.splitting import names_asked
from overlapkit.megatron_lm.shell.state import State, settled
from overlapkit.megatron_lm.shell.text import Piece, Source, Text, known, written
from overlapkit.megatron_lm.shell.tree import (
    Body,
    CountingFor,
    For,
    While,
)

MAX_ROUNDS = 64


@dataclass(slots=True)
class Frame:
    """Where a source has been followed to; ``source`` is None in a function, whose names always count."""

    source: Source | None
    offset: int = 0


class Loops(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []

    def for_loop(self, command: For, state: State) -> list[State]:
        expansion = self.expansion(state)
        over_arguments = command.words is None
        values = list(state.positional or ()) if command.words is None else expansion.fields(command.words)
        if (over_arguments and state.positional is None) or any(re.search(r"\$[@*]", written(v)) for v in values):
            return self._arguments_loop(command.line, [state])
        if len(values) > MAX_ROUNDS:
            state.note(f"line {command.line}: only the first {MAX_ROUNDS} rounds of the loop are read")
        rounds = values[:MAX_ROUNDS]
        return self._rounds(command, rounds, [state])

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
        for state in states:
            for name in command.names:
                reason = f"${name} is counted at run time"
                state.set(name, (Piece(None, f"${name}", command.line, reason),), command.line)
                state.fixed.discard(name)
        return settled(self._round(command.body, states, command.start), ("break", "continue"))

    def while_loop(self, command: While, states: list[State]) -> list[State]:
        names = names_asked(command.condition)
        unknown_arguments = any(state.positional is None for state in states)
        if unknown_arguments and (names & {"#", "@", "*", "1"} or "getopts" in names):
            return self._arguments_loop(command.line, states)
        done: list[State] = []
        judge = self.judge(command.condition[-1].first.commands[0]) if not command.condition[-1].rest else None
        for _ in range(MAX_ROUNDS):
            going: list[State] = []
            for state in self.body(command.condition, states):
                value = judge(self.expansion(state)).value if judge else None
                (done if value is command.until else going).append(state)
            states = []
            if not going:
                break
            states = settled(self._round(command.body, going, command.start), ("continue",))
            done += [state for state in states if state.flow == "break"]
            states = [state for state in states if state.flow != "break"]
            if judge is None or not names or any(judge(self.expansion(state)).value is None for state in states):
                done += states
                states = []
            if not states:
                break
        return settled(done + states, ("break",))

    def _arguments_loop(self, line: int, states: list[State]) -> list[State]:
        for state in states:
            state.note(f"line {line}: what the script's own arguments change is not read")
        return states
