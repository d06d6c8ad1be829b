"""Why measured rows differ from predicted ones: each likely reason is a prediction made again with one change.

A change counts where more of the measured rows then match. What makes most of them match comes first; the search goes
on from there, for what one change does not explain alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from overlapkit.facts import Facts
from overlapkit.measure.row_comparison import RowComparison
from overlapkit.rules.changes import home
from overlapkit.rules.dp_changes import home as dp_home
from overlapkit.volume.configuration import Configuration
from overlapkit.volume.levers import candidates, changed
from overlapkit.volume.model import padded_vocabulary

_MOST = 3  # changes on top of one another
_LEAST_GAIN = 0.1  # of the mismatch, where no row more matches
_MULTIPLES = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
_PER_MICROBATCH = ("tp", "pp", "cp", "ep", "etp")  # axes on which most calls are made for every microbatch
_MOST_FACTORS = 4
_VIRTUAL_STAGES = (2, 3, 4, 5, 6, 8)
# Switches that launch scripts and recipes set apart: both values are tried.
_SWITCHES = (
    ("the cross entropy is fused", "the cross entropy is not fused", "model.cross_entropy_loss_fusion"),
    (
        "embeddings and output share their weights",
        "output weights of their own",
        "model.share_embeddings_and_output_weights",
    ),
    ("a loss per token", "a loss per sequence", "model.calculate_per_token_loss"),
)


class Score(NamedTuple):
    """Rows that do not match, and how far they are apart in all; the smaller the better."""

    rows: int
    mismatch: float


class Cause(NamedTuple):
    """A change in words, the overrides that make it, and whether the batch is broadcast (None: as before)."""

    what: str
    overrides: tuple[str, ...] = ()
    data_broadcast: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A change after which more rows match: ``before`` and ``after`` count those that do not.

    Reasons stand on one another, in their order. ``or_else`` names changes that explain exactly as much.
    """

    what: str
    overrides: tuple[str, ...]
    data_broadcast: bool
    before: int
    after: int
    or_else: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "overrides": list(self.overrides),
            "data_broadcast": self.data_broadcast,
            "rows_before": self.before,
            "rows_after": self.after,
            "or_else": list(self.or_else),
        }


@dataclass(frozen=True, slots=True)
class _Point:
    """Where the search is: a configuration, with or without the batch's broadcast, and its rows."""

    found: Configuration
    data_broadcast: bool
    rows: tuple[RowComparison, ...]

    @property
    def score(self) -> Score:
        return score(self.rows)

    def explains_more(self, before: _Point) -> bool:
        """Whether more rows match, or fewer differ and none that did not: not where predicted rows only get fewer."""
        more = sum(row.matches for row in self.rows) > sum(row.matches for row in before.rows)
        return more or self._differing() <= before._differing()

    def _differing(self) -> set[tuple[str, str, str]]:
        return {(row.group, row.op, row.dtype) for row in self.rows if not row.matches}


def score(rows: Sequence[RowComparison]) -> Score:
    differing = [row for row in rows if not row.matches]
    return Score(len(differing), sum(row.mismatch for row in differing))


def likely_reasons(
    recipe: str | Path | Mapping[str, Any],
    base: Configuration,
    compared: Callable[[Configuration], Sequence[RowComparison]],
    *,
    data_broadcast: bool = False,
) -> tuple[Reason, ...]:
    """At most three changes, the one that explains most first; none where no row more comes to match.

    ``base`` is what ``configure`` makes of ``recipe``. ``compared`` gives the rows of a configuration beside the
    measured ones. None either where a group has another number of ranks than predicted.
    """
    at = _Point(base, data_broadcast, tuple(compared(base)))
    if any(row.other_layout for row in at.rows):
        return ()  # all figures follow from the layout, which no change here is about
    steps: list[Reason] = []
    while at.score.rows and len(steps) < _MOST:
        step = _best_step(recipe, at, compared)
        if step is None:
            break
        reason, at = step
        steps.append(reason)
    while steps and steps[-1].after == steps[-1].before:
        steps.pop()  # brought figures closer together, and no row to match
    return tuple(steps)


