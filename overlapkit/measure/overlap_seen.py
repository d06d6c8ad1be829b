"""What the recipe asks to overlap, what the plan leaves of it, and what a source with device times shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from overlapkit.volume.configuration import Configuration

if TYPE_CHECKING:
    from overlapkit.measure.measured import Measured, MeasuredRow


class _Kind(NamedTuple):
    """A setting and the rows that it makes overlap: axes, and operations (empty: all)."""

    axis: str
    what: str
    setting: str
    axes: tuple[str, ...]
    ops: tuple[str, ...] = ()


_KINDS = (
    _Kind("TP", "userbuffers", "model.tp_comm_overlap", ("tp",)),
    _Kind("PP", "sends and receives", "model.overlap_p2p_comm", ("pp",), ("send", "recv")),
    _Kind("DP", "gradient reduction", "ddp.overlap_grad_reduce", ("dp", "expert_dp"), ("reduce_scatter", "all_reduce")),
    _Kind("DP", "parameter gathering", "ddp.overlap_param_gather", ("dp", "expert_dp"), ("all_gather",)),
    _Kind("EP", "all-to-all", "model.overlap_moe_expert_parallel_comm", ("ep", "etp")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSeen:
    """One kind of overlap. ``requested`` is what the recipe says (None: nothing), ``planned`` what the plan leaves on,
    ``codes`` the rules that have a word about it.

    Times are microseconds of a rank's whole input, the mean of those that show this traffic: in all, without other
    device work, and beside it. Operations are timed apart, so that those that run at once count twice. None where no
    input has times of it.
    """

    axis: str
    what: str
    setting: str
    requested: Any
    planned: bool
    codes: tuple[str, ...]
    time_us: float | None
    exposed_us: float | None
    hidden_us: float | None

    def to_dict(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__slots__} | {"codes": list(self.codes)}
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}


def overlap_seen(found: Configuration, measured: Measured) -> tuple[OverlapSeen, ...]:
    """A row for every kind of overlap that the recipe's groups allow."""
    mesh = found.facts.parallelism
    sizes = {"TP": mesh.tp, "PP": mesh.pp, "DP": mesh.dp * mesh.cp, "EP": mesh.ep}
    return tuple(_seen(kind, found, measured) for kind in _KINDS if sizes[kind.axis] > 1)


def _seen(kind: _Kind, found: Configuration, measured: Measured) -> OverlapSeen:
    by_rank = [[row.times for row in rank.rows if _is_of(kind, row) and row.times] for rank in measured.ranks]
    timed = [times for times in by_rank if times]

    def mean(name: str) -> float | None:
        return sum(getattr(one, name) for times in timed for one in times) / len(timed) if timed else None

    return OverlapSeen(
        axis=kind.axis,
        what=kind.what,
        setting=kind.setting,
        requested=_requested(found, kind.setting),
        planned=bool(found.plan.settings[kind.setting]),
        codes=tuple(decision.code for decision in found.plan.decisions if decision.subject == kind.setting),
        time_us=mean("time_us"),
        exposed_us=mean("exposed_us"),
        hidden_us=mean("hidden_us"),
    )


def _is_of(kind: _Kind, row: MeasuredRow) -> bool:
    return row.axis in kind.axes and (not kind.ops or row.op in kind.ops)


def _requested(found: Configuration, setting: str) -> Any:
    """What the recipe says, in ``comm_overlap`` or, where that is silent, in the setting's own section."""
    facts, (section, _, name) = found.facts, setting.partition(".")
    if name == "tp_comm_overlap":
        return facts.tp_request
    asked = getattr(facts.asked, name)
    return getattr(getattr(facts.recipe, section), name, None) if asked is None else asked
