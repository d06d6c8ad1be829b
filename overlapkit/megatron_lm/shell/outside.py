"""Variables that the user gives beside the script, as an environment would."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from overlapkit.errors import printable
from overlapkit.megatron_lm.shell.text import Text, known

# Names that programs behind the script read: that the script itself does not is nothing to tell.
_FOR_PROGRAMS = re.compile(r"(CUDA|CUBLAS|NCCL|NVTE|NVSHMEM|NVIDIA|UB|TORCH|PYTORCH|TRITON|OMP|UCX|GLOO)_")


@dataclass(slots=True)
class Outside:
    """``used`` are the names whose given value something has read; ``set_over`` maps others to the line that set them.

    One for all ways through a script: what a single one of them reads counts.
    """

    values: Mapping[str, Text] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    set_over: dict[str, int] = field(default_factory=dict)

    def is_read(self, name: str, value: object) -> None:
        if name in self.values and self.values[name] is value:
            self.used.add(name)

    def is_set(self, name: str, before: object, line: int) -> None:
        if name in self.values and self.values[name] is before:
            self.set_over.setdefault(name, line)

    def instead_of(self, name: str, value: Text) -> Text | None:
        """The given value, where the script sets the name to what only a run could tell."""
        if name not in self.values or not value or any(piece.text and piece.text.strip() for piece in value):
            return None
        if all(piece.text is not None for piece in value):
            return None
        self.used.add(name)
        return self.values[name]

    def notes(self, text: str) -> list[str]:
        """What becomes of each given variable that the script, of this text, makes no use of."""
        found = []
        for name, value in self.values.items():
            shown = printable(f"{name}={known(value)}", limit=80)
            if name in self.used:
                continue
            if name in self.set_over:
                found.append(f"{shown} changes nothing: line {self.set_over[name]} sets {name}")
            elif not re.search(rf"\b{name}\b", text) and not _FOR_PROGRAMS.match(name):
                found.append(f"{shown}: the script has no {name}; it counts as an environment variable alone")
        return found
