"""Puts a wrapper around each function of torch.distributed that is counted, wherever it is known by a name.

Seven modules of Megatron-Core keep the functions under names of their own from their import on, and P2POp takes an
isend or irecv only if it is the one that torch.distributed.distributed_c10d has. So every module that is loaded and has
the function gets the wrapper, under whatever name; one that is loaded later finds it in torch.distributed.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from overlapkit.integrations.recorder_calls import FUNCTIONS, Counted

Function = Callable[..., Any]
Note = Callable[[Counted, tuple[Any, ...], dict[str, Any]], None]


class _Inside(threading.local):
    """Whether this thread is in a counted function: what that calls is a part of it."""

    call = False


def wrapped(function: Function, kind: Counted, note: Note, inside: _Inside) -> Function:
    """``function``, whose calls ``note`` is told before they are made.

    A collective calls itself again where a mode of torch's is active, the deprecated names call the new ones: these are
    one call.
    """

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if inside.call:
            return function(*args, **kwargs)
        note(kind, args, kwargs)
        inside.call = True
        try:
            return function(*args, **kwargs)
        finally:
            inside.call = False

    return counted


def install(note: Note, before_destroy: Callable[[], None]) -> dict[int, tuple[Any, Any]]:
    """Wraps what is counted; ``before_destroy`` is called when process groups are about to be destroyed.

    Returns what :func:`replace` needs to take the wrappers away: id -> (wrapper, function).
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    inside = _Inside()
    wrappers = {}
    for name, kind in FUNCTIONS.items():
        function = getattr(distributed_c10d, name, None)
        if function is not None:
            wrappers[function] = wrapped(function, kind, note, inside)
    wrappers[dist.destroy_process_group] = _after(dist.destroy_process_group, before_destroy)
    replace({id(function): (function, wrapper) for function, wrapper in wrappers.items()})
    return {id(wrapper): (wrapper, function) for function, wrapper in wrappers.items()}


def _after(function: Function, before: Callable[[], None]) -> Function:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        before()
        return function(*args, **kwargs)

    return called


def replace(others: Mapping[int, tuple[Any, Any]]) -> None:
    """Puts the second of each pair in the place of the first, in every loaded module; the key is the first's id."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        names = vars(module)
        for name, value in list(names.items()):
            pair = others.get(id(value))
            # What keeps the functions aside, as these pairs and the wrappers do, keeps them in no module's names.
            if pair is not None and value is pair[0]:
                names[name] = pair[1]
