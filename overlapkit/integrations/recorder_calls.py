"""The functions of torch.distributed that a recorder counts, and which of their arguments is the message.

Not here, because they end in these: batch_isend_irecv calls the isend and irecv of its operations, the collectives of
objects call those of tensors. What a version of torch lacks is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Counted(NamedTuple):
    """What a call of a function counts as: ``op`` in the names of predicted rows.

    The message is a tensor, or a list of them that is one call; with ``each`` every item of the list is a call.
    ``position`` and ``name`` are where it stands, ``group`` is the position of the group; without a ``name`` there is
    no message.
    """

    op: str
    position: int
    name: str | None
    group: int
    each: bool = False

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """(group, or None for the default one; the messages of the calls)."""
        group = args[self.group] if len(args) > self.group else kwargs.get("group")
        if self.name is None:
            return group, [[]]
        message = args[self.position] if len(args) > self.position else kwargs[self.name]
        return group, list(message) if self.each else [message]


_ALL_GATHER = Counted("all_gather", 0, "output_tensor", 2)
_REDUCE_SCATTER = Counted("reduce_scatter", 1, "input", 3)
_SEND = Counted("send", 0, "tensor", 2)
_RECV = Counted("recv", 0, "tensor", 2)
FUNCTIONS = {
    "all_reduce": Counted("all_reduce", 0, "tensor", 2),
    "all_reduce_coalesced": Counted("all_reduce", 0, "tensors", 2, each=True),
    "all_gather": Counted("all_gather_list", 0, "tensor_list", 2),
    "all_gather_coalesced": Counted("all_gather_list", 0, "output_tensor_lists", 2, each=True),
    "all_gather_single": _ALL_GATHER,
    "all_gather_into_tensor": _ALL_GATHER,
    "_all_gather_base": _ALL_GATHER,
    "reduce_scatter": Counted("reduce_scatter_list", 1, "input_list", 3),
    "reduce_scatter_single": _REDUCE_SCATTER,
    "reduce_scatter_tensor": _REDUCE_SCATTER,
    "_reduce_scatter_base": _REDUCE_SCATTER,
    "all_to_all": Counted("all_to_all", 1, "input_tensor_list", 2),
    "all_to_all_single": Counted("all_to_all", 1, "input", 4),
    "broadcast": Counted("broadcast", 0, "tensor", 2),
    "reduce": Counted("reduce", 0, "tensor", 3),
    "gather": Counted("gather", 0, "tensor", 3),
    "scatter": Counted("scatter", 0, "tensor", 3),
    "send": _SEND,
    "isend": _SEND,
    "recv": _RECV,
    "irecv": _RECV,
    "barrier": Counted("barrier", 0, None, 0),
}
