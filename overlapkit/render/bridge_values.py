"""What a configuration of Megatron-Bridge has to say so that Bridge's own set-up ends at a plan's settings.

The files beside this one write it as overrides, YAML and Python. Sources: megatron-bridge
training/comm_overlap.py, training/mixed_precision.py, training/utils/omegaconf_utils.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from overlapkit.catalogue import software_rows
from overlapkit.errors import printable
from overlapkit.facts import MEGATRON_LM
from overlapkit.plan import SETTINGS, Plan
from overlapkit.precision import derive_precision
from overlapkit.recipe.known_keys import known_keys, snapshots_around
from overlapkit.recipe.schema import SECTIONS, specs_of
from overlapkit.recipe.sections import Recipe
from overlapkit.render.bridge_userbuffers import (
    COMM_OVERLAP,
    complete_layers,
    listed,
    preset_tree,
    what_was_completed,
)
from overlapkit.userbuffers import Userbuffers
from overlapkit.versions import parse_range, parse_version

CARRIED = ("model", "train", "validation", "optimizer", "ddp", "dist", "checkpoint", "dataset")
_MIXED_PRECISION = "megatron.bridge.training.mixed_precision"
PRECISION_FIELDS = (
    *("bf16", "fp16", "fp8", "fp8_recipe", "fp4", "fp8_param"),
    *("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
)
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_NOT_TEXT = frozenset({"null", "true", "false", "inf", "nan", "yes", "no", "on", "off", "y", "n"})
_WHOLE_NUMBER = re.compile("0|[1-9][0-9]{0,14}")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_MODEL_REQUESTS = (
    *("tp_comm_overlap", "tp_comm_bootstrap_backend", "overlap_p2p_comm", "batch_p2p_comm"),
    *("defer_embedding_wgrad_compute", "wgrad_deferral_limit", "overlap_moe_expert_parallel_comm"),
)
_DDP_REQUESTS = ("overlap_grad_reduce", "overlap_param_gather", "align_param_gather", "bucket_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecisionValues:
    """Fields of Bridge's MixedPrecisionConfig, and the torch dtype of parameters and of pipeline messages."""

    fields: Mapping[str, Any]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeValues:
    """What to set on a ConfigContainer.

    ``comm_overlap`` is without its userbuffers, which stand beside it (layer -> every option of Bridge's class);
    it is None where ``sections`` has the values instead. ``mixed_precision`` may be a name of Bridge's, or None:
    left alone. ``not_carried`` are sentences.
    """

    version: str
    sections: Mapping[str, Mapping[str, Any]]
    mixed_precision: str | MixedPrecisionValues | None
    comm_overlap: Mapping[str, Any] | None
    userbuffers: Userbuffers | None
    env: Mapping[str, str]
    not_carried: tuple[str, ...]

    @property
    def has_env_vars(self) -> bool:
        return parse_version(self.version) in parse_range(">=0.6.0")


