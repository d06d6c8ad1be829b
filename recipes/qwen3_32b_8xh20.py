"""Qwen3-32B fine-tuned on 8 H20 as a recipe function in Megatron-Bridge's form: a few facts decide the overlap.

    python recipes/qwen3_32b_8xh20.py     # what will overlap, what to export

Sizes: the model's config.json. Layout: a single node; every sequence is padded to one length, as userbuffers need it.
Under Bridge give the function the ConfigContainer of its own recipe, as ``cfg``.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from overlapkit.comm_overlap import CommOverlapConfig
from overlapkit.plan import SETTINGS
from overlapkit.render.text import print_plan


def comm_overlap() -> CommOverlapConfig:
    """There are no presets for H20, so userbuffers start with Transformer Engine's own; DP 1 has nothing to overlap."""
    return CommOverlapConfig.decide(
        gpu="h20",
        num_gpus=8,
        precision="bf16",
        tensor_model_parallel_size=8,
        num_layers=64,
        hidden_size=5120,
        seq_length=16384,
        micro_batch_size=1,
        global_batch_size=16,
        software={"container": "nemo:26.04"},
        overrides=["dataset.dataset_kwargs.pad_to_max_length=true"],
    )


def qwen3_32b_finetune_config(cfg: Any = None) -> Any:
    """The configuration, set on ``cfg``, the ConfigContainer of Bridge's own recipe; without one on plain sections."""
    overlap = comm_overlap()
    if cfg is None:
        sections = {name: SimpleNamespace() for name in ("model", "train", "optimizer", "ddp")}
        cfg = SimpleNamespace(**sections, env_vars={}, comm_overlap=overlap)
        for path in SETTINGS:  # as Megatron's own classes have them before the set-up
            section, _, name = path.partition(".")
            setattr(getattr(cfg, section), name, None)
    else:
        cfg.comm_overlap = overlap.to_bridge()
    cfg.model.num_layers, cfg.model.hidden_size, cfg.model.seq_length = 64, 5120, 16384
    cfg.model.tensor_model_parallel_size, cfg.model.sequence_parallel = 8, True
    cfg.model.pipeline_model_parallel_size, cfg.model.virtual_pipeline_model_parallel_size = 1, None
    cfg.model.context_parallel_size = 1
    cfg.train.micro_batch_size, cfg.train.global_batch_size = 1, 16
    cfg.optimizer.use_distributed_optimizer = cfg.ddp.use_distributed_optimizer = True
    cfg.mixed_precision = "bf16_mixed"
    if hasattr(cfg, "env_vars"):  # a ConfigContainer has them from Bridge 0.6; before, the launcher exports overlap.env
        cfg.env_vars.update(overlap.env)
    return cfg


if __name__ == "__main__":
    print_plan(comm_overlap().plan, sys.stdout)
