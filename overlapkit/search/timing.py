"""The work of a layout's step, from the parts that layouts share.

The same functions as those of an estimate, each asked once for what it depends on: data-parallel calls do not depend on
the microbatch, but for FSDP's on how many there are, a layer's compute not on the pipeline, and stages that hold the
same have the same work.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from overlapkit.cost.constants import load
from overlapkit.cost.hardware import hardware_of
from overlapkit.cost.kernels import kernels_of
from overlapkit.cost.layers import Sublayer
from overlapkit.cost.stage import StageWork, Sublayers, stage_work, sublayers_of
from overlapkit.cost.step import Work, gather_width_of, kind_of_stage
from overlapkit.plan import Plan
from overlapkit.search.feasible import NOTHING_ON, Rules
from overlapkit.search.space import Layout, Point
from overlapkit.volume import cp, dp, ep, pp, scalars, tp
from overlapkit.volume.model import Model, Recompute, model_of
from overlapkit.volume.parameters import Parameters, parameters_of
from overlapkit.volume.placement import AXES, RankLayout, group_sizes, placements
from overlapkit.volume.predict import rank_layout
from overlapkit.volume.rows import Call, Row, merged


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What layouts with the same groups share: all but the microbatch, sequence parallelism and recomputation.

    ``models`` and ``data``, the rows of data parallelism and of what comes once per step, are by the plan that has the
    settings of the overlaps (its kind keeps it); ``data`` also by how many microbatches a step has, where it
    matters. ``known`` has the seconds of calls.
    """

    point: tuple[int, ...]
    ranks: RankLayout
    found: Parameters
    stages: tuple[int, ...]  # the different ones
    which: tuple[int, ...]
    models: dict[int, Model]
    data: dict[tuple[int, int], tuple[tuple[Row, ...], ...]]
    known: dict[tuple[str, str, bool, float], float]


