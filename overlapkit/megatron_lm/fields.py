"""Fields of a recipe and flags of Megatron-LM: what one says in the words of the other.

``data/megatron_lm_fields.yaml`` pairs them. Where it takes more than a pair, the table has ``parts``, and the two
functions here put fields together from parts (reading) and take them apart (writing).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from overlapkit.data import load_yaml
from overlapkit.errors import RecipeError, shown
from overlapkit.megatron_lm.flags import Flag, flags_of
from overlapkit.megatron_lm.words import Word
from overlapkit.pipeline_layout import parse_layout
from overlapkit.recipe.place import YAML_ENDINGS
from overlapkit.versions import Version

_KINDS = ("value", "values", "path", "sets", "clears", "given")
_PARTS = "parts."
_LAYERS_OF_FREQUENCY = re.compile(r"\[[01](,[01])*\]")
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")  # what argparse takes for a value although it starts with a minus
_UNSPEAKABLE = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Pair:
    """A field and what each flag does to it: value, values, path, sets, clears or given."""

    field: str
    flags: tuple[tuple[str, str], ...]
    default: Any = None


@dataclass(frozen=True, slots=True)
class Found:
    """What a flag says of a field.

    ``word`` holds the value, or is the flag where it takes none; None where no flag says it. ``known`` is False where
    only a run could tell.
    """

    value: Any
    word: Word | None = None
    known: bool = True


@lru_cache(maxsize=1)
def pairs() -> Mapping[str, Pair]:
    """Field (or part) -> its flags, in the order in which they are written."""
    found = {}
    for field, entry in load_yaml("megatron_lm_fields.yaml").items():
        flags = []
        for kind in _KINDS:
            names = entry.get(kind, [])
            flags += [(name, kind) for name in ([names] if isinstance(names, str) else names)]
        found[field] = Pair(field, tuple(flags), entry.get("default"))
    return found


# --- reading ------------------------------------------------------------------------------------


def readers(flags: Mapping[str, Flag]) -> Mapping[tuple[str, str], tuple[tuple[str, str, int], ...]]:
    """Meaning of a flag -> the fields it says: field, kind, and its rank among the field's flags (0 counts first)."""
    found: dict[tuple[str, str], tuple[tuple[str, str, int], ...]] = {}
    for pair in pairs().values():
        for rank, (name, kind) in enumerate(pair.flags):
            if name in flags:
                meaning = flags[name].meaning
                found[meaning] = (*found.get(meaning, ()), (pair.field, kind, rank))
    return found


def put_together(found: Mapping[str, Found], *, modules_flag: bool, complete: bool) -> dict[str, Found]:
    """The recipe's fields from fields and parts, with what the parser's defaults mean where a recipe's differ.

    ``modules_flag``: the parser has --cuda-graph-modules, --cuda-graph-scope being its old name. ``complete``: no flag
    is hidden, so that one which is absent says something.
    """
    parts = {name[len(_PARTS) :]: item for name, item in found.items() if name.startswith(_PARTS)}
    fields = {name: item for name, item in found.items() if not name.startswith(_PARTS)}
    if modules_flag and "model.cuda_graph_scope" in fields:
        fields.setdefault("model.cuda_graph_modules", fields.pop("model.cuda_graph_scope"))
    if "recompute_activations" in parts:
        fields["model.recompute_granularity"] = Found("selective", parts["recompute_activations"].word)
    if "group_query_attention" in parts:  # without it Megatron-LM passes over the number
        fields["model.num_query_groups"] = parts.get("num_query_groups", Found(1, parts["group_query_attention"].word))
    _vocabulary(parts, fields)
    _gradient_precision(parts, fields)
    _plain_texts(fields)
    if complete:
        _parser_defaults(fields)
    return fields


def _vocabulary(parts: Mapping[str, Found], fields: dict[str, Found]) -> None:
    for name, pads in (("padded_vocab_size", False), ("vocab_size", True)):
        if name in parts:
            fields["model.vocab_size"] = parts[name]
            fields["model.should_pad_vocab"] = Found(pads, parts[name].word)
            return


def _gradient_precision(parts: Mapping[str, Found], fields: dict[str, Found]) -> None:
    """Under BF16 the parser reduces gradients in FP32 unless told otherwise, and BF16 has the last word."""
    name, dtype = "ddp.grad_reduce_in_fp32", parts.get("main_grads_dtype")
    if "grads_in_bf16" in parts and "model.bf16" in fields:
        fields[name] = Found(False, parts["grads_in_bf16"].word)
    elif "grads_in_fp32" in parts:
        fields[name] = Found(True, parts["grads_in_fp32"].word)
    elif dtype is not None and "model.bf16" in fields and (not dtype.known or dtype.value != "fp32"):
        fields[name] = Found(False, dtype.word, dtype.known)


