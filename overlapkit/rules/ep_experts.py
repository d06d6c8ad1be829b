"""EP: fields of experts, as far as Megatron-Core's configuration refuses them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from overlapkit.facts import Facts
from overlapkit.rules.ep import EP_OVERLAP, alltoall, fields_of_experts_off, overlap_off
from overlapkit.rules.ep_delay import te_before, te_text
from overlapkit.rules.registry import Finding, State, Verdict, refusal, rule

_CONFIG = "megatron-core transformer/transformer_config.py"


@rule("EP036", source=f"{_CONFIG}; Megatron-LM training/arguments.py")
def fields_of_no_experts(f: Facts, s: State) -> Iterable[Verdict]:
    """No experts, and fields that say otherwise.

    ``num_moe_experts`` of 0, which Megatron-LM takes for none. ``moe_ffn_hidden_size`` without experts, from core 0.18
    not where ``moe_layer_freq`` has dense layers. A hand-written recipe for Bridge may leave the experts to the
    model's own recipe.

    Why: Megatron-Core refuses both.
    Fix: set ``model.num_moe_experts``, or remove the fields.
    """
    model, experts = f.recipe.model, f.recipe.model.num_moe_experts
    width = model.moe_ffn_hidden_size
    if experts == 0 and f.bridge and f.parallelism.ep == 1:  # EP024 says it otherwise
        changes = [*fields_of_experts_off(f), *([overlap_off(f, s)] if s[EP_OVERLAP] else [])]
        fix = f"set {' and '.join(changes)}"
        yield refusal("model.num_moe_experts", "a model without experts has null", fix, 0)
    if width is None or (experts is not None and (experts > 0 or f.bridge)):
        return
    if (f.bridge and not f.recipe.is_dump) or (f.core_in(">=0.18.0") and has_dense_layers(model.moe_layer_freq)):
        return
    yield refusal("model.moe_ffn_hidden_size", "num_moe_experts is null", "set model.moe_ffn_hidden_size=null", width)


def has_dense_layers(frequency: Any) -> bool:
    """Whether a ``moe_layer_freq`` leaves layers without experts."""
    if isinstance(frequency, str):  # Megatron-LM evaluates it, as ([0]*3+[1]*58)
        return "0" in re.findall(r"\d+", frequency)
    return 0 in frequency if isinstance(frequency, list) else isinstance(frequency, int) and frequency > 1


@rule("EP037", source=_CONFIG)
def biases_of_experts(f: Facts, s: State) -> Finding:
    """Biases in the linear layers of a model with experts.

    They need expert TP 1; before core 0.15 there may be none. Megatron-LM's parser has biases on unless
    ``--disable-bias-linear`` is given; under Bridge only what the recipe says is looked at.

    Why: Megatron-Core does not split an expert's biases over TP.
    Fix: set ``model.add_bias_linear=false``.
    """
    model = f.recipe.model
    experts = model.num_moe_experts if f.bridge else model.num_moe_experts or None
    biases = f.megatron_lm if model.add_bias_linear is None else model.add_bias_linear
    if experts is None or not biases or (f.parallelism.etp == 1 and f.core_in(">=0.15.0")):
        return None
    because = f"experts with biases and expert TP {f.parallelism.etp}"
    if f.core_in("<0.15.0"):
        because = f"megatron-core {f.versions.megatron_core} has no experts with biases"
    return refusal("model.add_bias_linear", because, "set model.add_bias_linear=false", True)


@rule("EP038", source=_CONFIG, megatron_lm=None)
def lengths_vary_in_allgather(f: Facts, s: State) -> Finding:
    """``variable_seq_lengths`` with the allgather dispatcher, which is Megatron-Core's default.

    A dense model is no exception. Megatron-LM sets the field itself.

    Why: the ranks would gather tokens of different numbers; Megatron-Core refuses it.
    Fix: set ``model.moe_token_dispatcher_type=alltoall``.
    """
    model = f.recipe.model
    unsaid = model.moe_token_dispatcher_type is None and model.num_moe_experts and not f.recipe.is_dump
    if not model.variable_seq_lengths or f.dispatcher != "allgather" or unsaid:
        return None
    because = "moe_token_dispatcher_type is allgather"
    return refusal("model.variable_seq_lengths", because, f"set {alltoall(f)}", True)


@rule("EP039", source=_CONFIG)
def experts_in_fp8(f: Facts, s: State) -> Finding:
    """Experts in FP8 need Transformer Engine 1.7.

    Why: older versions fail on an expert without tokens; Megatron-Core refuses them.
    Fix: use a newer Transformer Engine, or train in BF16.
    """
    if not f.recipe.model.num_moe_experts or not f.precision.fp8 or not te_before(f, "1.7.0.dev0"):
        return None
    subject = "mixed_precision" if f.recipe.mixed_precision else "model.fp8"
    return refusal(subject, f"experts in FP8: {te_text(f, '1.7')}", "use a newer one", f.precision.label)
