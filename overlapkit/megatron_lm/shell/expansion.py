"""Words -> what the shell would pass, in one state of the script."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from overlapkit.errors import printable
from overlapkit.megatron_lm.shell import arithmetic, substitution
from overlapkit.megatron_lm.shell.braces import braces
from overlapkit.megatron_lm.shell.parameters import Parameters
from overlapkit.megatron_lm.shell.splitting import Items, as_element, names_in, split
from overlapkit.megatron_lm.shell.state import Kind
from overlapkit.megatron_lm.shell.text import (
    Array,
    Piece,
    Text,
    Value,
    as_value,
    is_absent,
    known,
    why_unknown,
    written,
)
from overlapkit.megatron_lm.shell.tree import (
    Arithmetic,
    Assignment,
    Literal,
    Parameter,
    Segment,
    Segments,
    ShellWord,
    Substitution,
    Unknown,
)


class Expansion(Parameters):
    """Expands words in ``state``."""

    def fields(self, words: Iterable[ShellWord]) -> list[Text]:
        """The arguments that the words make, split where they are not quoted."""
        result: list[Text] = []
        ifs = self.ifs()
        for word in words:
            before = len(result)
            parts = braces(word)
            self.charge(len(parts) - 1)
            for part in parts:
                result.extend(split(self.items(part.segments), ifs))
            self.charge(sum(map(len, result[before:])))
        return result

    def text(self, segments: Segments) -> Text:
        """One text: nothing is split, the elements of a list stand a space apart."""
        pieces: list[Piece] = []
        for item in self.items(tuple(map(_together, segments))):
            pieces.append(Piece(" ", " ", pieces[-1].line if pieces else 0) if item is None else item)
        self.charge(len(pieces))
        return tuple(pieces)

    def assign(self, assignment: Assignment) -> None:
        state, name = self.state, self.state.target(assignment.name)
        if not name:
            state.note(f"line {assignment.line}: {assignment.name} stands for a variable that is not known")
            return
        if name != assignment.name:
            assignment = replace(assignment, name=name)
        segments = assignment.value.segments if assignment.value else ()
        names = names_in(segments) | ({name} if assignment.append else set())
        is_fixed = bool(names) and all(map(state.is_fixed, names))
        value = self._of_kind(name, self._assigned(assignment), assignment)
        if not (assignment.append or assignment.subscript or isinstance(value, Array)):
            given = self.or_given(name, value, assignment.line)
            value, is_fixed = (value, is_fixed) if given is None else (given, True)
        self.charge(len(value.items) // 2 if isinstance(value, Array) else len(value) // 8)
        state.set(name, value, assignment.line)
        (state.fixed.add if is_fixed else state.fixed.discard)(name)

    def _of_kind(self, name: str, value: Value, assignment: Assignment) -> Value:
        """The value as `declare -i`, ``-u`` or ``-l`` keeps it."""
        letter = self.state.kinds[name].letter if name in self.state.kinds else ""
        if letter not in ("i", "u", "l"):
            return value
        if isinstance(value, Array):
            reason = f"${name} is changed by its declaration, which is not followed for lists"
            return (Piece(None, f"${name}", assignment.line, reason, many=True),)
        text, raw = known(value), written(value)
        if letter == "i":
            if assignment.append and assignment.value is not None:
                added = self.text(assignment.value.segments)
                old = self.state.scalar(name) or (Piece("0", "0", assignment.line),)
                plus = Piece(")+(", "", assignment.line)
                value = (Piece("(", "", assignment.line), *old, plus, *added, Piece(")", "", assignment.line))
            return (self.evaluated(value, raw, assignment.line),)
        if text is None:
            return value
        return (Piece(text.upper() if letter == "u" else text.lower(), raw, assignment.line),)

    def or_given(self, name: str, value: Text, line: int) -> Text | None:
        """What the user gives for a variable that the script sets to an unknown."""
        given = self.state.outside.instead_of(name, value)
        if given is None:
            return None
        shown = printable(written(value), limit=80)
        self.state.note(f"line {line}: {name} is {shown}, which only a run could tell; {name}={known(given)} counts")
        return given

    def _assigned(self, assignment: Assignment) -> Value:
        old = self.state.variables.get(assignment.name)
        if assignment.elements is not None:
            return self._array(assignment, old)
        assert assignment.value is not None
        value = as_value(self.text(assignment.value.segments))
        if assignment.subscript is not None:
            array = old if isinstance(old, Array) else Array((("0", old),)) if old else Array()
            key = self._key(assignment.name, assignment.subscript, array, assignment.line)
            if key is None:  # whichever element it is: none of them is known from here on
                return _of_unknown_index(assignment)
            before = (array.get(key) or ()) if assignment.append else ()
            return array.with_item(key, before + value)
        if isinstance(old, Array):
            before = (old.get("0") or ()) if assignment.append else ()
            return old.with_item("0", before + value)
        return (old or ()) + value if assignment.append else value

    def _key(self, name: str, subscript: Segments, array: Array, line: int) -> str | None:
        """The key of an element: any text for `declare -A`, else a number that an expression may give."""
        key = known(self.text(subscript))
        if key is None or key.isdecimal() or self.state.kinds.get(name) == Kind("A"):
            return key
        index = self.evaluated((Piece(key, key, line),), key, line).text
        if index is None or not index.startswith("-"):
            return index
        return array.items[int(index)][0] if int(index) >= -len(array.items) else None

    def _array(self, assignment: Assignment, old: Value | None) -> Value:
        values: list[tuple[str | None, Text]] = []
        for key, word in assignment.elements or ():
            if key is not None:
                index = self._key(assignment.name, key, Array(), assignment.line)
                if index is None:
                    return _of_unknown_index(assignment)
                values.append((index, as_value(self.text(word.segments))))
            else:
                values.extend((None, as_element(field)) for field in self.fields([word]))
        start = Array()
        if assignment.append:
            start = old if isinstance(old, Array) else Array((("0", old),)) if old else start
        return start.extended(values)

    # Segments

    def items(self, segments: Segments) -> Items:
        items: Items = []
        for segment in segments:
            items.extend(self._segment(segment))
        return items

    def _segment(self, segment: Segment) -> Items:
        if isinstance(segment, Literal):
            return [Piece(segment.text, segment.text, segment.line, quoted=segment.quoted)]
        if isinstance(segment, Substitution):
            piece, quoted = segment.piece, segment.quoted
            text = substitution.output(segment.command, piece.written, piece.line, self)
            shown = (piece,) if text is None else text or (replace(piece, text="", unknown=None),)
            return [replace(part, quoted=quoted, expanded=not quoted) for part in shown]
        if isinstance(segment, Unknown):
            return [replace(segment.piece, quoted=segment.quoted, expanded=not segment.quoted)]
        if isinstance(segment, Arithmetic):
            piece = self.arithmetic(segment.expression, segment.written, segment.line)
            return [replace(piece, quoted=segment.quoted)]
        return self.parameter(segment)

    def arithmetic(self, expression: Segments, raw: str, line: int) -> Piece:
        return self.evaluated(self.text(expression), raw, line)

    def evaluated(self, text: Text, raw: str, line: int) -> Piece:
        """The value of an expression. What it sets is set; all of that is unknown where the value is."""
        characters = known(text)
        self.charge(len(characters or raw) // 10)
        changes: dict[str, int] = {}

        def value_of(name: str) -> int:
            return changes[name] if name in changes else self.number(name, raw, line)

        try:
            if characters is not None:
                piece = Piece(str(arithmetic.evaluate(characters, value_of, changes.__setitem__)), raw, line)
                for name, number in changes.items():
                    self.state.set(name, (replace(piece, text=str(number)),), line)
                return piece
            piece = Piece(None, raw, line, why_unknown(text), absent=is_absent(text))
        except arithmetic.Unknowable as problem:
            piece = Piece(None, raw, line, str(problem) if str(problem).startswith("$") else f"{raw}: {problem}")
        for name in arithmetic.changed_by(raw if characters is None else characters):
            self.state.set(name, (replace(piece, absent=False),), line)
            self.state.fixed.discard(name)
        return piece

    def number(self, name: str, raw: str, line: int) -> int:
        name = self.state.target(name)
        value = self.state.scalar(name)
        self.state.outside.is_read(name, value)
        if value is None:
            raise arithmetic.Unknowable(self.state.absent(name, raw, line).unknown or "")
        text = known(value)
        if text is None:
            raise arithmetic.Unknowable(why_unknown(value) or "")
        return arithmetic.number(text or "0")


def _of_unknown_index(assignment: Assignment) -> Text:
    """A list of which nobody knows which element was set: none of them is known from there on."""
    reason = f"${assignment.name} is set at an index that is only known at run time"
    return (Piece(None, f"${assignment.name}", assignment.line, reason, many=True),)


def _together(segment: Segment) -> Segment:
    """A list that is one text anyway has its elements as within quotes."""
    if isinstance(segment, Parameter) and "*" in (segment.name, segment.index):
        return replace(segment, quoted=True)
    return segment
