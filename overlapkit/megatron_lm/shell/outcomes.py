"""Launches met in many states -> one per outcome that differs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from overlapkit.megatron_lm.shell.launching import Record
from overlapkit.megatron_lm.shell.state import CALL, Branch, Path, merge_paths
from overlapkit.megatron_lm.words import Launch, Word

_LINE = re.compile(r"line (\d+): ")
_SIZE = re.compile(r"--?(n|N|np|nodes|nnodes|ntasks.*|nproc.*|gpus.*|gres|num[-_]\w+|ppn|npernode|map-by)(=|\Z)")


def launches(records: Sequence[Record], notes: Sequence[str]) -> tuple[Launch, ...]:
    """Equal records become one; those taken come first, then those that the script itself starts, then in its order."""
    sites: dict[int, list[tuple[Record, Path]]] = {}
    for record in records:
        _add(sites.setdefault(record.line, []), record)
    found: list[tuple[bool, Launch]] = []
    for site in sites.values():
        paths = _told(site)
        calls = len({tuple(filter(_is_call, record.place)) for record, _ in site}) > 1
        for (record, _), path in zip(site, paths, strict=True):
            found.append((record.only_written, _launch(record, path, calls, notes)))
    found.sort(key=lambda entry: (not entry[1].taken, entry[0], entry[1].line))
    return _told_apart([launch for _, launch in found])


def _told_apart(found: list[Launch]) -> tuple[Launch, ...]:
    """Of several launches each says on which line it stands; of one line and with the same branches, which it is."""
    several = len({launch.line for launch in found}) > 1
    same = Counter((launch.line, launch.when) for launch in found)
    met: Counter[object] = Counter()
    result = []
    for launch in found:
        key = (launch.line, launch.when)
        met[key] += 1
        which = f"launch {met[key]} of {same[key]} on line {launch.line}" if same[key] > 1 else ""
        told = which or (f"the launch on line {launch.line}" if several else "")
        result.append(replace(launch, when=(*launch.when, told)) if told else launch)
    return tuple(result)


def _add(site: list[tuple[Record, Path]], record: Record) -> None:
    """``site`` holds for each different launch a record of it, and the path that all of its records share."""
    key = _key(record)
    for number, (other, path) in enumerate(site):
        if _key(other) == key:
            first = record if record.taken and not other.taken else other
            all_notes = tuple(dict.fromkeys((*other.notes, *record.notes)))
            contrary = other.contrary and record.contrary
            site[number] = (replace(first, notes=all_notes, contrary=contrary), merge_paths(path, record.path))
            return
    site.append((record, dict(record.path)))


def _key(record: Record) -> object:
    exports = None if record.exports is None else tuple((name, _seen(word)) for name, word in record.exports.items())
    return (tuple(map(_seen, record.arguments)), _sizes(record.launcher), exports)


def _sizes(launcher: Sequence[Word]) -> object:
    """Of a launcher only the number of processes tells two launches apart: not addresses, ranks or containers."""
    found = []
    for number, word in enumerate(launcher):
        if _SIZE.match(word.text or word.written):
            following = launcher[number + 1 : number + 2]
            found.append((_seen(word), *map(_seen, following)))
    return tuple(found)


def _seen(word: Word) -> tuple[str | None, str | None]:
    return (word.text, word.unknown)


def _told(site: list[tuple[Record, Path]]) -> list[Path]:
    """What each launch says of its branches: of those that tell launches apart, and of those that it stands in.

    Several ways may lead to the same launch; the record kept is one of them, and its way stands for all.
    """
    taken = next((record.path for record, _ in site if record.taken), {})
    telling = {branch for _, path in site for branch in path}
    shared = {
        branch
        for branch, outcome in site[0][1].items()
        if all(path.get(branch) == outcome for _, path in site) and taken.get(branch) == outcome
    }
    return [
        {
            branch: outcomes
            for branch, outcomes in record.path.items()
            if branch in telling and (branch not in shared or branch.chain in record.around)
        }
        for record, _ in site
    ]


def _launch(record: Record, path: Path, calls: bool, notes: Sequence[str]) -> Launch:
    holding = {branch.chain for branch, outcomes in path.items() if True in outcomes}
    lines: list[tuple[int, str]] = []
    for branch, outcomes in path.items():
        holds = True in outcomes
        if holds or branch.chain not in holding or not _is_earlier(branch, path):
            lines.append((branch.line, branch.told(holds)))
    for step in record.place:
        told = step.removeprefix(CALL) if calls else step
        if found := _LINE.match(told):
            lines.append((int(found.group(1)), told))
    return Launch(
        line=record.line,
        arguments=record.arguments,
        launcher=record.launcher,
        exports=record.exports,
        when=tuple(dict.fromkeys(text for _, text in sorted(lines, key=lambda entry: entry[0]))),
        taken=record.taken,
        contrary=record.contrary,
        notes=tuple(dict.fromkeys((*record.notes, *notes))),
    )


def _is_call(step: str) -> bool:
    return step.startswith(CALL)


def _is_earlier(branch: Branch, path: Path) -> bool:
    """Whether a later arm of the same `if` or `case` holds, which says that this one does not."""
    later = [other for other, outcomes in path.items() if True in outcomes and other.line > branch.line]
    return any(other.chain == branch.chain for other in later)
