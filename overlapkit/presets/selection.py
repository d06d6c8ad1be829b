"""Which preset fits a recipe, and how far one that was named or given is from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlapkit.plan import PresetChoice
from overlapkit.presets.files import Preset, all_presets, load_preset, preset_names, tuned_presets
from overlapkit.userbuffers import dgrads_not_bulk, fp8_reduce_scatters


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


def choose_nearest(wanted: Wanted) -> tuple[PresetChoice, Mapping[str, Any] | None]:
    """The preset nearest to a recipe.

    Same GPU family, precision, TP and hidden size are required; then the fewest factors of two of
    tokens per rank decide, then the name. A preset that was tuned comes before one that is derived, and a
    variant is there by name only. LoRA presets lack the weight gradients' buffers, so they are for LoRA
    recipes, and these prefer them. A preset that Transformer Engine would refuse in the recipe's precision
    (rules UB009 and UB027) is never the nearest.
    """
    tokens = wanted.tokens_per_rank
    if wanted.missing or wanted.family is None or tokens is None:
        return NO_PRESET, None
    candidates = [preset for preset in _of_the_shape(wanted) if _eligible(preset, wanted)]
    if not candidates:
        return NO_PRESET, None
    best = min(candidates, key=lambda preset: _rank(preset, wanted, tokens))
    differs = _differences(best, wanted)
    choice = PresetChoice(
        name=best.name,
        aliases=_twins(best),
        match="nearest" if differs else "exact",
        differs=differs,
        provenance=best.provenance,
    )
    return choice, best.userbuffers


def _of_the_shape(wanted: Wanted) -> list[Preset]:
    """The presets of the recipe's precision, hidden size and TP, for its GPU or the one that it starts from."""
    shape = f"h{wanted.hidden_size}_tp{wanted.tensor_model_parallel_size}_"
    gpus = {(wanted.gpu or "").replace("_", ""), wanted.family}
    starts = tuple(f"userbuffers_{wanted.precision}_{gpu}_{shape}" for gpu in gpus)
    return [load_preset(name) for name in preset_names() if name.startswith(starts)]


def _eligible(preset: Preset, wanted: Wanted) -> bool:
    return preset.variant is None and (wanted.lora or not preset.lora) and _accepted(preset, wanted)


def _rank(preset: Preset, wanted: Wanted, tokens: int) -> tuple[Any, ...]:
    """A tuned preset of the family comes before one that is derived, even for the GPU itself."""
    another_gpu = preset.derived and preset.gpu != wanted.gpu
    return (not preset.lora, preset.derived, another_gpu, _distance(preset, tokens), preset.name)


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
    twins = [preset for preset in tuned_presets() if preset.userbuffers == userbuffers]
    twins = twins or [preset for preset in all_presets() if _is_of_the_shape(preset, wanted, userbuffers)]
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


def _is_of_the_shape(preset: Preset, wanted: Wanted, userbuffers: Mapping[str, Any]) -> bool:
    """Of a derived preset the content alone says nothing: the same comes out for many GPUs and shapes."""
    shape = (preset.gpu, preset.precision, preset.hidden_size, preset.tensor_model_parallel_size)
    own = (wanted.gpu, wanted.precision, wanted.hidden_size, wanted.tensor_model_parallel_size)
    return shape == own and preset.userbuffers == userbuffers


def _twins(preset: Preset) -> tuple[str, ...]:
    """The other tuned presets of the same content; derivations come to the same for many shapes, which says nothing."""
    if preset.derived:
        return ()
    return tuple(other.name for other in tuned_presets() if other != preset and other.userbuffers == preset.userbuffers)


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
