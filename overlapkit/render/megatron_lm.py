"""A plan as the command-line arguments of Megatron-LM."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from overlapkit.data import load_yaml
from overlapkit.errors import printable, shown
from overlapkit.facts import Facts, derive
from overlapkit.megatron_lm.fields import pairs, write_flags
from overlapkit.megatron_lm.flags import flags_of
from overlapkit.plan import Plan
from overlapkit.recipe.schema import SECTIONS
from overlapkit.recipe.sections import Recipe
from overlapkit.versions import parse_version

_SECTIONS = ("model", "train", "validation", "optimizer", "ddp", "dist", "checkpoint")
_REUSE = "reuse_grad_buf_for_mxfp8_param_ag"
_LAYERS_AT_ENDS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLmArguments:
    """``arguments`` are those of the training program.

    ``userbuffers`` is what the file of --tp-comm-overlap-cfg has to hold, None where none is to be written.
    ``cannot_express`` says in sentences what the flags leave out, each beginning with the field that it is about.
    """

    arguments: tuple[str, ...]
    userbuffers: Mapping[str, Any] | None
    cannot_express: tuple[str, ...]


def to_megatron_lm(recipe: Recipe, plan: Plan, *, userbuffers_path: str = "userbuffers.yaml") -> MegatronLmArguments:
    """The flags of the Megatron-LM of ``plan.target.megatron_core``: the recipe's fields, and the plan's settings.

    A recipe for Megatron-Bridge is translated: what it leaves to Bridge takes Megatron-LM's defaults. Where a file of
    userbuffers has to be written, ``userbuffers_path`` is what the flag names.
    """
    facts = derive(recipe)
    says: list[str] = []
    values = _recipe_values(recipe)
    values |= _precision(facts) | _data_parallel(facts) | _settings(facts, plan, says)
    if plan.parallelism.etp != plan.parallelism.tp:  # Bridge's default may be 1, the parser's is TP
        values["model.expert_tensor_parallel_size"] = plan.parallelism.etp
    userbuffers = _userbuffers(facts, plan, values, userbuffers_path)
    arguments, lacking = write_flags(values, parse_version(plan.target.megatron_core))
    says += [f"{item.field} is {_shown(values.get(item.field))}: {item.why}" for item in lacking]
    says += _left_out(recipe, plan)
    return MegatronLmArguments(arguments=arguments, userbuffers=userbuffers, cannot_express=tuple(says))


def to_text(arguments: tuple[str, ...]) -> str:
    """The arguments quoted for a shell, a flag with its values on each line.

    They fit between the parentheses of an array (``MODEL_ARGS=( ... )``), and Python's ``shlex.split`` reads them.
    """
    lines: list[list[str]] = []
    for word in arguments:
        if word.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return "".join(" ".join(line) + "\n" for line in lines)


def _recipe_values(recipe: Recipe) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for section in _SECTIONS:
        body = getattr(recipe, section)
        values |= {f"{section}.{spec.name}": getattr(body, spec.name) for spec in fields(body)}
    return values


def _precision(facts: Facts) -> dict[str, Any]:
    """The model's precision as the resolver understood it, be it from a name of Bridge's."""
    recipe, precision = facts.recipe, facts.precision
    section = recipe.mixed_precision
    values: dict[str, Any] = {
        "model.bf16": precision.compute == "bf16",
        "model.fp16": precision.compute == "fp16",
        "model.fp8": precision.fp8,
        "model.fp8_recipe": precision.fp8_recipe,
        "model.fp4": precision.fp4,
        "model.fp8_param": precision.fp8_param_gather,
        "model.first_last_layers_bf16": precision.first_last_layers_bf16,
    }
    for name in _LAYERS_AT_ENDS:
        number = getattr(recipe.model, name)
        if section is not None:
            named = load_yaml("mixed_precision.yaml")[section.name] if section.name else {}
            said = getattr(section, name)
            number = named.get(name, 0) if said is None else said
        values[f"model.{name}"] = number if precision.first_last_layers_bf16 else None
    by_itself = precision.grad_reduce_in_fp32 == (precision.compute == "bf16")
    said = recipe.ddp.grad_reduce_in_fp32
    values["ddp.grad_reduce_in_fp32"] = None if by_itself and said is None else precision.grad_reduce_in_fp32
    homes = (recipe.ddp, recipe.optimizer, *([section] if section else []))
    values[f"ddp.{_REUSE}"] = any(getattr(home, _REUSE) for home in homes)
    return values


def _data_parallel(facts: Facts) -> dict[str, Any]:
    """The distributed optimizer and Megatron-FSDP, each of which a recipe may ask for in several places."""
    custom = facts.fsdp and "--use-megatron-fsdp" not in flags_of(facts.versions.megatron_core, doubtful=False)
    return {
        "ddp.use_distributed_optimizer": facts.dist_opt,
        "optimizer.use_distributed_optimizer": facts.dist_opt,
        "ddp.use_megatron_fsdp": facts.fsdp and not custom,
        "ddp.use_custom_fsdp": custom,
        "dist.use_megatron_fsdp": None,
    }


def _settings(facts: Facts, plan: Plan, says: list[str]) -> dict[str, Any]:
    """The plan's settings, where the parser does not come to them by itself."""
    values = dict(plan.settings)
    _pipeline(facts, values, says)
    for first, second, what in (
        ("model.delay_wgrad_compute", "ddp.delay_wgrad_compute", "--delay-wgrad-compute"),
        ("ddp.overlap_param_gather", "optimizer.overlap_param_gather", "--overlap-param-gather"),
    ):
        if bool(values[first]) != bool(values[second]):
            says.append(f"{second} is {_shown(values[second])} and {first} is not: {what} sets both")
            values[second] = values[first]
    if values["model.tp_comm_bootstrap_backend"] is None:
        says.append("model.tp_comm_bootstrap_backend is null: without the flag Megatron-LM takes nccl")
    return values


