"""Simple commands: the builtins that change what a launch gets."""

from __future__ import annotations

import re

from overlapkit.errors import printable
from overlapkit.megatron_lm.shell import reading
from overlapkit.megatron_lm.shell.environment import split_assignment
from overlapkit.megatron_lm.shell.expansion import Expansion
from overlapkit.megatron_lm.shell.launching import Launching
from overlapkit.megatron_lm.shell.splitting import names_in
from overlapkit.megatron_lm.shell.state import Kind, State
from overlapkit.megatron_lm.shell.text import (
    Array,
    Piece,
    Source,
    Text,
    Value,
    as_value,
    known,
    written,
)
from overlapkit.megatron_lm.shell.tree import ArithmeticCommand, Assignment, ShellWord, Simple, Unknown

_DECLARATIONS = frozenset({"declare", "export", "local", "readonly", "typeset"})
_ELEMENT = re.compile(r"([A-Za-z_]\w*)\[(.+)\]", re.DOTALL)
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
        if name not in state.functions and name != "eval":
            return self._builtin(name or "", fields, command, state)
        kept = self._prefix(command, state, expansion)
        if name in state.functions:
            fixed = _fixed_arguments([w for w in command.words if isinstance(w, ShellWord)], len(fields), state)
            states = self.call(state.functions[name or ""], tuple(map(as_value, fields[1:])), fixed, state)
        else:
            states = self._eval(fields[1:], state)
        for result in states:
            for variable, (value, exported, is_fixed) in kept.items():
                _give_back(result, variable, value, exported=exported, fixed=is_fixed)
        return states

    def _prefix(
        self, command: Simple, state: State, expansion: Expansion
    ) -> dict[str, tuple[Value | None, bool, bool]]:
        """Makes the assignments in front of a function, which end with its call; returns what was there before."""
        kept: dict[str, tuple[Value | None, bool, bool]] = {}
        for assignment in command.assignments:
            name = assignment.name
            kept.setdefault(name, (state.variables.get(name), name in state.exported, name in state.fixed))
            expansion.assign(assignment)
            state.exported.add(name)
        return kept

    def _builtin(self, name: str, fields: list[Text], command: Simple, state: State) -> list[State]:
        if name == "exit":
            self.ended.append(state)
            return []
        if name in ("return", "break", "continue"):
            state.flow = name
        elif name in ("source", "."):
            self._not_read(fields, state)
        elif name == "unset":
            self._unset(fields[1:], state)
        elif name == "shift":
            self._shift(known(fields[1]) if len(fields) > 1 else "1", state)
        elif name == "set":
            self._set(fields, state)
        elif name in ("read", "mapfile", "readarray"):
            self._read(fields, command, state)
        elif name == "let":
            for field in fields[1:]:
                piece = self.expansion(state).evaluated(field, written(field), self.line)
                state.status = None if piece.text is None else piece.text != "0"
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
                self._begin(name, options, word.name, state)
                if state.kinds.get(word.name) == Kind("n"):
                    target = known(expansion.text(word.value.segments)) if word.value else None
                    self._refer(word.name, target or "", state)
                else:
                    expansion.assign(word)
                self._export(name, options, word.name, state)
                continue
            for field in expansion.fields([word]):
                text = known(field)
                pair = split_assignment(field)
                if pair:
                    value = ShellWord(tuple(Unknown(piece, True) for piece in pair[1]), written(pair[1]), self.line)
                    self._begin(name, options, pair[0], state)
                    expansion.assign(Assignment(pair[0], False, None, value, None, self.line))
                    self._export(name, options, pair[0], state)
                elif text is None:
                    state.note(f"line {self.line}: what {name} {printable(written(field))} sets is not known")
                elif text.startswith(("-", "+")):
                    options += text
                elif text.isidentifier():
                    self._begin(name, options, text, state)
                    if re.search("-[A-Za-z]*[aA]", options) and (name == "local" or text not in state.variables):
                        state.set(text, Array(), self.line)
                    elif name == "local" and text not in state.kinds:
                        state.set(text, (), self.line)
                    self._export(name, options, text, state)

    def _begin(self, declaration: str, options: str, name: str, state: State) -> None:
        """What a declaration makes of a name before it has a value."""
        if state.calls and declaration in ("local", "declare", "typeset") and not re.search(r"-[A-Za-z]*g", options):
            state.calls[-1].saved.setdefault(name, state.variables.get(name))
            state.kinds.pop(name, None)
        letter = re.search(r"-[A-Za-z]*(A)", options) or re.search(r"-[A-Za-z]*([iuln])", options)
        if letter and declaration != "export":
            state.kinds[name] = Kind(letter.group(1))

    def _refer(self, name: str, target: str, state: State) -> None:
        target = target if target.isidentifier() else ""
        state.kinds[name] = Kind("n", target)
        if target == name:  # of an outer variable of the same name
            del state.kinds[name]

    def _unset(self, fields: list[Text], state: State) -> None:
        of_functions = False
        for field in fields:
            text = known(field)
            if text is None:
                found = re.match(r"[A-Za-z_]\w*(?=\[)", written(field))
                self._lacks(state.target(found.group()) if found else "", written(field), state)
            elif text in ("-f", "-v", "-n"):
                of_functions = text == "-f"
            elif of_functions:
                state.functions.pop(text, None)
            elif element := _ELEMENT.fullmatch(text):
                self._unset_element(state.target(element[1]), element[2], state)
            else:
                state.drop(state.target(text), self.line)

    def _lacks(self, name: str, removed: str, state: State) -> None:
        """A list without an element of which only a run could tell which one it is."""
        state.note(f"line {self.line}: what unset {printable(removed)} removes is not known")
        if name:
            reason = f"${name} lacks {printable(removed)}, which is only known at run time"
            state.set(name, (Piece(None, f"${name}", self.line, reason, many=True),), self.line)

    def _unset_element(self, name: str, key: str, state: State) -> None:
        value = state.variables.get(name)
        if not isinstance(value, Array):
            return
        self.charge(len(value.items) // 2)
        if value.get(key) is None and not key.isdecimal() and state.kinds.get(name) != Kind("A"):
            index = self.expansion(state).evaluated((Piece(key, key, self.line),), key, self.line).text
            if index is None:
                self._lacks(name, f"{name}[{key}]", state)
                return
            position = int(index)
            key = value.items[position][0] if -len(value.items) <= position < 0 else index
        state.set(name, value.without(key), self.line)

    def _export(self, declaration: str, options: str, name: str, state: State) -> None:
        if ("-n" in options and declaration == "export") or re.search(r"\+[A-Za-z]*x", options):
            state.exported.discard(name)
        elif declaration == "export" or re.search(r"-[A-Za-z]*x", options):
            state.exported.add(name)

    def _unknown(self, name: str, state: State) -> None:
        if name.isidentifier():
            state.set(name, (Piece(None, f"${name}", self.line, f"${name} is only known at run time"),), self.line)
            state.fixed.discard(name)

    def _read(self, fields: list[Text], command: Simple, state: State) -> None:
        asked = reading.request(fields)
        body = self._input(command.redirects, state)
        inner = state.copy()
        for assignment in command.assignments:
            self.expansion(inner).assign(assignment)
        found = reading.values(asked, body, self.expansion(inner).ifs(), self.line)
        for name, value in found.items():
            given = None if isinstance(value, Array) else self.expansion(state).or_given(name, value, self.line)
            state.set(name, given or value, self.line)
            (state.fixed.add if given else state.fixed.discard)(name)

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
        piece = self.expansion(state).arithmetic(command.expression, command.raw, command.line)
        state.status = None if piece.text is None else piece.text != "0"

    # Other scripts

    def _not_read(self, fields: list[Text], state: State) -> None:
        if len(fields) > 1:
            file = printable(known(fields[1]) or written(fields[1]))
            self.other_files.append(f"line {self.line} reads {file}")
            state.note(f"line {self.line}: what {file} sets is not read")

    def _eval(self, fields: list[Text], state: State) -> list[State]:
        pieces: list[Piece] = []
        for field in fields:
            pieces += [Piece(" ", " ", self.line), *field] if pieces else field
        return self.run(self._checked(tuple(pieces)), [state]) if pieces else [state]

    def run_file(self, source: Source, states: list[State]) -> list[State]:
        """Follows the script itself."""
        self.launcher = self._directives(source)
        self.assigned = frozenset(_ASSIGNED.findall(source.text))
        return self.run(source, states)


def _give_back(state: State, name: str, value: Value | None, *, exported: bool, fixed: bool) -> None:
    """A variable as it was before the assignment in front of a command."""
    if value is None:
        state.variables.pop(name, None)
    else:
        state.variables[name] = value
    for names, is_in in ((state.exported, exported), (state.fixed, fixed)):
        (names.add if is_in else names.discard)(name)


def _fixed_arguments(words: list[ShellWord], count: int, state: State) -> set[str]:
    """Which arguments of a function are settled: those written out, and those of settled variables."""
    settled = [all(map(state.is_fixed, names_in(word.segments))) for word in words]
    if len(words) != count:
        settled = [all(settled)] * count
    return {str(number) for number in range(1, count) if settled[number]}
