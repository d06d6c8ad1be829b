"""Branches: where a condition decides, both of its outcomes are followed."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from overlapkit.megatron_lm.shell import conditions, patterns
from overlapkit.megatron_lm.shell.conditions import Verdict
from overlapkit.megatron_lm.shell.expansion import Expansion
from overlapkit.megatron_lm.shell.forks import Forks, Outcomes, short
from overlapkit.megatron_lm.shell.splitting import names_asked, names_in
from overlapkit.megatron_lm.shell.state import Branch, State
from overlapkit.megatron_lm.shell.statuses import is_question, is_step, label_of, rests_on
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


class Branches(Forks):
    """The part of the walk that meets conditions.

    ``asked`` says whether the status of what runs now decides something: None where it does not, else whether both
    outcomes count (true) or steps are taken to succeed (false). ``avoid`` is the outcome behind which the script ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: bool | None = None
        self.avoid: bool | None = None

    @abstractmethod
    def body(self, body: Body, states: list[State]) -> list[State]: ...

    @abstractmethod
    def pipeline(self, pipeline: Pipeline, states: list[State]) -> list[State]: ...

    @contextmanager
    def asking(self, asked: bool | None, avoid: bool | None = None) -> Iterator[None]:
        before = self.asked, self.avoid
        self.asked, self.avoid = asked, avoid
        yield
        self.asked, self.avoid = before

    def outcomes(
        self, statement: AndOr, states: list[State], *, chain: int, asked: bool | None, avoid: bool | None = None
    ) -> Outcomes:
        """The states in which a list succeeds, and those in which it fails; what has left it counts as the first.

        ``asked`` None: nobody asks for the status of the list, so that of its last command makes no outcome.
        """
        steps = [("", statement.first), *statement.rest]
        strict = asked or any(operator == "||" for operator, _ in statement.rest)
        avoided = _avoided(statement.rest, avoid)
        holds: list[State] = states
        fails: list[State] = []
        left: list[State] = []
        for number, (operator, pipeline) in enumerate(steps):
            following = steps[number + 1] if number + 1 < len(steps) else None
            going, waiting = (fails, holds) if operator == "||" else (holds, fails)
            if not going:
                continue
            with self.beside(waiting):
                if following is None and asked is None:
                    holds = (holds if operator == "||" else []) + self.pipeline(pipeline, going)
                    fails = [] if operator == "||" else fails
                    break
                new_holds, new_fails = self.status(
                    pipeline,
                    going,
                    chain=chain,
                    strict=strict,
                    avoid=avoided[number],
                    gives_default=following is not None and _gives_default(pipeline, *following),
                    presumed=not asked,
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
        presumed: bool = False,
    ) -> Outcomes:
        """``strict``: nothing is taken to succeed. ``avoid``: the outcome after which the script ends.

        ``gives_default``: what follows only sets what is asked for, as ``${name:-default}`` would. ``presumed``: a
        command that is no question is taken to succeed; the other outcome counts all the same.
        """
        *others, command = pipeline.commands
        judge = self.judge(command)
        if pipeline.negated and avoid is not None:
            avoid = not avoid
        if judge is None or others:
            with self.asking(strict if judge is None else None, avoid):
                states = self.pipeline(pipeline, states)
        left: list[State] = []
        holds: list[State] = []
        fails: list[State] = []
        presumed = presumed and judge is None and not is_question(command)
        if judge is None:
            left, holds, fails, states = _by_status(states)
            if not strict and is_step(command):
                holds, states = holds + states, []
            judge = _undecided(pipeline)
        branch = Branch(pipeline.line, short(label_of(pipeline)), chain, self.place)
        with self.beside(holds + fails):
            succeeds, fails_here = self.fork(
                states, judge, branch, avoid, gives_default=gives_default, presumed=presumed
            )
        if isinstance(command, ArithmeticCommand) and not others:
            for state in (*succeeds, *fails_here):  # the question was asked of what was there before
                self.arithmetic_effects(command, state)
        holds, fails = holds + succeeds, fails + fails_here
        holds, fails = (fails, holds) if pipeline.negated else (holds, fails)
        return left + holds, fails

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

    # Compound commands

    def if_command(self, command: If, states: list[State]) -> list[State]:
        done: list[State] = []
        for condition, body in command.arms:
            with self.asking(None):
                states = self.body(condition[:-1], states)
            avoid = True if _ends(body) else False if _ends(command.otherwise) else None
            with self.beside(done):
                gives_default = not command.otherwise and len(body) == 1 and len(condition) == 1
                gives_default = gives_default and _gives_default(condition[0].first, "&&", body[0].first)
                holds, states = self._decided(condition[-1], states, command.line, avoid, gives_default)
            with self.beside(done + states):
                done += self._inside(command.line, body, holds)
        _succeed(states)
        with self.beside(done):
            return done + self._inside(command.line, command.otherwise, states)

    def _decided(
        self, statement: AndOr, states: list[State], chain: int, avoid: bool | None, gives_default: bool
    ) -> Outcomes:
        self.line = statement.line
        if not statement.rest:
            return self.status(
                statement.first, states, chain=chain, strict=True, avoid=avoid, gives_default=gives_default
            )
        return self.outcomes(statement, states, chain=chain, asked=True, avoid=avoid)

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
                return conditions.presuming_none(
                    lambda expansion: _judge_case(command.subject, matching, expansion), expansion
                )

            avoid = True if _ends(body) else None
            with self.beside(done):
                holds, states = self.fork(states, judge, Branch(line, short(label), command.line, self.place), avoid)
            with self.beside(done + states):
                done += self._inside(command.line, body, holds)
        return done + _succeed(states)


def _succeed(states: list[State]) -> list[State]:
    """No arm has run, which is a success."""
    for state in states:
        state.status = True
    return states


def _by_status(states: list[State]) -> tuple[list[State], list[State], list[State], list[State]]:
    """Those that have left, those that succeed, those that fail, and those of which only a run could tell."""
    going = [state for state in states if state.flow is None]
    return (
        [state for state in states if state.flow is not None],
        [state for state in going if state.status],
        [state for state in going if state.status is False],
        [state for state in going if state.status is None],
    )


def _undecided(pipeline: Pipeline) -> Callable[[Expansion], Verdict]:
    verdict = Verdict(None, rests_on(pipeline))
    return lambda expansion: verdict


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


def _leaves(pipeline: Pipeline) -> bool:
    """Whether the script ends there."""
    command = pipeline.commands[-1]
    if isinstance(command, Group):
        return _ends(command.body)
    word = command.words[0] if isinstance(command, Simple) and command.words else None
    return isinstance(word, ShellWord) and word.plain in ("exit", "usage", "die")


def _avoided(rest: Sequence[tuple[str, Pipeline]], of_all: bool | None) -> list[bool | None]:
    """Of each pipeline of a list the outcome behind which the script ends: by what follows, and by that of the list."""
    avoided = [of_all]
    leaves: dict[str, bool] = {}  # whether the script ends at the next pipeline behind && and ||
    goes_on = of_all is not None  # whether that outcome is the list's here too
    for operator, pipeline in reversed(rest):
        leaves[operator] = _leaves(pipeline)
        goes_on = goes_on and operator == ("||" if of_all else "&&")
        avoided.append(True if leaves.get("&&") else False if leaves.get("||") else of_all if goes_on else None)
    return avoided[::-1]


def _gives_default(condition: Pipeline, operator: str, then: Pipeline) -> bool:
    """Whether all that follows a condition is an assignment to the variable that it asks for."""
    if operator == "||":
        return False
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
