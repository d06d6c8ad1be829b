"""The layers that have userbuffers, and how Transformer Engine overlaps each unless told otherwise.

Source: transformer-engine pytorch/module/base.py initialize_ub.
"""

from __future__ import annotations

RING, PIPELINE, BULK, EXTERNAL = "ring_exchange", "pipeline", "bulk", "external"

# In the order in which they get their buffers.
DEFAULT_METHODS = {
    "qkv_fprop": RING,
    "fc1_fprop": RING,
    "proj_dgrad": RING,
    "fc2_dgrad": RING,
    "proj_fprop": PIPELINE,
    "fc2_fprop": PIPELINE,
    "qkv_dgrad": BULK,
    "qkv_wgrad": BULK,
    "fc1_dgrad": BULK,
    "fc1_wgrad": BULK,
}
# From 2.7: gathered again for MXFP8's weight gradient, beside the GEMM of the dgrad layer of the same block.
EXTERNAL_METHODS = {"proj_wgrad": EXTERNAL, "fc2_wgrad": EXTERNAL}
ROW_PARALLEL_FORWARD = ("proj_fprop", "fc2_fprop")
COLUMN_PARALLEL_DGRAD = ("qkv_dgrad", "fc1_dgrad")
COLUMN_PARALLEL_WGRAD = ("qkv_wgrad", "fc1_wgrad")
REDUCE_SCATTERS = ROW_PARALLEL_FORWARD + COLUMN_PARALLEL_WGRAD
# Forward layers whose chunks come out of order when both GEMMs are atomic rings: one undoes what the other does.
ATOMIC_PAIRS = {"qkv_fprop": "proj_fprop", "fc1_fprop": "fc2_fprop"}
