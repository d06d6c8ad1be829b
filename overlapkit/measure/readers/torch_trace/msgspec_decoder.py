"""The decoding of a trace's events by msgspec (the extra ``trace``): only what is needed becomes an object."""

from __future__ import annotations

from typing import Any

import msgspec


class Event(msgspec.Struct, gc=False):
    """An event with the fields of ``json_stream.Event``; its arguments are still text."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Launch(msgspec.Struct, gc=False):
    correlation: int | None = None


ERRORS = (msgspec.DecodeError, RecursionError)
events = msgspec.json.Decoder(list[Event]).decode
_launch = msgspec.json.Decoder(_Launch).decode
_anything = msgspec.json.Decoder().decode


def arguments(event: Event) -> dict[str, Any]:
    """The arguments of an event; none where they are no mapping."""
    try:
        found = _anything(event.args)
    except ERRORS:
        return {}
    return found if isinstance(found, dict) else {}


def correlation(event: Event) -> int | None:
    """The id that joins a launch to its kernel; None where the event has none."""
    try:
        return _launch(event.args).correlation
    except ERRORS:
        return None
