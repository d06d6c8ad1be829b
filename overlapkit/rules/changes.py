"""What the fixes of several families change, and where."""

from __future__ import annotations

from dataclasses import replace

from overlapkit.facts import Facts
from overlapkit.rules.registry import State, passes, registered

_TP_OVERLAP = "model.tp_comm_overlap"


def home(f: Facts) -> str:
    """The section that asks for TP or EP overlap: where ``comm_overlap`` is null, Bridge reads the model's values."""
    return "comm_overlap" if f.overlap_setup or (f.megatron_lm and f.recipe.comm_overlap is not None) else "model"


def tp_overlap_works(f: Facts, s: State) -> bool:
    """Whether TP overlap, were it on, would meet no obstacle."""
    obstacles = (code for code in registered() if code.startswith(("TP", "UB")))
    return passes(f, {**s, _TP_OVERLAP: True}, *obstacles)


def with_sequence_parallel(f: Facts, s: State) -> str:
    """What turns sequence parallelism on, and TP overlap off where another obstacle stands behind."""
    on = "model.sequence_parallel=true"
    if not s[_TP_OVERLAP] or tp_overlap_works(replace(f, sequence_parallel=True), s):
        return on
    return f"{on} and {home(f)}.tp_comm_overlap=false"


def asserted(f: Facts, s: State) -> list[str]:
    """What Megatron-LM asserts for TP or CP, once the EP overlap or FSDP that it made an exception for is gone."""
    changes = [] if passes(f, s, "ENV011") else ["env_vars.CUDA_DEVICE_MAX_CONNECTIONS=1"]
    return changes if passes(f, s, "ENV018") else [*changes, "model.pipeline_model_parallel_comm_backend=nccl"]
