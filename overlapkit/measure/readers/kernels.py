"""Which device work is communication, by the name of its kernel, whatever wrote the profile.

NCCL spells its kernels ncclKernel_* (to 2.18), ncclDevKernel_* (since 2.19) and ncclSymkDevKernel_* (symmetric memory,
since 2.27); RCCL the same or rccl*. Communication is not NCCL alone: Transformer Engine's userbuffers, NVSHMEM, DeepEP
and HybridEP move bytes by kernels of their own, as do PyTorch's symmetric memory and custom all-reduces.
"""

from __future__ import annotations

import re

# One name of a type of NCCL or RCCL stands for many kernels; ReduceScatter and AllReduce contain Reduce.
_COLLECTIVES = (
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send_recv"),
    ("alltoall", "all_to_all"),
    ("reduce", "reduce"),
)
# Operations that a kernel of NCCL may run: SendRecv also all-to-alls, Broadcast and Reduce also uneven lists.
_RUNS = {
    "send_recv": ("send", "recv", "all_to_all", "gather", "scatter"),
    "all_gather": ("all_gather", "all_gather_list"),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter_list"),
    "broadcast": ("broadcast", "all_gather_list"),
    "reduce": ("reduce", "reduce_scatter_list"),
    "all_reduce": ("all_reduce", "barrier"),
}
_LIBRARY = re.compile(r"(?<![a-z])(?:nccl|rccl|msccl)\w*kernel", re.IGNORECASE)  # mangled too: _Z30ncclDev…
_OTHER = re.compile(
    r"userbuffers|nvshmem|deep_?ep|hybrid_?ep|cross_device_reduce|multimem_\w*(?:reduce|gather)"
    r"|(?:one|two)_shot_all_reduce",
    re.IGNORECASE,
)
# CUPTI reports waiting in the same tables as work.
_SYNCHRONISATION = re.compile(r"(?:stream|event|context|device) (?:sync|wait)|stream wait event", re.IGNORECASE)


def communication(kernel: str) -> str | None:
    """The operation of a communication kernel, None for all other kernels.

    Named as in predicted rows where the name says it; ``send_recv`` for NCCL's kernel of all point-to-point work
    (sends, receives and all-to-alls made of them), ``dispatch`` and ``combine`` for expert traffic outside NCCL,
    ``userbuffers``, ``nvshmem``, and ``communication`` for a kernel of NCCL that does not say what it does.
    """
    library = _LIBRARY.search(kernel)
    if library:
        name = kernel[library.start() :].lower().replace("_", "")
        return next((op for part, op in _COLLECTIVES if part in name), "communication")
    if not _OTHER.search(kernel):
        return None
    name = kernel.lower()
    for op in ("dispatch", "combine", "userbuffers", "nvshmem"):
        if op in name:
            return op
    return "all_reduce" if "reduce" in name else "communication"


def is_nccl(kernel: str) -> bool:
    """Whether NCCL or RCCL launched the kernel: only those belong to a call of torch.distributed."""
    return _LIBRARY.search(kernel) is not None


def may_run(kernel_op: str, op: str) -> bool:
    """Whether a kernel of NCCL with the operation that :func:`communication` gave may run a call of ``op``."""
    return op in _RUNS.get(kernel_op, (kernel_op,)) or kernel_op == "communication"


def synchronisation(name: str) -> bool:
    """Whether a device activity only waits: it is not work."""
    return _SYNCHRONISATION.match(name) is not None
