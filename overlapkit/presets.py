"""Userbuffers presets: the files of ``presets/userbuffers``, and which of them fits a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from overlapkit.errors import RecipeError, nearest, shown
from overlapkit.plan import PresetChoice
from overlapkit.userbuffers import dgrads_not_bulk, fp8_reduce_scatters

if TYPE_CHECKING:
    from importlib.abc import Traversable


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One preset: what it was tuned for, and the configuration as Transformer Engine reads it."""

    name: str
    provenance: str
    source: str
    gpu: str
    precision: str
    hidden_size: int
    tensor_model_parallel_size: int
    context_parallel_size: int
    micro_batch_size: int
    seq_length: int
    lora: bool
    userbuffers: Mapping[str, Mapping[str, Any]]

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a microbatch on one CP rank, the rows of every userbuffer."""
        return self.seq_length * self.micro_batch_size // self.context_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a recipe needs of a preset; None is not known."""

    gpu: str | None
    family: str | None
    precision: str
    hidden_size: int | None
    tensor_model_parallel_size: int
    context_parallel_size: int
    micro_batch_size: int | None
    seq_length: int | None
    lora: bool
    fp8_recipe: str | None
    quantization_modes_differ: bool
    rs_dgrad: bool

    @property
    def tokens_per_rank(self) -> int | None:
        if self.seq_length is None or self.micro_batch_size is None:
            return None
        return self.seq_length * self.micro_batch_size // self.context_parallel_size

    @property
    def missing(self) -> tuple[str, ...]:
        """The recipe's fields without which no preset can be chosen."""
        needed = {
            "cluster.gpu": self.gpu,
            "model.hidden_size": self.hidden_size,
            "model.seq_length": self.seq_length,
            "train.micro_batch_size": self.micro_batch_size,
        }
        return tuple(name for name, value in needed.items() if value is None)


NO_PRESET = PresetChoice(name=None, aliases=(), match="none", differs={}, provenance=None)


def preset_names() -> tuple[str, ...]:
    """The names of all presets, sorted."""
    return tuple(sorted(entry.name[: -len(".yaml")] for entry in _folder().iterdir() if entry.name.endswith(".yaml")))


@lru_cache(maxsize=128)
def load_preset(name: str) -> Preset:
    """One preset by name.

    Raises:
        RecipeError: there is none of that name.
    """
    if name not in _names():
        near = nearest(name, _names())
        hint = f"did you mean {near}?" if near else "overlapkit presets list names them"
        raise RecipeError(f"{shown(name)} is not a preset", hint=hint)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return Preset(**yaml.load(_folder().joinpath(f"{name}.yaml").read_text(encoding="utf-8"), Loader=loader))


def has_presets(gpu: str) -> bool:
    """Whether a preset was made for this GPU, or for the family that it starts from."""
    return any(name.split("_")[2] == gpu for name in _names())


def choose_nearest(wanted: Wanted) -> tuple[PresetChoice, Mapping[str, Any] | None]:
    """The preset nearest to a recipe.

    Same GPU family, precision, TP and hidden size are required; then the fewest factors of two of
    tokens per rank decide, then the name. LoRA presets lack the weight gradients' buffers, so they
    are for LoRA recipes, and these prefer them. A preset that Transformer Engine would refuse in the
    recipe's precision (rules UB009 and UB027) is never the nearest.
    """
    tokens = wanted.tokens_per_rank
    if wanted.missing or wanted.family is None or tokens is None:
        return NO_PRESET, None
    start = (
        f"userbuffers_{wanted.precision}_{wanted.family}_h{wanted.hidden_size}_tp{wanted.tensor_model_parallel_size}_"
    )
    candidates = [load_preset(name) for name in _names() if name.startswith(start)]
    candidates = [preset for preset in candidates if (wanted.lora or not preset.lora) and _accepted(preset, wanted)]
    if not candidates:
        return NO_PRESET, None
    best = min(candidates, key=lambda preset: (not preset.lora, _distance(preset, tokens), preset.name))
    differs = _differences(best, wanted)
    choice = PresetChoice(
        name=best.name,
        aliases=_twins(best),
        match="nearest" if differs else "exact",
        differs=differs,
        provenance=best.provenance,
    )
    return choice, best.userbuffers


