"""The switches of a recipe that change its traffic most, each by running the model again with that change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from overlapkit.errors import RecipeError
from overlapkit.facts import Facts
from overlapkit.plan import Plan
from overlapkit.rules.changes import home
from overlapkit.volume.configuration import Configuration, configure

_FULL_RECOMPUTE = {"granularity": "full", "method": "uniform", "num_layers": 1, "modules": None}
_NO_RECOMPUTE: dict[str, Any] = dict.fromkeys(_FULL_RECOMPUTE)
# What excludes recomputing whole layers.
_EP_OVERLAP = ("model.overlap_moe_expert_parallel_comm", "model.delay_wgrad_compute")
_LEAST_SHARE = 0.0005  # what would be shown as 0.0 %


class Change(NamedTuple):
    """A change in words, and the overrides that make it."""

    what: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """What a change does to the bytes that a rank sends per optimizer step, on average over the job's ranks.

    ``change`` is in bytes, below 0 where it saves; ``share`` is its part of what is sent now.
    """

    what: str
    overrides: tuple[str, ...]
    change: int
    share: float


def largest_levers(
    recipe: str | Path | Mapping[str, Any], base: Configuration, *, number: int = 3, data_broadcast: bool = False
) -> tuple[Lever, ...]:
    """The ``number`` changes with the largest effect, the largest first.

    ``base`` is what ``configure`` makes of ``recipe``. Only changes count that bring no error into the plan and that
    leave the model, the sizes of the groups and the batch as they are: switches, not other layouts.
    """
    found: dict[str, Lever] = {}
    for change in candidates(base.facts, base.plan):
        if change.what not in found and (lever := _tried(recipe, base, change, data_broadcast)) is not None:
            found[change.what] = lever
    return tuple(sorted(found.values(), key=lambda lever: -abs(lever.change))[:number])


def _tried(
    recipe: str | Path | Mapping[str, Any], base: Configuration, change: Change, data_broadcast: bool
) -> Lever | None:
    """The change's effect; None where it cannot be made, or makes none."""
    other = changed(recipe, base, change.overrides, data_broadcast=data_broadcast)
    if other is None:
        return None
    more = other.job_bytes - base.job_bytes
    if abs(more) < _LEAST_SHARE * base.job_bytes or not more:
        return None
    each = round(more / base.facts.parallelism.world_size)
    return Lever(what=change.what, overrides=change.overrides, change=each, share=more / base.job_bytes)


def changed(
    recipe: str | Path | Mapping[str, Any], base: Configuration, overrides: Sequence[str], *, data_broadcast: bool
) -> Configuration | None:
    """``base`` with more overrides; None where they cannot be had, or bring an error into the plan."""
    try:
        other = configure(recipe, [*base.overrides, *overrides], data_broadcast=data_broadcast)
    except RecipeError:
        return None
    return None if _errors(other.plan) - _errors(base.plan) else other


def _errors(plan: Plan) -> set[tuple[str, str]]:
    return {(decision.code, decision.subject) for decision in plan.decisions if decision.severity == "error"}


def candidates(facts: Facts, plan: Plan) -> Iterator[Change]:
    """What is tried; of several with one name the first that works."""
    yield from _sequence_parallel(facts, plan)
    yield from _recompute(facts, plan)
    yield from _gradients(facts)
    yield from _pipeline(facts)
    yield from _experts(facts, plan)
    yield from _context_parallel(facts)


def _sequence_parallel(facts: Facts, plan: Plan) -> Iterator[Change]:
    if facts.parallelism.tp == 1:
        return
    if not facts.parallelism.sequence_parallel:
        yield Change("sequence parallelism on", ("model.sequence_parallel=true",))
        return
    off = "model.sequence_parallel=false"
    yield Change("sequence parallelism off", (off,))
    if plan.settings["model.tp_comm_overlap"]:  # which Megatron-LM refuses without it
        yield Change("sequence parallelism off", (off, f"{home(facts)}.tp_comm_overlap=false"))


