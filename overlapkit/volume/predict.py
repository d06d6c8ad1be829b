"""Facts + Plan -> Volume: the calls of every stage, merged into rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from overlapkit.errors import RecipeError
from overlapkit.facts import Facts
from overlapkit.plan import Plan
from overlapkit.volume import cp, dp, ep, pp, scalars, tp
from overlapkit.volume.data_broadcast import calls as broadcast_calls
from overlapkit.volume.model import Model, model_of
from overlapkit.volume.parameters import Parameters, parameters_of
from overlapkit.volume.placement import AXES, RankLayout, bytes_between_nodes, group_sizes, placements, stage_ranks
from overlapkit.volume.requirements import check
from overlapkit.volume.rows import Call, Row, merged, total_wire_bytes

SCHEMA_VERSION = 1
CONVENTION = {
    "message": (
        "all_reduce: the tensor; all_gather: gathered output; reduce_scatter: full input; "
        "send/recv/broadcast: the tensor; all_to_all: local input"
    ),
    "wire": "ring-equivalent bytes sent per rank",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What each rank of one pipeline stage moves; ``ranks`` are its global ranks, as ranges."""

    pipeline_rank: int
    ranks: tuple[range, ...]
    rows: tuple[Row, ...]

    @property
    def global_ranks(self) -> str:
        """The ranks as text, such as 0-15 or 0-3,8-11."""
        return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in self.ranks)

    def wire_bytes(self, group: str | None = None) -> int:
        """Ring-equivalent bytes that a rank sends per step, in one group or in all."""
        return total_wire_bytes(row for row in self.rows if group in (None, row.group))

    def to_dict(self, *, phases: bool = False) -> dict[str, Any]:
        return {
            "pipeline_rank": self.pipeline_rank,
            "global_ranks": self.global_ranks,
            "rows": [row.to_dict(phases=phases) for row in self.rows],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Bytes per optimizer step, for every pipeline stage.

    ``assumed`` names what the recipe leaves open and what was taken. ``layout`` places the ranks.
    """

    recipe: str
    num_microbatches: int
    stages: tuple[Stage, ...]
    layout: RankLayout
    assumed: tuple[str, ...] = ()
    model: Model = field(repr=False, compare=False)  # what it was counted from
    parameters: Parameters = field(repr=False, compare=False)

    def between_nodes(self) -> dict[tuple[int, int], int]:
        """Bytes per step from one node to another; a node is what NVLink joins. Empty where its size is unknown."""
        return bytes_between_nodes(self.layout, tuple(stage.rows for stage in self.stages))

    def to_dict(self, *, phases: bool = False, nodes: bool = False) -> dict[str, Any]:
        """The volume as plain values, the form of ``--format json``; phases and bytes per node pair on request."""
        found: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "recipe": self.recipe,
            "convention": dict(CONVENTION),
            "per": "optimizer step",
            "num_microbatches": self.num_microbatches,
            "assumed": list(self.assumed),
            "stages": [stage.to_dict(phases=phases) for stage in self.stages],
        }
        if nodes:
            found["gpus_per_node"] = self.layout.node
            found["between_nodes"] = [
                {"from": source, "to": target, "wire_bytes": moved}
                for (source, target), moved in self.between_nodes().items()
            ]
        return found


def predict(facts: Facts, plan: Plan, *, data_broadcast: bool = False, approximate: bool = False) -> Volume:
    """The volume of a recipe whose facts and plan are known.

    ``approximate`` is for estimates of time: FP8 and FP4 are then counted as if gathers were in the compute type, in
    rows that are not ``exact``; multi-latent attention, multi-token prediction, experts with biases or in a latent
    space, and FSDP by what their sources say, unchecked against runs. Otherwise they are refused, as is all that is
    not exact to the byte.

    Raises:
        RecipeError: the recipe lacks a size that a number needs, or asks for what is not modelled.
    """
    if data_broadcast and not facts.megatron_lm:
        hint = "Megatron-Bridge's ranks read their own"
        raise RecipeError("only Megatron-LM broadcasts the batch over TP", source=facts.recipe.source, hint=hint)
    check(facts, plan, approximate=approximate)
    model = model_of(facts, plan)
    layout = rank_layout(facts, model)
    found, sizes, places = parameters_of(model), group_sizes(layout), placements(layout)
    stages = []
    known: dict[tuple[Any, ...], tuple[Row, ...]] = {}
    for stage in range(model.mesh.pp):
        rows = known.get(alike := _what_it_holds(model, stage))
        if rows is None:
            calls = list(_calls(model, found, stage))
            if data_broadcast:
                masks = facts.recipe.dataset.create_attention_mask is not False
                calls += broadcast_calls(model, stage, attention_mask=masks)
            rows = known[alike] = merged(calls, sizes, AXES, places)
        stages.append(Stage(pipeline_rank=stage, ranks=stage_ranks(layout, stage), rows=rows))
    return Volume(
        recipe=facts.recipe.source,
        num_microbatches=model.microbatches,
        stages=tuple(stages),
        layout=layout,
        assumed=_assumed(facts),
        model=model,
        parameters=found,
    )


def _what_it_holds(model: Model, stage: int) -> tuple[Any, ...]:
    """Equal for stages that move the same: neither end of the pipeline, with layers of the same kinds."""
    by_layer = len(model.cp_types) > 1  # which layers they are matters then
    chunks = tuple((chunk.first if by_layer else 0, chunk.moe) for chunk in model.stages[stage])
    return stage == 0, stage == model.mesh.pp - 1, chunks


def _calls(model: Model, found: Parameters, stage: int) -> Iterator[Call]:
    yield from tp.calls(model, found, stage)
    yield from pp.calls(model, stage)
    yield from dp.calls(model, found, stage)
    yield from cp.calls(model, stage)
    yield from ep.calls(model, stage)
    yield from scalars.calls(model, stage)


def rank_layout(facts: Facts, model: Model) -> RankLayout:
    """How the job's ranks sit in its groups and nodes."""
    mesh = model.mesh
    host, domain = facts.gpus_per_node, facts.nvlink_domain_size
    return RankLayout(
        tp=mesh.tp,
        cp=mesh.cp,
        dp=mesh.dp,
        pp=mesh.pp,
        etp=mesh.etp,
        ep=mesh.ep,
        expert_dp=model.expert_dp,
        instances=model.instances,
        cp_levels=model.cp_levels,
        pp_before_dp=bool(facts.recipe.dist.use_tp_pp_dp_mapping),
        node=None if host is None else max(host, domain or 0),
    )


def _assumed(facts: Facts) -> tuple[str, ...]:
    """Fields that a number depends on, that the recipe leaves open, with the value taken."""
    model, found = facts.recipe.model, []
    if facts.precision.assumed:
        found.append("mixed_precision=bf16_mixed")
    if facts.recipe.train.rampup_batch_size is not None:
        found.append("train.rampup_batch_size=null")
    defaults = {
        "position_embedding_type": "rope",
        "normalization": "LayerNorm",
        "add_bias_linear": "true",
        "gated_linear_unit": "false",
        "share_embeddings_and_output_weights": "true",
    }
    if facts.bridge:
        defaults["cross_entropy_loss_fusion"] = "true"
    if model.num_moe_experts:
        defaults |= {"moe_router_topk": "2", "moe_layer_freq": "1", "moe_aux_loss_coeff": "0"}
    if facts.recipe.is_dump:
        return tuple(found)
    return (*found, *(f"model.{name}={value}" for name, value in defaults.items() if getattr(model, name) is None))