class Timing:
    """Works of one recipe's layouts."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._constants = load()
        self._hardware, self._assumed = hardware_of(rules.facts, self._constants)
        self.kernels = kernels_of(rules.facts)
        self._gather_width = gather_width_of(rules.facts)
        self._last: _Sizes | None = None
        self._recomputes: dict[str, Recompute] = {}
        self._sublayers: dict[Hashable, Sublayers] = {}

    def model(self, layout: Layout) -> Model:
        """The model of a layout; its overlaps are some or other."""
        return self._model(layout, self._rules.settings)

    def work(self, layout: Layout, plan: Plan) -> Work:
        """The work of a step of a layout that is legal with the settings of ``plan``, those of its kind."""
        sizes, model = self._sizes(layout, plan), self._model(layout, plan)
        sublayers = self._layers(layout, plan)
        works = tuple(
            self._stage(sizes, model, sublayers, stage, data)
            for stage, data in zip(sizes.stages, self._data(sizes, model, plan), strict=True)
        )
        return Work(self._hardware, self._constants, model, self.kernels, works, sizes.which, self._assumed)

    def least_seconds(self, layout: Layout, plan: Plan, layers: tuple[int, int]) -> float:
        """What a step takes at least: the compute of a stage's ``layers``, dense and MoE, for every microbatch."""
        attention, mlp, moe = self._layers(layout, plan)
        again = 2.0 if self._recomputes[layout.recompute].full == "uniform" else 1.0

        def each(sublayer: Sublayer) -> float:
            return again * sublayer.forward.total + sublayer.backward.total

        seconds = sum(layers) * each(attention[0]) + layers[0] * each(mlp[0])
        if moe is not None:
            seconds += layers[1] * each(moe[0])
        return self._rules.microbatches(layout.point) * seconds

    def _model(self, layout: Layout, plan: Plan) -> Model:
        model = self._sizes(layout, plan).models[id(plan)]
        size, microbatches = layout.point.micro_batch_size, self._rules.microbatches(layout.point)
        if layout.recompute not in self._recomputes:
            facts = self._rules.facts_of(layout, NOTHING_ON)
            self._recomputes[layout.recompute] = model_of(facts, plan).recompute
        return replace(
            model,
            mesh=replace(model.mesh, num_microbatches=microbatches, sequence_parallel=layout.sequence_parallel),
            recompute=self._recomputes[layout.recompute],
            microbatches=microbatches,
            tokens=model.tokens // model.sequences * size,
            full_tokens=model.full_tokens // model.sequences * size,
            sequences=size,
        )

    def _sizes(self, layout: Layout, plan: Plan) -> _Sizes:
        sizes = self._last
        if sizes is None or sizes.point != layout.point[:6]:  # the microbatch changes fastest
            sizes = self._last = self._made(layout.point, plan)
        if id(plan) not in sizes.models:
            sizes.models[id(plan)] = model_of(self._rules.plain_facts(layout.point), plan)
        return sizes

    def _data(self, sizes: _Sizes, model: Model, plan: Plan) -> tuple[tuple[Row, ...], ...]:
        """By stage, the rows of data parallelism: with FSDP of all microbatches, else the same for every number."""
        key = id(plan), model.microbatches if model.fsdp else 0
        if key not in sizes.data:
            calls = (_calls_of_steps(model, sizes.found, stage) for stage in sizes.stages)
            sizes.data[key] = tuple(_rows(sizes.ranks, each) for each in calls)
        return sizes.data[key]

    def _made(self, point: Point, plan: Plan) -> _Sizes:
        facts = self._rules.plain_facts(point)
        model = model_of(facts, plan)
        keys: dict[Hashable, int] = {}
        which: list[int] = []
        stages: list[int] = []
        for stage in range(model.mesh.pp):
            key = kind_of_stage(model, stage)
            if key not in keys:
                keys[key] = len(stages)
                stages.append(stage)
            which.append(keys[key])
        return _Sizes(
            point=point[:6],
            ranks=rank_layout(facts, model),
            found=parameters_of(model),
            stages=tuple(stages),
            which=tuple(which),
            models={},
            data={},
            known={},
        )

    def _layers(self, layout: Layout, plan: Plan) -> Sublayers:
        point = layout.point
        key = (point.tp, point.cp, point.ep, self._rules.expert_tp(point), point.micro_batch_size, layout[1:])
        if key not in self._sublayers:
            model, ranks = self._model(layout, plan), self._sizes(layout, plan).ranks
            configuration = self._rules.configuration(layout)
            self._sublayers[key] = sublayers_of(
                self._hardware, self._constants, model, self.kernels, ranks, configuration
            )
        return self._sublayers[key]

    def _stage(self, sizes: _Sizes, model: Model, sublayers: Sublayers, stage: int, data: tuple[Row, ...]) -> StageWork:
        return stage_work(
            self._hardware,
            self._constants,
            model,
            self.kernels,
            sublayers,
            sizes.found,
            sizes.ranks,
            stage,
            _rows(sizes.ranks, _calls_of_microbatches(model, sizes.found, stage)) + data,
            gather_width=self._gather_width,
            known=sizes.known,
        )


def _rows(ranks: RankLayout, calls: Iterator[Call]) -> tuple[Row, ...]:
    return merged(calls, group_sizes(ranks), AXES, placements(ranks))


def _calls_of_microbatches(model: Model, found: Parameters, stage: int) -> Iterator[Call]:
    yield from tp.calls(model, found, stage)
    yield from pp.calls(model, stage)
    yield from cp.calls(model, stage)
    yield from ep.calls(model, stage)


def _calls_of_steps(model: Model, found: Parameters, stage: int) -> Iterator[Call]:
    """What is the same for every size of a microbatch, with and without sequence parallelism and recomputation."""
    yield from dp.calls(model, found, stage)
    yield from scalars.calls(model, stage)
