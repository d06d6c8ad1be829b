"""A userbuffers configuration by a preset's name or in a file of whatever form, with what else is known of it.

The forms: Megatron-LM's file of ``--tp-comm-overlap-cfg``, the dict that Transformer Engine takes as ``ub_cfgs``, in
JSON or Python, a dump of Megatron-Bridge or its ``comm_overlap`` section, and the presets' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlapkit.errors import RecipeError, nearest, shown
from overlapkit.presets.files import Preset, load_preset, preset_names
from overlapkit.presets.literal import NO_LITERAL, read_literal
from overlapkit.recipe import yaml_source
from overlapkit.recipe.place import YAML_ENDINGS, line_of
from overlapkit.recipe.userbuffers import clean_userbuffers, named_layers
from overlapkit.userbuffers.layers import DEFAULT_METHODS, EXTERNAL_METHODS

PRESET, MEGATRON_LM, ENGINE, BRIDGE = "preset", "Megatron-LM file", "Transformer Engine dict", "Megatron-Bridge dump"
_WHAT = "a userbuffers configuration is a mapping of layers"
_LAYERS = (*DEFAULT_METHODS, *EXTERNAL_METHODS)
_MAX_SIZE = 2**63
_RESOLVE = "overlapkit resolve reads recipes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """``ub_cfgs`` as Transformer Engine gets it: None, a mapping, or a list of these per quantization mode.

    Sizes are what the file says of them, None where it says nothing: tokens of a microbatch on one CP rank, elements
    of the model's hidden size. ``preset`` is None where it is none of ours.
    """

    source: str
    form: str
    ub_cfgs: Any
    preset: Preset | None = None
    tensor_model_parallel_size: int | None = None
    tokens: int | None = None
    hidden_size: int | None = None
    precision: str | None = None
    tp_comm_overlap_rs_dgrad: bool = False

    @property
    def layers(self) -> Mapping[str, Any]:
        """The first mode's layers; what Transformer Engine does not name is null or left out."""
        first = self.ub_cfgs[0] if isinstance(self.ub_cfgs, list) else self.ub_cfgs
        return named_layers(first or {})


def named_or_read(text: str) -> Configuration:
    """The configuration of a preset's name or a file's path.

    Raises:
        RecipeError: it is neither, the file cannot be read, or it holds no configuration.
    """
    if text in preset_names():
        return of_preset(load_preset(text), source=text)
    looks_like_a_name = "/" not in text and not text.endswith((*YAML_ENDINGS, ".json", ".py", ".txt"))
    if looks_like_a_name and not _is_there(text):
        near = nearest(text, preset_names())
        hint = f"did you mean {near}?" if near else "overlapkit presets list names the presets"
        raise RecipeError(f"{shown(text)} is neither a preset nor a file", hint=hint)
    return read(text)


def of_preset(preset: Preset, *, source: str) -> Configuration:
    return Configuration(
        source=source,
        form=PRESET,
        ub_cfgs={layer: dict(options) for layer, options in preset.userbuffers.items()},
        preset=preset,
        tensor_model_parallel_size=preset.tensor_model_parallel_size,
        tokens=preset.tokens_per_rank,
        hidden_size=preset.hidden_size,
        precision=preset.precision,
        tp_comm_overlap_rs_dgrad=_reduces_dgrad(preset.userbuffers),
    )


def read(path: str) -> Configuration:
    """The configuration in a file.

    Raises:
        RecipeError: the file cannot be read, is larger or deeper than a recipe may be, or holds no configuration.
    """
    text = yaml_source.read_text(path)
    value = read_literal(text)
    if value is not NO_LITERAL:
        return _Reader(path, {}).configuration(value, ENGINE)
    if text.lstrip().startswith(("[", "-")):
        return _Reader(path, {}).configuration(yaml_source.parse_value(text, path), MEGATRON_LM)
    try:
        document = yaml_source.parse(text, path, what=_WHAT)
    except RecipeError as error:
        if error.problem.startswith("not YAML"):
            error.hint = "of Python, the dict alone is read"
        raise
    is_json = text.lstrip().startswith("{")
    return _Reader(path, document.lines).configuration(document.value, ENGINE if is_json else MEGATRON_LM)


def _is_there(text: str) -> bool:
    try:
        return text != "" and Path(text).exists()
    except (OSError, ValueError):
        return False


def _reduces_dgrad(userbuffers: Mapping[str, Mapping[str, Any]]) -> bool:
    """A preset with a ring or pipeline for qkv_dgrad or fc1_dgrad is made for tp_comm_overlap_rs_dgrad."""
    return any(userbuffers.get(layer, {}).get("method", "bulk") != "bulk" for layer in ("qkv_dgrad", "fc1_dgrad"))


