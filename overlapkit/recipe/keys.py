"""Which keys a recipe may have, and what somebody meant who wrote another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from overlapkit.errors import RecipeError, nearest
from overlapkit.recipe.known_keys import KnownKeys, known_keys
from overlapkit.recipe.place import Place
from overlapkit.recipe.schema import OURS, SECTIONS, specs_of

# What people call these sizes elsewhere.
_MEANT = {
    "tp": "model.tensor_model_parallel_size",
    "pp": "model.pipeline_model_parallel_size",
    "vp": "model.virtual_pipeline_model_parallel_size",
    "cp": "model.context_parallel_size",
    "ep": "model.expert_model_parallel_size",
    "etp": "model.expert_tensor_parallel_size",
    "sp": "model.sequence_parallel",
    "mbs": "train.micro_batch_size",
    "gbs": "train.global_batch_size",
    "tensor_parallel_size": "model.tensor_model_parallel_size",
    "pipeline_parallel_size": "model.pipeline_model_parallel_size",
    "tp_size": "model.tensor_model_parallel_size",
    "pp_size": "model.pipeline_model_parallel_size",
    "cp_size": "model.context_parallel_size",
    "ep_size": "model.expert_model_parallel_size",
    "swiglu": "model.gated_linear_unit",
    "group_query_attention": "model.num_query_groups",
    "num_nodes": "cluster.num_gpus (the GPUs of all nodes)",
    "nnodes": "cluster.num_gpus (the GPUs of all nodes)",
    "world_size": "cluster.num_gpus",
    "num_virtual_stages_per_pipeline_rank": "model.virtual_pipeline_model_parallel_size",
    "data_parallel_size": "cluster.num_gpus (DP is what TP, PP and CP leave of it)",
}
_NEGATIONS = ("no_", "disable_", "untie_")


def check_keys(value: Mapping[str, Any], place: Place, is_dump: bool) -> None:
    """Every key of a hand-written recipe is known; of a dump, which may hold more, those that were overridden.

    Raises:
        RecipeError: an unknown section or key, with the one that was probably meant.
    """
    known = known_keys()
    for section, body in value.items():
        if section in OURS:
            _check_section_keys(section, body, place, frozenset(specs_of(section)))
        elif not is_dump:
            if section not in known.sections:
                raise unknown_section(section, place, (*known.sections, *OURS))
            if section not in known.free_sections:
                _check_section_keys(section, body, place, keys_of(section))
    if is_dump:
        _check_overrides(place, known)


def _check_section_keys(section: str, body: Any, place: Place, keys: frozenset[str]) -> None:
    if isinstance(body, dict):
        for key in body:
            if key not in keys and key != "_target_":
                raise unknown_key(section, key, place, keys)


def _check_overrides(place: Place, known: KnownKeys) -> None:
    """A dump's own keys pass, but a misspelt override must not vanish."""
    for path in place.overridden:
        section, _, rest = path.partition(".")
        if section in OURS:
            continue
        if section not in known.sections:
            raise unknown_section(section, place, (*known.sections, *OURS))
        key = rest.partition(".")[0]
        if key and section not in known.free_sections and key not in keys_of(section):
            raise unknown_key(section, key, place, known.keys(section))


def keys_of(section: str) -> frozenset[str]:
    """Bridge's and Megatron-Core's keys, and what Megatron-LM has an argument for."""
    known = known_keys().keys(section)
    return known | frozenset(specs_of(section)) if section in SECTIONS else known


def unknown_section(section: Any, place: Place, sections: Iterable[str]) -> RecipeError:
    if section in ("MODEL_ARGS", "ENV_VARS"):
        hint = "Megatron-LM's YAML of arguments is given as --megatron-lm-args FILE"
        return place.error(str(section), "unknown section", hint)
    near = nearest(str(section), sections)
    hint = f"did you mean {near}?" if near else f"sections are {', '.join(sorted(sections))}"
    return place.error(str(section), "unknown section", _home(str(section)) or hint)


def unknown_key(section: str, key: Any, place: Place, keys: Iterable[str]) -> RecipeError:
    name = str(key)
    return place.error(f"{section}.{name}", "unknown key", _home(name) or _in_section(section, name, keys))


def _in_section(section: str, name: str, keys: Iterable[str]) -> str | None:
    """The hint to another key of the same section, or to the one that a flag such as ``no_bias`` turns off."""
    for prefix in _NEGATIONS:
        if name.startswith(prefix) and (positive := nearest(name[len(prefix) :], keys)) is not None:
            return f"write {section}.{positive}: false"
    near = nearest(name, keys)
    return f"did you mean {section}.{near}?" if near else None


def _home(key: str) -> str | None:
    """The hint to where a key in the wrong place belongs, and under which name."""
    if key in _MEANT:
        return f"did you mean {_MEANT[key]}?"
    ours = [section for section in OURS if key in specs_of(section)]
    homes = known_keys().sections_of(key)
    read = [section for section in ("comm_overlap", *SECTIONS) if section in homes and section not in OURS]
    candidates = [*ours, *read] or (homes if len(homes) == 1 else [])
    return f"it belongs to {candidates[0]}: write {candidates[0]}.{key}" if candidates else None