def _plain_texts(fields: dict[str, Found]) -> None:
    """Texts that mean more to a recipe than to Megatron-LM, which opens and evaluates what it gets."""
    path = fields.get("model.tp_comm_overlap_cfg")
    if path is not None and "/" not in path.value and not path.value.endswith(YAML_ENDINGS):
        fields["model.tp_comm_overlap_cfg"] = Found(f"./{path.value}", path.word)
    frequency = fields.get("model.moe_layer_freq")
    if frequency is not None and frequency.known:
        text, value = frequency.value, frequency.value
        if text.isdecimal() and len(text) < 10:
            value = int(text)
        elif _LAYERS_OF_FREQUENCY.fullmatch(text):
            value = [int(digit) for digit in text[1:-1].split(",")]
        fields["model.moe_layer_freq"] = Found(value, frequency.word)


def _parser_defaults(fields: dict[str, Found]) -> None:
    """Defaults of the parser where a recipe that says nothing means another value."""
    if "model.bf16" not in fields and "model.fp16" not in fields:
        fields["model.bf16"] = Found(False)  # FP32; a recipe that says nothing is taken to be in BF16
    fields.setdefault("model.share_embeddings_and_output_weights", Found(True))
    if "model.first_last_layers_bf16" in fields:
        for end in ("start", "end"):
            fields.setdefault(f"model.num_layers_at_{end}_in_bf16", Found(1))
    hidden = fields.get("model.hidden_size")
    if "model.gated_linear_unit" in fields and hidden is not None and hidden.known:
        # Two thirds of 4 x hidden_size, as a multiple of 64; Megatron-LM computes it only for --swiglu.
        width = int((4 * hidden.value * 2 / 3) / 64) * 64
        fields.setdefault("model.ffn_hidden_size", Found(width, hidden.word))


# --- writing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lacking:
    """A field that the flags cannot say, and why."""

    field: str
    why: str


def write_flags(values: Mapping[str, Any], core: Version) -> tuple[tuple[str, ...], tuple[Lacking, ...]]:
    """Arguments that say ``values`` (dotted fields; None says nothing) to the parser of this core, and what they lack.

    A value that is the parser's default where its flag is absent needs none.
    """
    flags = flags_of(core, doubtful=False)
    lacking: list[Lacking] = []
    parts = _taken_apart(values, flags, lacking)
    arguments: dict[tuple[str, ...], None] = {}  # in order, each once: one flag may say several fields
    for name, value in parts.items():
        if value is None or value is False or value == () or value == []:
            wanted = "clears" if value is False else None
        else:
            wanted = "sets" if value is True else "value"
        pair = pairs().get(name)
        if wanted is None or (pair is not None and value == pair.default):
            continue
        written = _written(name, value, pair, flags, wanted)
        if isinstance(written, Lacking):
            lacking.append(written)
        elif written:
            arguments[written] = None
    order = {flag: position for position, (flag, _) in enumerate(_all_flags())}
    ordered = sorted(arguments, key=lambda words: order[words[0].partition("=")[0]])
    return tuple(word for words in ordered for word in words), tuple(lacking)


@lru_cache(maxsize=1)
def _all_flags() -> tuple[tuple[str, str], ...]:
    return tuple(flag for pair in pairs().values() for flag in pair.flags)


def _written(
    name: str, value: Any, pair: Pair | None, flags: Mapping[str, Flag], wanted: str
) -> tuple[str, ...] | Lacking:
    """The words that say one field; none where the absence of a flag says it."""
    kinds = ("value", "values", "path") if wanted == "value" else (wanted,)
    named = [flag for flag, kind in pair.flags if kind in kinds] if pair else []
    if not named:
        opposite = pair is not None and any(kind in ("sets", "clears") for _, kind in pair.flags)
        return () if opposite or wanted == "clears" else Lacking(name, "Megatron-LM has no flag for it")
    flag = next((flags[flag] for flag in named if flag in flags), None)
    if flag is None:
        return Lacking(name, f"the parser of this version has no {named[0]}")
    return (flag.name,) if wanted != "value" else _with_values(name, value, flag)


