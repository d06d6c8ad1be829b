"""What the lines of an NCCL log say, of 2.18 to 2.29 and of RCCL, for ``NCCL_DEBUG=INFO`` with INIT and COLL.

``host:pid:tid [device] NCCL INFO`` begins a line, behind whatever a launcher or a timestamp puts in front. Then:

- ``AllGather: opCount 1f sendbuff 0x7f recvbuff 0x7f count 64 datatype 9 op 0 root 0 comm 0x55 [nranks=8] stream 0x56``
- ``ncclCommInitRankConfig comm 0x55 rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 18000 commId 0x1f - Init COMPLETE``
- ``ncclCommSplit comm 0x55 rank 1 nranks 2 cudaDev 3 … parent 0x54 splitCount 4 color 923304772 key 4 - Init COMPLETE``

Source: the format strings in the libraries of these releases (src/collectives.cc, enqueue.cc and init.cc).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from overlapkit.measure.readers.element_types import WIDTHS

# ncclDataType_t -> torch's name.
DATATYPES = {
    0: "int8",
    1: "uint8",  # torch's bool too
    2: "int32",
    3: "uint32",
    4: "int64",
    5: "uint64",
    6: "float16",
    7: "float32",
    8: "float64",
    9: "bfloat16",
    10: "float8_e4m3fn",
    11: "float8_e5m2",
}

# The function that a line names, in lower case -> (operation, whether its count is that of one rank's part).
OPERATIONS = {
    "allreduce": ("all_reduce", False),
    "broadcast": ("broadcast", False),
    "bcast": ("broadcast", False),
    "reduce": ("reduce", False),
    "allgather": ("all_gather", True),
    "reducescatter": ("reduce_scatter", True),
    "alltoall": ("all_to_all", True),
    "gather": ("gather", True),
    "scatter": ("scatter", True),
    "send": ("send", False),
    "recv": ("recv", False),
}

# Cuts a block into what stands before a call, its count, what stands between it and the next, its count, and so on.
# Tokens are taken as they come: a quarter of the time that exact classes need, and the rest of the line is checked.
CALL = re.compile(rb"opCount [^ ]+ sendbuff [^ ]+ recvbuff [^ ]+ count ([0-9]{1,18}) ")

# What NCCL, or a container's log, puts in front of a line where asked for the time. It differs in every line, and what
# differs is looked up again and again: a block that begins with it loses it first.
_CLOCK = rb"(?:\[20\d\d-\d\d-\d\d[^\]\n]{0,40}\]|20\d\d-\d\d-\d\dT[^ \n]{0,40}) (?:std(?:out|err) [FP] )?"
_CLOCK_FIRST, _CLOCKS = re.compile(_CLOCK), re.compile(b"\n" + _CLOCK)

_TAIL = re.compile(
    rb"datatype (\d{1,4}) op -?\d{1,9} root (-?\d{1,9}) comm (0x[0-9a-f]{1,16}) \[nranks=(\d{1,9})\]"
    rb"(?: stream (?:0x[0-9a-f]{1,16}|\(nil\)))?(?: task \d{1,9} globalrank (\d{1,9}))?"
)
_MARK = b" NCCL INFO "
_INIT = re.compile(rb"comm (0x[0-9a-f]{1,16}) rank (\d{1,9}) nranks (\d{1,9}) (cudaDev .*)- (\w+) (\w+)")
_FIELD = re.compile(rb"(parent|splitCount|color|key|commId) (-?\w+)")
_SEPARATORS = bytes(c if (chr(c).isalnum() and c < 128) or c in b"_.-" else 32 for c in range(256))

# A line with one of these is a call or an Init, whole or damaged.
_TELLTALES = (b"opCount ", b" recvbuff ", b"[nranks=", b" cudaDev ")
_TELLTALE = re.compile(b"|".join(re.escape(word) for word in _TELLTALES))


class Origin(NamedTuple):
    """Whose line it is: the process, and what stands after ``NCCL INFO``.

    ``at_start``: nothing stands before it; ``alone``: no other line of NCCL does.
    """

    host: str
    pid: int
    text: bytes
    at_start: bool
    alone: bool


class Tail(NamedTuple):
    """The part of a call's line after its count; ``length`` counts its bytes, up to where NCCL's own text ends."""

    dtype: str
    width: int
    root: int
    pointer: str
    size: int
    global_rank: int | None
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A communicator as an Init line says it; ``started`` is the line before the work, the other one comes after."""

    pointer: str
    rank: int
    size: int
    started: bool
    parent: str | None = None
    split_count: int | None = None
    color: int | None = None
    key: int | None = None
    commid: str | None = None


