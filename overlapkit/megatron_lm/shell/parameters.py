"""``$name``, ``${name…}`` and lists, in one state of the script."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from overlapkit.megatron_lm.shell import arithmetic, patterns
from overlapkit.megatron_lm.shell.splitting import BLANKS, Items
from overlapkit.megatron_lm.shell.state import State
from overlapkit.megatron_lm.shell.text import Array, Piece, Text, Value, as_value, is_absent, known
from overlapkit.megatron_lm.shell.tree import Literal, Parameter, Segments


class Parameters(ABC):
    """Expands parameters in ``state``; ``charge`` is told how much work was done.

    ``counts_given``: of the script's own arguments there are no more than those that were given.
    """

    def __init__(self, state: State, charge: Callable[[int], None], *, counts_given: bool = False) -> None:
        self.counts_given = counts_given
        self.state = state
        self.charge = charge

    @abstractmethod
    def text(self, segments: Segments) -> Text: ...

    @abstractmethod
    def items(self, segments: Segments) -> Items: ...

    @abstractmethod
    def arithmetic(self, expression: Segments, raw: str, line: int) -> Piece: ...

    @abstractmethod
    def number(self, name: str, raw: str, line: int) -> int: ...

    def ifs(self) -> str:
        """The characters that divide words; blanks where nobody knows."""
        value = self.state.scalar("IFS")
        text = BLANKS if value is None else known(value)
        if text is None:
            self.state.note(f"line {value[0].line if value else 1}: IFS is not known; words are taken to end at blanks")
        return BLANKS if text is None else text

    def parameter(self, segment: Parameter) -> Items:
        name = self.state.target(segment.name)
        if name != segment.name and not segment.indirect:
            if not name:
                reason = f"{segment.written} stands for a variable that is not known"
                return [Piece(None, segment.written, segment.line, reason, quoted=segment.quoted, many=True)]
            segment = replace(segment, name=name)
        if segment.indirect:
            return self._mark(self._indirect(segment), segment)
        values = self._values(segment)
        if segment.length:
            return self._mark([self._length(segment, values)], segment)
        operator = segment.operator
        if operator.lstrip(":") in ("-", "=", "+", "?") and operator:
            chosen = self._chosen(segment, values)
            if chosen is not None:
                return chosen or self._mark([()] if segment.quoted and segment.index is None else [], segment)
        elif operator:
            values = self._modified(segment, values)
        return self._mark(values, segment)

    def _values(self, segment: Parameter) -> list[Text]:
        """The value of the parameter, or those of a list's elements."""
        state, name = self.state, segment.name
        absent = state.absent(name, segment.written, segment.line)
        if name in ("@", "*"):
            known_arguments = state.positional
            return [(replace(absent, many=True),)] if known_arguments is None else list(known_arguments)
        if name == "#" and state.positional is None and self.counts_given:
            given = max((int(number) for number in state.given), default=0)
            return [(Piece(str(max(given - state.shifted, 0)), segment.written, segment.line),)]
        if name == "#" and state.positional is not None:
            return [(Piece(str(len(state.positional)), segment.written, segment.line),)]
        if name.isdecimal() and name != "0":
            return [self._positional(int(name), absent)]
        value = state.variables.get(name)
        state.outside.is_read(name, value)
        if segment.index in ("@", "*"):
            if value is None:
                return [(replace(absent, many=True),)]
            return [text for _, text in value.items] if isinstance(value, Array) else [value]
        if segment.index is not None:
            return [self._element(segment, value, absent)]
        if name == "IFS" and value is None:
            return [(Piece(BLANKS, segment.written, segment.line),)]
        scalar = state.scalar(name)
        return [(absent,) if scalar is None else scalar]

    def _positional(self, number: int, absent: Piece) -> Text:
        state = self.state
        if state.positional is not None:
            return state.positional[number - 1] if number <= len(state.positional) else ()
        given = state.given.get(str(number + state.shifted))
        return (absent,) if given is None else (Piece(given, absent.written, absent.line),)

    def _element(self, segment: Parameter, value: Value | None, absent: Piece) -> Text:
        assert isinstance(segment.index, tuple)
        if value is None:
            return (absent,)
        key = known(self.text(segment.index))
        if key is None:
            return (replace(absent, unknown=f"{segment.written} is only known at run time", absent=False),)
        if not isinstance(value, Array) and any(piece.many for piece in value):
            return (replace(value[0], many=False),)
        array = value if isinstance(value, Array) else Array((("0", value),))
        found = array.get(key)
        several = [number for number, (_, text) in enumerate(array.items) if any(piece.many for piece in text)]
        before = [text for _, text in array.items[: several[0]]] if several else []
        if several and not any(found is text for text in before):  # nobody knows what stands at which index
            return (replace(absent, unknown=f"{segment.written} is only known at run time", absent=False),)
        if found is None and not key.isdecimal():
            piece = self.arithmetic((Literal(key, segment.line, True),), segment.written, segment.line)
            position = int(piece.text) if piece.text is not None else 0
            if position < 0 and -position <= len(array.items):
                return array.items[position][1]
            found = array.get(str(position)) if piece.text is not None else None
        return () if found is None else found

    def _indirect(self, segment: Parameter) -> list[Text]:
        refers_to = self.state.target(segment.name)
        if refers_to and refers_to != segment.name:
            return [(Piece(refers_to, segment.written, segment.line),)]
        value = self.state.variables.get(segment.name)
        self.state.outside.is_read(segment.name, value)
        if segment.index in ("@", "*") and isinstance(value, Array):
            return [(Piece(key, segment.written, segment.line),) for key, _ in value.items]
        target = known(self.state.scalar(segment.name) or (Piece(None, "", 0),))
        found = self.state.scalar(target) if target and not segment.operator else None
        self.state.outside.is_read(target or "", found)
        if found is None:
            return [(Piece(None, segment.written, segment.line, f"{segment.written} is only known at run time"),)]
        return [found]

    def _length(self, segment: Parameter, values: list[Text]) -> Text:
        texts = [known(value) for value in values]
        if segment.index in ("@", "*") or segment.name in ("@", "*"):
            number = None if any(piece.many for value in values for piece in value) else len(values)
        else:
            number = None if texts[0] is None else len(texts[0])
        if number is None:
            return (replace(values[0][0], text=None, written=segment.written, many=False),)
        return (Piece(str(number), segment.written, segment.line),)

    def _chosen(self, segment: Parameter, values: list[Text]) -> Items | None:
        """What ``:-``, ``:=``, ``:+`` and the like give instead of the value; None for the value itself."""
        operator, argument = segment.operator, segment.arguments[0]
        absent = bool(values) and all(value and is_absent(value) for value in values)
        null = not any(piece.text != "" for value in values for piece in value)
        is_set = not absent and not (null and (operator.startswith(":") or not values))
        if operator.endswith("?"):
            return None
        if operator.endswith("+"):
            if not is_set:
                return []
            unknown = all(piece.text is None for value in values for piece in value) and not null
            return None if unknown else self._default(segment, argument)
        if is_set:
            return None
        if operator.endswith("="):
            self.state.set(segment.name, as_value(self.text(argument)), segment.line)
        return self._default(segment, argument)

    def _default(self, segment: Parameter, argument: Segments) -> Items:
        items = self.items(argument)
        if all(item is not None for item in items):
            pieces = tuple(item for item in items if item is not None)
            quoted = any(piece.quoted for piece in pieces) or segment.quoted
            shown = _shown(pieces, segment)
            if len(shown) == 1 and shown is not pieces:
                return [replace(shown[0], quoted=quoted, expanded=not quoted)]
        return [
            item if item is None or item.quoted else replace(item, quoted=segment.quoted, expanded=not segment.quoted)
            for item in items
        ]

    def _modified(self, segment: Parameter, values: list[Text]) -> list[Text]:
        operator = segment.operator
        if operator == ":" and (segment.name in ("@", "*") or segment.index in ("@", "*")):
            return self._slice_of_list(segment, values)
        return [self._modified_text(segment, value) for value in values]

    def _modified_text(self, segment: Parameter, value: Text) -> Text:
        text = known(value)
        if text is None:
            return tuple(replace(piece, written=segment.written) for piece in value if piece.text is None)[:1]
        arguments = [self.text(argument) for argument in segment.arguments]
        changed = _changed(text, segment.operator, arguments, self._offset)
        reason = None if changed is not None else f"{segment.written} is only known at run time"
        return (Piece(changed, segment.written, segment.line, reason),)

    def _offset(self, argument: Text) -> int | None:
        text = known(argument)
        try:
            return None if text is None else arithmetic.evaluate(text, lambda name: self.number(name, name, 0))
        except arithmetic.Unknowable:
            return None

    def _slice_of_list(self, segment: Parameter, values: list[Text]) -> list[Text]:
        offsets = [self._offset(self.text(argument)) for argument in segment.arguments]
        if None in offsets or any(piece.many for value in values for piece in value):
            reason = f"{segment.written} is only known at run time"
            return [(Piece(None, segment.written, segment.line, reason, many=True),)]
        start = offsets[0] or 0
        start = max(start - 1, 0) if segment.name in ("@", "*") else start
        length = offsets[1] if len(offsets) > 1 else None
        return values[start:] if length is None else values[start:][: max(length, 0)]

    def _mark(self, values: Sequence[Text], segment: Parameter) -> Items:
        """The pieces of the values as the word has them: split or not, apart or together."""
        items: Items = []
        if segment.quoted and not values and (segment.index == "*" or segment.name == "*"):
            items.append(Piece("", "", segment.line, quoted=True))
        together = segment.quoted and (segment.index == "*" or segment.name == "*")
        between = self.ifs()[:1] if len(values) > 1 else ""
        joined = together or (not segment.quoted and between not in BLANKS)  # to be split again
        is_list = segment.name in ("@", "*") or segment.index in ("@", "*") or segment.operator == ":"
        for number, value in enumerate(values):
            if number:
                divider = Piece(between, between, segment.line, quoted=together, expanded=not together)
                items.append(divider if joined else None)
            shown = value if is_list else _shown(value, segment)
            if segment.quoted and not value:
                items.append(Piece("", "", segment.line, quoted=True))
            items.extend(replace(piece, quoted=segment.quoted, expanded=not segment.quoted) for piece in shown)
        self.charge(len(items))
        return items


