"""Megatron-Core 0.16.1 on a machine without CUDA: everything that stands in for CUDA is here.

The collectives are real ones, over gloo.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def run_on_cpu() -> None:
    """Call it once per process, before a model is built."""
    # Buffers are made on the "current device".
    torch.cuda.current_device = lambda: _CPU
    # After a batch of sends and receives the schedules wait for the device.
    torch.cuda.synchronize = lambda *_: None
    _share_random_state()
    _let_norms_be_sequence_parallel()
    _OnCpu().__enter__()


class _OnCpu(TorchFunctionMode):
    """Tensors asked for on CUDA are made here, and say they are there: the optimizers compare the names of types."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


def _share_random_state() -> None:
    """Megatron's tracker of CUDA's random states works on that of the CPU."""
    from megatron.core.tensor_parallel import random

    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = torch.get_rng_state
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _let_norms_be_sequence_parallel() -> None:
    """Without Transformer Engine and Apex the norm is torch's, whose wrapper refuses sequence parallelism.

    What it lacks is the mark by which the gradients of its parameters are summed over the tensor-parallel group.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def norm(_: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> torch.nn.Module:
        module = torch.nn.LayerNorm(hidden_size, eps=eps)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module

    WrappedTorchNorm.__new__ = staticmethod(norm)
