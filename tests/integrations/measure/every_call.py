"""Two processes over gloo that call every function of torch.distributed that moves something, with sizes that differ.

torchrun --nproc-per-node 2 every_call.py
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
RANK, OTHER = dist.get_rank(), 1 - dist.get_rank()
alone = [dist.new_group([rank], group_desc=f"ALONE_{rank}") for rank in (0, 1)]
both = dist.new_group([0, 1], group_desc="BOTH")


def floats(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.float32)


dist.all_reduce(floats(1), group=both)
dist.all_reduce(floats(2), dist.ReduceOp.MAX, both)
dist.all_reduce(tensor=torch.ones(3, dtype=torch.bfloat16), group=both, async_op=True).wait()
with dist._coalescing_manager(group=both):
    dist.all_reduce(floats(4), group=both)
    dist.all_reduce(floats(5), group=both)
dist.all_gather_into_tensor(floats(12), floats(6), group=both)
dist._all_gather_base(floats(14), floats(7), both)
dist.all_gather([floats(8), floats(8)], floats(8), group=both)
dist.reduce_scatter_tensor(floats(9), floats(18), group=both)
dist._reduce_scatter_base(output=floats(10), input=floats(20), group=both)
dist.reduce_scatter(floats(11), [floats(11), floats(11)], group=both)
dist.all_to_all_single(floats(24), floats(24), group=both)
dist.all_to_all([floats(13), floats(13)], [floats(13), floats(13)], group=both)
dist.broadcast(floats(14), 0, both)
dist.reduce(floats(15), 0, group=both)
dist.gather(floats(16), [floats(16), floats(16)] if RANK == 0 else None, 0, group=both)
dist.scatter(floats(17), [floats(17), floats(17)] if RANK == 0 else None, 0, both)
if RANK == 0:
    dist.send(floats(18), 1, both)
    dist.isend(floats(19), dst=1, group=both).wait()
else:
    dist.recv(floats(18), 0, both)
    dist.irecv(floats(19), src=0, group=both).wait()
exchange = [dist.P2POp(dist.isend, floats(20), OTHER, both), dist.P2POp(dist.irecv, floats(20), OTHER, both)]
for work in dist.batch_isend_irecv(exchange):
    work.wait()
dist.barrier(both)
dist.broadcast_object_list([None], 0, both)
dist.all_reduce(floats(21), group=alone[RANK])
dist.all_reduce(floats(22), group=alone[OTHER])  # of which it is no member: nothing happens
dist.all_reduce(floats(23))
dist.destroy_process_group()
