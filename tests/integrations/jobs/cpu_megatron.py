"""Megatron-Core on a machine without CUDA: everything that stands in for CUDA and for its kernels is here."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# What the local layer specification cannot do without Transformer Engine, Apex or CUDA.
WITHOUT_KERNELS = {
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
}


def run_on_cpu(device: str = "cpu") -> None:
    """Call it once per process, before a model is built.

    On ``meta`` tensors have sizes and no values: a large model takes no memory, and what reads a value gets 1.
    """
    here = torch.device(device)
    # Buffers are made on the "current device".
    torch.cuda.current_device = lambda: here
    # After a batch of sends and receives the schedules wait for the device.
    torch.cuda.synchronize = lambda *_: None
    # Several optimizer instances reduce on a stream of their own, experts copy their counts on one: here all is one.
    only = _Stream()
    torch.cuda.Stream = torch.cuda.default_stream = torch.cuda.current_stream = lambda **_: only
    torch.cuda.stream = lambda _: nullcontext()
    # Else torch runs backward, and what is computed again in it, outside of the mode below.
    torch.autograd.has_torch_function = lambda *_: False
    _share_random_state()
    _let_norms_be_sequence_parallel()
    _name_what_experts_miss()
    (_OnMeta if device == "meta" else _OnDevice)(here).__enter__()


class _Stream:
    """A stream and its events, where everything has happened when it is asked for."""

    def wait_stream(self, _: Any) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


class _OnDevice(TorchFunctionMode):
    """Tensors asked for on CUDA are made here, and say they are there: the optimizers compare the names of types."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = self.device
        if function is torch.Tensor.cuda:
            return args[0].to(self.device)
        if function is torch.Tensor.record_stream:
            return None
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return f"torch.cuda.{torch.empty(0, dtype=args[0].dtype).type().removeprefix('torch.')}"
        return function(*args, **kwargs)


_READS = {torch.Tensor.item: float, torch.Tensor.__bool__: bool, torch.Tensor.__float__: float}


class _OnMeta(_OnDevice):
    """The same for tensors without values: norms of gradients, scales and flags are read."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _READS and args[0].is_meta:
            return _READS[function](args[0].is_floating_point())
        if function is torch.tensor and _holds_tensors(args[0]):
            return torch.empty(len(args[0]), device=self.device)
        return super().__torch_function__(function, types, args, kwargs)


def _holds_tensors(data: Any) -> bool:
    return isinstance(data, torch.Tensor) or (isinstance(data, (list, tuple)) and any(map(_holds_tensors, data)))


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
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        module = kind(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module

    WrappedTorchNorm.__new__ = staticmethod(norm)


def _name_what_experts_miss() -> None:
    """Without Transformer Engine the router of 0.16.1 asks for a name that was never set."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def attend_to_own_part() -> None:
    """The local attention refuses context parallelism. Here it attends to its own part of the sequence alone.

    All but what attention would exchange is as it would be.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    construct = DotProductAttention.__init__

    def without_context_parallelism(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        size, config.context_parallel_size = config.context_parallel_size, 1
        try:
            construct(self, config, *args, **kwargs)
        finally:
            config.context_parallel_size = size

    DotProductAttention.__init__ = without_context_parallelism
