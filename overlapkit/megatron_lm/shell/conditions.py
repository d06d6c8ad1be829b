"""Tests -> what they come to in one state: true, false, or nobody knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from overlapkit.megatron_lm.shell import arithmetic, patterns, regular
from overlapkit.megatron_lm.shell.expansion import Expansion
from overlapkit.megatron_lm.shell.splitting import names_in
from overlapkit.megatron_lm.shell.text import MAX_DEPTH, Piece, ShellError, Text, is_absent, known
from overlapkit.megatron_lm.shell.tree import Arithmetic, ArithmeticCommand, Conditional, Literal, Parameter, ShellWord

_NUMERIC: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_BINARY = {*_NUMERIC, "=", "==", "!=", "=~", "<", ">", "-nt", "-ot", "-ef"}
_UNARY = frozenset("-" + letter for letter in "abcdefghknoprstuvwxzGLNORS")


@dataclass(frozen=True, slots=True)
class Verdict:
    """``value`` is None where nobody knows. ``names`` are the variables it rests on; ``if_true`` and ``if_false`` give
    the values that the outcome settles. ``presumed``: it holds as long as nobody sets what the script does not."""

    value: bool | None
    names: frozenset[str] = frozenset()
    if_true: dict[str, Text] = field(default_factory=dict)
    if_false: dict[str, Text] = field(default_factory=dict)
    presumed: bool = False

    def negated(self) -> Verdict:
        value = None if self.value is None else not self.value
        return Verdict(value, self.names, self.if_false, self.if_true, self.presumed)


UNDECIDED = Verdict(None, frozenset({"?"}))


def constant(value: bool) -> Verdict:
    return Verdict(value)


def _both(one: Verdict, other: Verdict) -> Verdict:
    value = None if None in (one.value, other.value) else True
    if False in (one.value, other.value):
        value = False
    return Verdict(value, one.names | other.names, {**one.if_true, **other.if_true}, {}, one.presumed or other.presumed)


def _either(one: Verdict, other: Verdict) -> Verdict:
    return _both(one.negated(), other.negated()).negated()


def judge_arithmetic(command: ArithmeticCommand, expansion: Expansion) -> Verdict:
    return presuming_none(lambda expansion: _judge_arithmetic(command, expansion), expansion)


def _judge_arithmetic(command: ArithmeticCommand, expansion: Expansion) -> Verdict:
    if arithmetic.changed_by(command.raw):  # asked here, done elsewhere
        expansion = Expansion(expansion.state.copy(), expansion.charge, counts_given=expansion.counts_given)
    names = frozenset(names_in((Arithmetic(command.expression, command.raw, command.line, True),)))
    piece = expansion.arithmetic(command.expression, command.raw, command.line)
    return Verdict(None if piece.text is None else piece.text != "0", names or frozenset({"?"}))


def judge_conditional(command: Conditional, expansion: Expansion) -> Verdict:
    return presuming_none(lambda expansion: _Test(command.tokens, expansion, patterned=True).verdict(), expansion)


def judge_test(words: Sequence[ShellWord], expansion: Expansion) -> Verdict:
    """``[ … ]`` and ``test …``: the words between."""
    operators = {"!", "(", ")", "-a", "-o"}
    tokens = [word.plain if word.plain in operators else word for word in words]
    known_tokens = [token for token in tokens if token is not None]
    return presuming_none(lambda expansion: _Test(known_tokens, expansion, patterned=False).verdict(), expansion)


def presuming_none(judge: Callable[[Expansion], Verdict], expansion: Expansion) -> Verdict:
    """What a question of ``$#`` comes to where the script is run without arguments other than those given."""
    verdict = judge(expansion)
    if verdict.value is not None or "#" not in verdict.names or expansion.state.positional is not None:
        return verdict
    return replace(judge(Expansion(expansion.state, expansion.charge, counts_given=True)), presumed=True)


