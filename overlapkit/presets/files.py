"""The files of ``presets/userbuffers``: one preset each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from overlapkit.errors import RecipeError, nearest, shown

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
    derivation: Mapping[str, Any] | None = None
    variant: str | None = None

    @property
    def derived(self) -> bool:
        return self.provenance == "derived"

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a microbatch on one CP rank, the rows of every userbuffer."""
        return self.seq_length * self.micro_batch_size // self.context_parallel_size


@lru_cache(maxsize=1)
def preset_names() -> tuple[str, ...]:
    """The names of all presets, sorted."""
    return tuple(sorted(entry.name[: -len(".yaml")] for entry in _folder().iterdir() if entry.name.endswith(".yaml")))


@lru_cache(maxsize=512)
def load_preset(name: str) -> Preset:
    """One preset by name.

    Raises:
        RecipeError: there is none of that name.
    """
    if name not in preset_names():
        near = nearest(name, preset_names())
        hint = f"did you mean {near}?" if near else "overlapkit presets list names them"
        raise RecipeError(f"{shown(name)} is not a preset", hint=hint)
    return preset_of(_text(name))


def preset_of(text: str) -> Preset:
    """The preset that a file of ours holds; not for what others write."""
    return Preset(**yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def preset_header(name: str) -> dict[str, Any]:
    """What stands before a preset's configuration, in a fraction of the time that parsing all of it takes.

    Raises:
        RecipeError: there is none of that name.
    """
    if name not in preset_names():
        raise RecipeError(f"{shown(name)} is not a preset")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    head: dict[str, Any] = yaml.load(_text(name).partition("\nuserbuffers:")[0], Loader=loader)
    return head


def has_presets(gpu: str) -> bool:
    """Whether a preset was made for this GPU, or for the family that it starts from."""
    return any(name.split("_")[2] == gpu for name in preset_names())


@lru_cache(maxsize=1)
def _folder() -> Traversable:
    """Inside the wheel ``overlapkit/_presets``; in a checkout ``presets`` beside the package."""
    packaged = files("overlapkit").joinpath("_presets").joinpath("userbuffers")
    if packaged.is_dir():
        return packaged
    return Path(__file__).resolve().parent.parent.parent / "presets" / "userbuffers"


@lru_cache(maxsize=1)
def tuned_presets() -> tuple[Preset, ...]:
    """All but the derived; most files are those, and parsing them takes longer than looking for the word."""
    texts = {name: _text(name) for name in preset_names()}
    return tuple(load_preset(name) for name, text in texts.items() if "\nprovenance: derived\n" not in text)


def _text(name: str) -> str:
    return _folder().joinpath(f"{name}.yaml").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def all_presets() -> tuple[Preset, ...]:
    return tuple(load_preset(name) for name in preset_names())
