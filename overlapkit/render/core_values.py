"""What Megatron-Core's configuration classes are constructed from, with a plan's settings applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlapkit.facts import Facts, derive
from overlapkit.plan import SETTINGS, Plan
from overlapkit.recipe.sections import Recipe
from overlapkit.render.bridge_values import CARRIED, DTYPES, PRECISION_FIELDS, section_values

# On the frameworks' own models, not on Megatron-Core's TransformerConfig.
_NOT_TRANSFORMER = frozenset(
    {
        "seq_length",
        "vocab_size",
        "make_vocab_size_divisible_by",
        "should_pad_vocab",
        "share_embeddings_and_output_weights",
    }
)
SECTIONS = ("model", "optimizer", "ddp")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreValues:
    """Keyword arguments of TransformerConfig, OptimizerConfig and DistributedDataParallelConfig, by section.

    ``dtype`` is torch's name of the parameters' dtype, which the pipeline's messages have too. ``userbuffers`` are for
    Transformer Engine. ``elsewhere`` are paths of the recipe for which these classes have no place, ``left_out``
    sentences about values that nothing can hold.
    """

    sections: Mapping[str, Mapping[str, Any]]
    dtype: str
    userbuffers: Any
    elsewhere: tuple[str, ...]
    left_out: tuple[str, ...]


def core_values(recipe: Recipe, plan: Plan) -> CoreValues:
    """The values as they are when Megatron-Core validates them.

    That is after Bridge's set-up and what its ``finalize`` and ``validate`` set, or after Megatron-LM's validate_args:
    the precision section copied over the model, the optimizer and DDP, and one distributed optimizer for both.
    Sources: megatron-bridge training/config.py, training/mixed_precision.py and models/transformer_config.py;
    Megatron-LM training/arguments.py.
    """
    facts, said = derive(recipe), list[str]()
    sections = {name: section_values(recipe, name, said) for name in CARRIED}
    sizes = _sizes(plan)
    sections["model"] = {**sizes, **sections["model"], **sizes}
    for path in SETTINGS:
        section, _, name = path.partition(".")
        sections[section][name] = plan.settings[path]
    userbuffers = sections["model"].pop("tp_comm_overlap_cfg")
    _put_precision(facts, sections)
    for name in ("ddp", "optimizer"):
        sections[name]["use_distributed_optimizer"] = facts.dist_opt
    elsewhere = [f"{section}.{name}" for section in CARRIED if section not in SECTIONS for name in sections[section]]
    elsewhere += [f"model.{name}" for name in sections["model"] if name in _NOT_TRANSFORMER]
    core = {
        name: {key: item for key, item in sections[name].items() if key not in _NOT_TRANSFORMER} for name in SECTIONS
    }
    return CoreValues(
        sections=core,
        dtype=DTYPES[facts.precision.compute],
        userbuffers=userbuffers,
        elsewhere=tuple(elsewhere),
        left_out=tuple(said),
    )


def _sizes(plan: Plan) -> dict[str, Any]:
    """The groups' sizes as the plan has them: some frameworks clear or fill in some before Megatron-Core looks."""
    p = plan.parallelism
    sizes = {
        "tensor_model_parallel_size": p.tp,
        "sequence_parallel": p.sequence_parallel,
        "pipeline_model_parallel_size": p.pp,
        "virtual_pipeline_model_parallel_size": p.vp,
        "context_parallel_size": p.cp,
        "expert_model_parallel_size": p.ep,
    }
    return {**sizes, "expert_tensor_parallel_size": p.etp} if p.ep > 1 else sizes


def _put_precision(facts: Facts, sections: Mapping[str, dict[str, Any]]) -> None:
    """Puts the precision where Megatron-Core reads it."""
    recipe, precision, model = facts.recipe, facts.precision, sections["model"]
    said = recipe.mixed_precision or recipe.model
    both = bool(said.bf16 and said.fp16)  # which Megatron-Core refuses (CFG008)
    kinds = {"bf16": precision.compute == "bf16", "fp16": precision.compute == "fp16" or both}
    if recipe.mixed_precision is not None:
        for name in PRECISION_FIELDS:
            model.pop(name, None)
    found: dict[str, Any] = {"fp8": precision.fp8, "fp8_recipe": precision.fp8_recipe, "fp4": precision.fp4}
    if precision.first_last_layers_bf16:
        found["num_layers_at_start_in_bf16"] = precision.bf16_layers_at_start
        found["num_layers_at_end_in_bf16"] = precision.bf16_layers_at_end
    model |= kinds | {name: value for name, value in found.items() if value is not None}
    model |= {"fp8_param": precision.fp8_param_gather, "first_last_layers_bf16": precision.first_last_layers_bf16}
    sections["optimizer"] |= kinds
    ddp = sections["ddp"]
    ddp["grad_reduce_in_fp32"] = precision.grad_reduce_in_fp32
    for name in ("ddp", "optimizer"):
        sections[name].pop("reuse_grad_buf_for_mxfp8_param_ag", None)
        if facts.reuses_gradient_buffer(name):
            sections[name]["reuse_grad_buf_for_mxfp8_param_ag"] = True
    if facts.megatron_lm or recipe.mixed_precision is not None:
        ddp["fp8_param_gather"] = precision.fp8_param_gather
