"""What consecutive lines of one communicator stand for together.

Before 2.28 NCCL has no all_to_all, and PyTorch issues one as a Send and a Recv per peer, in the order of ranks and
itself included, those of no bytes left out. An all_gather or reduce_scatter of tensors of unequal sizes is a Broadcast,
or a Reduce, from each rank in turn; of equal sizes it is an AllGather or a ReduceScatter. Source: PyTorch
torch/csrc/cuda/nccl.cpp (all2all_single_unequal_split) and ProcessGroupNCCL.cpp (allgather, reduce_scatter).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

_LISTS = {"broadcast": "all_gather_list", "reduce": "reduce_scatter_list"}


class Counted(Protocol):
    """A counter, as :class:`overlapkit.measure.readers.nccl_log.counting.Counter`."""

    op: str
    dtype: str
    width: int
    calls: int
    elements: int

    def add(self, count: bytes) -> None: ...


class Sequences:
    """The Send, Recv, Broadcast and Reduce of a communicator of ``size`` ranks, of which the process is ``own``.

    ``counter`` gives the one of an operation, a type and a width.
    """

    def __init__(self, counter: Callable[[str, str, int], Counted], size: int, own: int | None) -> None:
        self._counter, self._size, self._own = counter, size, own
        self._sends_to_itself = False
        self._peers: set[int] = set()
        self._exchanges: dict[str, Counted] = {}
        self._exchange: Counted | None = None
        self._place = 0
        self._pending: dict[str, list[tuple[Counted, bytes]]] = {}

    def told(self, counter: Counted, root: int) -> Callable[[bytes], None] | None:
        """The function that is told the count of every call from or to ``root``; None where counting is enough."""
        if counter.op in _LISTS:
            if self._size == 1:
                return None
            whole = self._counter(_LISTS[counter.op], counter.dtype, counter.width)
            return partial(self._part, counter, whole, root)
        sends = counter.op == "send"
        if sends and root not in self._peers:
            # Where the process's own rank is unknown, whoever sends to all ranks sends to itself.
            self._peers.add(root)
            self._sends_to_itself |= root == self._own or len(self._peers) == self._size
        exchange = self._exchanges.get(counter.dtype)
        if exchange is None:
            exchange = self._exchanges[counter.dtype] = self._counter("all_to_all", counter.dtype, counter.width)
        return partial(self._exchanged, counter, exchange, 2 * root + (not sends), sends)

    def _exchanged(self, counter: Counted, exchange: Counted, place: int, sends: bool, count: bytes) -> None:
        """A Send or Recv: of the exchange before while the ranks rise, else of the next one."""
        if not self._sends_to_itself:
            counter.add(count)
        if place <= self._place or exchange is not self._exchange:
            exchange.calls += 1
            self._exchange = exchange
        self._place = place
        if sends:
            exchange.elements += int(count)

    def _part(self, counter: Counted, whole: Counted, root: int, count: bytes) -> None:
        """A Broadcast or Reduce: of a list while the roots count up from 0 to the last, else by itself."""
        pending = self._pending.setdefault(counter.op, [])
        if pending and (root != len(pending) or pending[0][0] is not counter):
            self._singly(pending)
        if root != len(pending):
            counter.add(count)
            return
        pending.append((counter, count))
        if len(pending) == self._size:
            counts = [int(count) for _, count in pending]
            if len(set(counts)) > 1:
                whole.calls += 1
                whole.elements += sum(counts)
                pending.clear()
            else:
                self._singly(pending)

    def _singly(self, pending: list[tuple[Counted, bytes]]) -> None:
        for counter, count in pending:
            counter.add(count)
        pending.clear()

    def finish(self) -> None:
        """No more lines come: what was not a whole list was calls of their own."""
        for pending in self._pending.values():
            self._singly(pending)

    def leaves_out(self, counter: Counted) -> bool:
        """Whether the calls of a counter are told by another: Sends and Recvs by the exchange, or it by them."""
        if counter.op in ("send", "recv"):
            return self._sends_to_itself
        return not self._sends_to_itself and any(counter is exchange for exchange in self._exchanges.values())