def _shown(value: Text, segment: Parameter) -> Text:
    """A plain value is shown as the place that uses it; one of several words, or a flag, as the place that made it."""
    text = known(value)
    if text is None:
        if len(value) > 1:
            return value
        return (replace(value[0], written=segment.written, line=segment.line),)
    if not value or text.startswith("-") or any(character in " \t\n" for character in text):
        return value
    return (Piece(text, segment.written, segment.line),)


def _changed(text: str, operator: str, arguments: list[Text], offset: Callable[[Text], int | None]) -> str | None:
    if operator in ("#", "##", "%", "%%"):
        return patterns.strip(text, arguments[0], operator)
    if operator in ("/", "//"):
        pattern, new = known(arguments[0]), known(arguments[1]) if len(arguments) > 1 else ""
        if pattern in ("#", "%") and new is not None and operator == "/":
            return new + text if pattern == "#" else text + new
        if not pattern or new is None or re.search(r"[*?\[#%]", pattern) or len(text) * (len(new) + 1) > 100_000:
            return None
        return text.replace(pattern, new, -1 if operator == "//" else 1)
    if operator in ("^^", ",,") and not arguments[0]:
        return text.upper() if operator == "^^" else text.lower()
    if operator == ":":
        offsets = [offset(argument) for argument in arguments]
        start, length = offsets[0], offsets[1] if len(offsets) > 1 else len(text)
        if start is None or length is None or length < 0:
            return None
        start = max(len(text) + start, 0) if start < 0 else start
        return text[start : start + length]
    return None