def bridge_values(recipe: Recipe, plan: Plan) -> BridgeValues:
    """What the recipe says in Bridge's sections, with the plan's settings in place of what it asks for.

    ``comm_overlap`` gets the values that its set-up, which applies them last, ends at the settings with. It is None
    where no value could: in a recipe that has it so, in one for Megatron-LM, which ends at settings that Bridge's
    set-up would change (a bucket size of None), and where the userbuffers do not fit Bridge's classes.
    """
    said: list[str] = []
    megatron_lm = plan.target.framework == MEGATRON_LM
    version = plan.target.megatron_bridge or software_rows()[-1].megatron_bridge
    if megatron_lm:
        said.append(f"written for Megatron-Bridge {version}; other defaults of Megatron-LM's parser are not carried")
    userbuffers, foreign = complete_layers(plan.settings["model.tp_comm_overlap_cfg"])
    raw = recipe.comm_overlap is None or megatron_lm or bool(foreign)
    precision = _mixed_precision(recipe, megatron_lm=megatron_lm)
    sections = _sections(recipe, plan, version, precision_apart=precision is not None, said=said)
    dist_opt = bool(recipe.ddp.use_distributed_optimizer)
    # The sections whose values stand, because no set-up of Bridge overwrites them.
    standing = ("model", "optimizer", "ddp") if raw else () if dist_opt else ("optimizer", "ddp")
    for path in SETTINGS:
        section, _, name = path.partition(".")
        if section in standing:
            sections[section][name] = plan.settings[path]
    if raw:
        said += _why_raw(recipe, plan, foreign, megatron_lm=megatron_lm)
    elif userbuffers is not None:
        said += what_was_completed(plan.settings["model.tp_comm_overlap_cfg"])
    return BridgeValues(
        version=version,
        sections={name: body for name, body in sections.items() if body},
        mixed_precision=precision,
        comm_overlap=None if raw else requests(plan.settings, dist_opt=dist_opt),
        userbuffers=None if raw else userbuffers,
        env={**(recipe.env_vars or {}), **plan.env},
        not_carried=tuple(said + unread(recipe)),
    )


def requests(settings: Mapping[str, Any], *, dist_opt: bool) -> dict[str, Any]:
    """The values of ``comm_overlap`` with which Bridge's set-up ends at the settings, without the userbuffers.

    With the distributed optimizer it writes ddp and optimizer from them too; without, nothing but the model.
    """
    asked = {name: settings[f"model.{name}"] for name in _MODEL_REQUESTS}
    if not dist_opt:
        return {**asked, "delay_wgrad_compute": settings["model.delay_wgrad_compute"]}
    step = "overlap_param_gather_with_optimizer_step"
    ddp = {name: settings[f"ddp.{name}"] for name in _DDP_REQUESTS}
    # On the model null is false, on ddp it stays null: ddp's value says which it was.
    delay = {"delay_wgrad_compute": settings["ddp.delay_wgrad_compute"]}
    return {**asked, **ddp, step: settings[f"optimizer.{step}"], **delay}


def _why_raw(recipe: Recipe, plan: Plan, foreign: Iterable[str], *, megatron_lm: bool) -> Iterator[str]:
    stand = "comm_overlap is null, so that the values of model, ddp and optimizer stand"
    if megatron_lm:
        yield f"{stand} as Megatron-LM has them: Bridge's set-up would change some"
    elif recipe.comm_overlap is not None:
        yield f"{stand}: Bridge's classes for userbuffers cannot hold {listed(foreign)}"
    if isinstance(plan.settings["model.tp_comm_overlap_cfg"], str):
        yield "model.tp_comm_overlap_cfg is a path, which must be there where the job runs"


# --- sections -----------------------------------------------------------------------------------


def _sections(
    recipe: Recipe, plan: Plan, version: str, *, precision_apart: bool, said: list[str]
) -> dict[str, dict[str, Any]]:
    """What the recipe's sections say, without the settings of a plan."""
    sections = {name: section_values(recipe, name, said) for name in CARRIED}
    megatron_lm = plan.target.framework == MEGATRON_LM
    sections["model"] = {**parallelism(recipe, plan), **sections["model"], **parallelism(recipe, plan)}
    for name in ("ddp", "optimizer"):
        sections[name]["use_distributed_optimizer"] = bool(getattr(recipe, name).use_distributed_optimizer)
    if sections["ddp"]["use_distributed_optimizer"]:  # Bridge makes both true
        sections["optimizer"]["use_distributed_optimizer"] = True
    if megatron_lm:
        either = sections["ddp"]["use_distributed_optimizer"] or sections["optimizer"]["use_distributed_optimizer"]
        sections["ddp"]["use_distributed_optimizer"] = sections["optimizer"]["use_distributed_optimizer"] = either
    if precision_apart:  # Bridge copies the precision section over these
        for name in PRECISION_FIELDS:
            sections["model"].pop(name, None)
        sections["ddp"].pop("grad_reduce_in_fp32", None)
    return only_known(sections, "megatron-bridge", version, said)


