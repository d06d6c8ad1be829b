"""What `env`, `sudo`, `srun`, `docker run` and the like do to the environment of the command behind them.

Sources: the manual pages of env (coreutils), sudo (``env_reset`` is its default), srun (``--export``), mpirun
(Open MPI's ``-x``, MPICH's ``-genv``), docker run and singularity exec.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from overlapkit.errors import printable
from overlapkit.megatron_lm.shell.splitting import may_be_several
from overlapkit.megatron_lm.shell.text import Text, as_value, known, written

CONTAINERS = frozenset({"docker", "podman", "nvidia-docker"})
APPTAINER = frozenset({"singularity", "apptainer"})
SLURM = frozenset({"srun", "sbatch", "salloc"})
MPI = frozenset({"mpirun", "mpiexec", "orterun", "horovodrun"})
WRAPPERS = CONTAINERS | APPTAINER | SLURM | MPI | {"env", "sudo"}

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=")
_PREFIXES = ("SINGULARITYENV_", "APPTAINERENV_")
_LIST_NAME = re.compile(r"(args|opts|options?|flags|params|extra|envs?|vars)\W*\Z", re.IGNORECASE)
_SUDO_VALUES = frozenset({"-u", "-g", "-h", "-p", "-C", "-r", "-t", "-D", "-R", "-T", "--user", "--group"})


@dataclass(frozen=True, slots=True)
class Change:
    """One step from the environment outside to the one inside; ``pass`` and ``pass all`` undo a ``clear`` before it.

    ``prefixed`` are the variables that Singularity sets from others. ``told`` says who clears.
    """

    do: Literal["clear", "set", "unset", "pass", "pass all", "prefixed"]
    name: str = ""
    value: Text = ()
    told: str = ""


@dataclass(frozen=True, slots=True)
class Option:
    """What one argument of a wrapper does: how many arguments it uses up, and whether the wrapper's own end here."""

    used: int = 1
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    ends: bool = False


def changed(environment: Mapping[str, Text], changes: Sequence[Change]) -> tuple[dict[str, Text], list[str]]:
    """The environment behind all changes, and a note for each wrapper that keeps something of it back."""
    outer = passed = dict(environment)
    cleared: list[tuple[str, dict[str, Text]]] = []
    for change in changes:
        if change.do == "clear":
            outer, passed = passed, {}
            cleared.append((change.told, dict(outer)))
        elif change.do == "set":
            passed[change.name] = as_value(change.value)
        elif change.do == "unset":
            passed.pop(change.name, None)
        elif change.do == "pass all":
            passed = {**outer, **passed}
        elif change.do == "prefixed":
            prefixed = {name: name.partition("ENV_")[2] for name in outer if name.startswith(_PREFIXES)}
            passed |= {inner: outer[name] for name, inner in prefixed.items() if inner}
        elif change.name in outer:
            passed[change.name] = outer[change.name]
    notes = []
    for told, before in cleared:
        lost = [printable(name) for name in before if name not in passed]
        if told and lost:
            notes.append(f"{told} does not pass on {', '.join(lost)}")
    return passed, notes


def split_assignment(text: Text) -> tuple[str, Text] | None:
    """``NAME=value`` as one argument; the name may come out of an expansion."""
    head = ""
    for number, piece in enumerate(text):
        if piece.text is None:
            return None
        found = _ASSIGNMENT.match(head + piece.text)
        if found:
            rest = (head + piece.text)[found.end() :]
            first = (replace(piece, text=rest, written=rest),) if rest else ()
            return found.group(1), (*first, *text[number + 1 :])
        head += piece.text
    return None


def begin(wrapper: str, line: int) -> list[Change]:
    """What a wrapper does before any option is seen."""
    if wrapper == "sudo":
        return [Change("clear", told=f"line {line}: sudo without -E")]
    return []


def option(wrapper: str, fields: Sequence[Text], index: int) -> Option:
    """What the argument at ``index`` says of the environment, as an option of the wrapper in front of it."""
    field = fields[index]
    following = fields[index + 1] if index + 1 < len(fields) else ()
    head = _head(field)
    if wrapper == "env":
        return _env(field, head, following)
    if wrapper == "sudo":
        return _sudo(field, head)
    if wrapper in CONTAINERS:
        if head in ("run", "exec"):
            begins = not any(known(before) in ("run", "exec") for before in fields[:index])
            return Option(changes=(Change("clear"),) if begins else ())
        return _container(field, head, following)
    if wrapper in APPTAINER:
        return _apptainer(field, head, following)
    if wrapper in SLURM:
        return _slurm(field, head, following, wrapper)
    return _mpi(fields, index) if wrapper in MPI else Option()


def _env(field: Text, head: str, following: Text) -> Option:
    if pair := split_assignment(field):
        return Option(changes=(Change("set", *pair),))
    if head in ("-", "-i", "--ignore-environment"):
        return Option(changes=(Change("clear"),))
    if head in ("-u", "--unset"):
        return Option(2, (Change("unset", known(following) or ""),))
    if unset := re.fullmatch(r"(?:-u|--unset=)(\w+)", head):
        return Option(changes=(Change("unset", unset.group(1)),))
    if may_be_several(field):
        return Option(notes=(_not_known(field),))
    return Option(2 if head in ("-C", "--chdir", "-S") else 1, ends=not head.startswith("-"))


