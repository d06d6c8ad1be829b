"""``overlapkit search``: a recipe's best layouts, each of them judged by every rule and estimated by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlapkit.cost.estimate import estimate_of
from overlapkit.cost.memory import capacity_of, memory_constants, memory_of, most_allowed
from overlapkit.errors import OverlapkitError, RecipeError
from overlapkit.facts import Facts, derive
from overlapkit.recipe import Recipe, recipe_from_mapping
from overlapkit.resolver import plan as plan_of
from overlapkit.search.changes import Changes, changed_mapping, changes_of
from overlapkit.search.feasible import NO_SPLIT
from overlapkit.search.ranges import space_of
from overlapkit.search.ranking import Candidate, Ranking
from overlapkit.search.result import Found, Search
from overlapkit.search.work import judged
from overlapkit.volume.predict import predict
from overlapkit.volume.requirements import needs, refuse_unmodelled

_SPARE = 20  # candidates kept beyond those that are shown, in case a rule refuses one after all
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length")


class NothingFound(OverlapkitError):
    """A search that no layout survived."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A recipe with its overrides, typed and as plain values."""

    recipe: Recipe
    values: Mapping[str, Any]


def read_source(path: str | Path, overrides: Sequence[str] = ()) -> Source:
    """The recipe of a file.

    Raises:
        RecipeError: the file or an override cannot be used.
    """
    from overlapkit.recipe import yaml_source
    from overlapkit.recipe.overrides import apply_overrides

    document = yaml_source.parse(yaml_source.read_text(path), str(path))
    values, _ = apply_overrides(document.value, overrides)
    recipe = recipe_from_mapping(document.value, overrides, source=str(path), lines=document.lines)
    return Source(recipe=recipe, values=values)


def search(
    source: Source,
    ranges: Mapping[str, str],
    *,
    recompute: str | None = None,
    top: int,
    workers: int,
    report: Callable[[Ranking, int], None],
) -> Search:
    """The ``top`` fastest layouts among those that the ranges name, all overlaps and recomputation tried.

    The global batch and the model stay. ``report`` gets the ranking so far and the number of points of the space.

    Raises:
        RecipeError: the recipe lacks what a time or a memory needs, or a range cannot be used.
        NothingFound: no layout is legal and fits.
    """
    facts = derive(source.recipe)
    _check(facts)
    space = space_of(facts, ranges, recompute)
    ranking, interrupted = judged(
        source.recipe,
        space,
        keep=2 * top + _SPARE,
        workers=workers,
        report=lambda ranking: report(ranking, space.size),
    )
    refused = Counter(ranking.refused)
    best, front = _shown(source, facts, ranking, top, refused)
    if not best and not interrupted:
        raise NothingFound(_nothing(source.recipe.source, ranking, refused))
    capacity = capacity_of(facts) or 0.0
    return Search(
        recipe=source.recipe.source,
        gpu=facts.gpu.name if facts.gpu else "",
        capacity_bytes=int(capacity),
        memory_error=memory_constants().error,
        best=best,
        front=front,
        ranked=ranking.judged - refused.total() - ranking.too_large.total(),
        refused=dict(refused.most_common()),
        too_large=dict(ranking.too_large),
        points=ranking.points,
        all_points=space.size,
        interrupted=interrupted,
    )


def _check(facts: Facts) -> None:
    recipe = facts.recipe
    missing = [f"model.{name}" for name in _SIZES if getattr(recipe.model, name) is None]
    missing += [] if recipe.train.global_batch_size is not None else ["train.global_batch_size"]
    if missing:
        raise needs("search", missing, recipe.source)
    refuse_unmodelled(facts, approximate=True)


def _shown(
    source: Source, facts: Facts, ranking: Ranking, top: int, refused: Counter[str]
) -> tuple[tuple[Found, ...], tuple[Found, ...]]:
    """The best and the front, without what a rule refuses after all, which is counted as such."""
    known: dict[Candidate, Found | None] = {}

    def confirmed(candidates: Sequence[Candidate]) -> Iterator[Found]:
        for candidate in candidates:
            if candidate not in known:
                known[candidate] = _confirmed(source, facts, candidate, refused)
            found = known[candidate]
            if found is not None:
                yield found

    best = [found for found, _ in zip(confirmed(ranking.best), range(top), strict=False)]
    best.sort(key=lambda found: (found.seconds, found.memory.total))
    front: list[Found] = []
    for found in sorted(confirmed(ranking.front), key=lambda found: (found.seconds, found.memory.total)):
        if not front or found.memory.total < front[-1].memory.total:
            front.append(found)
    return tuple(best), tuple(front)


def _confirmed(source: Source, facts: Facts, candidate: Candidate, refused: Counter[str]) -> Found | None:
    """A candidate as its recipe file would be read; None where a rule has an error about it."""
    changes = changes_of(facts, candidate.layout, candidate.overlaps)
    values = changed_mapping(source.values, changes)
    try:
        recipe = recipe_from_mapping(values, source=source.recipe.source)
        own = derive(recipe)
        plan = plan_of(own)
        error = next((d for d in plan.decisions if d.severity == "error"), None)
        if error is not None:
            refused[f"{error.because} ({error.code})"] += 1
            return None
        volume = predict(own, plan, approximate=True)
        estimate = estimate_of(own, plan, volume)
        memory = memory_of(own, plan, volume)
    except RecipeError as error:
        refused[error.problem] += 1
        return None
    if memory.total > most_allowed(capacity_of(own) or 0.0):
        refused["does not fit after all"] += 1
        return None
    return Found(
        layout=candidate.layout,
        overlaps=candidate.overlaps,
        seconds=estimate.step_time_s,
        interval=estimate.interval_s,
        tokens_per_s_per_gpu=estimate.tokens_per_s_per_gpu,
        memory=memory,
        changes=_as_overrides(source, changes),
        recipe=values,
    )


def _as_overrides(source: Source, changes: Changes) -> tuple[str, ...]:
    """The changes that change something, in the form of the command line."""
    found = []
    for path, value in changes.items():
        section, _, name = path.partition(".")
        body = source.values.get(section)
        if isinstance(body, Mapping) and name in body and body[name] == value:
            continue
        found.append(f"{path}={_text(value)}")
    return tuple(found)


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _nothing(source: str, ranking: Ranking, refused: Counter[str]) -> str:
    """One line: how many, and what stopped most; of sizes that do not go together only where there are no others."""
    reasons = refused + ranking.too_large
    whole = reasons.pop(NO_SPLIT, 0)
    them = "that split the GPUs" if whole and reasons else "of them"
    ((reason, _),) = reasons.most_common(1) or [(NO_SPLIT, whole)]
    most = f", most {them} because: {reason}" if reasons or whole else ""
    return f"{source}: none of {ranking.judged:,} layouts is legal and fits the memory{most}"
