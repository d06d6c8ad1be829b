"""The work of a layout's step, from the parts that layouts share.

The same functions as those of an estimate, each asked once for what it depends on: data-parallel calls do not depend on
the microbatch, a layer's compute not on the pipeline, and stages that hold the same have the same work.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from overlapkit.cost.constants import load
from overlapkit.cost.hardware import hardware_of
from overlapkit.cost.kernels import kernels_of
from overlapkit.cost.stage import StageWork, Sublayers, stage_work, sublayers_of
from overlapkit.cost.step import Work
from overlapkit.plan import Plan
from overlapkit.search.feasible import NOTHING_ON, Rules
from overlapkit.search.space import Layout
from overlapkit.volume import cp, dp, ep, pp, scalars, tp
from overlapkit.volume.model import Model, model_of
from overlapkit.volume.parameters import Parameters, parameters_of
from overlapkit.volume.placement import AXES, RankLayout, group_sizes, placements
from overlapkit.volume.predict import rank_layout
from overlapkit.volume.rows import Call, Row, merged


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """What layouts that differ in the microbatch alone share. ``stages`` are the different ones."""

    model: Model
    layout: RankLayout
    found: Parameters
    stages: tuple[int, ...]
    which: tuple[int, ...]
    data: tuple[tuple[Row, ...], ...]


class Timing:
    """Works of one recipe's layouts."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._constants = load()
        self._hardware, self._assumed = hardware_of(rules.facts, self._constants)
        self.kernels = kernels_of(rules.facts)
        precision = rules.facts.precision
        self._gather_width = 0.5 if precision.fp8_param_gather and (precision.fp8 or precision.fp4) else 1.0
        self._frames: dict[Hashable, _Frame] = {}
        self._frames_of: Hashable = None
        self._known: dict[tuple[str, str, bool, float], float] = {}  # seconds of calls of these frames
        self._sublayers: dict[Hashable, Sublayers] = {}

    def model(self, layout: Layout) -> Model:
        """The model of a layout; its overlaps are some or other."""
        return model_of(self._rules.facts_of(layout, NOTHING_ON), self._rules.settings)

    def work(self, layout: Layout, plan: Plan) -> Work:
        """The work of a step of a layout that is legal with the settings of ``plan``, those of its kind."""
        frame = self._frame(layout, plan)
        model = _with_microbatch(frame.model, layout.point.micro_batch_size, self._rules.microbatches(layout.point))
        sublayers = self._layers(layout, frame, model)
        works = tuple(
            self._stage(frame, model, sublayers, stage, data)
            for stage, data in zip(frame.stages, frame.data, strict=True)
        )
        return Work(self._hardware, self._constants, model, self.kernels, works, frame.which, self._assumed)

    def _frame(self, layout: Layout, plan: Plan) -> _Frame:
        if self._frames_of != layout.point[:6]:  # the microbatch changes fastest
            self._frames_of = layout.point[:6]
            self._frames.clear()
            self._known = {}
        key = (layout.sequence_parallel, layout.recompute, id(plan))
        if key not in self._frames:
            self._frames[key] = self._made(layout, plan)
        return self._frames[key]

    def _made(self, layout: Layout, plan: Plan) -> _Frame:
        facts = self._rules.facts_of(layout, NOTHING_ON)
        model = model_of(facts, plan)
        ranks, found = rank_layout(facts, model), parameters_of(model)
        keys: dict[Hashable, int] = {}
        which: list[int] = []
        stages: list[int] = []
        for stage in range(model.mesh.pp):
            key = _stage_key(model, stage)
            if key not in keys:
                keys[key] = len(stages)
                stages.append(stage)
            which.append(keys[key])
        data = tuple(_rows(ranks, dp.calls(model, found, stage)) for stage in stages)
        return _Frame(model=model, layout=ranks, found=found, stages=tuple(stages), which=tuple(which), data=data)

    def _layers(self, layout: Layout, frame: _Frame, model: Model) -> Sublayers:
        point = layout.point
        key = (point.tp, point.cp, point.ep, model.mesh.etp, point.micro_batch_size, layout[1:])
        if key not in self._sublayers:
            configuration = self._rules.configuration(layout)
            self._sublayers[key] = sublayers_of(
                self._hardware, self._constants, model, self.kernels, frame.layout, configuration
            )
        return self._sublayers[key]

    def _stage(self, frame: _Frame, model: Model, sublayers: Sublayers, stage: int, data: tuple[Row, ...]) -> StageWork:
        return stage_work(
            self._hardware,
            self._constants,
            model,
            self.kernels,
            sublayers,
            frame.found,
            frame.layout,
            stage,
            _rows(frame.layout, _calls_of_microbatches(model, frame.found, stage)) + data,
            gather_width=self._gather_width,
            known=self._known,
        )


def _rows(ranks: RankLayout, calls: Iterator[Call]) -> tuple[Row, ...]:
    return merged(calls, group_sizes(ranks), AXES, placements(ranks))


def _calls_of_microbatches(model: Model, found: Parameters, stage: int) -> Iterator[Call]:
    yield from tp.calls(model, found, stage)
    yield from pp.calls(model, stage)
    yield from cp.calls(model, stage)
    yield from ep.calls(model, stage)
    yield from scalars.calls(model, stage)


def _stage_key(model: Model, stage: int) -> Hashable:
    """Stages with the same key issue the same calls and compute the same."""
    chunks = model.stages[stage]
    first = tuple(chunk.first for chunk in chunks) if len(model.cp_types) > 1 else ()
    held = tuple((chunk.moe, chunk.embedding, chunk.output) for chunk in chunks)
    return stage == 0, stage == model.mesh.pp - 1, held, first


def _with_microbatch(model: Model, size: int, microbatches: int) -> Model:
    if model.sequences == size:
        return model
    return replace(
        model,
        mesh=replace(model.mesh, num_microbatches=microbatches),
        microbatches=microbatches,
        tokens=model.tokens // model.sequences * size,
        full_tokens=model.full_tokens // model.sequences * size,
        sequences=size,
    )