def without_clock(block: bytes) -> bytes:
    """Whole lines without the times in front of them; the lines stay in their places."""
    found = _CLOCK_FIRST.match(block)
    return block if found is None else _CLOCKS.sub(b"\n", block[found.end() :])


def origin(line: bytes) -> Origin | None:
    """Who wrote the line, by the last ``host:pid:tid [device] NCCL INFO`` in it; None where that is damaged."""
    at = line.rfind(_MARK)
    if at < 0:
        return None
    words = line[max(0, at - 400) : at].split(b" ")[-2:]
    named = words[0] if words[-1].startswith(b"[") and words[-1].endswith(b"]") else words[-1]
    host, _, ids = named.partition(b":") if named.count(b":") == 2 else _last_three(named)
    pid, _, thread = ids.partition(b":")
    hosts = host.translate(_SEPARATORS).split()
    if not (hosts and len(hosts[-1]) <= 255 and pid.isdigit() and len(pid) <= 10 and thread.isdigit()):
        return None
    at_start, alone = line.startswith(hosts[-1] + b":"), line.find(_MARK) == at
    return Origin(hosts[-1].decode("ascii"), int(pid), line[at + len(_MARK) :], at_start, alone)


def without_prefix(head: bytes) -> bytes:
    """The beginning of a line from its ``host:pid:tid`` on: what stands before may differ in every line."""
    return head[head.rfind(b" ", 0, max(head.rfind(b" [", 0, max(head.rfind(_MARK), 0)), 0)) + 1 :]


def _last_three(named: bytes) -> tuple[bytes, bytes, bytes]:
    """A launcher's prefix may be glued to the host with a colon of its own: ``[default0]:node-0:12:12``."""
    parts = named.rsplit(b":", 2)
    return parts[0], b":", b":".join(parts[1:])


def operation(text: bytes) -> str | None:
    """The function that a call's line names just before its opCount, in lower case, behind any ``[tag]``."""
    if not text.endswith(b": "):
        return None
    name = text[:-2].rpartition(b" ")[2].rpartition(b"]")[2]
    return name.decode("ascii").lower() if name.isalnum() and len(name) <= 40 else None


def tail(text: bytes) -> Tail | None:
    """What a call's line says after its count, None where it is cut or not NCCL's."""
    found = _TAIL.match(text)
    if found is None or not int(found[4]):
        return None
    datatype, root, pointer, size, global_rank = found.groups()
    dtype = DATATYPES.get(int(datatype), f"datatype {int(datatype)}")
    return Tail(
        dtype=dtype,
        width=WIDTHS.get(dtype, 0),
        root=int(root),
        pointer=pointer.decode("ascii"),
        size=int(size),
        global_rank=None if global_rank is None else int(global_rank),
        length=found.end(),
    )


def telltale_lines(text: bytes) -> Iterator[bytes]:
    """Every line of ``text`` that looks like a call or an Init."""
    if not any(word in text for word in _TELLTALES):
        return
    end = 0
    while (found := _TELLTALE.search(text, end)) is not None:
        start = text.rfind(b"\n", 0, found.start()) + 1
        end = text.find(b"\n", found.end())
        end = len(text) if end < 0 else end
        yield text[start:end]


def looks_made(line: bytes) -> bool:
    """Whether a line with a telltale is one about a communicator's life, whole or damaged, and not a call's."""
    return b" cudaDev " in line and (b"- Init " in line or b"comm 0x" in line)


def made(line: bytes) -> Made | str | None:
    """The communicator of an Init line, the pointer of one whose life ends, None where the line is damaged.

    Any other line about a communicator gives an empty pointer.
    """
    found = _INIT.search(line)
    if found is None:
        return None
    pointer, rank, size, rest, event, state = found.groups()
    if int(rank) >= int(size):
        return None
    if event != b"Init":
        return pointer.decode("ascii") if event in (b"Destroy", b"Abort") else ""
    fields = dict(_FIELD.findall(rest))
    return Made(
        pointer=pointer.decode("ascii"),
        rank=int(rank),
        size=int(size),
        started=state == b"START",
        parent=_text(fields.get(b"parent")),
        split_count=_number(fields.get(b"splitCount")),
        color=_number(fields.get(b"color")),
        key=_number(fields.get(b"key")),
        commid=_text(fields.get(b"commId")),
    )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value[:40].decode("ascii", "replace")


def _number(value: bytes | None) -> int | None:
    try:
        return None if value is None else int(value[:20])
    except ValueError:
        return None
