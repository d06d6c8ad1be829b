"""Which layouts the rules refuse, without running every rule on every layout.

A rule about sizes is asked once per value of the sizes that it looks at. All the others see of a layout only which
groups it has and what overlaps: they are asked once per kind of layout. What is shown in the end is judged by all of
them again, so that nothing that this takes for legal by mistake is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from overlapkit.errors import RecipeError
from overlapkit.facts import Facts, derive
from overlapkit.plan import Plan
from overlapkit.recipe import Recipe
from overlapkit.resolver import plan as plan_of
from overlapkit.rules import documented
from overlapkit.rules.dp_changes import GRAD_REDUCE, PARAM_GATHER
from overlapkit.rules.registry import passes
from overlapkit.search.changes import changed, changes_of
from overlapkit.search.space import Layout, Overlaps, Point, overlaps_of
from overlapkit.userbuffers.check import Report
from overlapkit.volume.requirements import check

# The sizes that a rule looks at, by what they are of; every other rule sees the kind of a layout.
_BY_SIZES: tuple[tuple[tuple[str, ...], Callable[[Point, int, int], Hashable]], ...] = (
    (("CFG006", "CFG017"), lambda point, dp, microbatches: ("heads", point.tp)),
    (("CP001", "CP002", "CP003"), lambda point, dp, microbatches: ("sequence", point.cp)),
    (("EP024",), lambda point, dp, microbatches: ("experts", point.ep)),
    (("EP023",), lambda point, dp, microbatches: ("expert groups", point[:5])),
    (("CFG022",), lambda point, dp, microbatches: ("precision", point.pp)),
    (("CFG005", "CFG016"), lambda point, dp, microbatches: ("batch", dp, point.micro_batch_size)),
    (("PP006", "PP016"), lambda point, dp, microbatches: ("layers", point.pp, point.vp)),
    (("PP007", "PP008"), lambda point, dp, microbatches: ("schedule", point.pp, point.vp > 1, microbatches)),
)
NO_SPLIT = "TP · PP · CP does not divide the GPUs"
_TRIES = 3  # layouts of a kind that must fail before it is given up
# Setting of the plan for each of ``Overlaps``.
_SETTINGS = (
    "model.tp_comm_overlap",
    GRAD_REDUCE,
    PARAM_GATHER,
    "model.overlap_p2p_comm",
    "model.overlap_moe_expert_parallel_comm",
    "model.delay_wgrad_compute",
)
NOTHING_ON = Overlaps(*[False] * 6)


class Kind(NamedTuple):
    """All that rules see of a layout beyond its sizes."""

    tp: bool
    sequence_parallel: bool
    stages: int  # 1, 2, or 3 for more
    interleaved: bool
    cp: bool
    dp: bool
    ep: int  # 0: none, else GPUs of an EP group up to a node and beyond
    expert_tp: bool
    expert_dp: bool
    own_stages: bool
    recompute: str


@dataclass(slots=True)
class Allowed:
    """The settings of the overlaps that a kind of layout may have, and why others are refused.

    ``plan`` is that of the last one, in which most is on; ``tries`` the layouts looked at.
    """

    overlaps: tuple[Overlaps, ...]
    refused: Counter[str]
    plan: Plan | None
    tries: int


class _Answer(NamedTuple):
    """A plan, and why it is not what was asked for: none where it is."""

    plan: Plan
    problems: tuple[str, ...]

    @property
    def problem(self) -> str | None:
        return self.problems[0] if self.problems else None


class Rules:
    """The rules about one recipe's layouts, each answer kept."""

    def __init__(self, recipe: Recipe) -> None:
        self.facts = derive(recipe)
        self.recipe = recipe
        self._by_size: dict[Hashable, str | None] = {}
        self._kinds: dict[tuple[Kind, bool], Allowed] = {}
        self._userbuffers: dict[Hashable, Facts] = {}
        self._legal: dict[Hashable, bool] = {}
        self._plain: tuple[tuple[int, ...], Facts] | None = None
        self.settings = replace(plan_of(self.facts), decisions=())  # where it does not matter what they are
        self._batch = recipe.train.global_batch_size or 0

    # --- sizes --------------------------------------------------------------------------------

    def refused(self, point: Point) -> str | None:
        """Why the sizes of a point are illegal whatever overlaps, None where they are not."""
        group = point.tp * point.pp * point.cp
        if point.gpus % group:
            return NO_SPLIT
        dp, microbatches = point.gpus // group, self.microbatches(point)
        for codes, key_of in _BY_SIZES:
            key = key_of(point, dp, microbatches)
            if key not in self._by_size:
                self._by_size[key] = self._ask(point, codes)
            problem = self._by_size[key]
            if problem is not None:
                return problem
        return None

    def _ask(self, point: Point, codes: tuple[str, ...]) -> str | None:
        facts = self.facts_of(Layout(point, point.tp > 1, "none"), NOTHING_ON)
        return next((_named(code) for code in codes if not passes(facts, facts.start, code)), None)

    def uncounted(self, layout: Layout) -> str | None:
        """What keeps the volume from being counted, None where it can be: sizes that no rule minds, or what is
        not modelled."""
        key = (layout.point[:6], layout.sequence_parallel)
        if key not in self._by_size:
            facts = self.plain_facts(layout.point)
            if layout.sequence_parallel:
                facts = replace(facts, parallelism=replace(facts.parallelism, sequence_parallel=True))
            try:
                check(facts, self.settings, approximate=True)  # no rule has an error about the sizes it asks for
            except RecipeError as error:
                self._by_size[key] = error.problem
            else:
                self._by_size[key] = None
        return self._by_size[key]

    # --- kinds --------------------------------------------------------------------------------

    def allowed(self, layout: Layout) -> Allowed:
        """The settings of the overlaps that this layout may have."""
        takes_userbuffers = layout.point.tp > 1 and layout.sequence_parallel and self._takes_userbuffers(layout)
        key = (self._kind(layout), takes_userbuffers)
        found = self._kinds.get(key)
        if found is None or (not found.overlaps and found.tries < _TRIES):
            tries = found.tries if found is not None else 0
            found = self._kinds[key] = self._judge(layout, takes_userbuffers, tries + 1)
        return found

    def _kind(self, layout: Layout) -> Kind:
        point, mesh = layout.point, self.facts.parallelism
        dp = point.gpus // (point.tp * point.pp * point.cp)
        etp = self.expert_tp(point)
        node = self.facts.gpus_per_node or 8
        return Kind(
            point.tp > 1,
            layout.sequence_parallel,
            min(point.pp, 3),
            point.vp > 1,
            point.cp > 1,
            dp > 1,
            0 if point.ep == 1 else 1 if point.ep <= node else 2,
            etp > 1,
            point.gpus // (etp * point.ep * point.pp) > 1,
            (point.pp, point.vp) == (mesh.pp, mesh.vp or 1),
            layout.recompute,
        )

    def expert_tp(self, point: Point) -> int:
        """As the recipe says it; where it says nothing, what follows from TP and EP."""
        said = self.recipe.model.expert_tensor_parallel_size
        if said is not None:
            return said
        return 1 if point.ep > 1 and self.facts.bridge_in(">=0.6.0") else point.tp

    def _takes_userbuffers(self, layout: Layout) -> bool:
        """Whether TP overlap, alone, is legal in this layout: Transformer Engine looks at TP and tokens."""
        key = (layout.point.tp, layout.point.cp, layout.point.micro_batch_size)
        if key not in self._legal:
            plan = plan_of(self.with_userbuffers(layout))
            self._legal[key] = bool(plan.settings[_SETTINGS[0]]) and not self._errors(plan, ("TP", "UB"))
        return self._legal[key]

    def _judge(self, layout: Layout, takes_userbuffers: bool, tries: int) -> Allowed:
        """Asks about few of the settings: what is legal with everything on and with nothing is legal between.

        What fails at both ends for the same reason fails throughout. Otherwise what cannot be on alone is left out, and
        the rest is asked for one by one only where its own ends fail.
        """
        every = overlaps_of(layout.point)
        possible = [overlaps for overlaps in every if takes_userbuffers or not overlaps.tp_comm_overlap]
        refused = Counter({"TP overlap is not possible": len(every) - len(possible)})
        off, on = self._asked(layout, possible[0]), self._asked(layout, possible[-1])
        common = next((problem for problem in off.problems if problem in on.problems), None)
        if common is not None:
            refused[common] += len(possible)
            return Allowed((), +refused, None, tries)
        if off.problem is None and on.problem is not None:
            for alone in (overlaps for overlaps in possible[:-1] if sum(overlaps) - _brings(overlaps) == 1):
                problem = self._asked(layout, alone).problem
                without = [overlaps for overlaps in possible if not _contains(overlaps, alone)]
                if problem is not None:
                    refused[problem] += len(possible) - len(without)
                    possible = without
            on = self._asked(layout, possible[-1])
        if off.problem is not None or on.problem is not None:
            answers = {overlaps: self._asked(layout, overlaps) for overlaps in possible}
            possible = [overlaps for overlaps in possible if answers[overlaps].problem is None]
            refused.update(answer.problem for answer in answers.values() if answer.problem is not None)
            on = answers[possible[-1]] if possible else on
        return Allowed(tuple(possible), +refused, on.plan if possible else None, tries)

    def _asked(self, layout: Layout, overlaps: Overlaps) -> _Answer:
        plan = plan_of(self.facts_of(layout, overlaps))
        errors = self._errors(plan)
        if errors:
            return _Answer(plan, tuple(map(_named, errors)))
        got = [bool(plan.settings[name]) for name in _SETTINGS]
        lost = [name for name, has, wants in zip(_SETTINGS, got, overlaps, strict=True) if has is not wants]
        return _Answer(plan, tuple(f"{name.partition('.')[2]} is decided otherwise" for name in lost))

    def _errors(self, plan: Plan, families: tuple[str, ...] = ("",)) -> list[str]:
        return [d.code for d in plan.decisions if d.severity == "error" and d.code.startswith(families)]

    # --- what follows from a layout -------------------------------------------------------------

    def microbatches(self, point: Point) -> int:
        """Of one step, rounded down."""
        return self._batch * point.tp * point.pp * point.cp // (point.gpus * point.micro_batch_size)

    def configuration(self, layout: Layout) -> Mapping[str, Mapping[str, Any]]:
        """Of the userbuffers that TP overlap would have, empty where it is not possible."""
        report = self._report(layout)
        return report.buffers if report is not None else {}

    def userbuffer_bytes(self, layout: Layout) -> int:
        report = self._report(layout)
        return (report.bytes or 0) if report is not None else 0

    def _report(self, layout: Layout) -> Report | None:
        possible = layout.point.tp > 1 and layout.sequence_parallel
        return self.with_userbuffers(layout).userbuffers_report if possible else None

    # --- facts --------------------------------------------------------------------------------

    def facts_of(self, layout: Layout, overlaps: Overlaps) -> Facts:
        return derive(changed(self.recipe, changes_of(self.facts, layout, overlaps)))

    def plain_facts(self, point: Point) -> Facts:
        """The facts of some layout with these groups, nothing on; the microbatch changes fastest, so one is kept."""
        if self._plain is None or self._plain[0] != point[:6]:
            self._plain = point[:6], self.facts_of(Layout(point, False, "none"), NOTHING_ON)
        return self._plain[1]

    def with_userbuffers(self, layout: Layout) -> Facts:
        """The facts of some layout with this one's userbuffers, TP overlap alone on."""
        key = (layout.point.tp, layout.point.cp, layout.point.micro_batch_size)
        if key not in self._userbuffers:
            self._userbuffers[key] = self.facts_of(layout, NOTHING_ON._replace(tp_comm_overlap=True))
        return self._userbuffers[key]


def _brings(overlaps: Overlaps) -> int:
    """How many of the overlaps are on only because another needs them."""
    return overlaps.overlap_param_gather + overlaps.delay_wgrad_compute


def _contains(overlaps: Overlaps, part: Overlaps) -> bool:
    return all(on or not needed for on, needed in zip(overlaps, part, strict=True))


def _named(code: str) -> str:
    return f"{documented()[code].summary} ({code})"
