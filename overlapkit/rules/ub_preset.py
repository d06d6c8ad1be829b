"""UB: where the userbuffers configuration comes from, and whether it was made for this recipe.

``UB1xx`` are our own; the ids below 100 are those of Transformer Engine's rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from overlapkit.errors import RecipeError, printable
from overlapkit.facts import Facts
from overlapkit.presets import choose_nearest, has_presets
from overlapkit.presets.of_model import inputs_of_recipe, refuse_what_fails
from overlapkit.presets.of_recipe import Chosen, report_of
from overlapkit.recipe.place import YAML_ENDINGS
from overlapkit.recipe.sections import AUTO
from overlapkit.rules.changes import home, tp_overlap_works
from overlapkit.rules.registry import BRIDGE, Finding, State, Verdict, error, info, rule, warning
from overlapkit.rules.tp import OVERLAP, off

CFG = "model.tp_comm_overlap_cfg"
_PRESET = "preset"
_DEFAULTS = "transformer-engine pytorch/module/base.py initialize_ub; megatron-bridge training/comm_overlap.py"
# Differences that make a preset another model's; the rest, a GPU of the same family included, is a matter of degree.
_WEIGHTY = ("precision", "hidden_size", "tensor_model_parallel_size", "lora")


@rule("UB101", source=_DEFAULTS)
def transformer_engine_defaults(f: Facts, s: State) -> Finding:
    """No userbuffers configuration: Transformer Engine's defaults.

    Ring exchange for the all-gathers, a pipeline on 16 SMs for the reduce-scatters, bulk collectives on 16
    SMs beside the input and weight gradients, whatever the model and GPU. Bridge logs a warning.

    Why: the defaults are tuned for nothing in particular.
    Fix: name a preset in ``comm_overlap.tp_comm_overlap_cfg``; ``auto`` chooses one that fits, and ``overlapkit presets
    derive`` computes one where there is none.
    """
    if not s[OVERLAP] or f.preset.match != "none" or f.userbuffers is not None:
        return None
    cfg = f.asked.tp_comm_overlap_cfg
    if cfg != AUTO:
        return info(CFG, "no configuration is given: Transformer Engine's defaults", value=None)
    if f.wanted.missing:
        because = f"no preset can be chosen without {', '.join(f.wanted.missing)}: Transformer Engine's defaults"
        return info(CFG, because, value=None, requested=AUTO)
    because = f"no preset fits {_wanted(f)}"
    if f.gpu is not None and not has_presets(f.gpu.presets_of):
        because = f"there are no presets for {f.gpu.name}"
    because = f"{because}: Transformer Engine's defaults, unless you give the path of a file of your own"
    if _derivable(f):
        because = f"{because}; overlapkit presets derive RECIPE --format yaml computes one"
    return info(CFG, because, value=None, requested=AUTO)


def _derivable(f: Facts) -> bool:
    try:
        refuse_what_fails(f, inputs_of_recipe(f))
    except RecipeError:
        return False
    return True


def _wanted(f: Facts) -> str:
    gpu = f.gpu.name if f.gpu else "this GPU"
    hidden = f.recipe.model.hidden_size
    return f"{gpu}, {f.precision.label}, hidden size {hidden} and TP {f.parallelism.tp}"


@rule("UB102", source="presets/userbuffers; megatron-bridge training/comm_overlap.py")
def preset_made_for_something_else(f: Facts, s: State) -> Finding:
    """The preset was tuned for another GPU, precision, model, TP or batch.

    Bridge takes whatever preset a recipe names. H200 and H800 start from H100's presets; B300, GB200, GB300
    and VR200 from B200's.

    Why: the SM counts balance one collective against one GEMM; with other sizes they steal too many SMs, or
    leave the collective exposed. Another TP size or hidden size changes both sides.
    Fix: set ``comm_overlap.tp_comm_overlap_cfg=auto`` for the nearest, or measure.
    """
    if not s[OVERLAP] or f.preset.name is None or not f.preset.differs:
        return None
    requested = f.asked.tp_comm_overlap_cfg
    because = f"{f.preset.name} was made for {_made_for(f.preset.differs)}"
    weighty = any(name in _WEIGHTY for name in f.preset.differs) or _another_family(f)
    if f.preset.provenance == "derived":
        because = f"{because}; it is derived from computed times, not tuned"
    if f.preset.match == "nearest":
        return info(_PRESET, f"nearest preset: {because}", value=f.preset.name, requested=requested)
    asked = requested if isinstance(requested, str) else None
    if weighty:
        return warning(_PRESET, because, value=f.preset.name, requested=asked, fix=another_preset(f))
    return info(_PRESET, because, value=f.preset.name, requested=asked)


def another_preset(f: Facts) -> str:
    """How to get the nearest preset, or TP overlap off where Transformer Engine would not take that either.

    ``auto`` is ours alone, so it does nothing in a file that Bridge reads.
    """
    nearest = Chosen(*choose_nearest(f.wanted))
    report = report_of(f.recipe, f.versions, f.wanted, nearest, fp8=f.precision.fp8 is not None)
    if report is not None and not report.ok:
        return off(f)
    if not f.recipe.is_dump:
        return f"set {home(f)}.tp_comm_overlap_cfg=auto"
    if nearest.preset.name is None:
        return f"set {home(f)}.tp_comm_overlap_cfg=null for Transformer Engine's defaults"
    return f"give Bridge {nearest.preset.name}, the nearest"


def _another_family(f: Facts) -> bool:
    """Whether the preset's GPU is not the one that presets for this GPU come from."""
    theirs, _ = f.preset.differs.get("gpu", (None, None))
    return theirs is not None and f.gpu is not None and theirs != f.gpu.presets_of


