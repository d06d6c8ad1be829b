"""The regular expressions of ``[[ … =~ … ]]`` that bash and Python read alike, in bounded time."""

from __future__ import annotations

import re

_MAX_PATTERN, _MAX_TEXT, _MAX_REPEATS = 100, 200, 3
_SET = r"\[\^?[\w.,:/+ =@-]+\]"
_PART = re.compile(
    rf"(?P<plain>[\w,:/=@ -])|\\(?P<escaped>[.+*?()\[\]{{}}|^$\\])|(?P<any>\.)|(?P<set>{_SET})"
    r"|(?P<edge>[(|)^$])|(?P<repeat>[*+?]|\{\d{1,2}(?:,\d{0,2})?\})",
    re.ASCII,
)
_CLASSES = {"[:digit:]": "0-9", "[:alpha:]": "a-zA-Z", "[:alnum:]": "a-zA-Z0-9", "[:upper:]": "A-Z", "[:lower:]": "a-z"}


def escape(text: str) -> str:
    """The expression for the text itself, as quotes make it."""
    return re.sub(r"[.+*?()\[\]{}|^$\\]", r"\\\g<0>", text)


def search(pattern: str, text: str) -> bool | None:
    """Whether the extended regular expression matches a part of the text; None for one that is not tried."""
    for name, characters in _CLASSES.items():
        pattern = pattern.replace(name, characters)
    if len(pattern) > _MAX_PATTERN or len(text) > _MAX_TEXT or not text.isascii():
        return None
    found, position, repeats = "", 0, 0
    before = ""
    while position < len(pattern):
        part = _PART.match(pattern, position)
        if part is None or (part["repeat"] and before not in ("plain", "escaped", "any", "set")):
            return None
        before = part.lastgroup or ""
        repeats += before == "repeat"
        found += {"^": r"\A", "$": r"\Z"}.get(part.group(), part.group())
        position = part.end()
    try:
        return None if repeats > _MAX_REPEATS else re.search(found, text, re.DOTALL) is not None
    except re.error:
        return None
