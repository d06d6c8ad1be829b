"""``$(( … ))`` over whole numbers of 64 bits, as far as they are known."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(\d+#\w+|\d\w*|[A-Za-z_]\w*|<<=|>>=|\+\+|--|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%<>!~&|^?:(),=])"
)
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
    ("**",),
)
_ASSIGNING = frozenset({"=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^="})
_CHANGED = re.compile(
    r"([A-Za-z_]\w*)\s*(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)",
)
_MAX_LENGTH = 1_000
_MAX_DEPTH = 20


class Unknowable(Exception):
    """No value can be given; the text says why."""


def evaluate(expression: str, value_of: Callable[[str], int], assign: Callable[[str, int], None] | None = None) -> int:
    """The value of an expression; ``value_of`` gives that of a name, ``assign`` is told of each that is set.

    Raises:
        Unknowable: not an expression of whole numbers, or one that leaves 64 bits.
    """
    if len(expression) > _MAX_LENGTH:
        raise Unknowable("an expression of more than 1,000 characters")
    tokens, position = [], 0
    expression = expression.strip()
    while position < len(expression):
        found = _TOKEN.match(expression, position)
        if not found:
            raise Unknowable(f"'{expression[:40]}' is not a plain expression")
        tokens.append(found.group(1))
        position = found.end()
    return _Evaluator(tokens, value_of, assign).result()


def changed_by(expression: str) -> set[str]:
    """The variables that an expression sets."""
    return {found.group(1) or found.group(2) for found in _CHANGED.finditer(expression)}


class _Evaluator:
    """``skipping``: inside an operand that `&&`, `||` or `?:` does not evaluate."""

    def __init__(
        self, tokens: list[str], value_of: Callable[[str], int], assign: Callable[[str, int], None] | None
    ) -> None:
        self.tokens = tokens
        self.value_of = value_of
        self.assign = assign
        self.position = 0
        self.depth = 0
        self.skipping = 0

    def result(self) -> int:
        if not self.tokens:
            return 0
        value = self._all()
        if self.position < len(self.tokens):
            raise Unknowable(f"'{self.tokens[self.position]}' is not understood here")
        return value

    def _peek(self, ahead: int = 0) -> str:
        return self.tokens[self.position + ahead] if self.position + ahead < len(self.tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self.position += 1
        return token

    def _all(self) -> int:
        value = self._assignment()
        while self._peek() == ",":
            self.position += 1
            value = self._assignment()
        return value

    def _assignment(self) -> int:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise Unknowable("an expression nested too deep")
        if self._peek()[:1].isidentifier() and self._peek(1) in _ASSIGNING:
            name, operator = self._next(), self._next()
            before = 0 if operator == "=" else self._value(name)  # read first
            value = self._assignment()
            if operator != "=":
                value = self._applied(operator[:-1], before, value)
            self._set(name, value)
        else:
            value = self._choice()
        self.depth -= 1
        return value

    def _choice(self) -> int:
        value = self._binary(0)
        if self._peek() == "?":
            self.position += 1
            yes = self._skipped(self._assignment, skip=not value)
            if self._next() != ":":
                raise Unknowable("a ? without its :")
            no = self._skipped(self._assignment, skip=bool(value))
            value = yes if value else no
        return value

    def _binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._unary()
        value = self._binary(level + 1)
        while self._peek() in _LEVELS[level]:
            operator = self._next()
            if operator in ("&&", "||"):
                right = self._skipped(lambda: self._binary(level + 1), skip=bool(value) == (operator == "||"))
                value = int(bool(value and right) if operator == "&&" else bool(value or right))
            elif operator == "**":  # from the right
                value = self._applied(operator, value, self._binary(level))
            else:
                value = self._applied(operator, value, self._binary(level + 1))
        return value

    def _skipped(self, operand: Callable[[], int], *, skip: bool) -> int:
        self.skipping += skip
        value = operand()
        self.skipping -= skip
        return value

    def _applied(self, operator: str, left: int, right: int) -> int:
        return 0 if self.skipping else _within(_apply(operator, left, right))

    def _unary(self) -> int:
        signs: list[str] = []
        while self._peek() in ("-", "+", "!", "~") or (
            self._peek() in ("++", "--") and not self._peek(1)[:1].isidentifier()
        ):
            signs.extend(self._next())  # of `--5` each
        value = self._primary()
        for sign in reversed(signs):
            value = {"-": -value, "+": value, "!": int(not value), "~": ~value}[sign]
        return value

    def _primary(self) -> int:
        token = self._next()
        if token == "(":
            value = self._all()
            if self._next() != ")":
                raise Unknowable("a ( without its )")
            return value
        if token in ("++", "--"):
            name = self._next()
            return self._set(name, self._applied(token[0], self._value(name), 1))
        if token[:1].isdecimal():
            return number(token)
        if token[:1].isidentifier():
            value = self._value(token)
            if self._peek() in ("++", "--"):
                self._set(token, self._applied(self._next()[0], value, 1))
            return value
        raise Unknowable("the expression is not complete")

    def _value(self, name: str) -> int:
        return 0 if self.skipping else self.value_of(name)

    def _set(self, name: str, value: int) -> int:
        if not self.skipping:
            if self.assign is None:
                raise Unknowable(f"{name} is set here")
            self.assign(name, value)
        return value


def number(text: str) -> int:
    """A decimal, ``0x`` or octal number, or one of another base as ``base#number``.

    Raises:
        Unknowable: no such number, or one beyond 64 bits.
    """
    text = text.strip()
    base, divider, digits = text.partition("#")
    if divider and re.fullmatch(r"[2-9]|[12][0-9]|3[0-6]", base) and re.fullmatch(r"[0-9A-Za-z]{1,64}", digits):
        try:
            return _within(int(digits, int(base)))
        except ValueError:
            raise Unknowable(f"'{text[:40]}' is not a whole number") from None
    if not re.fullmatch(r"[-+]?(0[xX][0-9a-fA-F]{1,16}|0[0-7]{1,21}|0|[1-9][0-9]{0,18})", text):
        raise Unknowable(f"'{text[:40]}' is not a whole number")
    octal = re.fullmatch(r"[-+]?0[0-7]+", text)
    return _within(int(text, 8 if octal else 0))


def _within(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise Unknowable("a number beyond 64 bits")
    return value


def _apply(operator: str, left: int, right: int) -> int:
    if operator in ("/", "%"):
        if right == 0:
            raise Unknowable("a division by 0")
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if operator == "/" else left - quotient * right
    if operator in ("**", "<<", ">>") and not 0 <= right < 64:
        raise Unknowable(f"{operator} {right}")
    operations: dict[str, Callable[[], int]] = {
        "|": lambda: left | right,
        "^": lambda: left ^ right,
        "&": lambda: left & right,
        "==": lambda: int(left == right),
        "!=": lambda: int(left != right),
        "<": lambda: int(left < right),
        ">": lambda: int(left > right),
        "<=": lambda: int(left <= right),
        ">=": lambda: int(left >= right),
        "<<": lambda: left << right,
        ">>": lambda: left >> right,
        "+": lambda: left + right,
        "-": lambda: left - right,
        "*": lambda: left * right,
        "**": lambda: left**right,
    }
    return operations[operator]()
