"""``$(( … ))`` over whole numbers of 64 bits, as far as they are known."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(\d\w*|[A-Za-z_]\w*|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>!~&|^?:()])")
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
_MAX_LENGTH = 1_000
_MAX_DEPTH = 20


class Unknowable(Exception):
    """No value can be given; the text says why."""


def evaluate(expression: str, value_of: Callable[[str], int]) -> int:
    """The value of an expression; ``value_of`` gives that of a name.

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
    return _Evaluator(tokens, value_of).result()


class _Evaluator:
    def __init__(self, tokens: list[str], value_of: Callable[[str], int]) -> None:
        self.tokens = tokens
        self.value_of = value_of
        self.position = 0
        self.depth = 0

    def result(self) -> int:
        if not self.tokens:
            return 0
        value = self._choice()
        if self.position < len(self.tokens):
            raise Unknowable(f"'{self.tokens[self.position]}' is not understood here")
        return value

    def _peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self.position += 1
        return token

    def _choice(self) -> int:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise Unknowable("an expression nested too deep")
        value = self._binary(0)
        if self._peek() == "?":
            self.position += 1
            yes = self._choice()
            if self._next() != ":":
                raise Unknowable("a ? without its :")
            no = self._choice()
            value = yes if value else no
        self.depth -= 1
        return value

    def _binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._unary()
        value = self._binary(level + 1)
        while self._peek() in _LEVELS[level]:
            operator = self._next()
            value = _within(_apply(operator, value, self._binary(level + 1)))
        return value

    def _unary(self) -> int:
        signs = []
        while self._peek() in ("-", "+", "!", "~"):
            signs.append(self._next())
        value = self._primary()
        for sign in reversed(signs):
            value = {"-": -value, "+": value, "!": int(not value), "~": ~value}[sign]
        return value

    def _primary(self) -> int:
        token = self._next()
        if token == "(":
            value = self._choice()
            if self._next() != ")":
                raise Unknowable("a ( without its )")
            return value
        if token[:1].isdecimal():
            return number(token)
        if token[:1].isidentifier():
            return self.value_of(token)
        raise Unknowable("the expression is not complete")


def number(text: str) -> int:
    """A decimal, ``0x`` or octal number.

    Raises:
        Unknowable: no such number, or one beyond 64 bits.
    """
    text = text.strip()
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
        "||": lambda: int(bool(left or right)),
        "&&": lambda: int(bool(left and right)),
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
