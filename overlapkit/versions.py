"""Version numbers of the training software, compared as PEP 440 orders them.

Only what container tags, wheels and NGC builds use: releases, pre-releases, ``.postN``, ``.devN``
and ``+local``. Kept here so that a login node needs no further package.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

_PATTERN = re.compile(
    r"v?(?P<release>\d{1,9}(?:\.\d{1,9}){0,8})"
    r"(?:[-_.]?(?P<pre>alpha|beta|preview|pre|rc|a|b|c)[-_.]?(?P<pre_n>\d{0,9}))?"
    r"(?:[-_.]?(?:post|rev|r)[-_.]?(?P<post>\d{0,9})|-(?P<post_n>\d{1,9}))?"
    r"(?P<dev>[-_.]?dev[-_.]?(?P<dev_n>\d{0,9}))?"
    r"(?:\+(?P<local>[a-z0-9]+(?:[-_.][a-z0-9]+)*))?",
    re.IGNORECASE | re.ASCII,
)
_PRE = {"alpha": 0, "a": 0, "beta": 1, "b": 1, "preview": 2, "pre": 2, "rc": 2, "c": 2}
_DEV_ALONE, _FINAL = -1, 3


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """One version; ``text`` is as the user wrote it and takes no part in comparisons."""

    key: tuple[object, ...]
    text: str = field(compare=False)

    def __str__(self) -> str:
        return self.text

    @property
    def series(self) -> tuple[int, int]:
        """Major and minor."""
        release = self.key[0]
        assert isinstance(release, tuple)
        major, minor = (*release, 0, 0)[:2]
        return major, minor


@lru_cache(maxsize=512)
def parse_version(text: str) -> Version:
    """``"2.9.0+70f53666"`` -> Version.

    Raises:
        ValueError: the text is not a version.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a version such as 2.10 or 0.6.2")
    release = [int(part) for part in match["release"].split(".")]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    post = match["post"] if match["post"] is not None else match["post_n"]
    if match["pre"]:
        phase = (_PRE[match["pre"].lower()], int(match["pre_n"] or 0))
    elif match["dev"] and post is None:
        phase = (_DEV_ALONE, 0)
    else:
        phase = (_FINAL, 0)
    post_key = -1 if post is None else int(post or 0)
    dev_key = (0, int(match["dev_n"] or 0)) if match["dev"] else (1, 0)
    return Version((tuple(release), phase, post_key, dev_key, _local_key(match["local"])), text.strip())


def _local_key(local: str | None) -> tuple[tuple[int, int, str], ...]:
    """No local part sorts before any; numeric segments sort after text, as PEP 440 says."""
    if local is None:
        return ()
    parts = re.split(r"[-_.]", local.lower())
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts)


@dataclass(frozen=True, slots=True)
class VersionRange:
    """A half-open range such as ``>=0.4,<0.6``; ``text`` is how documentation prints it."""

    text: str
    since: Version | None
    before: Version | None

    def __contains__(self, version: Version) -> bool:
        if self.since is not None and version < self.since:
            return False
        return self.before is None or version < self.before


ANY = VersionRange("any", None, None)


@lru_cache(maxsize=256)
def parse_range(text: str) -> VersionRange:
    """``">=0.4,<0.6"`` -> VersionRange; ``"any"`` contains every version."""
    if text == "any":
        return ANY
    bounds: dict[str, Version] = {}
    for clause in text.split(","):
        operator = ">=" if clause.startswith(">=") else clause[:1]
        if operator not in (">=", "<"):
            raise ValueError(f"{text!r} is not a range such as >=0.4,<0.6")
        bounds[operator] = parse_version(clause[len(operator) :])
    return VersionRange(text, bounds.get(">="), bounds.get("<"))