@dataclass(frozen=True, slots=True)
class _Reader:
    """A file's value, whatever form it has, and the lines of its keys."""

    source: str
    lines: Mapping[str, int]

    def error(self, path: str, problem: str, hint: str | None = None) -> RecipeError:
        line = line_of(self.lines, path)
        return RecipeError(problem, source=self.source, line=line, path=path.lstrip(".") or None, hint=hint)

    def configuration(self, value: Any, form: str) -> Configuration:
        if isinstance(value, (list, tuple)):
            return Configuration(source=self.source, form=form, ub_cfgs=self._per_mode(value))
        if isinstance(value.get("comm_overlap"), dict) or "tp_comm_overlap_cfg" in value:
            return self._of_bridge(value)
        if "userbuffers" in value:
            return self._of_ours(value)
        if "_target_" in value or any(isinstance(entry, dict) and "_target_" in entry for entry in value.values()):
            return Configuration(source=self.source, form=BRIDGE, ub_cfgs=named_layers(self._layers(value, "")))
        return Configuration(source=self.source, form=form, ub_cfgs=self._layers(value, ""))

    def _per_mode(self, value: list[Any] | tuple[Any, ...]) -> list[Any]:
        if not 1 <= len(value) <= 2 or not all(each is None or isinstance(each, dict) for each in value):
            hint = "a list holds one mapping per quantization mode, one or two"
            raise self.error("", f"{_WHAT}, this is a list", hint)
        return [None if each is None else self._layers(each, str(index)) for index, each in enumerate(value)]

    def _layers(self, value: Any, path: str) -> dict[str, Any]:
        """Layers with their options; a file that is something else is refused without showing what is in it."""
        if not isinstance(value, dict):
            raise self.error(path, f"{_WHAT}, this is {shown(value)}")
        if value and not any(layer in value for layer in _LAYERS):
            raise self.error(path, "not a userbuffers configuration", "its keys are layers such as qkv_fprop")
        cleaned: dict[str, Any] = clean_userbuffers(value, path, self.error)
        return cleaned

    def _of_ours(self, value: Mapping[str, Any]) -> Configuration:
        layers = self._layers(value["userbuffers"], "userbuffers")
        tokens = self._tokens(value, "", value, "")
        return Configuration(
            source=self.source,
            form=PRESET,
            ub_cfgs=layers,
            tensor_model_parallel_size=self._size(value, "tensor_model_parallel_size", ""),
            tokens=tokens,
            hidden_size=self._size(value, "hidden_size", ""),
            precision="fp8" if value.get("precision") == "fp8" else "bf16",
            tp_comm_overlap_rs_dgrad=_reduces_dgrad(named_layers(layers)),
        )

    def _of_bridge(self, value: Mapping[str, Any]) -> Configuration:
        """A dump or the section alone; Bridge's set-up takes layers away that are null."""
        whole = isinstance(value.get("comm_overlap"), dict)
        section = value["comm_overlap"] if whole else value
        path = "comm_overlap.tp_comm_overlap_cfg" if whole else "tp_comm_overlap_cfg"
        if "tp_comm_overlap_cfg" not in section:
            raise self.error("comm_overlap", "no tp_comm_overlap_cfg to check", _RESOLVE)
        written = section["tp_comm_overlap_cfg"]
        if isinstance(written, str):
            if written not in preset_names():
                hint = _RESOLVE if written == "auto" else "give the file that it names"
                raise self.error(path, f"{shown(written)} holds no layers", hint)
            written = {layer: dict(options) for layer, options in load_preset(written).userbuffers.items()}
        model = self._section(value, "model")
        return Configuration(
            source=self.source,
            form=BRIDGE,
            ub_cfgs=None if written is None else named_layers(self._layers(written, path)),
            tensor_model_parallel_size=self._size(model, "tensor_model_parallel_size", "model."),
            tokens=self._tokens(model, "model.", self._section(value, "train"), "train."),
            hidden_size=self._size(model, "hidden_size", "model."),
            precision=_precision(value.get("mixed_precision"), model) if model else None,
            tp_comm_overlap_rs_dgrad=model.get("tp_comm_overlap_rs_dgrad") is True,
        )

    def _section(self, value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        section = value.get(name)
        return section if isinstance(section, dict) else {}

    def _tokens(self, model: Mapping[str, Any], at: str, train: Mapping[str, Any], train_at: str) -> int | None:
        length = self._size(model, "seq_length", at)
        micro = self._size(train, "micro_batch_size", train_at)
        parallel = self._size(model, "context_parallel_size", at) or 1
        return None if length is None or micro is None else max(length * micro // parallel, 1)

    def _size(self, section: Mapping[str, Any], name: str, at: str) -> int | None:
        value = section.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _MAX_SIZE:
            raise self.error(f"{at}{name}", f"expected a whole number of at least 1, got {shown(value)}")
        return value


def _precision(section: Any, model: Mapping[str, Any]) -> str:
    """Whether GEMMs are FP8: of a mixed-precision section or its name, else of the model."""
    if isinstance(section, str):
        return "fp8" if "fp8" in section else "bf16"
    fp8 = section.get("fp8") if isinstance(section, dict) else model.get("fp8")
    return "fp8" if fp8 else "bf16"
