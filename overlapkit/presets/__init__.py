"""Userbuffers presets: the files of ``presets/userbuffers``, which of them fits a recipe, and how they are derived.

``check_userbuffers`` says what Transformer Engine makes of a configuration, a preset's or any other.
"""

from __future__ import annotations

from overlapkit.presets.files import Preset, has_presets, load_preset, preset_names
from overlapkit.presets.selection import NO_PRESET, Wanted, choose_named, choose_nearest, recognise
from overlapkit.userbuffers.check import check_userbuffers

__all__ = [
    "NO_PRESET",
    "Preset",
    "Wanted",
    "check_userbuffers",
    "choose_named",
    "choose_nearest",
    "has_presets",
    "load_preset",
    "preset_names",
    "recognise",
]