def _made_for(differs: Mapping[str, tuple[Any, Any]]) -> str:
    names = {
        "tensor_model_parallel_size": "TP",
        "context_parallel_size": "CP",
        "hidden_size": "hidden size",
        "micro_batch_size": "microbatches of",
        "seq_length": "sequences of",
    }
    parts = []
    for field, (theirs, ours) in differs.items():
        if field == "lora":
            parts.append("LoRA" if theirs else "full training")
        elif field in ("gpu", "precision"):
            parts.append(f"{theirs} (this is {ours})")
        else:
            parts.append(f"{names[field]} {theirs} (this is {ours})")
    return ", ".join(parts)


@rule("UB103", source="presets/userbuffers")
def preset_fits(f: Facts, s: State) -> Finding:
    """The preset was made for this recipe.

    Why: GPU, precision, hidden size, TP, CP, microbatch and sequence length are the preset's own.
    Fix: nothing to do.
    """
    if not s[OVERLAP] or f.preset.match != "exact":
        return None
    because = f"{f.preset.name} was made for this GPU, precision, hidden size, TP, CP and batch"
    if f.preset.provenance == "derived":
        because = f"{because}: derived from computed times, not tuned"
    return info(_PRESET, because, value=f.preset.name)


@rule("UB104", source="megatron-bridge training/comm_overlap.py setup", megatron_lm=None)
def preset_not_a_dataclass(f: Facts, s: State) -> Finding:
    """``comm_overlap.tp_comm_overlap_cfg`` takes Bridge's dataclass only.

    A mapping, a name or a path in a file for Bridge raises a TypeError in its set-up while the overlap is
    on. A hand-written recipe may hold any of them: overlapkit turns it into the configuration, but Bridge
    has to be given a TransformerLayerTPOverlapCfg.

    Why: Bridge calls ``dataclasses.asdict`` on it.
    Fix: import the preset from megatron.bridge.training.comm_overlap; in YAML give ``_target_`` on both
    levels and all ten layers.
    """
    asked = f.asked
    if not s[OVERLAP] or not f.overlap_setup or asked.tp_comm_overlap_cfg in (None, AUTO):
        return None
    if asked.tp_comm_overlap_cfg_is_dataclass:
        return None
    subject = "comm_overlap.tp_comm_overlap_cfg"
    form = "a mapping" if not isinstance(asked.tp_comm_overlap_cfg, str) else "a name or path"
    fix = "give Bridge a TransformerLayerTPOverlapCfg"
    if f.preset.provenance == "bridge":
        fix = f"in a Bridge recipe: from megatron.bridge.training.comm_overlap import {f.preset.name}"
    if not f.recipe.is_dump:
        return info(subject, f"{form} will do here, but Bridge takes its dataclass only", value=f.preset.name, fix=fix)
    because = f"{form} where Bridge takes its dataclass only"
    return error(subject, because, fix=fix, by=BRIDGE, at="validation", value=f.preset.name)


