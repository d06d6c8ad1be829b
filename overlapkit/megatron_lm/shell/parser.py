"""Words -> commands: the grammar of bash as far as launch scripts use it."""

from __future__ import annotations

import re
from collections.abc import Callable

from overlapkit.megatron_lm.shell.cases import Item, case_of
from overlapkit.megatron_lm.shell.scanner import METACHARACTERS, Builder, Scanner
from overlapkit.megatron_lm.shell.simple_parser import SimpleParser
from overlapkit.megatron_lm.shell.substitution import MAY_BE_TEXT
from overlapkit.megatron_lm.shell.text import ShellError, Source
from overlapkit.megatron_lm.shell.tree import (
    AndOr,
    ArithmeticCommand,
    Body,
    Case,
    Command,
    CountingFor,
    For,
    Function,
    Group,
    If,
    Pipeline,
    ShellWord,
    Simple,
    Substitution,
    While,
)

MAX_COMMANDS = 5_000  # of a list or a pipeline
_MAX_SUBSTITUTIONS = 1_000  # of a source that are read; further ones are unknown
_CLOSERS = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})
_FUNCTION = re.compile(r"([A-Za-z_][\w.:-]*)[ \t]*\([ \t]*\)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_COPROCESS = re.compile(r"[A-Za-z_]\w*[ \t]+(?=[{(]|(?:if|for|while|until|case|select|\[\[)\s)")


class Parser(SimpleParser):
    """Statement by statement, as bash reads a script: what stands before an error counts."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.ready: list[AndOr] = []
        self.substitutions = 0

    def statement(self) -> AndOr | None:
        """The next statement, None at the end.

        Raises:
            ShellError: not shell text from here on.
        """
        if not self.ready:
            self._read_line()
        return self.ready.pop(0) if self.ready else None

    def _read_line(self) -> None:
        """One statement, and with a here-document all others of its line: its text stands behind them."""
        self._separators()
        while self.position < self.end:
            stray = self._reserved() or self.peek()
            if stray in _CLOSERS or stray == ")":
                raise self.error(f"nothing is open that {stray} could close")
            self.ready.append(self._and_or())
            self._separators(";&")
            if not self.pending:
                return
            if self.peek() in ("\n", ""):
                self._separators("\n")
                return

    def _substitution(self, builder: Builder, start: int, line: int, quoted: bool) -> None:
        found = MAY_BE_TEXT.match(self.text, start, self.position) if self.substitutions < _MAX_SUBSTITUTIONS else None
        self.substitutions += found is not None
        command = self._inner(start + (2 if found.group().startswith("$") else 1)) if found else None
        if command is None:
            super()._substitution(builder, start, line, quoted)
        else:
            builder.append(Substitution(self._hidden(start, line), quoted, command))

    def _inner(self, start: int) -> Simple | None:
        """The command of the substitution that ends here, if it is a single one."""
        inner = Parser(self.source)
        inner.position, inner.end, inner.depth = start, self.position - 1, self.depth
        inner.deeper()
        try:
            statement, more = inner.statement(), inner.statement()
        except ShellError as error:
            if error.fatal:
                raise
            return None
        if statement is None or more is not None or statement.rest or len(statement.first.commands) > 1:
            return None
        command = statement.first.commands[0]
        return command if isinstance(command, Simple) else None

    # Lists

    def _body(self, closers: tuple[str, ...]) -> Body:
        """Statements up to one of the closing words, which stays unread."""
        self.deeper()
        line = self.line()
        statements: list[AndOr] = []
        while True:
            self._separators()
            if self.position >= self.end:
                raise self.error(f"{closers[0]} is missing behind this", line)
            closer = self._reserved() or (";;" if self.text.startswith((";;", ";&"), self.position) else self.peek())
            if closer in closers:
                self.depth -= 1
                return tuple(statements)
            if closer in _CLOSERS or closer in (")", ";;"):
                raise self.error(f"{closer} stands where {closers[0]} is missing")
            statements.append(self._and_or())

    def _and_or(self) -> AndOr:
        line = self.line()
        first = self._pipeline()
        rest: list[tuple[str, Pipeline]] = []
        while True:
            self._blanks()
            operator = self.peek(2)
            if operator not in ("&&", "||"):
                return AndOr(first, tuple(rest), line, self.position)
            self.position += 2
            self._newlines()
            rest.append((operator, self._pipeline()))
            self.limit(len(rest), MAX_COMMANDS, "commands in a list", line)

    def _pipeline(self) -> Pipeline:
        line, negated = self.line(), False
        beside = False  # a coprocess runs beside the script, in a process of its own
        while True:
            self._blanks()
            word = self._reserved()
            if word not in ("!", "time", "coproc"):
                break
            negated ^= word == "!"
            self.position += len(word)
            self._blanks()
            if word == "time" and self.peek(3) == "-p ":
                self.position += 3
            if word == "coproc":
                beside = True
                name = _COPROCESS.match(self.text, self.position, self.end)
                self.position = name.end() if name else self.position
        pipeline = Pipeline(self._piped(), negated, line)
        if not beside:
            return pipeline
        body = (AndOr(pipeline, (), line, self.position),)
        return Pipeline((Group(body, True, line),), False, line)

    def _piped(self) -> tuple[Command, ...]:
        line, commands = self.line(), [self._command()]
        while True:
            self._blanks()
            if self.peek() != "|" or self.peek(2) == "||":
                return tuple(commands)
            self.position += 2 if self.peek(2) == "|&" else 1
            self._newlines()
            commands.append(self._command())
            self.limit(len(commands), MAX_COMMANDS, "commands in a pipeline", line)

    # Commands

    def _command(self) -> Command:
        word = self._reserved()
        readers: dict[str, Callable[[], Command]] = {
            "if": self._if,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "function": self._function,
            "{": self._braces_group,
            "[[": self._conditional,
        }
        if word in _CLOSERS:
            raise self.error(f"{word} stands where a command is missing")
        if word in readers:
            return self._redirected(readers[word]())
        if self.text.startswith("((", self.position):
            return self._redirected(self._arithmetic_command())
        if self.peek() == "(":
            return self._redirected(self._subshell())
        if _FUNCTION.match(self.text, self.position, self.end):
            return self._function()
        return self._simple()

    def _redirected(self, command: Command) -> Command:
        """Redirections of a compound command say nothing about a launch."""
        while True:
            self._blanks()
            if self._redirect() is None:
                return command

    # Compound commands

    def _subshell(self) -> Group:
        line = self.line()
        self.position += 1
        body = self._body((")",))
        self.position += 1
        return Group(body, True, line)

    def _braces_group(self) -> Group:
        line = self.line()
        self.position += 1
        body = self._body(("}",))
        self.position += 1
        return Group(body, False, line)

    def _if(self) -> If:
        line = self.line()
        arms: list[tuple[Body, Body]] = []
        otherwise: Body = ()
        word = "if"
        while word in ("if", "elif"):
            self.position += len(word)
            condition = self._body(("then",))
            self._expect("then")
            arms.append((condition, self._body(("fi", "elif", "else"))))
            word = self._reserved() or ""
        if word == "else":
            self.position += 4
            otherwise = self._body(("fi",))
        self._expect("fi")
        return If(tuple(arms), otherwise, line)

    def _do(self) -> Body:
        self._separators()
        if self._reserved() == "{":
            return self._braces_group().body
        self._expect("do")
        body = self._body(("done",))
        self._expect("done")
        return body

    def _for(self) -> For | CountingFor:
        line, start = self.line(), self.position
        self.position += len(self._reserved() or "")
        self._blanks()
        if self.text.startswith("((", self.position):
            opened = self.position
            closed = self._closed(opened)
            raw = self.source.raw(opened, closed)
            return CountingFor(self._header(opened + 2, closed - 2), raw, self._do(), line, start)
        found = _NAME.match(self.text, self.position, self.end)
        if not found:
            raise self.error("for is not followed by a name")
        self.position = found.end()
        self._newlines()
        words: list[ShellWord] | None = None
        if re.compile(r"in(?=\s|;)").match(self.text, self.position, self.end):
            self.position += 2
            words = []
            while True:
                self._blanks()
                if self.position >= self.end or self.peek() in METACHARACTERS:
                    break
                words.append(self.word())
        return For(found.group(), None if words is None else tuple(words), self._do(), line, start)

    def _header(self, start: int, stop: int) -> tuple[tuple[ArithmeticCommand, ...], ...]:
        """The expressions of `for (( … ))`: three parts, each of any number between commas."""
        self.deeper()
        parts: list[list[ArithmeticCommand]] = [[]]
        for found in re.compile(r"[^;,]*([;,]?)").finditer(self.text, start, stop):
            first, last = found.start(), found.end() - len(found.group(1))
            raw = self.source.raw(first, last)
            if raw.strip():
                expression = Scanner(self.source, first, last, self.depth).quoted_text()
                parts[-1].append(ArithmeticCommand(expression, raw, self.source.line_at(first)))
            if found.group(1) == ";":
                parts.append([])
        self.depth -= 1
        return tuple(map(tuple, parts))

    def _while(self) -> While:
        line, start, word = self.line(), self.position, self._reserved() or ""
        self.position += len(word)
        condition = self._body(("do",))
        return While(condition, self._do(), word == "until", line, start)

    def _case(self) -> Case:
        line = self.line()
        self.position += 4
        self._blanks()
        subject = self.word()
        self._newlines()
        self._expect("in")
        items: list[tuple[Item, str, int]] = []
        while True:
            self._newlines()
            if self._reserved() == "esac":
                self.position += 4
                return case_of(subject, items, line)
            items.append(self._case_item())

    def _case_item(self) -> tuple[Item, str, int]:
        line, patterns = self.line(), []
        if self.peek() == "(":
            self.position += 1
        while True:
            self._blanks()
            patterns.append(self.word())
            self._blanks()
            if self.peek() != "|":
                break
            self.position += 1
        if self.peek() != ")":
            raise self.error("a pattern of case is not closed by )")
        self.position += 1
        body = self._body((";;", "esac"))
        offset, ending = self.position, next((end for end in (";;&", ";;", ";&") if self.peek(len(end)) == end), "")
        self.position += len(ending)
        return (tuple(patterns), body, line), ending, offset

    def _function(self) -> Function:
        line, start = self.line(), self.position
        if self._reserved() == "function":
            self.position += len("function")
            self._blanks()
            name = self.word().raw
            self._blanks()
            if self.peek() == "(":
                self.position = self._closed(self.position)
        else:
            found = _FUNCTION.match(self.text, self.position, self.end)
            assert found
            name, self.position = found.group(1), found.end()
        self._newlines()
        self.deeper()
        body = self._command()
        self.depth -= 1
        names = frozenset(re.findall(r"[A-Za-z_]\w*", self.text[start : self.position]))
        return Function(name, body, names, line)

    def _arithmetic_command(self) -> Command:
        line, start = self.line(), self.position
        stop = self._closed(start)
        if self.text[stop - 2 : stop] != "))":
            self.position = start
            return self._subshell()
        self.deeper()
        expression = Scanner(self.source, start + 2, stop - 2, self.depth).quoted_text()
        self.depth -= 1
        return ArithmeticCommand(expression, self.source.raw(start, stop), line)