def _pipeline(facts: Facts, values: dict[str, Any], says: list[str]) -> None:
    """Without virtual stages the parser turns off p2p overlap and aligned gathers; batching has no flag."""
    name, layout = "model.virtual_pipeline_model_parallel_size", facts.stages
    model, pp = facts.recipe.model, facts.parallelism.pp
    written = model.virtual_pipeline_model_parallel_size
    if written is None and model.num_layers_per_virtual_pipeline_stage is not None:
        written = facts.parallelism.vp
    values["model.num_layers_per_virtual_pipeline_stage"] = None  # the other flag says it
    stages = written if layout is None else len(layout) // pp if len(layout) % pp == 0 else 1
    if layout is not None and (written or stages) != stages:
        says.append(f"{name} is {written}: the layout makes it {stages}")
    values[name] = stages  # for a parser that has no layouts
    interleaved = stages is not None and stages > 1
    if not interleaved:
        on = [name for name in ("model.overlap_p2p_comm", "ddp.align_param_gather") if values.pop(name)]
        says += [f"{name} is true: without virtual stages Megatron-LM turns it off" for name in on]
    overlaps = interleaved and values["model.overlap_p2p_comm"]
    batches = values.pop("model.batch_p2p_comm")
    if batches == overlaps:
        idle = "; at PP 1 there are no messages" if pp == 1 else ""
        because = f"Megatron-LM makes it the opposite of overlap_p2p_comm{idle}"
        says.append(f"model.batch_p2p_comm is {_shown(batches)}: {because}")


def _userbuffers(facts: Facts, plan: Plan, values: dict[str, Any], path: str) -> Mapping[str, Any] | None:
    """The configuration that needs a file; a path that the recipe gave stands as it is."""
    chosen = facts.userbuffers if plan.settings["model.tp_comm_overlap"] else None
    needs_file = isinstance(chosen, Mapping)
    values["model.tp_comm_overlap_cfg"] = path if needs_file and chosen else None if needs_file else chosen
    return chosen if isinstance(chosen, Mapping) and chosen else None  # an empty one means what no flag means


def _left_out(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """What the recipe holds beside fields that could have a flag."""
    if recipe.peft is not None:
        yield f"peft is {recipe.peft}: Megatron-LM trains no adapters"
    if recipe.env_vars is not None:
        yield "env_vars is the environment, not arguments: --format env prints what to export"
    for spec in fields(recipe.dataset):
        value = getattr(recipe.dataset, spec.name)
        if value is not None and value is not False and spec.name not in ("kind", "seq_length", "sequence_length"):
            yield f"dataset.{spec.name} is {_shown(value)}: Megatron-LM has no flag for it"
    yield from _unread(recipe, plan)
    if plan.target.megatron_bridge is not None:
        yield "software.framework is megatron-bridge: what the recipe leaves to Bridge takes Megatron-LM's defaults"


def _unread(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Fields that the recipe writes and whose values nobody keeps."""
    flags = flags_of(parse_version(plan.target.megatron_core), doubtful=False)
    by_dest = {flag.dest: name for name, flag in flags.items()}
    known = {f"{section}.{spec.name}" for section, body in SECTIONS.items() for spec in fields(body)}
    having: list[str] = []
    lacking: list[str] = []
    for path in sorted(recipe.written - known):
        section, _, name = path.partition(".")
        if section in _SECTIONS:
            flag = pairs()[path].flags[0][0] if path in pairs() else by_dest.get(name)
            (having if flag in flags else lacking).append(printable(f"{path} ({flag})" if flag in flags else path))
    if having:
        yield f"{', '.join(having)}: not read by overlapkit, so give the flags yourself"
    if lacking:
        yield f"{', '.join(lacking)}: not read by overlapkit, and no flag of Megatron-LM has the name"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value.isidentifier() else shown(value)