class _Test:
    def __init__(self, tokens: Sequence[ShellWord | str], expansion: Expansion, *, patterned: bool) -> None:
        self.tokens = tokens
        self.expansion = expansion
        self.patterned = patterned
        self.position = 0
        self.depth = 0

    def verdict(self) -> Verdict:
        if not self.tokens:
            return constant(False)
        verdict = self._or()
        return verdict if self.position == len(self.tokens) else UNDECIDED

    def _peek(self) -> str | None:
        """The operator here, None for a word and at the end."""
        token = self.tokens[self.position] if self.position < len(self.tokens) else None
        return token if isinstance(token, str) else None

    def _or(self) -> Verdict:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            first = self.tokens[0]
            line = first.line if isinstance(first, ShellWord) else 1
            raise ShellError(f"nested deeper than {MAX_DEPTH} levels", line, fatal=True)
        verdict = self._and()
        while self._peek() in ("||", "-o"):
            self.position += 1
            verdict = _either(verdict, self._and())
        self.depth -= 1
        return verdict

    def _and(self) -> Verdict:
        verdict = self._not()
        while self._peek() in ("&&", "-a"):
            self.position += 1
            verdict = _both(verdict, self._not())
        return verdict

    def _not(self) -> Verdict:
        negated = False
        while self._peek() == "!":
            self.position += 1
            negated = not negated
        verdict = self._primary()
        return verdict.negated() if negated else verdict

    def _primary(self) -> Verdict:
        if self._peek() == "(":
            self.position += 1
            verdict = self._or()
            if self._peek() != ")":
                return UNDECIDED
            self.position += 1
            return verdict
        words: list[ShellWord | str] = []
        while self.position < len(self.tokens) and len(words) < 3:
            token = self.tokens[self.position]
            if isinstance(token, str) and not (len(words) == 1 and token in ("<", ">")):
                break
            words.append(token)
            self.position += 1
            if len(words) == 2 and not self._is_binary(words[1]):
                break
        return self._compared(words)

    def _is_binary(self, token: ShellWord | str) -> bool:
        return (token if isinstance(token, str) else token.plain) in _BINARY

    def _compared(self, words: list[ShellWord | str]) -> Verdict:
        if len(words) == 3 and isinstance(words[0], ShellWord) and isinstance(words[2], ShellWord):
            operator = words[1] if isinstance(words[1], str) else words[1].plain or ""
            return self._binary(words[0], operator, words[2])
        if len(words) == 2 and isinstance(words[0], ShellWord) and isinstance(words[1], ShellWord):
            return self._unary(words[0].plain or "", words[1])
        if len(words) == 1 and isinstance(words[0], ShellWord):
            if words[0].plain in _UNARY:  # `[ -z $X ]` where nothing is left of $X
                return constant(words[0].plain != "-n")
            return self._unary("-n", words[0])
        return UNDECIDED

    def _unary(self, operator: str, word: ShellWord) -> Verdict:
        names = frozenset(names_in(word.segments))
        text = self.expansion.text(word.segments)
        if operator == "-v" and word.plain:
            state = self.expansion.state
            state.outside.is_read(word.plain, state.variables.get(word.plain))
            return Verdict(word.plain in self.expansion.state.variables, frozenset({word.plain}), presumed=True)
        if operator not in ("-z", "-n"):
            return Verdict(None, names | {"?"})
        presumed = is_absent(text)
        empty = True if presumed else False if any(piece.text for piece in text) else None
        if not presumed and known(text) == "":
            empty = True
        name = settles(word)
        settled: dict[str, Text] = {name: ()} if name else {}
        verdict = Verdict(empty, names, settled, {}, presumed)
        return verdict if operator == "-z" else verdict.negated()

    def _binary(self, left: ShellWord, operator: str, right: ShellWord) -> Verdict:
        names = frozenset(names_in(left.segments) | names_in(right.segments))
        one, other = self.expansion.text(left.segments), self.expansion.text(right.segments)
        if self.patterned and operator in _NUMERIC:  # expressions, whose names are those of variables
            names |= set(re.findall(r"[A-Za-z_]\w*", f"{left.plain or ''} {right.plain or ''}"))
        equal = {"=": True, "==": True, "-eq": True, "!=": False, "-ne": False}.get(operator)
        name = settles(left)
        settled: dict[str, Text] = {}
        is_pattern = self.patterned and any(re.search(r"[*?\[]", p.text or "") for p in other if not p.quoted)
        if equal is not None and name and known(other) is not None and not is_pattern:
            settled = {name: tuple(Piece(p.text, p.written, p.line) for p in other if p.text)}
        if_true, if_false = (settled, {}) if equal else ({}, settled)
        return Verdict(self._compare(one, operator, other), names, if_true, if_false)

    def _compare(self, one: Text, operator: str, other: Text) -> bool | None:
        left, right = known(one), known(other)
        if left is None or right is None:
            return None
        if operator in _NUMERIC:
            return self._numeric(one, operator, other)
        if operator == "=~":
            return self._matches(left, other)
        if operator in ("=", "==", "!="):
            same = patterns.matches(other, left) if self.patterned else left == right
            return same if operator != "!=" or same is None else not same
        if operator in ("<", ">"):
            return left < right if operator == "<" else left > right
        return None

    def _numeric(self, one: Text, operator: str, other: Text) -> bool | None:
        """`[` takes decimal numbers alone, `[[` expressions; for others it prints an error, which is not true."""
        numbers: list[int] = []
        for text in (one, other):
            if self.patterned:
                piece = self.expansion.evaluated(text, known(text) or "", 0)
                if piece.text is None:
                    return None if re.search("[A-Za-z_$]", known(text) or "") else False
                numbers.append(int(piece.text))
            elif re.fullmatch(r"\s*[-+]?\d{1,19}\s*", known(text) or "", re.ASCII):
                numbers.append(int(known(text) or "0"))
            else:
                return False
        return _NUMERIC[operator](*numbers)

    def _matches(self, text: str, pattern: Text) -> bool | None:
        parts = [regular.escape(piece.text or "") if piece.quoted else piece.text or "" for piece in pattern]
        return regular.search("".join(parts), text)


def settles(word: ShellWord) -> str | None:
    """The variable whose value the word is, with nothing around it."""
    segments = [s for s in word.segments if not (isinstance(s, Literal) and not s.text)]
    if len(segments) != 1 or not isinstance(segments[0], Parameter):
        return None
    segment = segments[0]
    plain = segment.index is None and not segment.length and not segment.indirect
    return segment.name if plain and segment.operator in ("", ":-", "-", ":=", "=") else None


_COMPARISONS = {"-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<=", "-eq": "=", "==": "=", "-ne": "!="}


def same_question(raw: str) -> str:
    """A test without its brackets and quotes, so that two ways to write one are known as the same."""
    case = re.fullmatch(r"case (\S+) in ([\w.-]+)\)", raw)
    raw = f"{case.group(1)} = {case.group(2)}" if case else raw
    if re.search(r"[*?]|=~", raw):  # quotes decide what a pattern is
        return raw
    words = re.sub(r"[\[\](){}\"'$\s;]+", " ", raw).split()
    return " ".join(_COMPARISONS.get(word, word) for word in words if word != "test")
