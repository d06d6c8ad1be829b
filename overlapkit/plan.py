"""What a resolution is: settings, environment, and the decisions that explain them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from overlapkit.errors import PlanError, printable

SCHEMA_VERSION = 1
Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

# The settings a plan decides, in the order it prints them.
SETTINGS = (
    "model.tp_comm_overlap",
    "model.tp_comm_overlap_cfg",
    "model.tp_comm_bootstrap_backend",
    "model.overlap_p2p_comm",
    "model.batch_p2p_comm",
    "model.defer_embedding_wgrad_compute",
    "model.wgrad_deferral_limit",
    "model.overlap_moe_expert_parallel_comm",
    "model.delay_wgrad_compute",
    "optimizer.overlap_param_gather",
    "optimizer.overlap_param_gather_with_optimizer_step",
    "ddp.overlap_grad_reduce",
    "ddp.overlap_param_gather",
    "ddp.align_param_gather",
    "ddp.bucket_size",
    "ddp.delay_wgrad_compute",
)


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing a rule found.

    ``subject`` is a setting, ``env.NAME`` or the field of the recipe that it is about; ``requested``
    what the user asked for there (None: nothing), ``value`` what it is now. ``raised_by`` names who
    would stop the launch and ``raised_at`` when; both are None where nothing raises.
    """

    code: str
    severity: Severity
    subject: str
    requested: Any
    value: Any
    because: str
    fix: str | None
    raised_by: str | None
    raised_at: str | None
    source: str

    def to_dict(self) -> dict[str, Any]:
        return {name: _plain(getattr(self, name)) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the plan is for. A version of None: not installed, or not part of this framework."""

    framework: str
    megatron_bridge: str | None
    megatron_core: str
    transformer_engine: str | None
    torch: str
    gpu: str | None
    compute_capability: str | None
    assumed: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {name: _plain(getattr(self, name)) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Sizes of the job's groups; ``dp`` is without CP, None is unknown or not possible."""

    world_size: int
    tp: int
    sequence_parallel: bool
    pp: int
    vp: int | None
    cp: int
    ep: int
    etp: int
    dp: int
    expert_dp: int | None
    num_microbatches: int | None

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetChoice:
    """Where the userbuffers configuration comes from.

    ``match``: exact (made for this recipe), nearest (chosen as the closest), user (given by the user),
    none. ``differs`` maps a field to [the preset's value, the recipe's].
    """

    name: str | None
    aliases: tuple[str, ...]
    match: Literal["exact", "nearest", "user", "none"]
    differs: Mapping[str, tuple[Any, Any]]
    provenance: str | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "aliases": list(self.aliases),
            "match": self.match,
            "differs": {key: list(pair) for key, pair in self.differs.items()},
            "provenance": self.provenance,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer for one recipe. ``env`` is what to export before launch."""

    recipe: str
    target: Target
    parallelism: Parallelism
    settings: Mapping[str, Any]
    preset: PresetChoice
    env: Mapping[str, str]
    decisions: tuple[Decision, ...]

    @property
    def ok(self) -> bool:
        """False iff a decision is an error."""
        return all(decision.severity != "error" for decision in self.decisions)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, the form of ``--format json``."""
        from overlapkit import __version__

        return {
            "schema_version": SCHEMA_VERSION,
            "overlapkit_version": __version__,
            "recipe": self.recipe,
            "ok": self.ok,
            "target": self.target.to_dict(),
            "parallelism": self.parallelism.to_dict(),
            "settings": {name: _plain(self.settings[name]) for name in SETTINGS},
            "preset": self.preset.to_dict(),
            "env": dict(self.env),
            "decisions": [decision.to_dict() for decision in self.decisions],
        }


def as_grave_as(least: str) -> tuple[Severity, ...]:
    """The severities from error down to ``least``; none for ``never``."""
    names = [str(severity) for severity in SEVERITIES]
    return () if least == "never" else SEVERITIES[: names.index(least) + 1]


def reason(decision: Decision) -> str:
    """Why, and who stops the launch."""
    if decision.raised_by is None:
        return decision.because
    return f"{decision.because} ({decision.raised_by} raises at {decision.raised_at})"


def refuse_errors(plan: Plan) -> None:
    """Raises where a launch would fail, in one line with every error's code, subject, reason and way out.

    Raises:
        PlanError: a decision of the plan is an error.
    """
    found = [decision for decision in plan.decisions if decision.severity == "error"]
    if not found:
        return
    said = (f"{d.code} {d.subject}: {reason(d)}{f' → {d.fix}' if d.fix else ''}" for d in found)
    plural = "" if len(found) == 1 else "s"
    text = f"{plan.recipe} would fail with {len(found)} error{plural}: {'; '.join(said)}"
    raise PlanError(printable(text, limit=2_000))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
