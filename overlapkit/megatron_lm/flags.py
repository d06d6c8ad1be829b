"""Which flags the parser of a Megatron-LM has, and what each takes.

``data/megatron_lm_flags.json`` is written by ``scripts/megatron_lm_flags.py`` from the real parsers of some versions,
the snapshots. Between two of them, and before the first, it is not certain whether a flag is there: what is read gets
the benefit of the doubt, what is written does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from overlapkit.data import load_json
from overlapkit.versions import Version, parse_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of one parser.

    ``do``: store (it takes a value), true, false, boolean (true, and false as ``--no-…``) or other. ``values`` is how
    many values it takes: a number, or argparse's ``+``, ``*`` and ``?``. ``kind`` is int, float, str or None (a type of
    the parser's own). ``choices`` is empty where any value does.
    """

    name: str
    dest: str
    do: str
    values: int | str
    kind: str | None
    choices: tuple[str, ...]

    @property
    def meaning(self) -> tuple[str, str]:
        """What aliases share: two flags with the same meaning do the same."""
        return self.dest, self.do


def flags_of(core: Version | None, *, doubtful: bool) -> Mapping[str, Flag]:
    """The flags of the Megatron-LM with this Megatron-Core, by name; of any version where ``core`` is None.

    ``doubtful`` says whether flags count that only one of the two snapshots around ``core`` has.
    """
    return _flags_of(None if core is None else core.text, doubtful)


@lru_cache(maxsize=32)
def _flags_of(core: str | None, doubtful: bool) -> Mapping[str, Flag]:
    data = load_json("megatron_lm_flags.json")
    versions = [parse_version(text) for text in data["snapshots"]]
    around = range(len(versions)) if core is None else _around(parse_version(core), versions)
    found = {}
    for name, variants in data["flags"].items():
        having = {position: spec for spec in variants for position in spec.get("in", range(len(versions)))}
        here = [having[position] for position in around if position in having]
        if here and (doubtful or core is None or len(here) == len(around)):
            found[name] = _flag(name, here[-1] if core is None else here[0])
    if core is None:
        found |= {name: _flag(name, spec) for name, spec in data["older"].items()}
    elif parse_version(core) < versions[0]:
        _before_all(found, parse_version(core), data)
    return found


def _around(here: Version, versions: list[Version]) -> tuple[int, ...]:
    """The positions of the snapshots around a version, the older one first; one where it is a snapshot itself."""
    below = [position for position, version in enumerate(versions) if not here < version][-1:]
    above = [position for position, version in enumerate(versions) if not version < here][:1]
    return tuple(dict.fromkeys([*below, *above]))


def _before_all(found: dict[str, Flag], here: Version, data: Mapping[str, Any]) -> None:
    """The oldest snapshot's flags without those that came later, with those that went."""
    for name, since in data["newer"].items():
        if here < parse_version(since):
            del found[name]
    for name, spec in data["older"].items():
        if here < parse_version(spec["before"]):
            found[name] = _flag(name, spec)


def _flag(name: str, spec: Mapping[str, Any]) -> Flag:
    do = spec["do"]
    return Flag(
        name=name,
        dest=spec.get("dest", name.lstrip("-").replace("-", "_")),
        do=do,
        values=spec.get("n", 1) if do == "store" else 0,
        kind=spec.get("type"),
        choices=tuple(spec.get("choices", ())),
    )


@lru_cache(maxsize=1)
def all_choices() -> Mapping[str, frozenset[str]]:
    """Flag -> the values that some version takes; without flags that take any in one."""
    found = {}
    for name, variants in load_json("megatron_lm_flags.json")["flags"].items():
        lists = [spec.get("choices", ()) for spec in variants]
        if all(lists):
            found[name] = frozenset(choice for choices in lists for choice in choices)
    return found
