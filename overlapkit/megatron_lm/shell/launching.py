"""Commands that may be a launch, or a script that holds one."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from overlapkit.errors import printable
from overlapkit.megatron_lm.shell.commands import Found, examine, likelihood
from overlapkit.megatron_lm.shell.environment import changed
from overlapkit.megatron_lm.shell.expansion import Expansion
from overlapkit.megatron_lm.shell.splitting import may_be_several
from overlapkit.megatron_lm.shell.state import Branch, State, Written
from overlapkit.megatron_lm.shell.text import (
    MAX_WRITTEN,
    Piece,
    Source,
    Text,
    known,
    to_word,
    why_unknown,
    written,
)
from overlapkit.megatron_lm.shell.tree import Function, Redirect, Simple
from overlapkit.megatron_lm.shell.written import base, targets
from overlapkit.megatron_lm.words import Word

_LIST_NAME = re.compile(r"\$[@*]|\[[@*]|\{[@*]|(args|opts|options?|flags|params|extra)\W*\Z", re.IGNORECASE)
_FLAG = re.compile(r"--[\w-]+[ \t]+\Z")
_NAMED_VALUE = re.compile(r"--[\w-]+=")
_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+([^\n#]*)", re.MULTILINE)
_HEAD = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*")


@dataclass(frozen=True, slots=True)
class Record:
    """A launch as it was met in one state. ``around`` are the chains of branches that it stands in."""

    line: int
    place: tuple[str, ...]
    path: dict[Branch, frozenset[bool]]
    around: frozenset[int]
    taken: bool
    contrary: bool
    likelihood: int
    launcher: tuple[Word, ...]
    arguments: tuple[Word, ...]
    exports: dict[str, Word] | None
    notes: tuple[str, ...]
    only_written: bool = False  # in a script that nothing here runs


class Launching(ABC):
    """What the walk has met so far, and the commands outside the shell."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.unread: list[tuple[int, str]] = []  # notes that hold for every launch, with their line
        self.other_files: list[str] = []
        self.hidden: list[tuple[int, str]] = []  # commands of which only a run could tell what they are
        self.ended: list[State] = []
        self.enclosing: list[int] = []
        self.place: tuple[str, ...] = ()
        self.assigned: frozenset[str] = frozenset()
        self.function_names: frozenset[str] = frozenset()
        self.launcher: tuple[Word, ...] = ()
        self.started: set[int] = set()  # lines of the commands that write a script which is run
        self.only_written = False
        self.line = 1

    @abstractmethod
    def charge(self, amount: int) -> None: ...

    @abstractmethod
    def expansion(self, state: State) -> Expansion: ...

    @abstractmethod
    def run(self, source: Source, states: list[State]) -> list[State]: ...

    @abstractmethod
    def call(self, function: Function, arguments: tuple[Text, ...], fixed: set[str], state: State) -> list[State]: ...

    # Scripts within the script

    def _child(self, script: Text, state: State, environment: dict[str, Text], arguments: tuple[Text, ...]) -> None:
        """A script in a process of its own: it sees what is exported, and changes nothing here."""
        hidden = {
            name: f"${name} is not exported to the script of line {self.line}"
            for name in state.variables
            if name not in environment
        }
        inner = replace(
            state.copy(),
            variables=dict(environment),
            exported=set(environment),
            kinds={},
            positional=arguments,
            calls=[],
            hidden=hidden,
            exports_all=False,
        )
        inner.fixed &= set(environment)
        kept = self.place, self.line, self.ended
        self.place = (*self.place, f"run {self.line}")
        self.run(self._checked(script), [inner])
        self.place, self.line, self.ended = kept

    def _checked(self, value: Text) -> Source:
        source = Source.of_value(value)
        self.charge(len(value))
        return source

    def _directives(self, source: Source) -> tuple[Word, ...]:
        """``#SBATCH`` lines say what an `sbatch` in front of the launch would; they end where commands begin."""
        words: list[Word] = []
        for found in _DIRECTIVE.finditer(source.text, 0, _HEAD.match(source.text).end()):  # type: ignore[union-attr]
            line = source.line_at(found.start())
            words += [Word("sbatch", "#SBATCH", line)] if not words else []
            for part in re.finditer(r"\S+", found.group(1)):
                offset = found.start(1)
                words.append(_directive_word(source, offset + part.start(), offset + part.end()))
                if re.match(r"--export=(?!.*\bALL\b)", part.group()) and "srun" in source.text:
                    shown = printable(words[-1].written)
                    note = f"line {line}: #SBATCH {shown} holds for srun too, unless that has an --export of its own"
                    self.unread.append((0, note))
        return tuple(words)

    # Commands that may be a launch

    def _environment(self, command: Simple, state: State) -> dict[str, Text]:
        """The environment of a command: what is exported, and what stands before it."""
        inner = state.copy()
        expansion = self.expansion(inner)
        for assignment in command.assignments:
            expansion.assign(assignment)
        names = sorted(state.exported) + [assignment.name for assignment in command.assignments]
        return {name: value for name in names if (value := inner.scalar(name)) is not None}

    def _input(self, redirects: tuple[Redirect, ...], state: State) -> Text | None:
        for redirect in redirects:
            if redirect.body is not None:
                return self.expansion(state).text(redirect.body)
            if redirect.operator == "<<<":
                return (*self.expansion(state).text(redirect.target.segments), Piece("\n", "", redirect.target.line))
        return None

    def _external(self, fields: list[Text], command: Simple, state: State) -> None:
        name = (known(fields[0]) or "").rsplit("/", 1)[-1]
        if name.startswith("--"):
            text = f"line {self.line}: {printable(name)} begins a command of its own, as a comment or a missing \\ "
            self.unread.append((0, text + "ends the one above it"))
            return
        if name in ("cat", "tee"):
            self._file_written(fields, command, state)
            return
        found = examine(fields, state.files)
        if found.kind == "other" and known(fields[0]) is None:
            text = f"line {self.line} runs {printable(written(fields[0]))}: {why_unknown(fields[0])}"
            self.hidden.append((self.line, text))
        if found.kind == "other" and not command.redirects:
            if name.endswith((".sh", ".slurm", ".sbatch")):
                self.other_files.append(f"line {self.line} runs {printable(name)}")
            return
        environment, kept_back = changed(self._environment(command, state), found.changes)
        if found.notes or kept_back:
            state = state.copy()  # they hold for this launch alone
            for note in (*found.notes, *kept_back):
                state.note(note)
        if found.kind == "launch":
            self._record(fields, found, environment, command.line, state)
            return
        if found.kind == "file":
            file = state.files.get(found.file.rsplit("/", 1)[-1])
            if file is None:
                self.other_files.append(f"line {self.line} runs {printable(found.file)}")
            else:
                self.started.add(file.line)
                self._nested(file.text, fields, found, environment, state)
            return
        script = found.script if found.kind == "script" else self._input(command.redirects, state)
        if script and (found.kind in ("script", "input") or name in ("srun", "ssh", "mpirun", "docker")):
            self._nested(script, fields, found, environment, state)

    def _nested(
        self, script: Text, fields: list[Text], found: Found, environment: dict[str, Text], state: State
    ) -> None:
        before = self.launcher
        outer = [field for field in fields if field is not found.script]
        source = Source.of_value(script)
        self.launcher = (*before, *self._directives(source), *self._words(outer, self.line))  # the last one counts
        self._child(script, state, environment, found.script_arguments)
        self.launcher = before

    def _file_written(self, fields: list[Text], command: Simple, state: State) -> None:
        """``cat > job.sh <<EOF``: kept until something runs it."""
        body = self._input(command.redirects, state)
        if body is None:
            return
        appends = any(redirect.operator.endswith(">>") for redirect in command.redirects)
        environment = self._environment(command, state)
        for target in targets(fields, command.redirects, self.expansion(state)):
            before = state.files.get(base(target)) if appends else None
            text = body if before is None else before.text + body
            file = Written(text, environment, command.line, self.place, tuple(self.enclosing))
            state.files = {**state.files, base(target): file}

    def follow_what_is_only_written(self, states: list[State]) -> None:
        """The scripts that these states have written and nothing has run: somebody will."""
        self.only_written = True
        for state in states:
            for file in state.files.values():
                if file.line not in self.started and any(".py" in (piece.text or "") for piece in file.text):
                    self.line, self.place, self.enclosing = file.line, file.place, list(file.around)
                    self._nested(file.text, [], Found(), dict(file.environment), state)

    def _words(self, fields: list[Text], line: int) -> list[Word]:
        return [to_word(field, line) for field in fields]

    def _record(self, fields: list[Text], found: Found, environment: dict[str, Text], line: int, state: State) -> None:
        program, rest = fields[found.program], fields[found.program + 1 :]
        sure = likelihood("".join(piece.text or "" for piece in program), rest)
        arguments, notes = self.arguments(rest, state)
        self.charge(10 + len(fields))
        self.records.append(
            Record(
                line=line,
                place=self.place,
                path=dict(state.path),
                around=frozenset(self.enclosing),
                taken=state.taken,
                contrary=bool(state.contrary),
                likelihood=sure,
                launcher=(*self.launcher, *self._words(fields[: found.program], line)),
                arguments=arguments,
                exports={name: to_word(value, line) for name, value in environment.items()},
                notes=(*state.notes, *notes),
                only_written=self.only_written,
            )
        )

    def arguments(self, fields: list[Text], state: State | None = None) -> tuple[tuple[Word, ...], list[str]]:
        """An unknown where a flag may stand is a note; one behind a flag that takes a value is that value."""
        words: list[Word] = []
        notes: list[str] = []
        flag, given = "", 0  # the last flag, and how many words have stood behind it
        for field in fields:
            if _may_hold_flags(field, flag, given):
                if field[0].absent and self._is_set_elsewhere(field[0], state):
                    continue  # empty on this way through the script
                reason = why_unknown(field)
                shown = printable(written(field))
                notes.append(f"line {field[0].line}: {shown} may hold flags that are not read: {reason}")
            else:
                words.append(to_word(field, field[0].line if field else self.line))
                is_flag = (words[-1].text or "").startswith("--")
                flag, given = (words[-1].text or "", 0) if is_flag else (flag, given + 1)
                if (text := known(field)) and text[-1] in " \t" and (text.isspace() or _FLAG.match(text)):
                    line = field[0].line
                    notes.append(f"line {line}: a blank stands behind the \\, so that the line is not continued")
        return tuple(words), notes

    def _is_set_elsewhere(self, piece: Piece, state: State | None) -> bool:
        found = re.search(r"[A-Za-z_]\w*", piece.written)
        name = found.group() if found else ""
        return name in self.assigned and (state is None or name not in state.variables)


def _may_hold_flags(field: Text, flag: str, given: int) -> bool:
    """Whether an argument is unknown and stands where a flag could: behind ``given`` words after ``flag``."""
    if known(field) is not None or _NAMED_VALUE.match(field[0].text or ""):
        return False
    if (field[0].text or "").startswith("--"):
        return True
    is_list = may_be_several(field) and _LIST_NAME.search(written(field)) is not None
    if is_list or not flag:
        return True
    takes = _values_of(flag)
    if isinstance(takes, int):
        return given >= takes
    return given > 0 and may_be_several(field)


def _values_of(flag: str) -> int | str:
    """How many values a flag takes; of one that no Megatron-LM has nobody knows."""
    from overlapkit.megatron_lm.flags import flags_of

    if "=" in flag:
        return 0
    found = flags_of(None, doubtful=True).get(flag)
    return "*" if found is None else found.values


def _directive_word(source: Source, start: int, stop: int) -> Word:
    unknown = [piece for offset in range(start, stop) if (piece := source.unknown_at(offset))]
    text = source.raw(start, stop)
    shown = printable(text, limit=MAX_WRITTEN)
    return Word(None if unknown else text, shown, source.line_at(start), why_unknown(tuple(unknown)))
