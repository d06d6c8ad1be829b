"""Forks: a state goes both ways where nothing has settled which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from overlapkit.errors import printable
from overlapkit.megatron_lm.shell import conditions
from overlapkit.megatron_lm.shell.builtins import Builtins
from overlapkit.megatron_lm.shell.conditions import Verdict
from overlapkit.megatron_lm.shell.expansion import Expansion
from overlapkit.megatron_lm.shell.state import Branch, State, text_key, value_key
from overlapkit.megatron_lm.shell.text import Text, known

MAX_STATES = 64
_LABEL = 120  # characters of a condition that are shown
Outcomes = tuple[list[State], list[State]]  # those in which something holds, and those in which it does not


class Forks(Builtins):
    """The part of the walk that follows both outcomes."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = 0  # states that wait until the others have gone through a branch
        self.counters: frozenset[str] = frozenset()  # what the loops around here count: no choice of anybody

    @contextmanager
    def beside(self, states: list[State]) -> Iterator[None]:
        """While these states wait, they count as outcomes too."""
        self.aside += len(states)
        yield
        self.aside -= len(states)

    def fork(
        self,
        states: list[State],
        judge: Callable[[Expansion], Verdict],
        branch: Branch,
        avoid: bool | None = None,
        *,
        gives_default: bool = False,
        presumed: bool = False,
    ) -> Outcomes:
        """Each state where the condition holds, and where it does not; both, unless something has settled it.

        ``avoid`` is the outcome behind which the script ends, ``presumed`` the one taken where nobody knows.
        """
        question = conditions.same_question(branch.label)
        outcomes: dict[bool, list[State]] = {True: [], False: []}
        for state in states:
            self.charge(20 + len(state.variables) // 5)
            verdict = judge(self.expansion(state))
            fact = f"{question} {[self._seen(state, name) for name in sorted(verdict.names)]}"
            settled_as = state.facts.get(fact)
            if settled_as is None and self._is_settled(state, verdict):
                settled_as = verdict.value
            if settled_as is None and verdict.presumed and gives_default:
                settled_as = verdict.value
            takes = presumed if verdict.value is None else verdict.value
            if takes == avoid and (verdict.presumed or verdict.value is None):
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
                settles = verdict.if_true if outcome else verdict.if_false
                if outcome != takes and verdict.value is not None and not settles:
                    way.contrary |= {branch.chain}
                _settle(way, settles, branch.line)
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
        return verdict.value is not None and all(
            name in self.counters or state.is_fixed(name) for name in verdict.names
        )


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


def short(text: str) -> str:
    return printable(" ".join(text.replace("\\\n", " ").split()), limit=_LABEL)