def _sudo(field: Text, head: str) -> Option:
    if pair := split_assignment(field):
        return Option(changes=(Change("set", *pair),))
    if head == "--preserve-env" or re.fullmatch(r"-[A-Za-z]*E[A-Za-z]*", head):
        return Option(changes=(Change("pass all"),))
    if head.startswith("--preserve-env="):
        return _list_of(without(field, "--preserve-env="), passes=True)
    return Option(2 if head in _SUDO_VALUES else 1, ends=not head.startswith("-") and bool(head))


def _container(field: Text, head: str, following: Text) -> Option:
    if head in ("-e", "--env") or re.fullmatch(r"-[itd]+e", head):
        return replace(_variable(following), used=2)
    for prefix in ("--env=", "-e="):
        if head.startswith(prefix):
            return _variable(without(field, prefix))
    if short := re.match(r"-[itd]*e(?=\w)", head):
        return _variable(without(field, short.group()))
    if may_be_several(field) and _LIST_NAME.search(written(field)):
        return Option(notes=(_not_known(field),))
    return _file(field, head, following)


def _apptainer(field: Text, head: str, following: Text) -> Option:
    if head in ("exec", "run", "shell"):
        return Option(changes=(Change("prefixed"),))
    if head in ("-e", "--cleanenv", "-C", "--containall"):
        return Option(changes=(Change("clear"), Change("prefixed")))
    if head == "--env":
        return replace(_list_of(following), used=2)
    if head.startswith("--env="):
        return _list_of(without(field, "--env="))
    return _file(field, head, following)


def _slurm(field: Text, head: str, following: Text, wrapper: str) -> Option:
    if head == "--export":
        names, used = following, 2
    elif head.startswith("--export="):
        names, used = without(field, "--export="), 1
    else:
        return _file(field, head, following)
    told = f"line {field[0].line}: {wrapper} {printable(written(field))}{' ' + printable(written(names)) * (used - 1)}"
    parts = [part for part in _parts(names) if known(part) not in ("NONE", "NIL")]
    passes_all = any(known(part) == "ALL" for part in parts)
    found = _list_of_parts([part for part in parts if known(part) != "ALL"], passes=True)
    clear = () if passes_all else (Change("clear", told=told.rstrip()),)
    return Option(used, (*clear, *found.changes), found.notes)


def _mpi(fields: Sequence[Text], index: int) -> Option:
    head = known(fields[index])
    following = fields[index + 1 : index + 3]
    if head in ("-x", "--env") and following:
        return replace(_variable(following[0]), used=2)
    if head in ("-env", "-genv") and len(following) == 2:
        return Option(3, (Change("set", known(following[0]) or "", following[1]),))
    return Option()


def _variable(argument: Text) -> Option:
    """``NAME=value``, or ``NAME`` for one that is passed on."""
    if not argument:
        return Option()
    return _list_of_parts([argument], passes=True)


def _list_of(text: Text, *, passes: bool = False) -> Option:
    return _list_of_parts(_parts(text), passes=passes)


def _list_of_parts(parts: Sequence[Text], *, passes: bool) -> Option:
    changes: list[Change] = []
    notes = []
    for part in parts:
        name = known(part)
        if pair := split_assignment(part):
            changes.append(Change("set", *pair))
        elif name is None:
            notes.append(_not_known(part))
        elif passes and name.isidentifier():
            changes.append(Change("pass", name))
    return Option(1, tuple(changes), tuple(notes))


def _file(field: Text, head: str, following: Text) -> Option:
    """A file of variables, which is not read."""
    for name in ("--env-file", "--export-file"):
        if head == name and following:
            return Option(2, notes=(_not_read(following),))
        if head.startswith(f"{name}="):
            return Option(notes=(_not_read(without(field, f"{name}=")),))
    return Option()


def _not_read(file: Text) -> str:
    return f"line {file[0].line if file else 1}: what {printable(written(file))} sets is not read"


def _not_known(text: Text) -> str:
    return f"line {text[0].line}: what {printable(written(text))} sets is not known"


def _head(text: Text) -> str:
    """The characters in front of the first unknown piece."""
    head = ""
    for piece in text:
        if piece.text is None:
            break
        head += piece.text
    return head


def without(text: Text, prefix: str) -> Text:
    """An argument without what its known characters begin with."""
    count = len(prefix)
    rest = []
    for piece in text:
        part = piece.text
        if part is not None and count:
            cut, count = part[count:], max(count - len(part), 0)
            if cut:
                rest.append(replace(piece, text=cut, written=cut))
        else:
            rest.append(piece)
    return tuple(rest)


def _parts(text: Text) -> list[Text]:
    """What stands between commas."""
    parts: list[Text] = [()]
    for piece in text:
        between = [None] if piece.text is None else piece.text.split(",")
        for number, part in enumerate(between):
            if number:
                parts.append(())
            if part != "":
                parts[-1] = (*parts[-1], piece if part == piece.text else replace(piece, text=part, written=part or ""))
    return [part for part in parts if part]
