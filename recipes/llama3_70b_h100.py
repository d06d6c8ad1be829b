"""Llama 3 70B on 64 H100 as a recipe function in Megatron-Bridge's form: the sections say everything once.

    python recipes/llama3_70b_h100.py     # what will overlap, what to export

Sizes: the model's config.json. Layout and batch: Megatron-Bridge 0.6.2, perf_recipes/llama/h100 (BF16).
Under Bridge give the function the ConfigContainer of its own recipe, as ``cfg``.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from overlapkit.comm_overlap import CommOverlapConfig
from overlapkit.plan import SETTINGS
from overlapkit.render.text import print_plan

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 80,
        "hidden_size": 8192,
        "ffn_hidden_size": 28672,
        "num_attention_heads": 64,
        "num_query_groups": 8,
        "gated_linear_unit": True,
        "seq_length": 8192,
        "vocab_size": 128256,
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 5,
        "context_parallel_size": 2,
    },
    "train": {"micro_batch_size": 1, "global_batch_size": 256},
    "optimizer": {"use_distributed_optimizer": True},
    "ddp": {"use_distributed_optimizer": True},
}
PRECISION = "bf16_mixed"
MACHINE: dict[str, dict[str, Any]] = {
    "cluster": {"gpu": "h100", "num_gpus": 64},
    "software": {
        "megatron_bridge": "0.6.2",
        "megatron_core": "0.19.2",
        "transformer_engine": "2.18",
        "torch": "2.13.0",
    },
}


def comm_overlap() -> CommOverlapConfig:
    """Decided from the sections: userbuffers where they are legal, with the nearest preset."""
    return CommOverlapConfig.from_recipe({**MACHINE, **SECTIONS, "mixed_precision": PRECISION})


def llama3_70b_pretrain_config(cfg: Any = None) -> Any:
    """The configuration, set on ``cfg``, the ConfigContainer of Bridge's own recipe; without one on plain sections."""
    overlap = comm_overlap()
    if cfg is None:
        cfg = SimpleNamespace(**{section: SimpleNamespace() for section in SECTIONS}, env_vars={})
        for path in SETTINGS:  # as Megatron's own classes have them before the set-up
            section, _, name = path.partition(".")
            setattr(getattr(cfg, section), name, None)
        cfg.comm_overlap = overlap
    else:
        cfg.comm_overlap = overlap.to_bridge()
    for section, values in SECTIONS.items():
        for name, value in values.items():
            setattr(getattr(cfg, section), name, value)
    cfg.mixed_precision = PRECISION
    cfg.env_vars.update(overlap.env)
    return cfg


if __name__ == "__main__":
    print_plan(comm_overlap().plan, sys.stdout)
