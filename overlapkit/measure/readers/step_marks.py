"""Which call marks the optimizer steps, where a source has no mark of its own: what lies between two of them is a step.

Megatron's training loops reduce one int32 per optimizer step, whether the update went well, on a group that may have
one rank. Megatron-Core 0.19.2 reduces another one on another group, in the first step alone: a mark recurs. Source:
train_step of Megatron-LM's and Megatron-Bridge's training loops.
"""

from __future__ import annotations

from collections.abc import Mapping

Mark = tuple[str, int | None]  # step, int32 or float32; the group, None for a step of the user's
_KINDS = ("step", "int32", "float32")


def mark_of_steps(times: Mapping[Mark, int], sizes: Mapping[int | None, int]) -> Mark | None:
    """What marks the steps, of what was seen so many ``times``, in the order of the first time; None of nothing.

    A step of the user's; else an all_reduce of one int32, of the first group that has it more than once, or of the
    first one; else an all_reduce of one float32 on the largest group, by ``sizes``, and there where it recurs most.
    """
    for kind in _KINDS:
        found = [mark for mark in times if mark[0] == kind]
        if found and kind == "float32":
            return max(found, key=lambda mark: (sizes[mark[1]], times[mark]))
        if found:
            return next((mark for mark in found if times[mark] > 1), found[0])
    return None


class StepMarks:
    """What may mark optimizer steps, counted as it comes, and which of it does."""

    def __init__(self) -> None:
        self._times: dict[Mark, int] = {}
        self._sizes: dict[int | None, int] = {}

    def add(self, kind: str, group: int | None, size: int) -> None:
        mark = kind, group
        self._times[mark] = self._times.get(mark, 0) + 1
        self._sizes[group] = size

    def chosen(self) -> Mark | None:
        """(kind, group) of what marks the steps; None before the first mark."""
        return mark_of_steps(self._times, self._sizes)

    def count(self) -> int:
        chosen = self.chosen()
        return 0 if chosen is None else self._times[chosen]
