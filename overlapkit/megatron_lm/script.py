"""Launch scripts and argument lists -> the launches that they may lead to."""

from __future__ import annotations

import re
from collections.abc import Mapping

from overlapkit.errors import RecipeError
from overlapkit.megatron_lm.shell.commands import LAUNCHER_FLAGS, TRAINING_FLAGS
from overlapkit.megatron_lm.shell.expansion import Expansion
from overlapkit.megatron_lm.shell.interpreter import Interpreter
from overlapkit.megatron_lm.shell.launching import Record
from overlapkit.megatron_lm.shell.outcomes import launches
from overlapkit.megatron_lm.shell.outside import Outside
from overlapkit.megatron_lm.shell.scanner import Scanner
from overlapkit.megatron_lm.shell.state import State
from overlapkit.megatron_lm.shell.text import MAX_CHARACTERS, Array, Piece, ShellError, Source, Text, known, to_word
from overlapkit.megatron_lm.shell.tree import Parameter, ShellWord
from overlapkit.megatron_lm.words import Launch

_NOT_ALLOWED = re.compile("[\x00\ud800-\udfff\U000f0000-\U000ffffd]")
_COMMENT_OR_BLANK = re.compile(r"(?:\s|\\\n|#[^\n]*\n)*")


def read_script(text: str, source: str, variables: Mapping[str, str] | None = None) -> tuple[Launch, ...]:
    """The training launches of a shell script, or of a list of arguments, without running anything.

    One launch per outcome of the branches that change it; those that the script takes as it is written come first.
    ``variables`` are set and exported from outside, as an environment would; ``1``, ``2``, … are the script's own
    arguments. One counts instead of what the script sets where that is unknown; a note names one of no effect.
    No other file is read, and neither is this process's environment.

    Raises:
        RecipeError: no training launch is found, or the text is too large, too deep or no shell text.
    """
    _check(text, source)
    text = text.replace("\r\n", "\n")
    given = dict(variables or {})
    try:
        if text.startswith("-", _COMMENT_OR_BLANK.match(text).end()):  # type: ignore[union-attr]
            return (_argument_list(text, given),)
        return _script(text, source, given)
    except ShellError as error:
        raise RecipeError(error.problem, source=source, line=error.line) from None


def _check(text: str, source: str) -> None:
    if len(text) > MAX_CHARACTERS or len(text.encode("utf-8", "replace")) > MAX_CHARACTERS:
        raise RecipeError(f"larger than {MAX_CHARACTERS // 1024} KB, which no launch script needs", source=source)
    found = _NOT_ALLOWED.search(text)
    if found:
        line = text.count("\n", 0, found.start()) + 1
        code = ord(found.group())
        raise RecipeError(f"the character U+{code:04X} is not allowed in a script", source=source, line=line)


def _start(given: Mapping[str, str]) -> State:
    values: dict[str, Text] = {name: (Piece(value, value, 1),) for name, value in given.items() if name.isidentifier()}
    state = State(
        given={name: value for name, value in given.items() if name.isdecimal()},
        outside=Outside(values),
        exported=set(values),
        fixed=set(values),
    )
    for name, text in values.items():
        state.set(name, text, 1)
    return state


def _script(text: str, source: str, given: Mapping[str, str]) -> tuple[Launch, ...]:
    walk = Interpreter()
    start = _start(given)
    states = walk.run_file(Source.of_file(text), [start])
    walk.follow_what_is_only_written(states + walk.ended)
    likely = max((record.likelihood for record in walk.records), default=0)
    records = [record for record in walk.records if record.likelihood == likely] if likely else []
    if not records:
        records = [record for state in states + walk.ended if (record := _from_variables(state, walk)) is not None]
    if not records:
        raise _nothing_found(walk, source)
    return launches(records, [*(note for _, note in walk.unread), *start.outside.notes(text)])


def _nothing_found(walk: Interpreter, source: str) -> RecipeError:
    problem, line = "no training launch is found here", None
    if walk.unread:
        line, note = walk.unread[0]
        problem = f"{problem}: {note.partition(': ')[2]}"
    hint = "a launch is a .py program with flags of Megatron-LM, or the flags alone"
    if walk.hidden:
        line, hint = (line or walk.hidden[0][0]), walk.hidden[0][1]
    elif walk.other_files:
        hint = f"{walk.other_files[0]}, which is not read"
    return RecipeError(problem, source=source, line=line or None, hint=hint)


def _from_variables(state: State, walk: Interpreter) -> Record | None:
    """The flags that a script without a launch keeps in its variables for another one."""
    lists: dict[str, list[Text]] = {}
    for name, value in state.variables.items():
        fields = [text for _, text in value.items if text] if isinstance(value, Array) else _words_of(value)
        if fields and (fields[0][0].text or "").startswith("--"):
            lists[name] = fields
    arguments: list[Text] = []
    launcher: list[Text] = []
    for fields in _outermost(lists):
        flags = {(known(field) or "").partition("=")[0] for field in fields}
        (launcher if any(LAUNCHER_FLAGS.match(flag) for flag in flags) else arguments).extend(fields)
    if not any((known(field) or "").partition("=")[0] in TRAINING_FLAGS for field in arguments):
        return None
    words, notes = walk.arguments(arguments)
    exported = [(name, state.scalar(name)) for name in sorted(state.exported - set(lists))]
    exports = {name: to_word(value, 1) for name, value in exported if value is not None}
    return Record(
        line=words[0].line,
        place=(),
        path=state.path,
        around=frozenset(),
        taken=state.taken,
        contrary=bool(state.contrary),
        likelihood=1,
        launcher=(*walk.launcher, *(to_word(field, 1) for field in launcher)),
        arguments=words,
        exports=exports or None,
        notes=(*state.notes, *notes),
    )


def _words_of(value: Text) -> list[Text]:
    state = State(variables={"value": value})
    word = ShellWord((Parameter("value", "$value", 1, False),), "$value", 1)
    return Expansion(state, lambda amount: None).fields([word])


def _outermost(lists: Mapping[str, list[Text]]) -> list[list[Text]]:
    """Without the lists that another one contains."""
    places = {
        name: {(piece.line, piece.written) for field in fields for piece in field} for name, fields in lists.items()
    }
    kept = []
    for name, fields in lists.items():
        inside = any(
            other != name and places[name] <= places[other] and (places[name] < places[other] or other < name)
            for other in lists
        )
        if not inside:
            kept.append(fields)
    return kept


def _argument_list(text: str, given: Mapping[str, str]) -> Launch:
    """Flags without a command, on one line or many."""
    scanner = Scanner(Source.of_file(text))
    start = _start(given)
    expansion = Expansion(start, lambda amount: None)
    fields: list[Text] = []
    while (position := _COMMENT_OR_BLANK.match(text, scanner.position).end()) < len(text):  # type: ignore[union-attr]
        if text[position] == "#":  # a comment that the end of the file ends
            break
        scanner.position = position
        fields.extend(expansion.fields([scanner.word(" \t\n")]))
    words, notes = Interpreter().arguments(fields)
    if not words:
        raise ShellError("the list of arguments is empty", 1)
    return Launch(line=words[0].line, arguments=words, notes=(*notes, *start.outside.notes(text)))
