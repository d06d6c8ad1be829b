"""Every case of the gating oracles through ``CommOverlapConfig.setup`` on the dataclasses of the real megatron-core.

The cases are those of ``tests/oracles`` (its README says what they are): what Megatron-Bridge's own set-up did.
"""

from __future__ import annotations

from dataclasses import fields, make_dataclass
from functools import lru_cache
from typing import Any

import pytest
from comm_overlap_cases import DDP, MODEL, OPTIMIZER, GatingCase, gating_cases, set_up
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

# Bridge's providers are this, with fields of their own; the installed megatron-core may lack some that a case sets.
_PROVIDERS_OWN = ("seq_length", "vocab_size", "tp_comm_overlap_cfg", "cuda_graph_modules", "add_qkv_bias")


@lru_cache(maxsize=1)
def provider() -> type:
    has = {spec.name for spec in fields(TransformerConfig)}
    own = [(name, Any, None) for name in _PROVIDERS_OWN if name not in has]
    return make_dataclass("Provider", own, bases=(TransformerConfig,))


def objects(case: GatingCase) -> tuple[Any, Any, Any]:
    """Valid ones, with the attributes set afterwards: the constructors refuse what set-ups may be given."""
    model = provider()(num_layers=2, hidden_size=64, num_attention_heads=4)
    made = (model, OptimizerConfig(), DistributedDataParallelConfig())
    for owner, names in zip(made, (MODEL, OPTIMIZER, DDP), strict=True):
        for key, name in names.items():
            assert hasattr(owner, name)
            setattr(owner, name, case.given[key])
    return made


@pytest.mark.parametrize("version", ["0.3.1", "0.5.1", "0.6.2"])
def test_setup_agrees_with_bridge_on_real_dataclasses(version: str) -> None:
    cases = gating_cases(version)
    assert len(cases) > 900
    assert [miss for case in cases if (miss := set_up(case, *objects(case)))] == []
