"""Words -> what the shell would pass, in one state of the script."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from overlapkit.megatron_lm.shell import arithmetic, patterns
from overlapkit.megatron_lm.shell.splitting import Items, as_element, braces, names_in, split
from overlapkit.megatron_lm.shell.state import State
from overlapkit.megatron_lm.shell.text import Array, Piece, Text, Value, as_value, is_absent, known, why_unknown
from overlapkit.megatron_lm.shell.tree import (
    Arithmetic,
    Assignment,
    Literal,
    Parameter,
    Segment,
    Segments,
    ShellWord,
    Unknown,
)


class Expansion:
    """Expands words in ``state``; ``charge`` is told how much work was done."""

    def __init__(self, state: State, charge: Callable[[int], None]) -> None:
        self.state = state
        self.charge = charge

    def fields(self, words: Iterable[ShellWord]) -> list[Text]:
        """The arguments that the words make, split where they are not quoted."""
        result: list[Text] = []
        for word in words:
            for part in braces(word):
                result.extend(split(self._items(part.segments)))
        self.charge(sum(map(len, result)))
        return result

    def text(self, segments: Segments) -> Text:
        """One text: nothing is split, the elements of a list stand a space apart."""
        pieces: list[Piece] = []
        for item in self._items(segments):
            pieces.append(Piece(" ", " ", pieces[-1].line if pieces else 0) if item is None else item)
        self.charge(len(pieces))
        return tuple(pieces)

    def assign(self, assignment: Assignment) -> None:
        state, name = self.state, assignment.name
        segments = assignment.value.segments if assignment.value else ()
        names = names_in(segments) | ({name} if assignment.append else set())
        is_fixed = bool(names) and all(map(state.is_fixed, names))
        value = self._assigned(assignment)
        self.charge(len(value.items) // 2 if isinstance(value, Array) else len(value) // 8)
        state.set(name, value, assignment.line)
        (state.fixed.add if is_fixed else state.fixed.discard)(name)

    def _assigned(self, assignment: Assignment) -> Value:
        old = self.state.variables.get(assignment.name)
        if assignment.elements is not None:
            return self._array(assignment, old)
        assert assignment.value is not None
        value = as_value(self.text(assignment.value.segments))
        if assignment.subscript is not None:
            array = old if isinstance(old, Array) else Array((("0", old),)) if old else Array()
            key = known(self.text(assignment.subscript)) or ""
            before = (array.get(key) or ()) if assignment.append else ()
            return array.with_item(key, before + value)
        if isinstance(old, Array):
            before = (old.get("0") or ()) if assignment.append else ()
            return old.with_item("0", before + value)
        return (old or ()) + value if assignment.append else value

    def _array(self, assignment: Assignment, old: Value | None) -> Array:
        values: list[tuple[str | None, Text]] = []
        for key, word in assignment.elements or ():
            if key is not None:
                values.append((known(self.text(key)), as_value(self.text(word.segments))))
            else:
                values.extend((None, as_element(field)) for field in self.fields([word]))
        start = Array()
        if assignment.append:
            start = old if isinstance(old, Array) else Array((("0", old),)) if old else start
        return start.extended(values)

    # Segments

    def _items(self, segments: Segments) -> Items:
        items: Items = []
        for segment in segments:
            items.extend(self._segment(segment))
        return items

    def _segment(self, segment: Segment) -> Items:
        if isinstance(segment, Literal):
            return [Piece(segment.text, segment.text, segment.line, quoted=segment.quoted)]
        if isinstance(segment, Unknown):
            return [replace(segment.piece, quoted=segment.quoted, expanded=not segment.quoted)]
        if isinstance(segment, Arithmetic):
            piece = self.arithmetic(segment.expression, segment.written, segment.line)
            return [replace(piece, quoted=segment.quoted)]
        return self._parameter(segment)

    def arithmetic(self, expression: Segments, raw: str, line: int) -> Piece:
        text = self.text(expression)
        characters = known(text)
        if characters is None:
            return Piece(None, raw, line, why_unknown(text), absent=is_absent(text))
        self.charge(len(characters) // 10)
        try:
            return Piece(str(arithmetic.evaluate(characters, lambda name: self._number(name, raw, line))), raw, line)
        except arithmetic.Unknowable as problem:
            return Piece(None, raw, line, str(problem) if str(problem).startswith("$") else f"{raw}: {problem}")

    def _number(self, name: str, raw: str, line: int) -> int:
        value = self.state.scalar(name)
        if value is None:
            raise arithmetic.Unknowable(self.state.absent(name, raw, line).unknown or "")
        text = known(value)
        if text is None:
            raise arithmetic.Unknowable(why_unknown(value) or "")
        return arithmetic.number(text or "0")

    # Parameters

    def _parameter(self, segment: Parameter) -> Items:
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
        if name == "#" and state.positional is not None:
            return [(Piece(str(len(state.positional)), segment.written, segment.line),)]
        if name.isdecimal() and name != "0":
            return [self._positional(int(name), absent)]
        value = state.variables.get(name)
        if segment.index in ("@", "*"):
            if value is None:
                return [(replace(absent, many=True),)]
            return [text for _, text in value.items] if isinstance(value, Array) else [value]
        if segment.index is not None:
            return [self._element(segment, value, absent)]
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
        array = value if isinstance(value, Array) else Array((("0", value),))
        found = array.get(key)
        if found is None and not key.isdecimal():
            piece = self.arithmetic((Literal(key, segment.line, True),), segment.written, segment.line)
            position = int(piece.text) if piece.text is not None else 0
            if position < 0 and -position <= len(array.items):
                return array.items[position][1]
            found = array.get(str(position)) if piece.text is not None else None
        return () if found is None else found

    def _indirect(self, segment: Parameter) -> list[Text]:
        value = self.state.variables.get(segment.name)
        if segment.index in ("@", "*") and isinstance(value, Array):
            return [(Piece(key, segment.written, segment.line),) for key, _ in value.items]
        target = known(self.state.scalar(segment.name) or (Piece(None, "", 0),))
        found = self.state.scalar(target) if target and not segment.operator else None
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
        items = self._items(argument)
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
            return None if text is None else arithmetic.evaluate(text, lambda name: self._number(name, name, 0))
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
        is_list = segment.name in ("@", "*") or segment.index in ("@", "*") or segment.operator == ":"
        for number, value in enumerate(values):
            if number:
                items.append(Piece(" ", " ", segment.line, quoted=True) if together else None)
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
