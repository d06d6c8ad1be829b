"""Simple commands: the builtins that change what a launch gets."""

from __future__ import annotations

import re

from overlapkit.errors import printable
from overlapkit.megatron_lm.shell.commands import split_assignment
from overlapkit.megatron_lm.shell.expansion import Expansion
from overlapkit.megatron_lm.shell.launching import Launching
from overlapkit.megatron_lm.shell.scanner import Scanner
from overlapkit.megatron_lm.shell.splitting import names_in
from overlapkit.megatron_lm.shell.state import State
from overlapkit.megatron_lm.shell.text import (
    Piece,
    Source,
    Text,
    as_value,
    known,
    written,
)
from overlapkit.megatron_lm.shell.tree import ArithmeticCommand, Assignment, ShellWord, Simple

_DECLARATIONS = frozenset({"declare", "export", "local", "readonly", "typeset"})
_ARITHMETIC_EFFECT = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:([-+*/%]?)=(?!=)(.*)|(\+\+|--)\s*)", re.DOTALL)
_CHANGED_NAME = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_ASSIGNED = re.compile(r"(?:^|[\s;({])([A-Za-z_]\w*)\+?=", re.MULTILINE)


class Builtins(Launching):
    """The part of the walk that follows simple commands, in one state each."""

    # One simple command

    def simple(self, command: Simple, state: State) -> list[State]:
        self.line = command.line
        self.charge(3 + len(command.words))
        expansion = self.expansion(state)
        first = command.words[0] if command.words else None
        if first is None:
            for assignment in command.assignments:
                expansion.assign(assignment)
            return [state]
        if isinstance(first, ShellWord) and first.plain in _DECLARATIONS:
            self._declare(first.plain or "", command, state)
            return [state]
        fields = expansion.fields([word for word in command.words if isinstance(word, ShellWord)])
        if not fields:
            return [state]
        name = known(fields[0])
        if name in ("command", "builtin", "exec", "nohup", "time") and len(fields) > 1:
            fields = fields[1:]
            name = known(fields[0])
        if name in state.functions:
            self._prefix(command, state, expansion)
            fixed = _fixed_arguments([w for w in command.words if isinstance(w, ShellWord)], len(fields), state)
            return self.call(state.functions[name or ""], tuple(map(as_value, fields[1:])), fixed, state)
        return self._builtin(name or "", fields, command, state)

    def _prefix(self, command: Simple, state: State, expansion: Expansion) -> None:
        for assignment in command.assignments:
            expansion.assign(assignment)
            state.exported.add(assignment.name)

    def _builtin(self, name: str, fields: list[Text], command: Simple, state: State) -> list[State]:
        if name == "exit":
            self.ended.append(state)
            return []
        if name in ("return", "break", "continue"):
            state.flow = name
        elif name == "eval":
            return self._eval(fields[1:], state)
        elif name in ("source", "."):
            self._not_read(fields, state)
        elif name == "unset":
            for field in fields[1:]:
                state.variables.pop(known(field) or "", None)
                state.exported.discard(known(field) or "")
        elif name == "shift":
            self._shift(known(fields[1]) if len(fields) > 1 else "1", state)
        elif name == "set":
            self._set(fields, state)
        elif name in ("read", "mapfile", "readarray"):
            self._read(name, fields, command, state)
        elif name == "let":
            for field in fields[1:]:
                self._count(known(field) or written(field), state)
        elif name == "printf" and len(fields) > 2 and known(fields[1]) == "-v":
            self._unknown(known(fields[2]) or "", state)
        elif name not in ("echo", "printf", ":", "true", "test", "[", "cd", "mkdir"):
            self._external(fields, command, state)
        return [state]

    # Variables

    def _declare(self, name: str, command: Simple, state: State) -> None:
        expansion = self.expansion(state)
        options = ""
        for word in command.words[1:]:
            if isinstance(word, Assignment):
                self._localise(name, word.name, state)
                expansion.assign(word)
                self._export(name, options, word.name, state)
                continue
            for field in expansion.fields([word]):
                text = known(field)
                pair = split_assignment(field)
                if pair:
                    self._localise(name, pair[0], state)
                    state.set(pair[0], as_value(pair[1]), self.line)
                    state.fixed.discard(pair[0])
                    self._export(name, options, pair[0], state)
                elif text is None:
                    state.note(f"line {self.line}: what {name} {printable(written(field))} sets is not known")
                elif text.startswith(("-", "+")):
                    options += text
                elif text.isidentifier():
                    self._localise(name, text, state)
                    if name == "local":
                        state.set(text, (), self.line)
                    self._export(name, options, text, state)

    def _localise(self, declaration: str, name: str, state: State) -> None:
        if state.calls and declaration in ("local", "declare", "typeset"):
            state.calls[-1].saved.setdefault(name, state.variables.get(name))

    def _export(self, declaration: str, options: str, name: str, state: State) -> None:
        if "-n" in options and declaration == "export":
            state.exported.discard(name)
        elif declaration == "export" or re.search(r"-[A-Za-z]*x", options):
            state.exported.add(name)

    def _unknown(self, name: str, state: State) -> None:
        if name.isidentifier():
            state.set(name, (Piece(None, f"${name}", self.line, f"${name} is only known at run time"),), self.line)
            state.fixed.discard(name)

    def _read(self, command_name: str, fields: list[Text], command: Simple, state: State) -> None:
        names = [text for field in fields[1:] if (text := known(field)) and text.isidentifier()]
        for name in names:
            self._unknown(name, state)
        body = self._input(command.redirects, state)
        if command_name == "read" and names and body is not None and command.redirects[-1].body is not None:
            state.set(names[-1], as_value(body), self.line)

    def _shift(self, count: str | None, state: State) -> None:
        number = int(count) if count and re.fullmatch(r"\d{1,4}", count) else 1
        state.shift(number)

    def _set(self, fields: list[Text], state: State) -> None:
        texts = [known(field) for field in fields]
        if "-a" in texts or "allexport" in texts:
            state.exports_all = "+a" not in texts and "+o" not in texts
        elif "+a" in texts:
            state.exports_all = False
        if "--" in texts and not any(piece.many for field in fields for piece in field):
            state.positional, state.shifted = tuple(map(as_value, fields[texts.index("--") + 1 :])), 0

    def arithmetic_effects(self, command: ArithmeticCommand, state: State) -> None:
        text = known(self.expansion(state).text(command.expression))
        self._count(text or command.raw, state)

    def _count(self, expression: str, state: State) -> None:
        """``name=…``, ``name+=…`` and ``name++``; what changes in any other way is unknown from here on."""
        found = _ARITHMETIC_EFFECT.fullmatch(expression.strip("() \t\n"))
        if found:
            name, operator, right = found.group(1), found.group(2), found.group(3)
            if found.group(4):
                operator, right = found.group(4)[0], "1"
            whole = f"{name}{operator}({right})" if operator else right
            source = Source.of_value((Piece(whole, whole, self.line),))
            piece = self.expansion(state).arithmetic(Scanner(source).quoted_text(), expression, self.line)
            state.set(name, (piece,), self.line)
            return
        for match in _CHANGED_NAME.finditer(expression):
            self._unknown(match.group(1) or match.group(2), state)

    # Other scripts

    def _not_read(self, fields: list[Text], state: State) -> None:
        if len(fields) > 1:
            file = printable(known(fields[1]) or written(fields[1]))
            self.other_files.append(f"line {self.line} reads {file}")
            state.note(f"line {self.line}: what {file} sets is not read")

    def _eval(self, fields: list[Text], state: State) -> list[State]:
        value: Text = ()
        for field in fields:
            value = (*value, Piece(" ", " ", self.line), *field) if value else field
        return self.run(self._checked(value), [state]) if value else [state]

    def run_file(self, source: Source, states: list[State]) -> list[State]:
        """Follows the script itself."""
        self.launcher = self._directives(source)
        self.assigned = frozenset(_ASSIGNED.findall(source.text))
        return self.run(source, states)


def _fixed_arguments(words: list[ShellWord], count: int, state: State) -> set[str]:
    """Which arguments of a function are settled: those written out, and those of settled variables."""
    settled = [all(map(state.is_fixed, names_in(word.segments))) for word in words]
    if len(words) != count:
        settled = [all(settled)] * count
    return {str(number) for number in range(1, count) if settled[number]}
