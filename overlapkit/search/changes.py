"""What a layout changes of the recipe: the same changes make a recipe in memory and one in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from overlapkit.facts import Facts
from overlapkit.recipe import Recipe
from overlapkit.rules import changes as tp_changes
from overlapkit.rules import dp_changes
from overlapkit.search.space import Layout, Overlaps, Point

Changes = Mapping[str, Any]


def changes_of(facts: Facts, layout: Layout, overlaps: Overlaps) -> Changes:
    """Dotted path -> value, None to take it away; ``facts`` are those of the recipe that is searched.

    What the recipe says of its own stages (an explicit layout, layers of the first stage) holds for its own PP and VP;
    others get a layout of equal stages where the recipe has one, and else none.
    """
    point = layout.point
    found: dict[str, Any] = {}
    found["cluster.num_gpus"] = point.gpus
    found["model.tensor_model_parallel_size"] = point.tp
    found["model.sequence_parallel"] = layout.sequence_parallel
    found["model.pipeline_model_parallel_size"] = point.pp
    found["model.context_parallel_size"] = point.cp
    if facts.recipe.model.num_moe_experts:
        found["model.expert_model_parallel_size"] = point.ep
    found["train.micro_batch_size"] = point.micro_batch_size
    found |= _stages(facts, layout) | _recompute(facts, layout.recompute)
    return found | _overlaps(facts, point, overlaps)


def _stages(facts: Facts, layout: Layout) -> dict[str, Any]:
    model, mesh, point = facts.recipe.model, facts.parallelism, layout.point
    vp = point.vp if point.vp > 1 else None
    found: dict[str, Any] = {"model.virtual_pipeline_model_parallel_size": vp}
    own_pp = point.pp == mesh.pp
    if not own_pp or point.vp != (mesh.vp or 1):
        laid_out = balanced_stages(model.num_layers or 0, model.mtp_num_layers or 0, point.pp * point.vp)
        found["model.pipeline_model_parallel_layout"] = laid_out if facts.stages is not None else None
        found["model.num_layers_per_virtual_pipeline_stage"] = None
        found["model.microbatch_group_size_per_vp_stage"] = None
    elif facts.stages is not None or model.num_layers_per_virtual_pipeline_stage is not None:  # which says VP itself
        found["model.virtual_pipeline_model_parallel_size"] = model.virtual_pipeline_model_parallel_size
    if not own_pp:
        found["model.num_layers_in_first_pipeline_stage"] = None
        found["model.num_layers_in_last_pipeline_stage"] = None
    levels = model.hierarchical_context_parallel_sizes
    if levels is not None and prod(levels) != point.cp:
        found["model.hierarchical_context_parallel_sizes"] = None
    return {path: value for path, value in found.items() if value is not None or _said(facts.recipe, path)}


def balanced_stages(layers: int, predicted: int, chunks: int) -> str | None:
    """A pipeline layout of equal chunks, where the loss and each MTP layer count as a layer of the last one.

    The first chunks, behind the embedding, have a layer less where the layers do not divide. None where one stage takes
    all, or a chunk would have no layer.
    """
    ends = 1 + predicted
    last = max((layers + ends) // chunks - ends, 0)
    if chunks == 1 or layers - last < chunks - 1:
        return None
    each, more = divmod(layers - last, chunks - 1)
    counts = [each] * (chunks - 1 - more) + [each + 1] * more
    return "|".join(["E" + "t" * counts[0], *("t" * count for count in counts[1:]), "t" * last + "m" * predicted + "L"])


def _recompute(facts: Facts, recompute: str) -> dict[str, Any]:
    """Of the recipe's own kind it keeps what is recomputed; else Megatron-Core's usual: core_attn, or every layer."""
    model = facts.recipe.model
    if (model.recompute_granularity or "none") == recompute:
        return {}
    full = recompute == "full"
    found: dict[str, Any] = {
        "model.recompute_granularity": None if recompute == "none" else recompute,
        "model.recompute_method": "uniform" if full else None,
        "model.recompute_num_layers": 1 if full else None,
        "model.recompute_modules": ["core_attn"] if recompute == "selective" else None,
    }
    return {path: value for path, value in found.items() if value is not None or _said(facts.recipe, path)}


def _overlaps(facts: Facts, point: Point, overlaps: Overlaps) -> dict[str, Any]:
    """Explicit values where a framework would choose by itself, and of the others what is on."""
    home = tp_changes.home(facts)
    found: dict[str, Any] = {f"{home}.tp_comm_overlap": overlaps.tp_comm_overlap}
    for name in ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"):
        found[f"{home}.{name}"] = getattr(overlaps, name) or None
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        found[f"{dp_changes.home(facts, name)}.{name}"] = getattr(overlaps, name)
        for section in ("ddp", "optimizer"):  # Bridge takes either for both
            if _said(facts.recipe, f"{section}.{name}"):
                found[f"{section}.{name}"] = getattr(overlaps, name)
    for section in dict.fromkeys(("model", home)):
        here = section == home and point.pp > 1 and point.vp > 1
        found[f"{section}.overlap_p2p_comm"] = overlaps.overlap_p2p_comm if here else None
        found[f"{section}.batch_p2p_comm"] = None
    return {path: value for path, value in found.items() if value is not None or _said(facts.recipe, path)}


def _said(recipe: Recipe, path: str) -> bool:
    """Whether the recipe has a value there that is to be taken away."""
    section, _, name = path.partition(".")
    return getattr(getattr(recipe, section), name, None) is not None


def changed(recipe: Recipe, changes: Changes) -> Recipe:
    """The recipe with the changes, as if they had been overrides."""
    by_section: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        section, _, name = path.partition(".")
        by_section.setdefault(section, {})[name] = tuple(value) if isinstance(value, list) else value
    given = frozenset(path for path, value in changes.items() if value is not None)
    taken = frozenset(changes) - given
    sections = {name: replace(getattr(recipe, name), **values) for name, values in by_section.items()}
    return replace(recipe, **sections, written=(recipe.written - taken) | given)


def changed_mapping(value: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """A recipe's plain values with the changes; what is taken away stays as null where it was there."""
    found = {name: dict(body) if isinstance(body, Mapping) else body for name, body in value.items()}
    for path, new in changes.items():
        section, _, name = path.partition(".")
        body = found.get(section)
        if not isinstance(body, dict):
            if new is None:
                continue
            body = found[section] = {}
        if new is not None or name in body:
            body[name] = new
    return found
