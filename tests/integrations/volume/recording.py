"""A backend of torch.distributed that notes every call and passes it on, to gloo or to torch's fake process group.

It stands where NCCL would: whatever way Megatron-Core takes to a collective, imported by name, coalesced or batched,
ends here. A kind of call that is not among these has no backend to go to, and raises.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork


class Call(NamedTuple):
    """One call of one rank: ``group`` and its ``size`` in ranks, message ``bytes`` as a volume counts them.

    ``peer`` is the global rank at the other end of a send or recv.
    """

    group: str
    size: int
    op: str
    dtype: str
    bytes: int
    peer: int | None = None


def start(backend: str, rank: int, world: int, store: str | None) -> list[Call]:
    """Initialises torch.distributed on ``gloo`` or ``fake``; the list that it returns grows with every call.

    ``store`` is the file by which the processes of gloo meet.
    """
    calls: list[Call] = []

    def group_of(options: Any, _: Any) -> RecordingGroup:
        if backend == "gloo":
            arguments = options.store, options.group_rank, options.group_size
            inner = dist.ProcessGroupGloo(*arguments, timeout=options.timeout)
        else:
            inner = FakeProcessGroup._create_internal(options.group_rank, options.group_size)
        return RecordingGroup(inner, list(options.global_ranks_in_group) or list(range(world)), calls)

    dist.Backend.register_backend("recording", group_of, extended_api=True, devices=["cpu"])
    shared = dist.HashStore() if store is None else dist.FileStore(store, world)
    dist.init_process_group("recording", rank=rank, world_size=world, store=shared)
    return calls


class RecordingGroup(dist.ProcessGroup):
    """The group that torch.distributed calls; ``inner`` does the work, ``ranks`` are its global ranks."""

    # What the fake group's recv gives for the shape that sequences of variable length announce; none over gloo.
    announced_shape: tuple[int, ...] | None = None

    def __init__(self, inner: Any, ranks: list[int], calls: list[Call]) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.ranks, self.calls = inner, ranks, calls

    def getBackendName(self) -> str:
        return "recording"

    def _get_backend(self, _: torch.device) -> RecordingGroup:
        """Who asks what the backend can do finds no way around the notes."""
        return self

    def _note(self, op: str, tensors: list[torch.Tensor], peer: int | None = None) -> None:
        name = "WORLD" if self.group_desc == "default_pg" else self.group_desc
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        self.calls.append(
            Call(name, len(self.ranks), op, dtype, size, None if peer is None else self.ranks[peer]),
        )

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self._note("all_reduce", tensors)
        return self.inner.allreduce(tensors, options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self._note("broadcast", tensors)
        return self.inner.broadcast(tensors, options)

    def all_gather_single(self, output: torch.Tensor, part: torch.Tensor, options: Any) -> Any:
        self._note("all_gather", [output])
        return self.inner._allgather_base(output, part, options)

    def reduce_scatter_single(self, part: torch.Tensor, whole: torch.Tensor, options: Any) -> Any:
        self._note("reduce_scatter", [whole])
        return self.inner._reduce_scatter_base(part, whole, options)

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, received: Any, sent: Any, options: Any
    ) -> Any:
        self._note("all_to_all", [given])
        if isinstance(self.inner, FakeProcessGroup) and not len(given):
            # The fake group repeats what is given; other ranks may have given where this one has nothing.
            self._invent(output)
            return FakeWork()
        # On a CPU Megatron-Core counts tokens in tensors, where it would have copied them from a GPU as numbers.
        return self.inner.alltoall_base(output, given, [int(n) for n in received], [int(n) for n in sent], options)

    def allgather(self, outputs: list[list[torch.Tensor]], given: list[torch.Tensor], options: Any) -> Any:
        self._note("all_gather_list", outputs[0])
        return self.inner.allgather(outputs, given, options)

    def reduce_scatter(self, outputs: list[torch.Tensor], given: list[list[torch.Tensor]], options: Any) -> Any:
        self._note("reduce_scatter_list", given[0])
        return self.inner.reduce_scatter(outputs, given, options)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self._note("send", tensors, peer)
        return self.inner.send(tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self._note("recv", tensors, peer)
        if isinstance(self.inner, FakeProcessGroup):
            self._invent(tensors[0])
        return self.inner.recv(tensors, peer, tag)

    def _invent(self, tensor: torch.Tensor) -> None:
        """The fake group leaves what it receives as memory had it."""
        with torch.no_grad():
            if tensor.is_floating_point():
                tensor.normal_()
            elif self.announced_shape is not None:
                tensor.copy_(torch.tensor(self.announced_shape))

    # Buckets come in one list, which NCCL runs as one call each in a group of calls.

    def allreduce_coalesced(self, tensors: list[torch.Tensor], options: Any) -> Any:
        single = dist.AllreduceOptions()
        single.reduceOp = options.reduceOp
        return _last([self.allreduce([tensor], single) for tensor in tensors])

    def all_gather_single_coalesced(self, outputs: list[Any], parts: list[Any], options: Any) -> Any:
        return _last([self.all_gather_single(*pair, options) for pair in zip(outputs, parts, strict=True)])

    def reduce_scatter_single_coalesced(self, parts: list[Any], wholes: list[Any], options: Any) -> Any:
        return _last([self.reduce_scatter_single(*pair, options) for pair in zip(parts, wholes, strict=True)])


def _last(works: list[Any]) -> Any:
    for work in works:
        work.wait()
    return works[-1]
