"""Writes the NCCL logs of a whole job from its predicted volume, in the format of a release.

    paths = write_logs(volume, folder, steps=2, version=(2, 25), split=True, one_file=False)

Every rank of the job first meets the others on the world communicator, runs one step that is not counted because it
comes before the first mark, and then ``steps`` complete ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from zlib import crc32

from overlapkit.volume import Row, Stage, Volume
from overlapkit.volume.placement import MODEL, PP, WORLD, members

DATATYPES = {
    "int8": (0, 1),
    "uint8": (1, 1),
    "bool": (1, 1),
    "int32": (2, 4),
    "int64": (4, 8),
    "float16": (6, 2),
    "float32": (7, 4),
    "float64": (8, 8),
    "bfloat16": (9, 2),
}
FUNCTIONS = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
    "send": "Send",
    "recv": "Recv",
}
PER_RANK = ("all_gather", "reduce_scatter")  # NCCL counts one rank's part of them
LISTS = {"all_gather_list": "Broadcast", "reduce_scatter_list": "Reduce"}
MARK = ("all_reduce", "int32")  # comes last in a step, as in Megatron's train loop
Line = tuple[str, int, int, int]  # function, elements, datatype, root


def write_logs(
    volume: Volume,
    folder: Path,
    *,
    steps: int,
    version: tuple[int, int] = (2, 25),
    split: bool = True,
    one_file: bool = False,
    prefix: str = "",
    suffix: str = "",
) -> list[Path]:
    """The logs of all ranks, one file each or all lines in one file in turns.

    ``split``: PyTorch bound the device, and groups are split from the world; else they are made when they are first
    used. ``prefix`` and ``suffix`` stand around every line, ``{rank}`` in them is the rank.
    """
    names = [
        (rank, f"nccl.node-{rank // 8}.{1000 + rank}.log")
        for stage in volume.stages
        for part in stage.ranks
        for rank in part
    ]
    stages = {rank: stage for stage in volume.stages for part in stage.ranks for rank in part}
    logs = {
        rank: [
            f"{prefix}{line}{suffix}".replace("{rank}", str(rank))
            for line in Writer(volume, stages[rank], rank, version, split).lines(steps)
        ]
        for rank in sorted(stages)
    }
    if one_file:
        path = folder / "job.log"
        turns = chain.from_iterable(zip_longest(*logs.values()))
        path.write_text("".join(f"{line}\n" for line in turns if line is not None))
        return [path]
    paths = []
    for rank, name in names:
        path = folder / name
        path.write_text("".join(f"{line}\n" for line in logs[rank]))
        paths.append(path)
    return paths


def ranks_of(volume: Volume, group: str, rank: int) -> tuple[int, ...]:
    return tuple(range(volume.layout.world_size)) if group == WORLD else members(volume.layout, group, rank)


class Writer:
    """One rank's log."""

    def __init__(self, volume: Volume, stage: Stage, rank: int, version: tuple[int, int], split: bool) -> None:
        self.volume, self.rank, self.version, self.split = volume, rank, version, split
        self.rows = sorted(
            (row for row in stage.rows if row.observable),
            key=lambda row: (row.group == MODEL, (row.op, row.dtype) == MARK),
        )
        self.world = tuple(range(volume.layout.world_size))
        self.pointers: dict[str, int] = {}
        self.calls = 0

    def lines(self, steps: int) -> Iterator[str]:
        yield from self.call(WORLD, self.world, ("AllReduce", 1, 7, 0))
        marked = any((row.op, row.dtype) == MARK and row.group == MODEL for row in self.rows)
        for _ in range(steps + 1):
            for row in self.rows:
                ranks = ranks_of(self.volume, row.group, self.rank)
                for line in self.row(row, ranks):
                    yield from self.call(row.group, ranks, line)
            if not marked:
                yield from self.call(MODEL, (self.rank,), ("AllReduce", 1, 2, 0))

    def row(self, row: Row, ranks: tuple[int, ...]) -> Iterator[Line]:
        """The calls of one row in one step; what does not divide by their number goes to the first."""
        datatype, width = DATATYPES[row.dtype]
        part = width * row.size if row.op in PER_RANK else width
        elements, rest = divmod(row.message_bytes, part)
        assert not rest, f"{row.op} of {row.message_bytes} bytes in {row.group}"
        each = elements // row.count
        onward = round(row.count * row.onward_bytes / row.message_bytes) if row.op == "send" else 0
        for index in range(row.count):
            count = elements - each * (row.count - 1) if index == 0 else each
            if row.op in LISTS:
                yield from (
                    (LISTS[row.op], share, datatype, root) for root, share in enumerate(uneven(count, row.size))
                )
            elif row.op == "all_to_all":
                yield from self.exchange(count, row.size, datatype)
            elif row.op in ("send", "recv"):
                yield FUNCTIONS[row.op], count, datatype, self.neighbour(row.group, ranks, onward=index < onward)
            else:
                yield FUNCTIONS[row.op], count, datatype, 0

    def exchange(self, count: int, size: int, datatype: int) -> Iterator[Line]:
        """An all_to_all: one call from 2.28 on, where its parts are equal, else a Send and a Recv per rank."""
        if self.version >= (2, 28) and count % size == 0:
            yield "AlltoAll", count // size, datatype, 0
            return
        for peer, share in enumerate(uneven(count, size)):
            yield "Send", share, datatype, peer
            yield "Recv", share, datatype, peer

    def neighbour(self, group: str, ranks: tuple[int, ...], *, onward: bool) -> int:
        """The place in ``ranks`` of the next rank, or of the one before, of the pipeline where the group is WORLD."""
        order = members(self.volume.layout, PP, self.rank) if group == WORLD else ranks
        return ranks.index(order[(order.index(self.rank) + (1 if onward else -1)) % len(order)])

    def call(self, group: str, ranks: tuple[int, ...], line: Line) -> Iterator[str]:
        if group not in self.pointers:
            yield from self.init(group, ranks)
        function, count, datatype, root = line
        self.calls += 1
        send = "(nil)" if function == "Recv" else f"0x7f{self.calls % 7:010x}"
        receive = "(nil)" if function == "Send" else f"0x7e{self.calls % 5:010x}"
        yield self.info(
            f"{function}: opCount {self.calls:x} sendbuff {send} recvbuff {receive} count {count} datatype {datatype} "
            f"op 0 root {root} comm {self.pointers[group]:#x} [nranks={len(ranks)}] stream 0x5600aabbccd0"
        )

    def init(self, group: str, ranks: tuple[int, ...]) -> Iterator[str]:
        """The lines about a new communicator; the world comes before the first split."""
        if self.split and not self.pointers and group != WORLD:
            yield from self.init(WORLD, self.world)
        parent = self.pointers.get(WORLD)
        pointer = self.pointers[group] = 0x55AA00000000 + 0x100000 * len(self.pointers)
        device = f"cudaDev {self.rank % 8}" + (f" nvmlDev {self.rank % 8}" if self.version >= (2, 19) else "")
        said = f"comm {pointer:#x} rank {ranks.index(self.rank)} nranks {len(ranks)} {device} busId 18000"
        commid = f"commId {crc32(repr((group, ranks)).encode()) + 1:#x}"
        if self.split and parent is not None:
            count = f"splitCount {len(self.pointers) - 1} " if self.version >= (2, 25) else ""
            # The groups of one kind are split one after the other: their counts differ by rank in no other way.
            said += f" parent {parent:#x} {count}color {abs(hash(ranks)) % 2**31} key {self.rank}"
            said += f" {commid}" if self.version < (2, 23) else ""
            function = "ncclCommSplit " if self.version >= (2, 21) else ""
        else:
            said += f" {commid}"
            function = "ncclCommInitRankConfig " if self.version >= (2, 21) else ""
        if self.version >= (2, 19):
            yield self.info(f"{function}{said}{'' if self.split and parent is not None else ' '}- Init START")
        yield self.info(f"{function}{said} - Init COMPLETE")

    def info(self, text: str) -> str:
        pid = 1000 + self.rank
        return f"node-{self.rank // 8}:{pid}:{pid} [{self.rank % 8}] NCCL INFO {text}"


def uneven(count: int, size: int) -> list[int]:
    """``count`` elements in ``size`` parts, the first one larger."""
    part = count // (size + 1)
    return [count - part * (size - 1), *[part] * (size - 1)]
