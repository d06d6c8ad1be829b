"""Characters -> simple commands: blanks, here-documents, redirections, assignments and ``[[ ]]``."""

from __future__ import annotations

import re

from overlapkit.megatron_lm.shell.scanner import METACHARACTERS, Scanner
from overlapkit.megatron_lm.shell.text import MAX_PIECES, Piece, Source
from overlapkit.megatron_lm.shell.tree import (
    Assignment,
    Conditional,
    Redirect,
    Segments,
    ShellWord,
    Simple,
    Unknown,
)

_RESERVED = re.compile(
    r"(?:if|then|elif|else|fi|for|select|while|until|do|done|case|esac|function|time|coproc|\{|\}|!|\[\[)"
    r"(?=[\s;&|()<>]|\Z)"
)
_REDIRECT = re.compile(r"(?:[0-9]+|\{\w+\})?(<<<|<<-|<<|<>|<&|>>|>&|>\||&>>|&>|<(?!\()|>(?!\())")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[|\+?=)")
_DECLARATIONS = frozenset({"declare", "export", "local", "readonly", "typeset"})
_TEST_OPERATOR = re.compile(r"&&|\|\||[()<>]|!(?=[\s(])")


class SimpleParser(Scanner):
    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.pending: list[Redirect] = []

    # Blanks, newlines and here-documents

    def _blanks(self) -> None:
        while self.position < self.end:
            character = self.text[self.position]
            if character in " \t":
                self.position += 1
            elif character == "\\" and self.peek(2) == "\\\n":
                self.position += 2
            elif character == "#" and (self.position == 0 or self.text[self.position - 1] in " \t\n;&|()"):
                newline = self.text.find("\n", self.position, self.end)
                self.position = newline if newline >= 0 else self.end
            else:
                return

    def _separators(self, characters: str = "\n;&") -> None:
        while True:
            self._blanks()
            if self.position >= self.end or self.text[self.position] not in characters:
                return
            if self.text.startswith((";;", ";&"), self.position) or _REDIRECT.match(self.text, self.position):
                return
            newline = self.text[self.position] == "\n"
            self.position += 1
            if newline and self.pending:
                self._read_bodies()

    def _newlines(self) -> None:
        self._separators("\n")

    def _read_bodies(self) -> None:
        for redirect in self.pending:
            delimiter = "".join(s.text for s in redirect.target.segments if hasattr(s, "text"))
            start = self.position
            stop, following = self._body_end(delimiter, redirect.operator == "<<-")
            self.deeper()
            if redirect.target.raw == delimiter:
                redirect.body = Scanner(self.source, start, stop, self.depth).quoted_text()
            else:
                redirect.body = Scanner(self.source, start, stop, self.depth).raw_text()
            self.depth -= 1
            self.position = following
        self.pending = []

    def _body_end(self, delimiter: str, tabs: bool) -> tuple[int, int]:
        """Where a here-document ends, and where the line behind its delimiter begins; both at the end without one."""
        offset = self.position
        while offset < self.end:
            newline = self.text.find("\n", offset, self.end)
            following = self.end if newline < 0 else newline + 1
            line = self.text[offset : self.end if newline < 0 else newline]
            if (line.lstrip("\t") if tabs else line) == delimiter:
                return offset, following
            offset = following
        return self.end, self.end

    def _reserved(self) -> str | None:
        found = _RESERVED.match(self.text, self.position, self.end)
        return found.group() if found else None

    def _expect(self, word: str) -> None:
        self._separators()
        if not self.text.startswith(word, self.position) or self.position >= self.end:
            raise self.error(f"{word} is missing")
        self.position += len(word)

    # Simple commands

    def _redirect(self) -> Redirect | None:
        found = _REDIRECT.match(self.text, self.position, self.end)
        if not found:
            return None
        self.position = found.end()
        self._blanks()
        target = self._argument_word()
        if not target.raw:
            raise self.error(f"nothing stands behind {found.group(1)}")
        redirect = Redirect(found.group(1), target)
        if redirect.operator in ("<<", "<<-"):
            self.pending.append(redirect)
        return redirect

    def _simple(self) -> Simple:
        start, line = self.position, self.line()
        assignments: list[Assignment] = []
        words: list[ShellWord | Assignment] = []
        redirects: list[Redirect] = []
        end = start
        while True:
            self._blanks()
            redirect = self._redirect()
            if redirect is not None:
                redirects.append(redirect)
            elif self.position >= self.end or (self.peek() in METACHARACTERS and not self._process_substitution()):
                break
            elif not words and (assignment := self._assignment()):
                assignments.append(assignment)
            elif words and self._is_declaration(words[0]) and (assignment := self._assignment()):
                words.append(assignment)
            else:
                words.append(self._argument_word())
            self.limit(len(words) + len(assignments) + len(redirects), MAX_PIECES, "words in a command", line)
            end = self.position
        if self.peek() == "(":
            raise self.error("a ( stands where no command begins; quote it")
        if end == start:
            raise self.error(
                f"{self.peek()} stands where a command is missing" if self.peek() else "a command is missing"
            )
        return Simple(tuple(assignments), tuple(words), tuple(redirects), self.source.raw(start, end), line)

    def _is_declaration(self, word: ShellWord | Assignment) -> bool:
        return isinstance(word, ShellWord) and word.raw in _DECLARATIONS

    def _process_substitution(self) -> bool:
        return self.peek(2) in ("<(", ">(")

    def _argument_word(self) -> ShellWord:
        if not self._process_substitution():
            return self.word()
        start, line = self.position, self.line()
        self._closed(start + 1)
        raw = self.source.raw(start, self.position)[:200]
        return ShellWord((Unknown(Piece(None, raw, line, f"{raw} is only known at run time"), True),), raw, line)

    def _assignment(self) -> Assignment | None:
        found = _ASSIGNMENT.match(self.text, self.position, self.end)
        if not found:
            return None
        start, line = self.position, self.line()
        operator, subscript = found.group(2), None
        self.position = found.end()
        if operator == "[":
            subscript = self.word("]\n").segments
            if self.peek(2) == "]=" or self.peek(3) == "]+=":
                operator = self.peek(3)[1:].rstrip("=") + "="
                operator = "+=" if operator.startswith("+") else "="
                self.position += 1 + len(operator)
            else:
                self.position = start
                return None
        append = operator == "+="
        if self.peek() == "(" and subscript is None:
            return Assignment(found.group(1), append, None, None, self._elements(), line)
        value = self._argument_word() if self._process_substitution() else self.word()
        return Assignment(found.group(1), append, subscript, value, None, line)

    def _elements(self) -> tuple[tuple[Segments | None, ShellWord], ...]:
        line = self.line()
        elements: list[tuple[Segments | None, ShellWord]] = []
        self.position += 1
        while True:
            self._newlines()
            if self.position >= self.end:
                raise self.error("the ( of an array is never closed", line)
            if self.peek() == ")":
                self.position += 1
                return tuple(elements)
            if self.peek() in METACHARACTERS:
                raise self.error(f"{self.peek()} stands in an array; quote it")
            key = None
            if self.peek() == "[":
                start = self.position
                self.position += 1
                key = self.word("]\n").segments
                if self.peek(2) == "]=":
                    self.position += 2
                else:
                    self.position, key = start, None
            elements.append((key, self.word()))
            self.limit(len(elements), MAX_PIECES, "elements in an array", line)

    # Conditions

    def _conditional(self) -> Conditional:
        line, start = self.line(), self.position
        self.position += 2
        tokens: list[ShellWord | str] = []
        while True:
            self._newlines()
            if self.position >= self.end:
                raise self.error("a [[ is never closed", line)
            found = _TEST_OPERATOR.match(self.text, self.position, self.end)
            if tokens and isinstance(tokens[-1], ShellWord) and tokens[-1].raw == "=~":
                tokens.append(self._regular_expression())
            elif found and not self._process_substitution():
                tokens.append(found.group())
                self.position = found.end()
            else:
                word = self.word()
                if word.raw == "]]":
                    return Conditional(tuple(tokens), self.source.raw(start, self.position), line)
                if not word.raw:
                    raise self.error(f"{self.peek()} stands in a [[ ]]")
                tokens.append(word)

    def _regular_expression(self) -> ShellWord:
        """Up to the next blank: parentheses and bars are part of it."""
        start, line, quote = self.position, self.line(), ""
        while self.position < self.end and (quote or self.text[self.position] not in " \t\n"):
            character = self.text[self.position]
            if character == "\\" and quote != "'":
                self.position += 1
            elif character == "(" and not quote:
                self._closed(self.position)
                continue
            elif character in "'\"" and quote in ("", character):
                quote = "" if quote else character
            self.position += 1
        self.position = min(self.position, self.end)
        raw = self.source.raw(start, self.position)[:200]
        if re.search(r"\\[\w<>]", raw):  # extensions of one library: \w, \b, \1
            return ShellWord((Unknown(Piece(None, raw, line, f"{raw} is not tried"), True),), raw, line)
        return Scanner(self.source, start, self.position, self.depth).word("")
