"""What a script has set when a statement begins, and the branches that led there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from overlapkit.megatron_lm.shell.outside import Outside
from overlapkit.megatron_lm.shell.text import MAX_CHARACTERS, MAX_PIECES, Array, Piece, ShellError, Text, Value
from overlapkit.megatron_lm.shell.tree import Function

_AT_RUN_TIME = frozenset(
    {"RANDOM", "SECONDS", "LINENO", "BASHPID", "UID", "EUID", "PPID", "PWD", "OLDPWD", "HOME", "USER", "HOSTNAME"}
    | {"BASH_SOURCE", "FUNCNAME", "RANK", "LOCAL_RANK", "WORLD_SIZE"}
)


CALL = "call: "  # begins the name of a place that is a call, which is told only where it tells launches apart


@dataclass(frozen=True, slots=True)
class Branch:
    """A condition that was met. ``chain`` is the line of the `if` or `case` that it is part of, ``place`` the calls
    and rounds of loops around it."""

    line: int
    label: str
    chain: int
    place: tuple[str, ...] = ()

    def told(self, holds: bool) -> str:
        verb = "holds" if holds else "does not hold"
        return f"line {self.line}: {self.label} {verb}"


# What was found at each branch; both outcomes once they no longer differ.
Path = Mapping[Branch, frozenset[bool]]


@dataclass(frozen=True, slots=True)
class Kind:
    """What `declare` makes of a variable: ``-A``, ``-i``, ``-u``, ``-l``, or ``-n``, where ``target`` is the name it
    stands for; empty where nobody knows."""

    letter: str
    target: str = ""


@dataclass(slots=True)
class Call:
    """What a function gives back when it returns."""

    positional: tuple[Text, ...] | None
    shifted: int
    fixed: frozenset[str]
    saved: dict[str, Value | None]
    kinds: dict[str, Kind] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Written:
    """A script that the script writes, with what it would see where it is run; ``line`` is that of the command."""

    text: Text
    environment: Mapping[str, Text]
    line: int
    place: tuple[str, ...]
    around: tuple[int, ...]

    def key(self) -> object:
        return (self.line, text_key(self.text), tuple((name, text_key(of)) for name, of in self.environment.items()))


@dataclass(slots=True, eq=False)
class State:
    """One way through the script so far.

    ``positional`` is None outside functions: nobody knows the script's arguments, except those in ``given``.
    ``fixed`` names have a value that a branch, a loop or the user has settled: conditions on them have one outcome.
    ``facts`` are conditions that earlier branches have settled. ``hidden`` says why a child process lacks a variable.
    """

    variables: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    kinds: dict[str, Kind] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    positional: tuple[Text, ...] | None = None
    shifted: int = 0
    given: Mapping[str, str] = field(default_factory=dict)
    outside: Outside = field(default_factory=Outside)
    calls: list[Call] = field(default_factory=list)
    fixed: set[str] = field(default_factory=set)
    facts: dict[str, bool] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict)
    files: Mapping[str, Written] = field(default_factory=dict)
    path: dict[Branch, frozenset[bool]] = field(default_factory=dict)
    departed: frozenset[int] = frozenset()  # chains in which it leaves the way taken
    contrary: frozenset[int] = frozenset()  # those of them in which its own values say otherwise
    flow: str | None = None
    status: bool | None = True  # whether the last command succeeded; None where only a run could tell
    exports_all: bool = False
    capped: bool = False  # further branches follow the way taken
    notes: tuple[str, ...] = ()

    @property
    def taken(self) -> bool:
        """Whether the script goes this way as it is written."""
        return not self.departed

    def copy(self) -> State:
        return replace(
            self,
            variables=dict(self.variables),
            exported=set(self.exported),
            kinds=dict(self.kinds),
            functions=dict(self.functions),
            calls=[replace(call, saved=dict(call.saved)) for call in self.calls],
            fixed=set(self.fixed),
            facts=dict(self.facts),
            path=dict(self.path),
        )

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes = (*self.notes, text)

    def target(self, name: str) -> str:
        """The variable that a name stands for: its own, unless `declare -n` says another."""
        for _ in range(8):
            kind = self.kinds.get(name)
            if kind is None or kind.letter != "n":
                break
            name = kind.target
        return name

    def drop(self, name: str, line: int) -> None:
        """`unset`."""
        self.outside.is_set(name, self.variables.pop(name, None), line)
        self.kinds.pop(name, None)
        self.exported.discard(name)
        self.fixed.discard(name)

    def set(self, name: str, value: Value, line: int) -> None:
        name = self.target(name)
        check_size(name, value, line)
        self.outside.is_set(name, self.variables.get(name), line)
        self.variables[name] = value
        if self.exports_all:
            self.exported.add(name)

    def is_fixed(self, name: str) -> bool:
        """Whether a condition on the name has one outcome here."""
        if name.isdecimal() and self.positional is None:
            return str(int(name) + self.shifted) in self.given
        return name in self.fixed or (name in ("@", "*", "#") and self.positional is not None)

    def shift(self, count: int) -> None:
        if self.positional is None:
            self.shifted += count
            return
        self.positional = self.positional[count:]
        fixed = {str(int(name) - count) for name in self.fixed if name.isdecimal() and int(name) > count}
        self.fixed = {name for name in self.fixed if not name.isdecimal()} | fixed

    def scalar(self, name: str) -> Text | None:
        """A variable's text; of an array its first element."""
        value = self.variables.get(name)
        return value.get("0") if isinstance(value, Array) else value

    def absent(self, name: str, written: str, line: int) -> Piece:
        """The unknown that an unset name stands for."""
        if name.isdecimal() or name in ("@", "*", "#"):
            reason = f"${name} is given to the script at run time"
        elif name in _AT_RUN_TIME or name.startswith(("SLURM_", "OMPI_", "PMI_")) or not name.isidentifier():
            reason = f"${name} is only known at run time"
        else:
            reason = self.hidden.get(name, f"${name} is not set in this script")
        return Piece(None, written, line, reason, absent=True)