def _best_step(
    recipe: str | Path | Mapping[str, Any],
    at: _Point,
    compared: Callable[[Configuration], Sequence[RowComparison]],
) -> tuple[Reason, _Point] | None:
    tried: dict[str, tuple[Cause, _Point]] = {}
    for cause in causes(at.found, at.rows):
        broadcast = at.data_broadcast if cause.data_broadcast is None else cause.data_broadcast
        other = changed(recipe, at.found, cause.overrides, data_broadcast=broadcast)
        if other is None:
            continue
        point = _Point(other, broadcast, tuple(compared(other)))
        if not point.explains_more(at):
            continue
        if cause.what not in tried or point.score < tried[cause.what][1].score:
            tried[cause.what] = cause, point
    if not tried:
        return None
    cause, best = min(tried.values(), key=lambda pair: pair[1].score)
    gained = best.score.mismatch <= (1 - _LEAST_GAIN) * at.score.mismatch
    if best.score.rows > at.score.rows or (best.score.rows == at.score.rows and not gained):
        return None
    reason = Reason(
        what=cause.what,
        overrides=cause.overrides,
        data_broadcast=best.data_broadcast,
        before=at.score.rows,
        after=best.score.rows,
        or_else=tuple(other.what for other, point in tried.values() if point.score == best.score and other != cause),
    )
    return reason, best


# --- what is tried -----------------------------------------------------------------------------------


def causes(found: Configuration, rows: Sequence[RowComparison]) -> Iterator[Cause]:
    """Changes of the recipe that would change its traffic; ``rows`` say how many microbatches may have been run."""
    facts, plan = found.facts, found.plan
    for change in candidates(facts, plan):
        yield Cause(change.what, change.overrides)
    yield from _batches(facts, rows)
    yield from _virtual_stages(facts)
    yield from _vocabulary(facts)
    yield from _overlap(found)
    yield from _precision(facts)
    mlp = ("model.recompute_granularity=selective", "model.recompute_modules=[mlp]")
    yield Cause("the MLP is recomputed", mlp)
    for on, off, path in _SWITCHES:
        yield Cause(on, (f"{path}=true",))
        yield Cause(off, (f"{path}=false",))
    if facts.megatron_lm:
        yield Cause("the batch is broadcast over TP", ("dataset.create_attention_mask=false",), True)
        masked = "the batch is broadcast over TP, attention masks with it"
        yield Cause(masked, ("dataset.create_attention_mask=true",), True)
        yield Cause("the batch is not broadcast over TP", (), False)


def _batches(facts: Facts, rows: Sequence[RowComparison]) -> Iterator[Cause]:
    """Other numbers of microbatches, and of sequences in one, as calls and their sizes suggest them."""
    now, each = facts.parallelism.num_microbatches or 0, facts.recipe.train.micro_batch_size or 0
    width = facts.parallelism.dp
    for factor in _factors(rows, lambda figures: figures.count):
        wanted = now * factor
        if wanted.denominator == 1:
            size = int(wanted) * each * width
            yield Cause(f"{int(wanted)} microbatches, not {now}", (f"train.global_batch_size={size}",))
    for factor in _factors(rows, lambda figures: Fraction(figures.message_bytes) / figures.count):
        wanted = each * factor
        if wanted.denominator == 1:
            words = f"{int(wanted)} sequences per microbatch, not {each}"
            yield Cause(words, (f"train.micro_batch_size={int(wanted)}",))
            batch = f"train.global_batch_size={now * int(wanted) * width}"
            yield Cause(f"{words}, in as many microbatches", (f"train.micro_batch_size={int(wanted)}", batch))
        length = (facts.recipe.model.seq_length or 0) * factor
        if length.denominator == 1:
            yield Cause(f"sequences of {int(length)} tokens", (f"model.seq_length={int(length)}",))


