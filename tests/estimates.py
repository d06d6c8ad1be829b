"""Estimates made by hand, for the tests of what is made of them."""

from __future__ import annotations

from collections.abc import Sequence

from overlapkit.cost.result import Estimate, GroupTime, Parts, Saving, StageTime, Timeline


def stage_of(forward_s: float, backward_s: float) -> StageTime:
    """A stage's passes: half of each is GEMMs, a quarter attention, a quarter exposed TP communication."""

    def made_of(seconds: float) -> dict[str, float]:
        return {"gemm": seconds / 2, "attention": seconds / 4, "memory_bound": 0.0, "host": 0.0, "tp": seconds / 4}

    return StageTime(
        forward_s=forward_s, backward_s=backward_s, forward_by=made_of(forward_s), backward_by=made_of(backward_s)
    )


def timeline_of(stages: int | Sequence[StageTime], microbatches: int, *, vp: int = 1, p2p_s: float = 0.0) -> Timeline:
    """By default each stage takes 1 s forward and 2 s backward; 0.5 s of DP communication and 0.25 s are left over."""
    each = (stage_of(1.0, 2.0),) * stages if isinstance(stages, int) else tuple(stages)
    return Timeline(
        num_microbatches=microbatches,
        vp=vp,
        stages=each,
        slowest=0,
        p2p_s=p2p_s,
        dp_exposed_s=0.5,
        optimizer_s=0.25,
    )


def estimate_with(timeline: Timeline, *, step_time_s: float = 20.0) -> Estimate:
    """A step of 20 s, whose parts add up to it."""
    groups = {
        "dp": GroupTime(message_bytes=3_000_000, total_s=1.5, hidden_s=1.0, exposed_s=0.5),
        "all": GroupTime(message_bytes=12, total_s=0.0, hidden_s=0.0, exposed_s=0.0),
        "tp": GroupTime(message_bytes=52_076_478_464, total_s=6.0, hidden_s=3.0, exposed_s=3.0),
    }
    rest = step_time_s - 3.5 - 0.25 - 5.0
    return Estimate(
        recipe="recipes/by_hand.yaml",
        gpu="h100",
        step_time_s=step_time_s,
        interval_s=(0.8 * step_time_s, 1.25 * step_time_s),
        kind="moe",
        tokens_per_step=2_097_152,
        tokens_per_s_per_gpu=6553.6,
        model_tflops_per_gpu=412.34,
        mfu=0.4169,
        groups=groups,
        parts=Parts(gemm_s=rest, attention_s=4.0, memory_bound_s=0.001, host_s=0.999, bubble_s=1e-15, optimizer_s=0.25),
        saves={
            "overlap_grad_reduce": Saving(seconds=0.1, share=0.005, low_share=0.0025, high_share=0.008),
            "tp_comm_overlap": Saving(seconds=3.0, share=0.15, low_share=0.075, high_share=0.24),
            "overlap_moe_expert_parallel_comm": Saving(seconds=-0.4, share=-0.02, low_share=-0.032, high_share=-0.01),
        },
        assumed=("cluster.nic_gbps=400",),
        notes=("no step times on h100 were at hand",),
        timeline=timeline,
    )