def section_values(recipe: Recipe, section: str, said: list[str]) -> dict[str, Any]:
    """Field -> plain value, for what the recipe says; not what a plan has settings for, nor what nothing can hold."""
    values = {}
    for name in specs_of(section):
        value = getattr(getattr(recipe, section), name)
        path = f"{section}.{name}"
        if value is None or path in SETTINGS or name == "num_layers_per_virtual_pipeline_stage":  # VP says it
            continue
        if _stands_for_all(recipe, name) and len(value) == 1:
            value = value[0]
        value = list(value) if isinstance(value, tuple) else value
        problem = unwritable(value)
        if problem:
            said.append(f"{path} is left out: {problem}")
        else:
            values[name] = value
    return values


def _stands_for_all(recipe: Recipe, name: str) -> bool:
    """Whether a list of one would mean something else: cp_comm_type's has one per layer, the other's a coefficient."""
    coefficients = isinstance(recipe.model.moe_aux_loss_coeff, list)
    return name == "cp_comm_type" or (name == "moe_router_load_balancing_type" and not coefficients)


def only_known(
    sections: Mapping[str, Mapping[str, Any]], package: str, version: str, said: list[str]
) -> dict[str, dict[str, Any]]:
    """The fields that a version of ``package`` has, as far as its neighbours tell."""
    around = "".join(map(str, snapshots_around(package, version)))
    tables = known_keys().tables
    kept: dict[str, dict[str, Any]] = {}
    unknown = []
    for section, body in sections.items():
        kept[section] = {}
        for name, value in body.items():
            if set(around) & set(tables.get(section, {}).get(name, "")):
                kept[section][name] = value
            else:
                unknown.append(f"{section}.{name}")
    if unknown:
        said.append(f"{package} {version} does not have {listed(unknown)}")
    return kept


def unwritable(value: Any) -> str | None:
    """Why no form can hold a value: an object to be built, or what is neither text, number, list nor mapping."""
    if value is None or isinstance(value, (bool, int, str)):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else "it is not a finite number"
    if isinstance(value, (list, tuple)):
        return next((problem for item in value if (problem := unwritable(item))), None)
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return "it is no plain value"
    if "_target_" in value:
        return "it names a _target_, which Bridge would build"
    return next((problem for item in value.values() if (problem := unwritable(item))), None)


