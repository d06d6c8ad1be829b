"""``;&`` and ``;;&``: what stands behind the end of a case's arm, as statements of the arm itself."""

from __future__ import annotations

from collections.abc import Sequence

from overlapkit.megatron_lm.shell.tree import AndOr, Body, Case, Command, Group, Pipeline, ShellWord

Item = tuple[tuple[ShellWord, ...], Body, int]


def case_of(subject: ShellWord, items: Sequence[tuple[Item, str, int]], line: int) -> Case:
    """The case whose arms have these endings, each with its offset.

    Behind ``;&`` the next arm is run whatever its patterns, behind ``;;&`` the patterns further on are tried as well.
    """
    done: tuple[Item, ...] = ()
    for (patterns, body, arm_line), ending, offset in reversed(items):
        behind: Command | None = None
        if ending == ";&" and done:
            behind = Group(done[0][1], False, arm_line)
        elif ending == ";;&" and done:
            behind = Case(subject, done, line)
        if behind is not None:
            body = (*body, AndOr(Pipeline((behind,), False, arm_line), (), arm_line, offset))
        done = ((patterns, body, arm_line), *done)
    return Case(subject, done, line)