def _recompute(facts: Facts, plan: Plan) -> Iterator[Change]:
    model = facts.recipe.model

    def fields(wanted: Mapping[str, Any]) -> tuple[str, ...]:
        """Overrides of the fields that are otherwise now."""
        now = {name: getattr(model, f"recompute_{name}") for name in wanted}
        return tuple(
            f"model.recompute_{name}={'null' if value is None else value}"
            for name, value in wanted.items()
            if now[name] != value
        )

    if model.recompute_granularity is not None:
        saved = ("model.distribute_saved_activations=false",) if model.distribute_saved_activations else ()
        yield Change("no recomputation", (*fields(_NO_RECOMPUTE), *saved))
    if model.recompute_granularity != "full":
        yield Change("full recomputation", fields(_FULL_RECOMPUTE))
        asked = [name.partition(".")[2] for name in _EP_OVERLAP if plan.settings[name]]
        if asked:
            off = tuple(f"{home(facts)}.{name}=false" for name in asked)
            yield Change("full recomputation", (*fields(_FULL_RECOMPUTE), *off))


def _gradients(facts: Facts) -> Iterator[Change]:
    recipe, precision = facts.recipe, facts.precision
    if precision.grad_reduce_in_fp32 and precision.compute != "fp32":
        section = "ddp" if recipe.mixed_precision is None else "mixed_precision"
        off = f"{section}.grad_reduce_in_fp32=false"
        yield Change(f"gradients reduced in {precision.compute.upper()}", (off,))
    if not facts.dist_opt:
        yield Change("distributed optimizer", ("ddp.use_distributed_optimizer=true",))
        return
    asked = {
        "ddp": recipe.ddp.use_distributed_optimizer,
        "optimizer": recipe.optimizer.use_distributed_optimizer,
    }
    off_everywhere = tuple(f"{name}.use_distributed_optimizer=false" for name, said in asked.items() if said)
    yield Change("no distributed optimizer", off_everywhere)
    # Gathering parameters has nothing to gather then, which Megatron-LM refuses.
    yield Change("no distributed optimizer", (*off_everywhere, *_gathering(facts, "false")))
    if (recipe.ddp.num_distributed_optimizer_instances or 1) > 1:
        yield Change("one optimizer instance", ("ddp.num_distributed_optimizer_instances=1",))


def _gathering(facts: Facts, value: str) -> tuple[str, ...]:
    """Overlapped parameter gathering in the sections that ask for it."""
    sections = ("comm_overlap",) if facts.overlap_setup else ("ddp", "optimizer")
    if facts.megatron_lm and facts.recipe.comm_overlap is not None:
        sections = ("comm_overlap",)
    return tuple(f"{section}.overlap_param_gather={value}" for section in sections)


def _pipeline(facts: Facts) -> Iterator[Change]:
    if facts.parallelism.pp > 1 and facts.recipe.model.virtual_pipeline_model_parallel_size is not None:
        yield Change("no virtual stages", ("model.virtual_pipeline_model_parallel_size=null",))


def _experts(facts: Facts, plan: Plan) -> Iterator[Change]:
    if not facts.recipe.model.num_moe_experts:
        return
    other = {"alltoall": "allgather", "allgather": "alltoall"}.get(facts.dispatcher)
    if other is not None and facts.parallelism.ep > 1:
        yield Change(f"the {other} dispatcher", (f"model.moe_token_dispatcher_type={other}",))
    if facts.dist_opt and not plan.settings["ddp.overlap_param_gather"]:
        yield Change("overlapped parameter gathering", _gathering(facts, "true"))


def _context_parallel(facts: Facts) -> Iterator[Change]:
    if facts.parallelism.cp == 1:
        return
    now = facts.recipe.model.cp_comm_type or ["p2p"]
    for kind in ("p2p", "all_gather", "a2a"):
        if list(now) != [kind]:
            yield Change(f"CP by {kind}", (f"model.cp_comm_type={kind}",))
