"""The values of each axis: those named on the command line, else those that are usual for the recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from overlapkit.errors import RecipeError, shown
from overlapkit.facts import Facts
from overlapkit.parallelism import counted_layers
from overlapkit.search.space import RECOMPUTES, Space

_MOST_VALUES = 10_000
_LARGEST = 2**31 - 1
_OPTIONS = {
    "gpus": "--gpus",
    "tp": "--tp",
    "pp": "--pp",
    "cp": "--cp",
    "ep": "--ep",
    "vp": "--vp",
    "micro_batch_size": "--mbs",
}
# What is looked at where no range is named.
_MOST_TP, _MOST_PP, _MOST_CP, _MOST_EP, _MOST_VP = 16, 64, 16, 64, 16
_TOKENS_PER_CP_RANK = 2048
_USUAL = (1, 2, 4, 8)


def sizes_of(text: str, option: str) -> tuple[int, ...]:
    """``1,2,4`` or ``1-8`` (every whole number from 1 to 8), or both, as sizes in order.

    Raises:
        RecipeError: something else, a size below 1, or more of them than a range has.
    """
    found: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        start, stop = _size(first, text, option), _size(last if dash else first, text, option)
        if stop < start or stop - start >= _MOST_VALUES or len(found) >= _MOST_VALUES:
            what = "runs backwards" if stop < start else f"has more than {_MOST_VALUES:,} sizes"
            raise RecipeError(f"{shown(text)} {what}", source=option)
        found.update(dict.fromkeys(range(start, stop + 1)))
    return tuple(sorted(found))


def _size(part: str, text: str, option: str) -> int:
    part = part.strip()
    if not (part.isascii() and part.isdigit()) or len(part) > 10 or not 1 <= int(part) <= _LARGEST:
        hint = "write sizes of at least 1, for example 1,2,4 or 1-8"
        raise RecipeError(f"{shown(text)} is no range of sizes", source=option, hint=hint)
    return int(part)


def recomputes_of(text: str) -> tuple[str, ...]:
    """``none,selective,full`` or some of them.

    Raises:
        RecipeError: another word.
    """
    words = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    wrong = next((word for word in words if word not in RECOMPUTES), None)
    if wrong is not None:
        hint = f"write some of {', '.join(RECOMPUTES)}"
        raise RecipeError(f"{shown(wrong)} is no kind of recomputation", source="--recompute", hint=hint)
    return words


def space_of(facts: Facts, ranges: Mapping[str, str], recompute: str | None = None) -> Space:
    """The space of a recipe; ``ranges`` has the texts of the axes that are named, by the axis.

    Raises:
        RecipeError: a text is no range, or asks for experts where there are none.
    """
    given = {axis: sizes_of(text, _OPTIONS[axis]) for axis, text in ranges.items()}
    if max(given.get("ep", (1,))) > 1 and not facts.recipe.model.num_moe_experts:
        raise RecipeError("the model has no experts to spread over EP", source="--ep", hint="leave --ep out")
    gpus = given.get("gpus", (facts.parallelism.world_size,))
    axes = {**_usual(facts, gpus), **given}
    return Space(**axes, recompute=RECOMPUTES if recompute is None else recomputes_of(recompute))


def _usual(facts: Facts, gpus: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Powers of two up to where they stop making sense, and the recipe's own sizes."""
    model, mesh = facts.recipe.model, facts.parallelism
    most, layers = max(gpus), counted_layers(facts.recipe) or 1
    node = max(facts.gpus_per_node or 1, facts.nvlink_domain_size or 1)
    experts = model.num_moe_experts or 1
    stages = (size for size in range(1, min(most, layers, _MOST_PP) + 1) if any(each % size == 0 for each in gpus))
    laid_out = facts.stages is not None  # then chunks need not be equal
    chunks = [size for size in range(1, min(layers, _MOST_VP) + 1) if layers % size == 0]
    chunks += [size for size in _USUAL if laid_out]
    return {
        "gpus": gpus,
        "tp": _with(_powers(min(node, most, _MOST_TP, model.num_attention_heads or most)), mesh.tp),
        "pp": _with(stages, mesh.pp),
        "cp": _with(_powers(min(_MOST_CP, most, (model.seq_length or 0) // _TOKENS_PER_CP_RANK)), mesh.cp),
        "ep": _with((size for size in _powers(min(experts, most, _MOST_EP)) if experts % size == 0), mesh.ep),
        "vp": _with(chunks, mesh.vp or 1),
        "micro_batch_size": _with(_USUAL, facts.recipe.train.micro_batch_size or 1),
    }


def _powers(most: int) -> tuple[int, ...]:
    return tuple(2**exponent for exponent in range(max(most, 1).bit_length()))


def _with(sizes: Iterable[int], own: int) -> tuple[int, ...]:
    return tuple(sorted({*sizes, own}))