def parallelism(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """The sizes that the plan is for, where the recipe leaves them to a default too: a Bridge recipe has its own."""
    p, model = plan.parallelism, recipe.model
    megatron_lm = plan.target.framework == MEGATRON_LM
    sizes = {
        "tensor_model_parallel_size": p.tp,
        "sequence_parallel": p.sequence_parallel if megatron_lm else bool(model.sequence_parallel),
        "pipeline_model_parallel_size": p.pp,
        "virtual_pipeline_model_parallel_size": p.vp if megatron_lm else model.virtual_pipeline_model_parallel_size,
        "context_parallel_size": p.cp,
        "expert_model_parallel_size": p.ep,
    }
    if megatron_lm and p.ep > 1:
        sizes["expert_tensor_parallel_size"] = p.etp
    return sizes


def unread(recipe: Recipe) -> list[str]:
    """What the recipe says and overlapkit does not keep."""
    kept = {f"{section}.{name}" for section in SECTIONS for name in specs_of(section)}
    own = ("tp_comm_overlap", "tp_comm_overlap_cfg", "tp_comm_bootstrap_backend")
    kept |= {f"comm_overlap.{name}" for name in own}
    paths = [path for path in sorted(recipe.written) if path not in kept and not path.endswith("._target_")]
    unread = [path for path in paths if path.partition(".")[0] not in ("env_vars", "peft")]
    said = (
        [f"overlapkit does not read {listed(unread)}: the recipe that this is put on has to say it"] if unread else []
    )
    if recipe.peft:
        said.append(f"peft is not in it: take a Bridge recipe for {printable(recipe.peft)}")
    if recipe.is_dump:
        said.append("what overlapkit does not read of the dump is not in it")
    return said


# --- precision ----------------------------------------------------------------------------------


def _mixed_precision(recipe: Recipe, *, megatron_lm: bool) -> str | MixedPrecisionValues | None:
    """Where the recipe says a precision, on the model or in the section, the section that means the same."""
    section, model, ddp = recipe.mixed_precision, recipe.model, recipe.ddp
    if section is not None and section.name and not (megatron_lm and ddp.grad_reduce_in_fp32 is not None):
        return str(section.name)
    if section is None and all(getattr(model, name) is None for name in PRECISION_FIELDS):
        return None
    precision = derive_precision(recipe, megatron_lm=megatron_lm)
    source = section if section is not None and not section.name else model
    values: dict[str, Any] = {
        "bf16": precision.compute == "bf16",
        "fp16": precision.compute == "fp16",
        "fp8": precision.fp8,
        "fp8_recipe": precision.fp8_recipe,
        "fp4": precision.fp4,
        "grad_reduce_in_fp32": precision.grad_reduce_in_fp32,
        "first_last_layers_bf16": precision.first_last_layers_bf16,
        "num_layers_at_start_in_bf16": source.num_layers_at_start_in_bf16,
        "num_layers_at_end_in_bf16": source.num_layers_at_end_in_bf16,
        "fp8_param_gather": precision.fp8_param_gather,
        "reuse_grad_buf_for_mxfp8_param_ag": (section or ddp).reuse_grad_buf_for_mxfp8_param_ag,
    }
    return MixedPrecisionValues(
        fields={name: value for name, value in values.items() if value is not None},
        dtype=DTYPES[precision.compute],
    )


# --- the tree that overrides and YAML are written from -------------------------------------------


def bridge_tree(values: BridgeValues) -> dict[str, Any]:
    """The configuration as nested mappings; ``_target_`` where Bridge has to build an object.

    Bridge merges it over a recipe whose own objects may be of another class, or None: hence the targets.
    """
    tree: dict[str, Any] = {name: dict(body) for name, body in values.sections.items()}
    precision = values.mixed_precision
    if isinstance(precision, MixedPrecisionValues):
        dtype = {"_target_": f"torch.{precision.dtype}", "_call_": False}
        target = {"_target_": f"{_MIXED_PRECISION}.MixedPrecisionConfig"}
        tree["mixed_precision"] = {**target, **precision.fields, "params_dtype": dtype, "pipeline_dtype": dict(dtype)}
    elif precision is not None:
        tree["mixed_precision"] = precision
    tree["comm_overlap"] = None
    if values.comm_overlap is not None:
        target = {"_target_": f"{COMM_OVERLAP}.CommOverlapConfig"}
        tree["comm_overlap"] = {**target, **values.comm_overlap, "tp_comm_overlap_cfg": preset_tree(values.userbuffers)}
    if values.has_env_vars and values.env:
        # Whole numbers as such, as Bridge's recipes have them; it puts str() of a value into the environment.
        tree["env_vars"] = {
            name: int(text) if _WHOLE_NUMBER.fullmatch(text) else text for name, text in values.env.items()
        }
    return tree


def environment_elsewhere(values: BridgeValues) -> tuple[str, ...]:
    """What to say where the environment has no place in the configuration."""
    if values.has_env_vars or not values.env:
        return ()
    return (f"megatron-bridge {values.version} has no env_vars (0.6 has): --format env prints the environment",)


def uninterpolated(text: str) -> str:
    """The text that OmegaConf reads as ``text``: a ``${`` in it is not a reference."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def is_word(text: str) -> bool:
    """Whether Hydra and OmegaConf's YAML both read it as this text without quotes."""
    return _WORD.fullmatch(text) is not None and text.lower() not in _NOT_TEXT
