"""The parts of a shell script: words made of segments, and commands made of words."""

from __future__ import annotations

from dataclasses import dataclass, field

from overlapkit.megatron_lm.shell.text import Piece


@dataclass(frozen=True, slots=True)
class Literal:
    text: str
    line: int
    quoted: bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """``$name`` and all forms of ``${name…}``; ``index`` is ``@``, ``*`` or the segments of a subscript."""

    name: str
    written: str
    line: int
    quoted: bool
    index: str | tuple[Segment, ...] | None = None
    operator: str = ""
    arguments: tuple[tuple[Segment, ...], ...] = ()
    length: bool = False
    indirect: bool = False


@dataclass(frozen=True, slots=True)
class Arithmetic:
    expression: tuple[Segment, ...]
    written: str
    line: int
    quoted: bool


@dataclass(frozen=True, slots=True)
class Unknown:
    """What only a run could tell: a command substitution, or an unknown piece of text that is parsed again."""

    piece: Piece
    quoted: bool


@dataclass(frozen=True, slots=True)
class Substitution(Unknown):
    """A command substitution whose output may follow from its text alone."""

    command: Simple


Segment = Literal | Parameter | Arithmetic | Unknown
Segments = tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class ShellWord:
    segments: Segments
    raw: str
    line: int

    @property
    def plain(self) -> str | None:
        """Its text where nothing in it is expanded."""
        parts = [segment.text for segment in self.segments if isinstance(segment, Literal)]
        return "".join(parts) if len(parts) == len(self.segments) else None


@dataclass(frozen=True, slots=True)
class Assignment:
    """``name=value``, ``name+=value``, ``name[subscript]=value`` or ``name=( … )``."""

    name: str
    append: bool
    subscript: Segments | None
    value: ShellWord | None
    elements: tuple[tuple[Segments | None, ShellWord], ...] | None
    line: int


@dataclass(slots=True)
class Redirect:
    """``body`` is filled in for a here-document, where its text begins after the line."""

    operator: str
    target: ShellWord
    body: Segments | None = None


@dataclass(frozen=True, slots=True)
class Simple:
    assignments: tuple[Assignment, ...]
    words: tuple[ShellWord | Assignment, ...]
    redirects: tuple[Redirect, ...]
    raw: str
    line: int


@dataclass(frozen=True, slots=True)
class Conditional:
    """``[[ … ]]``: words and operators."""

    tokens: tuple[ShellWord | str, ...]
    raw: str
    line: int


@dataclass(frozen=True, slots=True)
class ArithmeticCommand:
    expression: Segments
    raw: str
    line: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    commands: tuple[Command, ...]
    negated: bool
    line: int


@dataclass(frozen=True, slots=True)
class AndOr:
    """A list of pipelines; each but the first stands behind ``&&`` or ``||``. ``end`` is its offset in the source."""

    first: Pipeline
    rest: tuple[tuple[str, Pipeline], ...]
    line: int
    end: int


Body = tuple[AndOr, ...]


@dataclass(frozen=True, slots=True)
class Group:
    body: Body
    subshell: bool
    line: int


@dataclass(frozen=True, slots=True)
class If:
    arms: tuple[tuple[Body, Body], ...]
    otherwise: Body
    line: int


@dataclass(frozen=True, slots=True)
class Case:
    subject: ShellWord
    items: tuple[tuple[tuple[ShellWord, ...], Body, int], ...]
    line: int


@dataclass(frozen=True, slots=True)
class For:
    """``words`` is None for a loop over the positional parameters."""

    name: str
    words: tuple[ShellWord, ...] | None
    body: Body
    line: int
    start: int


@dataclass(frozen=True, slots=True)
class CountingFor:
    """``header`` is what `((…; …; …))` does at first, asks, and does behind every round; ``raw`` all of it."""

    header: tuple[tuple[ArithmeticCommand, ...], ...]
    raw: str
    body: Body
    line: int
    start: int


@dataclass(frozen=True, slots=True)
class While:
    condition: Body
    body: Body
    until: bool
    line: int
    start: int


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    body: Command
    names: frozenset[str] = field(compare=False)  # every name in its text
    line: int = 0


Command = Simple | Conditional | ArithmeticCommand | Group | If | Case | For | CountingFor | While | Function
