"""Commands that may be a launch, or a script that holds one."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from overlapkit.errors import printable
from overlapkit.megatron_lm.shell.commands import Found, examine, likelihood
from overlapkit.megatron_lm.shell.expansion import Expansion
from overlapkit.megatron_lm.shell.splitting import may_be_several
from overlapkit.megatron_lm.shell.state import Branch, State
from overlapkit.megatron_lm.shell.text import (
    MAX_WRITTEN,
    Piece,
    Source,
    Text,
    as_value,
    known,
    to_word,
    why_unknown,
    written,
)
from overlapkit.megatron_lm.shell.tree import Function, Redirect, Simple
from overlapkit.megatron_lm.words import Word

_LIST_NAME = re.compile(r"\$[@*]|\[[@*]|\{[@*]|(args|opts|options?|flags|params|extra)\W*\Z", re.IGNORECASE)
_NO_SCRIPT = (".py", ".json", ".yaml", ".yml", ".txt", ".toml", ".cfg", ".md", ".xml", ".ini", ".conf")
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
    likelihood: int
    launcher: tuple[Word, ...]
    arguments: tuple[Word, ...]
    exports: dict[str, Word] | None
    notes: tuple[str, ...]


class Launching:
    """What the walk has met so far, and the commands outside the shell."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.unread: list[tuple[int, str]] = []  # notes that hold for every launch, with their line
        self.other_files: list[str] = []
        self.ended: list[State] = []
        self.enclosing: list[int] = []
        self.place: tuple[str, ...] = ()
        self.assigned: frozenset[str] = frozenset()
        self.function_names: frozenset[str] = frozenset()
        self.launcher: tuple[Word, ...] = ()
        self.written_files: set[str] = set()
        self.line = 1

    def charge(self, amount: int) -> None:
        raise NotImplementedError

    def expansion(self, state: State) -> Expansion:
        raise NotImplementedError

    def run(self, source: Source, states: list[State]) -> list[State]:
        raise NotImplementedError

    def call(self, function: Function, arguments: tuple[Text, ...], fixed: set[str], state: State) -> list[State]:
        raise NotImplementedError

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
                return self.expansion(state).text(redirect.target.segments)
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
        found = examine(fields)
        if found.kind == "other" and not command.redirects:
            if name.endswith((".sh", ".slurm", ".sbatch")) and name not in self.written_files:
                self.other_files.append(f"line {self.line} runs {printable(name)}")
            return
        environment = self._passed_on(found, self._environment(command, state))
        if found.kind == "launch":
            self._record(fields, found, environment, command.line, state)
            return
        if found.kind == "file":
            if found.file.rsplit("/", 1)[-1] not in self.written_files:
                self.other_files.append(f"line {self.line} runs {printable(found.file)}")
            return
        script = found.script if found.kind == "script" else self._input(command.redirects, state)
        if script and (found.kind in ("script", "input") or name in ("srun", "ssh", "mpirun", "docker")):
            self._nested(script, fields, found, environment, state)

    def _passed_on(self, found: Found, environment: dict[str, Text]) -> dict[str, Text]:
        passed = {} if found.isolated else dict(environment)
        for name, value in found.environment:
            if value is not None:
                passed[name] = as_value(value)
            elif name in environment:
                passed[name] = environment[name]
        return passed

    def _nested(
        self, script: Text, fields: list[Text], found: Found, environment: dict[str, Text], state: State
    ) -> None:
        before = self.launcher
        outer = [field for field in fields if field is not found.script]
        source = Source.of_value(script)
        self.launcher = (*before, *self._words(outer, self.line), *self._directives(source))
        self._child(script, state, environment, found.script_arguments)
        self.launcher = before

    def _file_written(self, fields: list[Text], command: Simple, state: State) -> None:
        """``cat > job.sh <<EOF``: the script that is written there."""
        targets = [redirect.target.plain or "" for redirect in command.redirects if redirect.operator.startswith(">")]
        targets += [known(field) or "" for field in fields[1:] if known(fields[0]) == "tee"]
        body = self._input(command.redirects, state)
        text = "".join(piece.text or "" for piece in body or ())
        if not targets or body is None or targets[0].endswith(_NO_SCRIPT) or ".py" not in text:
            return
        self.written_files.update(target.rsplit("/", 1)[-1] for target in targets)
        self._nested(body, [], Found(), self._environment(command, state), state)

    def _words(self, fields: list[Text], line: int) -> list[Word]:
        return [to_word(field, line) for field in fields]

    def _record(self, fields: list[Text], found: Found, environment: dict[str, Text], line: int, state: State) -> None:
        program, rest = fields[found.program], fields[found.program + 1 :]
        sure = likelihood("".join(piece.text or "" for piece in program), rest)
        arguments, notes = self.arguments(rest)
        self.charge(10 + len(fields))
        self.records.append(
            Record(
                line=line,
                place=self.place,
                path=dict(state.path),
                around=frozenset(self.enclosing),
                taken=state.taken,
                likelihood=sure,
                launcher=(*self.launcher, *self._words(fields[: found.program], line)),
                arguments=arguments,
                exports={name: to_word(value, line) for name, value in environment.items()},
                notes=(*state.notes, *notes),
            )
        )

    def arguments(self, fields: list[Text]) -> tuple[tuple[Word, ...], list[str]]:
        """An unknown that may be any number of flags is a note; one behind a flag is taken for its value."""
        words: list[Word] = []
        notes: list[str] = []
        for field in fields:
            before = words[-1].text if words else None
            is_value = before is not None and before.startswith("--") and "=" not in before
            if may_be_several(field) and not (is_value and not _LIST_NAME.search(written(field))):
                if field[0].absent and self._is_set_elsewhere(field[0]):
                    continue  # empty on this way through the script
                reason = why_unknown(field)
                shown = printable(written(field))
                notes.append(f"line {field[0].line}: {shown} may hold flags that are not read: {reason}")
            else:
                words.append(to_word(field, field[0].line if field else self.line))
        return tuple(words), notes

    def _is_set_elsewhere(self, piece: Piece) -> bool:
        found = re.search(r"[A-Za-z_]\w*", piece.written)
        return found is not None and found.group() in self.assigned


def _directive_word(source: Source, start: int, stop: int) -> Word:
    unknown = [piece for offset in range(start, stop) if (piece := source.unknown_at(offset))]
    text = source.raw(start, stop)
    shown = printable(text, limit=MAX_WRITTEN)
    return Word(None if unknown else text, shown, source.line_at(start), why_unknown(tuple(unknown)))