def _accepted(preset: Preset, wanted: Wanted) -> bool:
    """Whether Transformer Engine takes the preset in the recipe's precision; see rules/ub_contents.py."""
    if wanted.quantization_modes_differ and dgrads_not_bulk(preset.userbuffers):
        return False
    reduces_in_fp8 = fp8_reduce_scatters(preset.userbuffers, rs_dgrad=wanted.rs_dgrad)
    return wanted.fp8_recipe in (None, "delayed") or not reduces_in_fp8


def choose_named(name: str, wanted: Wanted) -> tuple[PresetChoice, Mapping[str, Any]]:
    """The preset that the user named, kept whatever the recipe is.

    Raises:
        RecipeError: there is none of that name.
    """
    preset = load_preset(name)
    differs = _differences(preset, wanted)
    choice = PresetChoice(
        name=name,
        aliases=_twins(preset),
        match="user" if differs else "exact",
        differs=differs,
        provenance=preset.provenance,
    )
    return choice, preset.userbuffers


def recognise(userbuffers: Mapping[str, Any], wanted: Wanted) -> PresetChoice:
    """The preset that a configuration's content is; of twins, the one nearest to the recipe."""
    twins = [preset for preset in _all() if preset.userbuffers == userbuffers]
    if not twins:
        return PresetChoice(name=None, aliases=(), match="user", differs={}, provenance="user")
    best = min(twins, key=lambda preset: _twin_rank(preset, wanted))
    differs = _differences(best, wanted)
    return PresetChoice(
        name=best.name,
        aliases=_twins(best),
        match="user" if differs else "exact",
        differs=differs,
        provenance=best.provenance,
    )


def _twins(preset: Preset) -> tuple[str, ...]:
    """The other presets of the same content."""
    return tuple(other.name for other in _all() if other != preset and other.userbuffers == preset.userbuffers)


def _twin_rank(preset: Preset, wanted: Wanted) -> tuple[Any, ...]:
    tokens = wanted.tokens_per_rank
    return (
        preset.gpu != wanted.family,
        preset.precision != wanted.precision,
        preset.tensor_model_parallel_size != wanted.tensor_model_parallel_size,
        preset.hidden_size != wanted.hidden_size,
        0.0 if tokens is None else _distance(preset, tokens),
        preset.name,
    )


def _distance(preset: Preset, tokens: int) -> float:
    return abs(math.log2(preset.tokens_per_rank / max(tokens, 1)))


def _differences(preset: Preset, wanted: Wanted) -> dict[str, tuple[Any, Any]]:
    """Field -> (the preset's value, the recipe's), for what the recipe says and the preset does not."""
    names = (
        "gpu",
        "precision",
        "hidden_size",
        "tensor_model_parallel_size",
        "context_parallel_size",
        "micro_batch_size",
        "seq_length",
        "lora",
    )
    pairs = {name: (getattr(preset, name), getattr(wanted, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[1] is not None and pair[0] != pair[1]}


@lru_cache(maxsize=1)
def _folder() -> Traversable:
    """Inside the wheel ``overlapkit/_presets``; in a checkout ``presets`` beside the package."""
    packaged = files("overlapkit").joinpath("_presets").joinpath("userbuffers")
    if packaged.is_dir():
        return packaged
    return Path(__file__).resolve().parent.parent / "presets" / "userbuffers"


@lru_cache(maxsize=1)
def _names() -> tuple[str, ...]:
    return preset_names()


@lru_cache(maxsize=1)
def _all() -> tuple[Preset, ...]:
    return tuple(load_preset(name) for name in _names())
