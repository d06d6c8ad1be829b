"""Compares plans with the constructors of the installed megatron-core, on random configurations.

    .venv-mcore/bin/python scripts/parity_mcore.py [--count 2000] [--seed 0]

Each configuration is resolved, and constructed as Megatron-Core's TransformerConfig, OptimizerConfig and
DistributedDataParallelConfig (overlapkit.integrations.megatron.construct). Both agree where the constructors refuse
it, and one of the rules that stand for the message has found an error (mcore_refusals.py); or where they accept it, and
no rule has found an error that megatron-core raises at validation. Under Megatron-LM an error may be its parser's,
which is asked first.

Prints how many agree, how many are accepted, and how often each rule and each message was met. Exit status 1: they
disagree, too few are accepted, or a rule or a message was met too seldom.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from mcore_configurations import configuration
from mcore_refusals import ELSEWHERE, OUT_OF_SCOPE, REFUSALS, SAID_BEFORE, SAID_BY_ANOTHER, WITHOUT_TEXT, Refusal

from overlapkit.catalogue import software_rows
from overlapkit.errors import RecipeError
from overlapkit.integrations.megatron.construct import construct
from overlapkit.integrations.megatron.packages import megatron_core
from overlapkit.plan import Decision, Plan
from overlapkit.recipe import Recipe, recipe_from_mapping
from overlapkit.resolver import resolve
from overlapkit.versions import Version, parse_range, parse_version

LEAST_HITS = 10
LEAST_ACCEPTED = 0.4
CORE, LM = "megatron-core", "megatron-lm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One configuration. ``message`` is the constructors' refusal, None where they accept; ``found`` our errors' codes.

    ``refusing`` are those codes among them that say that Megatron-Core's constructors refuse it.
    """

    index: int
    message: str | None
    refusal: Refusal | None
    found: frozenset[str]
    refusing: frozenset[str]

    @property
    def agrees(self) -> bool:
        if self.message is None:
            return not self.refusing
        return self.refusal is not None and bool(self.found.intersection(self.refusal.codes))


@dataclass(slots=True)
class Tally:
    """All configurations of a run; ``out_of_scope`` counts refusals over fields that no recipe is read for."""

    core: Version
    outcomes: list[Outcome]
    out_of_scope: Counter[str]

    @property
    def disagreements(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.agrees]

    @property
    def accepted(self) -> float:
        return sum(outcome.message is None for outcome in self.outcomes) / len(self.outcomes)

    @property
    def rules(self) -> dict[str, int]:
        """Rule -> configurations that it and the constructors refuse, for every rule that this version can meet."""
        expected = {code for refusal in self.refusals for code in refusal.codes} | SAID_BY_ANOTHER.keys()
        hits = Counter(code for outcome in self.outcomes if outcome.message is not None for code in outcome.refusing)
        return {code: hits[code] for code in sorted(expected | hits.keys())}

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Those of this version."""
        return tuple(refusal for refusal in REFUSALS if self.core in parse_range(refusal.core))

    @property
    def messages(self) -> dict[str, int]:
        hits = Counter(outcome.refusal.text for outcome in self.outcomes if outcome.refusal is not None)
        return {refusal.text: hits[refusal.text] for refusal in (*self.refusals, WITHOUT_TEXT)}

    def problems(self) -> Iterator[str]:
        """What keeps this run from showing that both agree, a sentence each."""
        for outcome in self.disagreements:
            said = "accepted" if outcome.message is None else f"refused: {outcome.message}"
            yield f"configuration {outcome.index}: {said}; our errors: {' '.join(sorted(outcome.found)) or 'none'}"
        if self.accepted < LEAST_ACCEPTED:
            yield f"only {self.accepted:.0%} are accepted"
        yield from (f"{code} was met {hits} times" for code, hits in self.rules.items() if hits < LEAST_HITS)
        yield from (f"no constructor said: {text}" for text, hits in self.messages.items() if not hits)


def compare(count: int, seed: int) -> Tally:
    """``count`` configurations that the constructors can decide from what a recipe says."""
    core = parse_version(megatron_core().__version__)
    rows = [row for row in software_rows() if parse_version(row.megatron_core).series == core.series]
    tally, index = Tally(core, [], Counter()), -1
    while len(tally.outcomes) < count:
        index += 1
        try:
            recipe = recipe_from_mapping(configuration(index, seed, core, rows[-1].megatron_bridge))
            plan = resolve(recipe)
        except RecipeError:  # sizes that do not divide the GPUs
            continue
        message = refused(recipe, plan)
        unread = [text for text in OUT_OF_SCOPE if message is not None and text in message]
        if unread:
            tally.out_of_scope[unread[0]] += 1
        else:
            tally.outcomes.append(_outcome(index, message, plan, tally.refusals))
    return tally


def refused(recipe: Recipe, plan: Plan) -> str | None:
    """What the constructors say against it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            construct(recipe, plan)
    except Exception as error:
        return str(error)
    return None


def _outcome(index: int, message: str | None, plan: Plan, refusals: tuple[Refusal, ...]) -> Outcome:
    errors = [decision for decision in plan.decisions if decision.severity == "error"]
    by = (CORE, LM) if plan.target.framework == LM else (CORE,)
    return Outcome(
        index=index,
        message=message,
        refusal=None if message is None else _meaning(message, refusals),
        found=frozenset(each.code for each in errors if each.raised_by in by or each.code in SAID_BEFORE),
        refusing=frozenset(each.code for each in errors if _by_a_constructor(each)),
    )


def _meaning(message: str, refusals: tuple[Refusal, ...]) -> Refusal | None:
    if not message:
        return WITHOUT_TEXT
    return next((refusal for refusal in refusals if refusal.text in message), None)


def _by_a_constructor(decision: Decision) -> bool:
    if decision.code in SAID_BEFORE:
        return True
    return (decision.raised_by, decision.raised_at) == (CORE, "validation") and decision.code not in ELSEWHERE


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compares plans with megatron-core's constructors.")
    parser.add_argument("--count", type=int, default=2_000, help="configurations to compare")
    parser.add_argument("--seed", type=int, default=0, help="of the random configurations")
    given = parser.parse_args(arguments)
    tally = compare(given.count, given.seed)
    _report(tally)
    problems = list(tally.problems())
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


def _report(tally: Tally) -> None:
    total = len(tally.outcomes)
    print(f"megatron-core {tally.core}: {total - len(tally.disagreements)} of {total} configurations agree")
    print(f"{tally.accepted:.1%} are accepted; not compared: {sum(tally.out_of_scope.values())}, refused over")
    for text, hits in tally.out_of_scope.items():
        print(f"{hits:6}  {OUT_OF_SCOPE[text]}, which no recipe is read for")
    print("\nRefused by a rule and by the constructors")
    for code, hits in tally.rules.items():
        print(f"{hits:6}  {code}")
    here = {code for refusal in (*tally.refusals, WITHOUT_TEXT) for code in refusal.codes}
    gone = {code: f"megatron-core {each.core} alone" for each in REFUSALS for code in each.codes if code not in here}
    for code, why in sorted({**gone, **ELSEWHERE}.items()):
        print(f"     -  {code}: {why}")
    print("\nThe constructors' messages")
    for text, hits in tally.messages.items():
        print(f"{hits:6}  {text or '(an assertion without a text)'}")


if __name__ == "__main__":
    sys.exit(main())
