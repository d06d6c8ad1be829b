"""Qwen3-235B-A22B on 256 H100 as a recipe function in Megatron-Bridge's form, with the EP all-to-all overlapped.

    python recipes/qwen3_235b_a22b_h100.py comm_overlap.delay_wgrad_compute=false

The YAML recipe of the same name says sizes, layout and what overlaps; the words behind the command override it.
Under Bridge give the function the ConfigContainer of its own recipe, as ``cfg``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from overlapkit import load_recipe
from overlapkit.comm_overlap import CommOverlapConfig
from overlapkit.render.text import print_plan

RECIPE = Path(__file__).with_suffix(".yaml")


def comm_overlap(overrides: Sequence[str] = ()) -> CommOverlapConfig:
    """What overlaps; a combination that a gate refuses raises here, on the login node."""
    return CommOverlapConfig.from_recipe(RECIPE, overrides)


def qwen3_235b_a22b_pretrain_config(overrides: Sequence[str] = (), cfg: Any = None) -> Any:
    """The configuration, set on ``cfg``, the ConfigContainer of Bridge's own recipe; without one on plain sections."""
    recipe, overlap = load_recipe(RECIPE, overrides), comm_overlap(overrides)
    sections = {name: asdict(getattr(recipe, name)) for name in ("model", "train", "optimizer", "ddp")}
    if cfg is None:
        cfg = SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in sections.items()}, env_vars={})
        cfg.model.bf16 = True  # Bridge's own set-up of mixed_precision does it
        cfg.comm_overlap = overlap
    else:
        cfg.comm_overlap = overlap.to_bridge()
    for name, values in sections.items():
        for field, value in values.items():
            if value is not None:
                setattr(getattr(cfg, name), field, value)
    cfg.mixed_precision = "bf16_mixed"
    cfg.env_vars.update(overlap.env)
    return cfg


if __name__ == "__main__":
    print_plan(comm_overlap(sys.argv[1:]).plan, sys.stdout)
