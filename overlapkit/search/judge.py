"""A part of the space, layout by layout: refused, too large, or ranked."""

from __future__ import annotations

from collections.abc import Hashable

from overlapkit.cost.activations import Kept, kept_of, widths_of
from overlapkit.cost.memory import (
    Held,
    Sharing,
    capacity_of,
    held_of,
    microbatches_in_flight,
    most_allowed,
    stage_bytes,
    storage_of,
)
from overlapkit.cost.step import Switches, step_seconds
from overlapkit.facts import Facts
from overlapkit.plan import Plan
from overlapkit.recipe import Recipe
from overlapkit.recipe.place import Place
from overlapkit.search.feasible import Rules
from overlapkit.search.ranking import Candidate, Ranking
from overlapkit.search.space import Layout, Overlaps, Point, Space, overlaps_of
from overlapkit.search.timing import Timing
from overlapkit.volume.parameters import parameters_of

TOO_LARGE = "does not fit the GPU's memory"


class Judge:
    """Judges layouts of one recipe. ``keep`` is how many of the best it remembers."""

    def __init__(self, recipe: Recipe, space: Space, keep: int) -> None:
        self._space = space
        self._keep = keep
        self._rules = Rules(recipe)
        self._timing = Timing(self._rules)
        self._storage = storage_of(self._rules.facts)
        self._most = most_allowed(_capacity(self._rules.facts))
        self._seen = Ranking(keep)
        self._held: dict[Hashable, tuple[Held, ...]] = {}
        self._kept: dict[Hashable, Kept] = {}

    def judge(self, start: int, stop: int) -> Ranking:
        """The points of the space from ``start`` to ``stop``."""
        ranking = Ranking(self._keep)
        for point in self._space.points(start, stop):
            count = len(overlaps_of(point))
            problem = self._rules.refused(point)
            for layout in self._space.layouts(point):
                reason = problem or self._rules.uncounted(layout)
                if reason is not None:
                    ranking.refused[reason] += count
                else:
                    self._layout(layout, ranking)
        ranking.points = min(stop, self._space.size) - start
        return ranking

    def _layout(self, layout: Layout, ranking: Ranking) -> None:
        """Every setting of its overlaps; the fastest of them stands for the layout."""
        sizes = {(False, False): self._memory(layout, False, False)}
        if sizes[False, False] > self._most:
            ranking.too_large[TOO_LARGE] += len(overlaps_of(layout.point))
            return
        allowed = self._rules.allowed(layout)
        ranking.refused.update(allowed.refused)
        if allowed.plan is None:
            return
        best: dict[tuple[bool, bool], tuple[float, Overlaps]] = {}
        seconds: dict[Switches, float] = {}
        work = None
        hopeless = self._hopeless(layout, allowed.plan, sizes[False, False])
        for overlaps in allowed.overlaps:
            kind = (overlaps.tp_comm_overlap, overlaps.overlap_moe_expert_parallel_comm)
            if kind not in sizes:
                sizes[kind] = self._memory(layout, *kind)
            if sizes[kind] > self._most:
                ranking.too_large[TOO_LARGE] += 1
                continue
            ranking.ranked += 1
            if hopeless:
                continue
            if work is None:
                work = self._timing.work(layout, allowed.plan)
            switches = Switches(*overlaps[:5])
            if switches not in seconds:
                seconds[switches] = step_seconds(work, switches)
            if kind not in best or seconds[switches] < best[kind][0]:
                best[kind] = (seconds[switches], overlaps)
        candidates = [Candidate(took, sizes[kind], layout, overlaps) for kind, (took, overlaps) in best.items()]
        for seen in (ranking, self._seen):
            seen.take(candidates)

    def _hopeless(self, layout: Layout, plan: Plan, memory: float) -> bool:
        """Whether compute alone takes too long for the best and the front of what this process has judged."""
        layers = max((held.layers for held in self._held_of(layout)), key=sum)
        return self._seen.beats(self._timing.least_seconds(layout, plan, layers), memory)

    # --- memory -------------------------------------------------------------------------------

    def _memory(self, layout: Layout, tp_overlap: bool, ep_overlap: bool) -> float:
        """Bytes of the fullest rank, as ``memory_of``."""
        point, rules = layout.point, self._rules
        kept = self._kept_of(layout)
        storage, sharing = self._storage, self._sharing(point)
        m, userbuffers = rules.microbatches(point), rules.userbuffer_bytes(layout) if tp_overlap else 0
        group = rules.facts.recipe.model.microbatch_group_size_per_vp_stage or point.pp
        return max(
            sum(
                stage_bytes(
                    held,
                    kept,
                    storage,
                    sharing,
                    microbatches=microbatches_in_flight(
                        point.pp, point.vp, m, held.stage, group, ep_overlap=ep_overlap
                    ),
                    userbuffers=userbuffers,
                )
            )
            for held in self._held_of(layout)
        )

    def _sharing(self, point: Point) -> Sharing:
        facts = self._rules.facts
        if not (facts.dist_opt or facts.fsdp):
            return Sharing(1.0, 1.0, False)
        instances = facts.recipe.ddp.num_distributed_optimizer_instances or 1
        expert = point.gpus / (self._rules.expert_tp(point) * point.ep * point.pp)
        return Sharing(point.gpus / (point.tp * point.pp) / instances, max(expert / instances, 1.0), facts.fsdp)

    def _held_of(self, layout: Layout) -> tuple[Held, ...]:
        point = layout.point
        key = (point.tp, point.pp, point.ep, point.vp, self._rules.expert_tp(point), layout.recompute)
        if key not in self._held:
            model = self._timing.model(layout)
            self._held[key] = held_of(model, parameters_of(model))
        return self._held[key]

    def _kept_of(self, layout: Layout) -> Kept:
        point = layout.point
        key = (point.tp, point.cp, point.ep, self._rules.expert_tp(point), point.micro_batch_size, layout[1:])
        if key not in self._kept:
            model = self._timing.model(layout)
            widths = widths_of(self._rules.facts, model)
            self._kept[key] = kept_of(model, self._timing.kernels, widths)
        return self._kept[key]


def _capacity(facts: Facts) -> float:
    """Bytes of the GPU's memory.

    Raises:
        RecipeError: it is not known.
    """
    found = capacity_of(facts)
    if found is None:
        recipe, name = facts.recipe, facts.gpu.name if facts.gpu else "this GPU"
        place = Place(recipe.source, recipe.lines, recipe.overridden)
        raise place.error("cluster.gpu", f"the memory of {name} is not known, so no layout can be said to fit it")
    return found
