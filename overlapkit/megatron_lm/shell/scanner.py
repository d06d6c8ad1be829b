"""Characters -> words: quotes, escapes and expansions."""

from __future__ import annotations

import re

from overlapkit.megatron_lm.shell.text import MAX_DEPTH, Piece, ShellError, Source
from overlapkit.megatron_lm.shell.tree import Arithmetic, Literal, Parameter, Segment, Segments, ShellWord, Unknown

METACHARACTERS = " \t\n;&|<>()"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!_-]")
_SHORT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]")
_OPERATOR = re.compile(r":[-=+?]|[-=+?]|##?|%%?|//?|\^\^?|,,?|@|:")
_RUN = re.compile(r"[^\\'\"$`\s;&|<>(){}\[\]/:\U000F0000-\U000FFFFD]+")
_AS_IT_STANDS = re.compile(r"[\U000F0000-\U000FFFFD]|[^\n\U000F0000-\U000FFFFD]+\n?|\n")
_ANSI = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}
_ANSI_CODE = re.compile(r"x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|([0-7]{1,3})")


class Builder:
    """Collects segments; literal text is cut after every line, so that each piece has one."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._text: list[str] = []
        self._line = 0
        self._quoted = False

    def add(self, text: str, line: int, quoted: bool) -> None:
        if self._text and (quoted != self._quoted or line != self._line):
            self.flush()
        if not self._text:
            self._line, self._quoted = line, quoted
        self._text.append(text)

    def flush(self) -> None:
        if self._text:
            self.segments.append(Literal("".join(self._text), self._line, self._quoted))
            self._text = []

    def append(self, segment: Segment) -> None:
        self.flush()
        self.segments.append(segment)


class Scanner:
    """Reads ``source`` from ``position`` to ``end``."""

    def __init__(self, source: Source, position: int = 0, end: int | None = None, depth: int = 0) -> None:
        self.source = source
        self.text = source.text
        self.position = position
        self.end = len(source.text) if end is None else end
        self.depth = depth

    def line(self) -> int:
        return self.source.line_at(min(self.position, max(self.end - 1, 0)))

    def error(self, problem: str, line: int | None = None) -> ShellError:
        return ShellError(problem, self.line() if line is None else line)

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ShellError(f"nested deeper than {MAX_DEPTH} levels", self.line(), fatal=True)

    def limit(self, count: int, most: int, what: str, line: int) -> None:
        if count > most:
            raise ShellError(f"more than {most:,} {what}", line, fatal=True)

    def peek(self, length: int = 1) -> str:
        return self.text[self.position : min(self.position + length, self.end)]

    def word(self, ends: str = METACHARACTERS) -> ShellWord:
        """The word that begins here, possibly of no characters."""
        start, line = self.position, self.line()
        builder = Builder()
        self._parts(builder, ends, quoted=False)
        return ShellWord(tuple(builder.segments), self.source.raw(start, self.position), line)

    def quoted_text(self) -> Segments:
        """All up to the end, as within double quotes: a here-document or an arithmetic expression."""
        builder = Builder()
        self._parts(builder, "", quoted=True)
        return tuple(builder.segments)

    def raw_text(self) -> Segments:
        """All up to the end as it stands: a here-document whose delimiter is quoted."""
        builder = Builder()
        self._as_it_stands(builder, self.position, self.end)
        self.position = self.end
        builder.flush()
        return tuple(builder.segments)

    def _as_it_stands(self, builder: Builder, start: int, stop: int) -> None:
        for part in _AS_IT_STANDS.finditer(self.text, start, stop):
            unknown = self.source.unknown_at(part.start())
            if unknown is not None:
                builder.append(Unknown(unknown, True))
            else:
                builder.add(part.group(), self.source.line_at(part.start()), True)

    def _parts(self, builder: Builder, ends: str, *, quoted: bool) -> None:
        """Segments up to a character of ``ends``; a ``"`` that does not end quoted text is a character like others."""
        while self.position < self.end:
            character = self.text[self.position]
            if character in ends:
                if character == "(" and not quoted and self._extended_pattern(builder):
                    continue
                break
            run = _RUN.match(self.text, self.position, self.end)
            if run:
                builder.add(run.group(), self.line(), quoted)
                self.position = run.end()
            elif character == "\\":
                self._escape(builder, quoted)
            elif character == "'" and not quoted:
                self._single_quotes(builder)
            elif character == '"' and (not quoted or "}" in ends):
                self._double_quotes(builder)
            elif character == "$":
                self._dollar(builder, quoted)
            elif character == "`":
                self._backticks(builder, quoted)
            else:
                self._character(builder, quoted)
        builder.flush()

    def _character(self, builder: Builder, quoted: bool) -> None:
        unknown = self.source.unknown_at(self.position)
        if unknown is not None:
            builder.append(Unknown(unknown, quoted))
        else:
            builder.add(self.text[self.position], self.line(), quoted)
        self.position += 1

    def _extended_pattern(self, builder: Builder) -> bool:
        """``@( … )`` and the like, kept as text that no pattern is matched against."""
        if self.position == 0 or self.text[self.position - 1] not in "@?+!*":
            return False
        start = self.position
        builder.add(self.source.raw(start, self._closed(start)), self.line(), False)
        return True

    def _escape(self, builder: Builder, quoted: bool) -> None:
        line, following = self.line(), self.text[self.position + 1 : min(self.position + 2, self.end)]
        self.position = min(self.position + 2, self.end)
        if following == "\n":
            return
        if quoted and following not in ("$", "`", '"', "\\"):
            builder.add("\\", line, quoted)
            self.position -= len(following)
        else:
            builder.add(following or "\\", line, True)

    def _single_quotes(self, builder: Builder) -> None:
        start, close = self.position + 1, self.text.find("'", self.position + 1, self.end)
        if close < 0:
            raise self.error("a ' is never closed")
        if close == start:
            builder.append(Literal("", self.line(), True))
        self._as_it_stands(builder, start, close)
        self.position = close + 1

    def _double_quotes(self, builder: Builder) -> None:
        self.deeper()
        line = self.line()
        self.position += 1
        builder.flush()
        before = len(builder.segments)
        self._parts(builder, '"', quoted=True)
        if self.position >= self.end:
            raise self.error('a " is never closed', line)
        if len(builder.segments) == before:
            builder.append(Literal("", line, True))
        self.position += 1
        self.depth -= 1

    def _backticks(self, builder: Builder, quoted: bool) -> None:
        line, start = self.line(), self.position
        close = start + 1
        while close < self.end and self.text[close] != "`":
            close += 2 if self.text[close] == "\\" else 1
        if close >= self.end:
            raise self.error("a ` is never closed")
        self.position = close + 1
        self._substitution(builder, start, line, quoted)

    def _substitution(self, builder: Builder, start: int, line: int, quoted: bool) -> None:
        builder.append(Unknown(self._hidden(start, line), quoted))

    def _hidden(self, start: int, line: int) -> Piece:
        """What stands for the output of the substitution that ends here."""
        raw = " ".join(self.source.raw(start, min(self.position, start + 200)).split())
        return Piece(None, raw, line, f"{raw} is only known at run time")

    def _dollar(self, builder: Builder, quoted: bool) -> None:
        line, start = self.line(), self.position
        following = self.text[start + 1 : min(start + 2, self.end)]
        name = _SHORT_NAME.match(self.text, start + 1, self.end)
        if following == "{":
            self._braces(builder, quoted)
        elif following == "(":
            self._parentheses(builder, quoted)
        elif following == "[" and (close := self.text.find("]", start, min(self.end, start + 200))) > 0:
            expression = Scanner(self.source, start + 2, close, self.depth + 1).quoted_text()
            self.position = close + 1
            builder.append(Arithmetic(expression, self.source.raw(start, close + 1), line, quoted))
        elif name:
            self.position = name.end()
            builder.append(Parameter(name.group(), self.text[start : name.end()], line, quoted))
        elif following == "'" and not quoted:
            self._ansi_quotes(builder)
        elif following == '"' and not quoted:
            self.position += 1
        else:
            builder.add("$", line, quoted)
            self.position += 1

    def _ansi_quotes(self, builder: Builder) -> None:
        line = self.line()
        close = self.position + 2
        parts: list[str] = []
        while close < self.end and self.text[close] != "'":
            unknown, character = self.source.unknown_at(close), self.text[close]
            close += 1
            if unknown is not None:
                builder.append(Literal("".join(parts), line, True))
                builder.append(Unknown(unknown, True))
                parts = []
                continue
            if character == "\\" and close < self.end:
                code = _ANSI_CODE.match(self.text, close, self.end)
                if code:
                    digits = code.group(1) or code.group(2)
                    number = int(digits, 16) if digits else int(code.group(3), 8)
                    character, close = (chr(number) if 0 < number < 0xD800 else "\ufffd"), code.end()
                else:
                    character, close = _ANSI.get(self.text[close], self.text[close]), close + 1
            parts.append(character)
        if close >= self.end:
            raise self.error("a $' is never closed", line)
        builder.append(Literal("".join(parts), line, True))
        self.position = close + 1

    def _parentheses(self, builder: Builder, quoted: bool) -> None:
        line, start = self.line(), self.position
        stop = self._closed(start + 1)
        if self.text.startswith("$((", start) and self.text[stop - 2 : stop] == "))":
            self.deeper()
            expression = Scanner(self.source, start + 3, stop - 2, self.depth).quoted_text()
            self.depth -= 1
            self.position = stop
            builder.append(Arithmetic(expression, self.source.raw(start, stop)[:200], line, quoted))
        else:
            self.position = stop
            self._substitution(builder, start, line, quoted)

    def _closed(self, start: int) -> int:
        """The offset behind the parenthesis that closes the one at ``start``; quotes and comments are passed over."""
        line = self.source.line_at(start)
        self.position = start
        open_quotes: list[int] = []  # how many parentheses were open when a " began
        level = 0
        while self.position < self.end:
            character = self.text[self.position]
            in_quotes = bool(open_quotes) and open_quotes[-1] == level
            if character == "\\":
                self.position += 1
            elif character == '"':
                if in_quotes:
                    open_quotes.pop()
                else:
                    open_quotes.append(level)
            elif character == "'" and not in_quotes:
                self.position = self.text.find("'", self.position + 1, self.end)
                if self.position < 0:
                    break
            elif character == "(" and (not in_quotes or self.text[self.position - 1] == "$"):
                level += 1
            elif character == ")" and not in_quotes:
                level -= 1
                if level == 0:
                    self.position += 1
                    return self.position
            elif character == "#" and not in_quotes and self.text[self.position - 1] in " \t\n;":
                newline = self.text.find("\n", self.position, self.end)
                self.position = newline if newline >= 0 else self.end
            self.position += 1
        self.position = min(max(self.position, 0), self.end)
        raise self.error("a ( is never closed", line)

    def _braces(self, builder: Builder, quoted: bool) -> None:
        self.deeper()
        line, start = self.line(), self.position
        self.position += 2
        length = self._prefix("#")
        indirect = not length and self._prefix("!")
        name = _NAME.match(self.text, self.position, self.end)
        if name is None:
            raise self.error("a ${ is not followed by a name", line)
        self.position = name.end()
        index = self._subscript() if self.peek() == "[" else None
        operator, arguments = self._operator(quoted)
        if self.peek() != "}":
            raise self.error("a ${ is never closed", line)
        self.position += 1
        self.depth -= 1
        raw = " ".join(self.source.raw(start, self.position)[:200].split())
        builder.append(
            Parameter(name.group(), raw, line, quoted, index, operator, arguments, length=length, indirect=indirect)
        )

    def _prefix(self, character: str) -> bool:
        """Whether ``#`` or ``!`` stands before a name rather than being the name."""
        if self.peek() != character or self.peek(2)[1:] in ("", "}", ":", "-", "+", "=", "?", "%", "/"):
            return False
        self.position += 1
        return True

    def _subscript(self) -> str | Segments:
        self.position += 1
        index: str | Segments
        if self.peek(2) in ("@]", "*]"):
            index = self.peek()
            self.position += 1
        else:
            index = self.word("]").segments
        if self.peek() != "]":
            raise self.error("a [ is never closed")
        self.position += 1
        return index

    def _operator(self, quoted: bool) -> tuple[str, tuple[Segments, ...]]:
        found = _OPERATOR.match(self.text, self.position, self.end)
        if not found:
            return "", ()
        operator = found.group()
        self.position = found.end()
        divider = operator[0] if operator in ("/", "//", ":") else ""
        arguments = [self._argument(divider + "}", quoted)]
        if divider and self.peek() == divider:
            self.position += 1
            arguments.append(self._argument("}", quoted))
        return operator, tuple(arguments)

    def _argument(self, ends: str, quoted: bool) -> Segments:
        builder = Builder()
        self._parts(builder, ends, quoted=quoted)
        return tuple(builder.segments)
