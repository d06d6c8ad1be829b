"""What a rule is, and how the rules of a target become a plan's decisions.

A rule is a function of the facts and of the state so far (settings and ``env.NAME`` values) that
returns what it decides. A verdict about a setting or a variable becomes its value, so that the
decisions, replayed over the starting values, are the plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, TypeVar

from overlapkit.facts import Facts
from overlapkit.plan import SETTINGS, Decision, Severity
from overlapkit.software import Versions
from overlapkit.versions import ANY, VersionRange, parse_range

KEEP: Final = object()
State = Mapping[str, Any]

BRIDGE: Final = "megatron-bridge"
MEGATRON_LM: Final = "megatron-lm"
MEGATRON_CORE: Final = "megatron-core"
TRANSFORMER_ENGINE: Final = "transformer-engine"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule says about one subject; ``value`` is KEEP where the rule changes nothing."""

    subject: str
    value: Any
    because: str
    severity: Severity = "info"
    requested: Any = None
    fix: str | None = None
    raised_by: str | None = None
    raised_at: str | None = None


Finding = Verdict | Iterable[Verdict] | None
Check = Callable[[Facts, State], Finding]
Observe = TypeVar("Observe", bound=Callable[..., Verdict])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A code, the check behind it, and the targets it holds for.

    ``bridge`` ranges over Megatron-Bridge's versions, ``megatron_lm`` and ``core`` over Megatron-Core's
    (``core`` narrows both targets), ``te`` over Transformer Engine's; None: not for that target.
    """

    code: str
    check: Callable[..., Finding]
    bridge: VersionRange | None
    megatron_lm: VersionRange | None
    core: VersionRange
    te: VersionRange
    source: str

    @property
    def page(self) -> str:
        """The rule's documentation: its docstring."""
        return inspect.cleandoc(self.check.__doc__ or "")

    @property
    def summary(self) -> str:
        return self.page.partition("\n")[0].rstrip(".")

    def holds_for(self, versions: Versions) -> bool:
        if versions.megatron_bridge is not None:
            if self.bridge is None or versions.megatron_bridge not in self.bridge:
                return False
        elif self.megatron_lm is None or versions.megatron_core not in self.megatron_lm:
            return False
        if versions.megatron_core not in self.core:
            return False
        return self.te is ANY or (versions.transformer_engine is not None and versions.transformer_engine in self.te)


_RULES: dict[str, Rule] = {}
_OBSERVATIONS: dict[str, Rule] = {}


def rule(
    code: str,
    *,
    source: str,
    bridge: str | None = "any",
    megatron_lm: str | None = "any",
    core: str = "any",
    te: str = "any",
) -> Callable[[Check], Check]:
    """Register a check under its code. Codes are never reused or renumbered."""

    def register(check: Check) -> Check:
        if code in _RULES:
            raise ValueError(f"the code {code} is taken")
        _RULES[code] = Rule(
            code=code,
            check=check,
            bridge=None if bridge is None else parse_range(bridge),
            megatron_lm=None if megatron_lm is None else parse_range(megatron_lm),
            core=parse_range(core),
            te=parse_range(te),
            source=source,
        )
        return check

    return register


def observation(code: str, *, source: str) -> Callable[[Observe], Observe]:
    """Register the page of a decision that no rule makes: what only the real software tells when it is asked.

    Its function takes what was observed and returns the verdict; ``run`` does not call it. Codes are the rules' own,
    never reused or renumbered.
    """

    def register(observe: Observe) -> Observe:
        if code in _RULES or code in _OBSERVATIONS:
            raise ValueError(f"the code {code} is taken")
        _OBSERVATIONS[code] = Rule(
            code=code, check=observe, bridge=ANY, megatron_lm=ANY, core=ANY, te=ANY, source=source
        )
        return observe

    return register


def registered() -> dict[str, Rule]:
    """Code -> rule, in the order of evaluation."""
    return dict(_RULES)


def documented() -> dict[str, Rule]:
    """Code -> whatever a decision's code can name: the rules, then the observations."""
    return {**_RULES, **_OBSERVATIONS}


def observed(code: str, verdict: Verdict, source: str | None = None) -> Decision:
    """The decision of an observation; ``source`` says more exactly than its page where it comes from."""
    found = _OBSERVATIONS[code]
    decision = _decision(found, verdict, verdict.requested if verdict.value is KEEP else verdict.value)
    return decision if source is None else replace(decision, source=source)


@lru_cache(maxsize=64)
def _rules_for(versions: Versions) -> tuple[Rule, ...]:
    return tuple(rule for rule in _RULES.values() if rule.holds_for(versions))


def run(facts: Facts) -> tuple[dict[str, Any], dict[str, str], tuple[Decision, ...]]:
    """Settings, environment and decisions of the recipe behind ``facts``."""
    state: dict[str, Any] = {name: facts.start[name] for name in SETTINGS}
    decisions = []
    for found in _rules_for(facts.versions):
        for verdict in _verdicts(found.check(facts, state)):
            if verdict.value is KEEP:
                value = state.get(verdict.subject)
            else:
                value = verdict.value
                if verdict.subject in state or verdict.subject.startswith("env."):
                    state[verdict.subject] = value
            decisions.append(_decision(found, verdict, value))
    env = {name[4:]: value for name, value in state.items() if name.startswith("env.") and value is not None}
    return {name: state[name] for name in SETTINGS}, env, tuple(decisions)


def passes(facts: Facts, state: State, *codes: str) -> bool:
    """Whether none of these rules finds an error; for a fix, with the facts and the state as it would leave them."""
    checks = (_RULES[code].check for code in codes if _RULES[code].holds_for(facts.versions))
    return not any(verdict.severity == "error" for check in checks for verdict in _verdicts(check(facts, state)))


def _verdicts(finding: Finding) -> Iterable[Verdict]:
    if finding is None:
        return ()
    return (finding,) if isinstance(finding, Verdict) else finding


def _decision(found: Rule, verdict: Verdict, value: Any) -> Decision:
    return Decision(
        found.code,
        verdict.severity,
        verdict.subject,
        verdict.requested,
        value,
        verdict.because,
        verdict.fix,
        verdict.raised_by,
        verdict.raised_at,
        found.source,
    )


# --- what rules return ------------------------------------------------------------------------


def info(subject: str, because: str, *, value: Any = KEEP, requested: Any = None, fix: str | None = None) -> Verdict:
    """Something decided or worth knowing; nothing is lost."""
    return Verdict(subject, value, because, "info", requested, fix)


def warning(subject: str, because: str, *, value: Any = KEEP, requested: Any = None, fix: str | None = None) -> Verdict:
    """Something requested is turned off, lost, or works against the rest."""
    return Verdict(subject, value, because, "warning", requested, fix)


def error(
    subject: str,
    because: str,
    *,
    fix: str,
    by: str | None = None,
    at: str | None = None,
    value: Any = KEEP,
    requested: Any = None,
) -> Verdict:
    """This launch fails (``by`` whom, ``at`` which moment), or computes something wrong (both None)."""
    return Verdict(subject, value, because, "error", requested, fix, by, at)


def refusal(subject: str, because: str, fix: str, value: Any, by: str = MEGATRON_CORE) -> Verdict:
    """A value that ``by`` refuses when it validates the configuration; it stands as it is."""
    return error(subject, because, fix=fix, by=by, at="validation", requested=value, value=value)
