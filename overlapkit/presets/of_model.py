"""From a recipe to what a preset is derived from."""

from __future__ import annotations

from dataclasses import replace

from overlapkit.errors import RecipeError
from overlapkit.facts import Facts
from overlapkit.presets import check_userbuffers, choose_nearest
from overlapkit.presets.derivation import derive
from overlapkit.presets.derived_file import derived_userbuffers
from overlapkit.presets.times import MODEL_SIZES, Inputs, Precision, inputs_of_hidden_size, sizes_of_model
from overlapkit.userbuffers.releases import NEWEST

_OWN = "the recipe's model"


def inputs_of_recipe(facts: Facts) -> Inputs:
    """The recipe's GPU, precision, parallel sizes and model; where it has no heads, the usual model of its hidden size.

    Raises:
        RecipeError: something is missing, or the model is one for which nothing can be derived.
    """
    wanted, model, source = facts.wanted, facts.recipe.model, facts.recipe.source
    if wanted.missing:
        hint = f"for example {wanted.missing[0]}={_EXAMPLES[wanted.missing[0]]}"
        raise RecipeError(f"a preset is derived from {', '.join(wanted.missing)}, not given", source=source, hint=hint)
    for field, says in (("num_moe_experts", "a model with experts"), ("multi_latent_attention", "latent attention")):
        if getattr(model, field):
            raise RecipeError(f"no preset can be derived for {says}", source=source, path=f"model.{field}")
    if facts.precision.fp4:
        raise RecipeError("Transformer Engine has no userbuffers for FP4", source=source, path="mixed_precision")
    assert facts.gpu is not None and wanted.hidden_size is not None
    assert wanted.micro_batch_size is not None and wanted.seq_length is not None
    precision: Precision = "fp8" if facts.precision.fp8 else "bf16"
    usual = inputs_of_hidden_size(
        facts.gpu,
        precision,
        hidden_size=wanted.hidden_size,
        tensor_model_parallel_size=wanted.tensor_model_parallel_size,
        context_parallel_size=wanted.context_parallel_size,
        micro_batch_size=wanted.micro_batch_size,
        seq_length=wanted.seq_length,
    )
    own = _with_own_sizes(facts, usual)
    same = all(getattr(own, name) == getattr(usual, name) for name in MODEL_SIZES)
    return usual if same else replace(own, model=_OWN)


def refuse_what_fails(facts: Facts, inputs: Inputs) -> None:
    """Sizes that no configuration makes possible, such as a hidden size that 8 does not divide.

    Raises:
        RecipeError: the recipe's Transformer Engine would fail at what is derived.
    """
    engine = facts.versions.transformer_engine
    report = check_userbuffers(
        derived_userbuffers(derive(inputs)),
        transformer_engine=NEWEST if engine is None else engine.text,
        tensor_model_parallel_size=inputs.tensor_model_parallel_size,
        tokens=inputs.tokens,
        hidden_size=inputs.hidden_size,
        quantization_modes=("fp8",) if inputs.precision == "fp8" else ("none",),
    )
    for problem in report.problems:
        if problem.severity == "error":
            raise RecipeError(f"no preset can be derived: {problem.because}", source=facts.recipe.source)


_EXAMPLES = {
    "cluster.gpu": "h20",
    "model.hidden_size": "5120",
    "model.seq_length": "4096",
    "train.micro_batch_size": "1",
}


def tuned_already(facts: Facts) -> str | None:
    """The tuned preset that fits the recipe but for its lengths, where there is one."""
    choice, _ = choose_nearest(facts.wanted)
    return None if choice.provenance == "derived" or "gpu" in choice.differs else choice.name


def _with_own_sizes(facts: Facts, usual: Inputs) -> Inputs:
    """With heads the model is the recipe's, and Megatron-Core's defaults fill what it leaves out."""
    model = facts.recipe.model
    heads = model.num_attention_heads
    if heads is not None:
        return replace(usual, **sizes_of_model(model, hidden_size=usual.hidden_size, num_attention_heads=heads))
    given = {name: getattr(model, name) for name in MODEL_SIZES if getattr(model, name) is not None}
    return replace(usual, **given)