def _factors(rows: Sequence[RowComparison], figure: Callable[[Any], Any]) -> list[Fraction]:
    """What the measured figure is of the predicted one, on axes that activations cross; the most frequent first."""
    ratios: Counter[Fraction] = Counter()
    for row in rows:
        one, other = row.predicted, row.measured
        if row.axis in _PER_MICROBATCH and one and other and other.count and figure(one):
            ratios[Fraction(figure(other)) / Fraction(figure(one))] += 1
    return [ratio for ratio, _ in ratios.most_common(_MOST_FACTORS) if ratio != 1]


def _virtual_stages(facts: Facts) -> Iterator[Cause]:
    pp, layers = facts.parallelism.pp, facts.recipe.model.num_layers or 0
    now = facts.recipe.model.virtual_pipeline_model_parallel_size or 1
    for number in _VIRTUAL_STAGES if pp > 1 else ():
        if number != now and layers % (pp * number) == 0:
            field = f"model.virtual_pipeline_model_parallel_size={number}"
            yield Cause(f"{number} virtual stages per rank, not {now}", (field,))


def _vocabulary(facts: Facts) -> Iterator[Cause]:
    model, tp = facts.recipe.model, facts.parallelism.tp
    now, size = padded_vocabulary(facts), model.vocab_size or 0
    if now != size:
        yield Cause(f"a vocabulary of {size}, not padded to {now}", ("model.should_pad_vocab=false",))
    seen = {now, size}
    for multiple in _MULTIPLES:
        padded = -(-size // (multiple * tp)) * multiple * tp
        if padded not in seen:
            seen.add(padded)
            fields = ("model.should_pad_vocab=true", f"model.make_vocab_size_divisible_by={multiple}")
            yield Cause(f"a vocabulary padded to {padded}, not {now}", fields)


def _overlap(found: Configuration) -> Iterator[Cause]:
    facts, settings = found.facts, found.plan.settings
    section = home(facts)
    if facts.parallelism.tp > 1:
        if settings["model.tp_comm_overlap"]:
            yield Cause("TP traffic did not go through userbuffers", (f"{section}.tp_comm_overlap=false",))
        else:
            yield Cause("TP traffic went through userbuffers", (f"{section}.tp_comm_overlap=true",))
    if facts.parallelism.pp > 1:
        to = "false" if settings["model.overlap_p2p_comm"] else "true"
        words = "pipeline sends overlap" if to == "true" else "pipeline sends do not overlap"
        batch = "false" if to == "true" else "true"
        yield Cause(words, (f"{section}.overlap_p2p_comm={to}", f"{section}.batch_p2p_comm={batch}"))
    yield from _buckets(found)


def _buckets(found: Configuration) -> Iterator[Cause]:
    facts, settings = found.facts, found.plan.settings
    reduce = f"{dp_home(facts, 'overlap_grad_reduce')}.overlap_grad_reduce"
    gather = f"{dp_home(facts, 'overlap_param_gather')}.overlap_param_gather"
    if settings["ddp.overlap_grad_reduce"]:
        yield Cause("gradient reduction does not overlap", (f"{reduce}=false", f"{gather}=false"))
    else:
        yield Cause("gradient reduction overlaps, in buckets", (f"{reduce}=true",))
    if settings["ddp.overlap_param_gather"]:
        yield Cause("parameter gathering does not overlap", (f"{gather}=false",))
    else:
        yield Cause("parameter gathering overlaps", (f"{gather}=true", f"{reduce}=true"))
    if facts.recipe.ddp.bucket_size is not None or facts.asked.bucket_size is not None:
        bucket = f"{dp_home(facts, 'bucket_size')}.bucket_size"
        yield Cause("buckets of the default size", (f"{bucket}=null",))


def _precision(facts: Facts) -> Iterator[Cause]:
    for name in ("bf16", "fp16"):
        if facts.precision.compute != name:
            yield Cause(f"activations in {name.upper()}", (f"mixed_precision={name}_mixed",))
    if not facts.precision.grad_reduce_in_fp32:
        section = "ddp" if facts.recipe.mixed_precision is None else "mixed_precision"
        yield Cause("gradients reduced in FP32", (f"{section}.grad_reduce_in_fp32=true",))