def _with_values(name: str, value: Any, flag: Flag) -> tuple[str, ...] | Lacking:
    several = flag.values != 1
    words = [str(item) for item in (value if several and isinstance(value, (list, tuple)) else [value])]
    if isinstance(flag.values, int) and len(words) != flag.values:
        return Lacking(name, f"{flag.name} takes {flag.values} values")
    if flag.choices and (other := next((word for word in words if word not in flag.choices), None)) is not None:
        return Lacking(name, f"{flag.name} takes {', '.join(flag.choices)}, not {shown(other)}")
    if flag.kind == "int" and not all(_is_whole(item) for item in words):
        return Lacking(name, f"{flag.name} takes whole numbers, not {shown(value)}")
    if any(_UNSPEAKABLE.search(word) for word in words):
        return Lacking(name, "no argument can hold a NUL or half of a surrogate pair")
    if not any(looks_like_a_flag(word) for word in words):
        return (flag.name, *words)
    if len(words) > 1:
        return Lacking(name, "argparse would take a value that starts with a minus for a flag")
    return (f"{flag.name}={words[0]}",)


def _is_whole(word: str) -> bool:
    return word.removeprefix("-").isdecimal() and len(word) < 25


def looks_like_a_flag(word: str) -> bool:
    """Whether argparse takes the word for a flag, be it one that the parser does not have."""
    return len(word) > 1 and word.startswith("-") and not _NEGATIVE.fullmatch(word)


def _taken_apart(values: Mapping[str, Any], flags: Mapping[str, Flag], lacking: list[Lacking]) -> dict[str, Any]:
    """Fields and parts that have flags, from fields."""
    found = {name: value for name, value in values.items() if value is not None}
    groups = found.pop("model.num_query_groups", None)
    if groups is not None:
        found |= {"parts.group_query_attention": True, "parts.num_query_groups": groups}
    pads, vocabulary = found.pop("model.should_pad_vocab", None), found.pop("model.vocab_size", None)
    found["parts.padded_vocab_size" if pads is False else "parts.vocab_size"] = vocabulary
    reduces_in_fp32 = found.pop("ddp.grad_reduce_in_fp32", None)
    if reduces_in_fp32 is not None:
        found["parts.grads_in_fp32"] = reduces_in_fp32
        found["parts.grads_in_bf16"] = not reduces_in_fp32 and bool(found.get("model.bf16"))
    captured = [name for key in ("modules", "scope") for name in found.pop(f"model.cuda_graph_{key}", ())]
    name = "modules" if "--cuda-graph-modules" in flags else "scope"
    found[f"model.cuda_graph_{name}"] = tuple(dict.fromkeys(captured))
    _layout(found, flags, lacking)
    frequency = found.get("model.moe_layer_freq")
    if isinstance(frequency, (list, tuple)):
        found["model.moe_layer_freq"] = f"[{','.join(map(str, frequency))}]"
    odd = [
        name
        for name in ("model.moe_layer_freq", "train.rampup_batch_size")
        if isinstance(found.get(name), (dict, bool))
    ]
    lacking += [Lacking(name, f"Megatron-LM does not take {shown(found.pop(name))}") for name in odd]
    return found


def _layout(found: dict[str, Any], flags: Mapping[str, Flag], lacking: list[Lacking]) -> None:
    """A layout as text; it implies the virtual stages, and the parser refuses them beside it."""
    name = "model.pipeline_model_parallel_layout"
    layout = found.get(name)
    if layout is None:
        return
    if "--pipeline-model-parallel-layout" in flags:
        found.pop("model.virtual_pipeline_model_parallel_size", None)
    if not isinstance(layout, str):
        try:
            found[name] = "|".join(parse_layout(layout))
        except ValueError as error:
            del found[name]
            lacking.append(Lacking(name, str(error)))


Fail = Callable[[str], RecipeError]


def convert(texts: Iterable[str], flag: Flag, allowed: frozenset[str] | None, fail: Fail) -> Any:
    """The value of a flag from its words: one, or a list where the flag takes several.

    Raises:
        RecipeError: no number where one belongs, or none of the choices that any version has.
    """
    items = [_converted(text, flag, fail) for text in texts]
    if allowed is not None and (other := next((item for item in items if str(item) not in allowed), None)) is not None:
        raise fail(f"takes {', '.join(sorted(allowed))}, not {shown(other)}")
    return items if flag.values != 1 else items[0]


def _converted(text: str, flag: Flag, fail: Fail) -> Any:
    if flag.kind == "float":
        return _float(text, fail)
    if flag.kind != "int":
        return text
    try:
        value = int(text) if len(text) < 25 else None
    except ValueError:
        value = None
    if value is None or abs(value) >= 2**63:
        raise fail(f"takes a whole number, not {shown(text)}")
    return value


def _float(text: str, fail: Fail) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise fail(f"takes a number, not {shown(text)}")
    return value
