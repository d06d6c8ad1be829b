"""Branches: where a condition decides, both of its outcomes are followed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from overlapkit.errors import printable
from overlapkit.megatron_lm.shell import conditions, patterns
from overlapkit.megatron_lm.shell.builtins import Builtins
from overlapkit.megatron_lm.shell.conditions import Verdict
from overlapkit.megatron_lm.shell.expansion import Expansion
from overlapkit.megatron_lm.shell.splitting import names_asked, names_in
from overlapkit.megatron_lm.shell.state import Branch, State, text_key, value_key
from overlapkit.megatron_lm.shell.text import Piece, Text, known
from overlapkit.megatron_lm.shell.tree import (
    AndOr,
    ArithmeticCommand,
    Assignment,
    Body,
    Case,
    Command,
    Conditional,
    Group,
    If,
    Pipeline,
    ShellWord,
    Simple,
)

MAX_STATES = 64
_LABEL = 120  # characters of a condition that are shown

# Commands whose outcome is asked for; every other one is taken to succeed where `&&` or `||` follows it.
_QUESTIONS = frozenset(
    {"grep", "egrep", "command", "which", "type", "hash", "pgrep", "diff", "cmp", "nvidia-smi", "lspci", "ping"}
)
_Outcomes = tuple[list[State], list[State]]


class Branches(Builtins):
    """The part of the walk that meets conditions."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = 0  # states that wait until the others have gone through a branch

    def body(self, body: Body, states: list[State]) -> list[State]:
        raise NotImplementedError

    def pipeline(self, pipeline: Pipeline, states: list[State]) -> list[State]:
        raise NotImplementedError

    @contextmanager
    def beside(self, states: list[State]) -> Iterator[None]:
        """While these states wait, they count as outcomes too."""
        self.aside += len(states)
        yield
        self.aside -= len(states)

    def outcomes(self, statement: AndOr, states: list[State], *, chain: int, strict: bool) -> _Outcomes:
        """The states in which a list succeeds, and those in which it fails; what has left it counts as the first."""
        steps = [("", statement.first), *statement.rest]
        holds: list[State] = states
        fails: list[State] = []
        left: list[State] = []
        for number, (operator, pipeline) in enumerate(steps):
            following = steps[number + 1] if number + 1 < len(steps) else None
            avoid = following[0] == "&&" if following and _leaves(following[1]) else None
            gives_default = following is not None and following[0] == "&&" and _gives_default(pipeline, following[1])
            asked, waiting = (fails, holds) if operator == "||" else (holds, fails)
            with self.beside(waiting):
                new_holds, new_fails = self.status(
                    pipeline, asked, chain=chain, strict=strict, avoid=avoid, gives_default=gives_default
                )
            if operator == "||":
                holds, fails = holds + new_holds, new_fails
            else:
                holds, fails = new_holds, fails + new_fails
            left += [state for state in holds if state.flow is not None]
            holds = [state for state in holds if state.flow is None]
        return holds + left, fails

    def status(
        self,
        pipeline: Pipeline,
        states: list[State],
        *,
        chain: int,
        strict: bool,
        avoid: bool | None = None,
        gives_default: bool = False,
    ) -> _Outcomes:
        """``strict``: nothing is taken to succeed. ``avoid``: the outcome after which the script ends.

        ``gives_default``: what follows only sets what is asked for, as ``${name:-default}`` would.
        """
        command = pipeline.commands[0]
        judge = self.judge(command) if len(pipeline.commands) == 1 else None
        label = command.raw if isinstance(command, (Simple, Conditional, ArithmeticCommand)) else "the condition"
        if judge is None:
            states = self.pipeline(pipeline, states)
            left = [state for state in states if state.flow is not None]
            states = [state for state in states if state.flow is None]
            name = command.words[0] if isinstance(command, Simple) and command.words else None
            question = strict or (isinstance(name, ShellWord) and name.plain in _QUESTIONS)
            if left or not question:
                return (left, states) if pipeline.negated else (left + states, [])
            judge = _undecided
        elif isinstance(command, ArithmeticCommand):
            for state in states:
                self.arithmetic_effects(command, state)
        if pipeline.negated and avoid is not None:
            avoid = not avoid
        branch = Branch(pipeline.line, short(label), chain, self.place)
        holds, fails = self.fork(states, judge, branch, avoid, gives_default=gives_default)
        return (fails, holds) if pipeline.negated else (holds, fails)

    def judge(self, command: Command) -> Callable[[Expansion], Verdict] | None:
        """How a test is judged, None for a command that is no test."""
        if isinstance(command, Conditional):
            return lambda expansion: conditions.judge_conditional(command, expansion)
        if isinstance(command, ArithmeticCommand):
            return lambda expansion: conditions.judge_arithmetic(command, expansion)
        if not isinstance(command, Simple) or not command.words:
            return None
        words = [word for word in command.words if isinstance(word, ShellWord)]
        name = words[0].plain if words else None
        if name in ("true", ":", "false"):
            return lambda expansion: conditions.constant(name != "false")
        if name == "[" and words[-1].plain == "]":
            return lambda expansion: conditions.judge_test(words[1:-1], expansion)
        if name == "test":
            return lambda expansion: conditions.judge_test(words[1:], expansion)
        return None

    # Branches

    def fork(
        self,
        states: list[State],
        judge: Callable[[Expansion], Verdict],
        branch: Branch,
        avoid: bool | None = None,
        *,
        gives_default: bool = False,
    ) -> _Outcomes:
        """Each state where the condition holds, and where it does not; both, unless something has settled it."""
        question = conditions.same_question(branch.label)
        outcomes: dict[bool, list[State]] = {True: [], False: []}
        for state in states:
            self.charge(5 + len(state.variables) // 5)
            verdict = judge(self.expansion(state))
            fact = f"{question} {[self._seen(state, name) for name in sorted(verdict.names)]}"
            settled_as = state.facts.get(fact)
            if settled_as is None and self._is_settled(state, verdict):
                settled_as = verdict.value
            if settled_as is None and verdict.presumed and gives_default:
                settled_as = verdict.value
            takes = bool(verdict.value)
            if verdict.presumed and avoid is not None and takes == avoid:
                takes = not avoid
            count = len(states) + len(outcomes[True]) + self.aside
            if settled_as is None and not self._may_split(count, state, branch):
                if not state.capped:
                    note = f"more than {MAX_STATES} outcomes; from here on only the way taken is read"
                    state.note(f"line {branch.line}: {note}")
                settled_as, state.capped = takes, True
            if settled_as is not None:
                outcomes[settled_as].append(state)
                continue
            for outcome in (True, False):
                way = state.copy() if outcome else state
                way.path[branch] = frozenset({outcome})
                way.facts[fact] = outcome
                way.departed |= frozenset() if outcome == takes else {branch.chain}
                _settle(way, verdict.if_true if outcome else verdict.if_false, branch.line)
                outcomes[outcome].append(way)
        return outcomes[True], outcomes[False]

    def _may_split(self, count: int, state: State, branch: Branch) -> bool:
        """Beyond the limit, only the way taken splits, and what leaves it no more than here."""
        return count < MAX_STATES or (state.departed <= {branch.chain} and count < 3 * MAX_STATES)

    def _seen(self, state: State, name: str) -> object:
        value = state.variables.get(name)
        if value is not None:
            return value_key(value)
        if name.isdecimal() and state.positional is not None:
            return tuple(map(text_key, state.positional))
        return (state.given.get(str(int(name) + state.shifted)), state.shifted) if name.isdecimal() else None

    def _is_settled(self, state: State, verdict: Verdict) -> bool:
        return verdict.value is not None and all(map(state.is_fixed, verdict.names))

    # Compound commands

    def if_command(self, command: If, states: list[State]) -> list[State]:
        done: list[State] = []
        for condition, body in command.arms:
            states = self.body(condition[:-1], states)
            avoid = True if _ends(body) else False if _ends(command.otherwise) else None
            with self.beside(done):
                gives_default = not command.otherwise and len(body) == 1 and len(condition) == 1
                gives_default = gives_default and _gives_default(condition[0].first, body[0].first)
                holds, states = self._decided(condition[-1], states, command.line, avoid, gives_default)
            with self.beside(done + states):
                done += self._inside(command.line, body, holds)
        with self.beside(done):
            return done + self._inside(command.line, command.otherwise, states)

    def _decided(
        self, statement: AndOr, states: list[State], chain: int, avoid: bool | None, gives_default: bool
    ) -> _Outcomes:
        self.line = statement.line
        if not statement.rest:
            return self.status(
                statement.first, states, chain=chain, strict=True, avoid=avoid, gives_default=gives_default
            )
        return self.outcomes(statement, states, chain=chain, strict=True)

    def _inside(self, chain: int, body: Body, states: list[State]) -> list[State]:
        if not states or not body:
            return states
        self.enclosing.append(chain)
        states = self.body(body, states)
        self.enclosing.pop()
        return states

    def case_command(self, command: Case, states: list[State]) -> list[State]:
        done: list[State] = []
        for matching, body, line in command.items:
            label = f"case {command.subject.raw} in {'|'.join(pattern.raw for pattern in matching)})"

            def judge(expansion: Expansion, matching: tuple[ShellWord, ...] = matching) -> Verdict:
                return _judge_case(command.subject, matching, expansion)

            avoid = True if _ends(body) else None
            with self.beside(done):
                holds, states = self.fork(states, judge, Branch(line, short(label), command.line, self.place), avoid)
            with self.beside(done + states):
                done += self._inside(command.line, body, holds)
        return done + states


def _settle(state: State, values: dict[str, Text], line: int) -> None:
    """What the outcome says of a variable becomes its value."""
    for name, text in values.items():
        if name.isidentifier():
            before = state.variables.get(name)
            if before is None or value_key(before) != text_key(text):
                state.set(name, tuple(replace(piece, line=line) for piece in text), line)
            state.fixed.add(name)
        elif name.isdecimal() and state.positional is None:
            state.given = {**state.given, str(int(name) + state.shifted): known(text) or ""}


def _judge_case(subject: ShellWord, matching: tuple[ShellWord, ...], expansion: Expansion) -> Verdict:
    if any(pattern.plain == "*" for pattern in matching):
        return conditions.constant(True)
    text = known(expansion.text(subject.segments))
    found = [None if text is None else patterns.matches(expansion.text(p.segments), text) for p in matching]
    value = True if True in found else None if None in found else False
    names = frozenset(names_in(subject.segments).union(*(names_in(pattern.segments) for pattern in matching)))
    plain = matching[0].plain if len(matching) == 1 else None
    name = conditions.settles(subject)
    if_true: dict[str, Text] = {}
    if name and plain and not re.search(r"[*?\[]", plain):
        if_true = {name: (Piece(plain, plain, matching[0].line),)}
    return Verdict(value, names, if_true)


def _undecided(expansion: Expansion) -> Verdict:
    return conditions.UNDECIDED


def short(text: str) -> str:
    return printable(" ".join(text.replace("\\\n", " ").split()), limit=_LABEL)


def _leaves(pipeline: Pipeline) -> bool:
    """Whether the script ends there."""
    command = pipeline.commands[-1]
    if isinstance(command, Group):
        return _ends(command.body)
    word = command.words[0] if isinstance(command, Simple) and command.words else None
    return isinstance(word, ShellWord) and word.plain in ("exit", "usage", "die")


def _gives_default(condition: Pipeline, then: Pipeline) -> bool:
    """Whether all that follows a condition is an assignment to the variable that it asks for."""
    command = then.commands[0]
    if not isinstance(command, Simple) or len(then.commands) > 1:
        return False
    assigned = [*command.assignments, *(word for word in command.words[1:] if isinstance(word, Assignment))]
    if command.words and len(assigned) < len(command.words) - 1:
        return False
    asked = names_asked((AndOr(condition, (), condition.line, 0),))
    return bool(assigned) and {assignment.name for assignment in assigned} == asked


def _ends(body: Body) -> bool:
    return bool(body) and _leaves(body[-1].first) and not body[-1].rest