@rule("UB105", source="megatron-bridge training/initialize.py; Megatron-LM training/initialize.py")
def configuration_not_here(f: Facts, s: State) -> Finding:
    """The file of the userbuffers configuration is not on this machine.

    Why: it may exist in the training container; here it cannot be read, so nothing in it was checked.
    Fix: give a path relative to the recipe, or a preset's name.
    """
    if not s[OVERLAP] or not isinstance(f.userbuffers, str):
        return None
    return warning(CFG, f"{printable(f.userbuffers)} is not here, so it was not checked", requested=f.userbuffers)


@rule("UB106", source="megatron-bridge training/comm_overlap.py setup", megatron_lm=None)
def model_values_overwritten(f: Facts, s: State) -> Iterable[Verdict]:
    """Userbuffers values on the model that Bridge's set-up overwrites.

    Why: Bridge writes what ``comm_overlap`` says over ``model.tp_comm_overlap``, its configuration and its bootstrap
    backend, whatever stood there.
    Fix: set the value under ``comm_overlap``, or take it off the model.
    """
    if not f.overlap_setup:
        return
    for name in ("tp_comm_overlap", "tp_comm_overlap_cfg", "tp_comm_bootstrap_backend"):
        subject, said = f"model.{name}", getattr(f.recipe.model, name)
        if not f.written(subject) or said == s[subject] or (name != "tp_comm_overlap" and not s[OVERLAP]):
            continue
        yield warning(
            subject,
            "Bridge overwrites what stands on the model",
            requested=said,
            fix=f"set {_kept(f, s, name)}",
        )


def _kept(f: Facts, s: State, name: str) -> str:
    """What makes Bridge keep a value of the model, or else leaves nothing to overwrite."""
    said, final = getattr(f.recipe.model, name), s[f"model.{name}"]
    if name == "tp_comm_overlap_cfg":
        return f"comm_overlap.{name} instead"
    if name == "tp_comm_bootstrap_backend":
        return f"comm_overlap.{name}={said}" if said in ("nccl", "gloo", "mpi") else f"model.{name}={final or 'null'}"
    same = f"model.{name}={str(final).lower()}"
    gates = f.parallelism.tp > 1 and f.sequence_parallel and f.versions.transformer_engine is not None
    works = gates and f.tp_request is False and tp_overlap_works(f, s) if said else True
    return f"comm_overlap.{name}={str(said).lower()}, or {same}" if works else same


@rule(
    "UB107",
    source="Megatron-LM training/initialize.py _initialize_tp_communicators; megatron-bridge training/initialize.py",
)
def configuration_has_to_be_a_file(f: Facts, s: State) -> Finding:
    """Megatron-LM reads the userbuffers configuration from a file.

    ``--tp-comm-overlap-cfg`` takes the path of a YAML file, and so does text in ``model.tp_comm_overlap_cfg`` where
    Bridge's ``comm_overlap`` is null. ``auto``, a preset's name, a preset's own file and, for Megatron-LM, a mapping
    are overlapkit's forms.

    Why: the framework opens whatever text it gets, and Transformer Engine passes over what is no layer: of a preset's
    own file, everything.
    Fix: write the file with ``overlapkit presets show NAME --format yaml``, and give its path.
    """
    if not s[OVERLAP] or f.overlap_setup or not isinstance(f.userbuffers, Mapping):
        return None
    section = "comm_overlap" if f.megatron_lm and f.written("comm_overlap.tp_comm_overlap_cfg") else "model"
    cfg = f.asked.tp_comm_overlap_cfg if f.megatron_lm else f.recipe.model.tp_comm_overlap_cfg
    subject, name = f"{section}.tp_comm_overlap_cfg", f.preset.name
    who = "Megatron-LM" if f.megatron_lm else "Bridge"
    if f.userbuffers_own_file:
        because = f"a preset's own file, which {who} hands on whole: Transformer Engine finds no layer in it"
        fix = "write the file with --format yaml of overlapkit presets show or derive"
        return warning(subject, because, fix=fix, requested=cfg)
    if not (isinstance(cfg, str) or f.megatron_lm) or (isinstance(cfg, str) and cfg.endswith(YAML_ENDINGS)):
        return None
    fix = f"overlapkit presets show {name} --format yaml > FILE, and give FILE" if name else "give the path of a file"
    if f.recipe.is_dump and f.bridge:
        because = "a name where Bridge opens a file"
        return error(subject, because, fix=fix, by=BRIDGE, at="initialize_ub", requested=cfg)
    return info(subject, f"{who} reads it from a file", requested=name, fix=fix)