def check_size(name: str, value: Value, line: int) -> None:
    texts = [text for _, text in value.items] if isinstance(value, Array) else [value]
    pieces = sum(len(text) + 1 for text in texts)
    if pieces > MAX_PIECES or sum(len(piece.text or "") for text in texts for piece in text) > MAX_CHARACTERS:
        raise ShellError(f"${name} grows beyond {MAX_CHARACTERS // 1024} KB or {MAX_PIECES:,} parts", line, fatal=True)


def merge_paths(one: Path, other: Path) -> dict[Branch, frozenset[bool]]:
    """The path of two states that are one from here on: where both outcomes lead here, the branch said nothing."""
    merged = {}
    for branch, outcomes in one.items():
        together = outcomes | other.get(branch, frozenset((True, False)))
        if len(together) == 1:
            merged[branch] = together
    return merged


def merged(states: list[State], is_live: Mapping[str, bool], *, asked: bool) -> list[State]:
    """States that differ in nothing that still counts become one; the one taken stays in front.

    ``asked``: whether the last command succeeded counts too.
    """
    found: dict[object, State] = {}
    for state in states:
        key = (_key(state, is_live), state.status if asked or state.flow else None)
        earlier = found.get(key)
        if earlier is None:
            found[key] = state
            continue
        kept, dropped = (state, earlier) if state.taken and not earlier.taken else (earlier, state)
        kept.path = merge_paths(kept.path, dropped.path)
        kept.departed &= dropped.departed if not kept.taken else frozenset()
        kept.contrary &= dropped.contrary & kept.departed
        kept.facts = {text: holds for text, holds in kept.facts.items() if dropped.facts.get(text) == holds}
        kept.fixed &= dropped.fixed
        kept.status = kept.status if kept.status == dropped.status else None
        kept.notes = tuple(dict.fromkeys((*kept.notes, *dropped.notes)))
        found[key] = kept
    return list(found.values())


def _key(state: State, is_live: Mapping[str, bool]) -> object:
    return (
        state.flow,
        state.shifted,
        state.exports_all,
        tuple(sorted(state.given.items())),
        None if state.positional is None else tuple(map(text_key, state.positional)),
        frozenset(state.exported),
        frozenset(state.kinds.items()),
        frozenset((name, id(function)) for name, function in state.functions.items()),
        frozenset((name, file.key()) for name, file in state.files.items()),
        tuple(tuple((name, value and value_key(value)) for name, value in call.saved.items()) for call in state.calls),
        frozenset(
            (name, value_key(value))
            for name, value in state.variables.items()
            if name in state.exported or is_live.get(name, False)
        ),
    )


def text_key(text: Text) -> object:
    """Equal for texts that read the same, wherever they stand."""
    parts: list[object] = []
    for piece in text:
        if piece.text is None:
            parts.append((piece.unknown, piece.absent))
        elif parts and isinstance(parts[-1], str):
            parts[-1] += piece.text
        else:
            parts.append(piece.text)
    return tuple(parts)


def value_key(value: Value) -> object:
    if isinstance(value, Array):
        return frozenset((key, text_key(text)) for key, text in value.items)
    return text_key(value)


def settled(states: Iterable[State], flows: tuple[str, ...]) -> list[State]:
    """The states, with a `break`, `continue` or `return` that ends here done."""
    result = list(states)
    for state in result:
        if state.flow in flows:
            state.flow = None
    return result
