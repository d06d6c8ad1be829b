"""CFG: whose layers, as far as Megatron-Core's configuration refuses them."""

from __future__ import annotations

from overlapkit.facts import Facts
from overlapkit.rules.registry import Finding, State, refusal, rule

_IMPL = "model.transformer_impl"


@rule("CFG029", source="megatron-core transformer/transformer_config.py", core=">=0.16.0")
def layers_for_inference(f: Facts, s: State) -> Finding:
    """``transformer_impl=inference_optimized`` and what its layers lack.

    LayerNorm and biases, with experts from core 0.17 expert TP, from 0.18 gated linear units. What a hand-written
    recipe for Bridge leaves to the model is not looked at.

    Why: Megatron-Core asserts it; these layers are no good for training either.
    Fix: set ``model.transformer_impl=transformer_engine``.
    """
    model = f.recipe.model
    if model.transformer_impl != "inference_optimized":
        return None
    known = f.recipe.is_dump or f.megatron_lm
    usual = "RMSNorm" if model.multi_latent_attention or not known else "LayerNorm"
    norm = model.normalization or usual
    biases = known if model.add_bias_linear is None else model.add_bias_linear
    experts = bool(model.num_moe_experts)
    lacks = {
        f"normalization {norm}": norm != "RMSNorm",
        "add_bias_linear": biases,
        "add_qkv_bias": model.add_qkv_bias,
        f"expert TP {f.parallelism.etp}": experts and f.parallelism.etp > 1 and f.core_in(">=0.17.0"),
        "gated_linear_unit": experts and model.gated_linear_unit and f.core_in(">=0.18.0"),
    }
    found = [name for name, is_there in lacks.items() if is_there]
    if not found:
        return None
    because = f"inference_optimized excludes {' and '.join(found)}"
    return refusal(_IMPL, because, f"set {_IMPL}=transformer_engine", "inference_optimized")
