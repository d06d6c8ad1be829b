"""PP: pipeline sends and receives, virtual stages, and the embedding's deferred weight gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from overlapkit.facts import Facts
from overlapkit.rules.registry import (
    MEGATRON_CORE,
    MEGATRON_LM,
    Finding,
    State,
    Verdict,
    error,
    info,
    passes,
    rule,
    warning,
)

_OVERLAP = "model.overlap_p2p_comm"
_BATCH = "model.batch_p2p_comm"
_SETUP = "megatron-bridge training/comm_overlap.py"
_SCHEDULES = "megatron-core pipeline_parallel/schedules.py"
_PARALLEL_CONFIG = "megatron-core model_parallel_config.py"


def _requested(f: Facts, name: str) -> Any:
    """What the user asked for: in comm_overlap, or on the model where Bridge reads nothing else."""
    asked = getattr(f.asked, name)
    return getattr(f.recipe.model, name) if asked is None and not f.overlap_setup else asked


def _home(f: Facts) -> str:
    """The section in which the user sets what a rule's fix names."""
    return "comm_overlap" if f.overlap_setup or f.megatron_lm else "model"


@rule("PP001", source=_SETUP, megatron_lm=None)
def p2p_by_pp_and_vp(f: Facts, s: State) -> Iterable[Verdict]:
    """Bridge sets ``overlap_p2p_comm`` and ``batch_p2p_comm`` from PP and VP.

    With PP and VP above 1 sends overlap and are not batched; with PP alone they are batched and do not
    overlap; without PP both are off. What stood in the model before is overwritten. Virtual stages that
    only a layout gives are not seen yet.

    Why: only an interleaved schedule has another chunk to compute while a message is on its way.
    Fix: set ``virtual_pipeline_model_parallel_size`` above 1 to overlap pipeline messages.
    """
    if not f.overlap_setup:
        return
    pp, interleaved = f.parallelism.pp, f.vp_at_setup > 1
    if pp == 1:
        values, because = (False, False), "PP is 1: no pipeline messages"
    elif interleaved:
        values, because = (
            (True, False),
            f"PP {pp} with {f.vp_at_setup} virtual stages: another chunk computes meanwhile",
        )
    else:
        values, because = (
            (False, True),
            f"PP {pp} without virtual stages: nothing to compute meanwhile, so in one batch",
        )
    fix, vp = None, f.parallelism.vp
    if pp > 1 and not interleaved and vp is not None and vp > 1:
        because = f"Bridge decides before it reads the layout, whose {vp} virtual stages it does not see"
        fix = f"set model.virtual_pipeline_model_parallel_size={vp}"
    for subject, value in zip((_OVERLAP, _BATCH), values, strict=True):
        yield info(subject, because, value=value, fix=fix)


@rule("PP002", source=_SETUP, megatron_lm=None)
def p2p_by_user(f: Facts, s: State) -> Iterable[Verdict]:
    """The user's p2p values come after Bridge's gate, one by one.

    Why: Bridge applies every value of ``comm_overlap`` that is not null last, without checking that the
    two fit together or fit the schedule.
    Fix: leave both null unless the schedule allows it.
    """
    if not f.overlap_setup:
        return
    for subject, asked in ((_OVERLAP, f.asked.overlap_p2p_comm), (_BATCH, f.asked.batch_p2p_comm)):
        if asked is not None and asked != s[subject]:
            yield info(subject, "set by comm_overlap, after Bridge's own choice", requested=asked, value=asked)


@rule("PP003", source=_SCHEDULES)
def both_p2p_flags(f: Facts, s: State) -> Finding:
    """``overlap_p2p_comm`` and ``batch_p2p_comm`` exclude each other in the interleaved schedule.

    Why: batched messages are waited for at once, overlapped ones later; the schedule raises.
    Fix: set ``comm_overlap.batch_p2p_comm=false``, or leave both null.
    """
    if not (f.interleaved and s[_OVERLAP] and s[_BATCH]):
        return None
    return error(
        _BATCH,
        "overlap_p2p_comm and batch_p2p_comm are both true",
        fix=f"set {_home(f)}.batch_p2p_comm=false",
        by=MEGATRON_CORE,
        at="first_forward",
        requested=_requested(f, "batch_p2p_comm"),
    )


@rule("PP004", source=_SCHEDULES, megatron_lm=None)
def p2p_overlap_without_virtual_stages(f: Facts, s: State) -> Finding:
    """``overlap_p2p_comm`` needs an interleaved schedule.

    Why: without virtual stages there is no other chunk to compute during a message, and the
    non-interleaved schedule raises.
    Fix: set ``model.virtual_pipeline_model_parallel_size``, or leave ``overlap_p2p_comm`` null.
    """
    if f.parallelism.pp == 1 or f.interleaved or not s[_OVERLAP]:
        return None
    batched = f.asked.batch_p2p_comm if f.overlap_setup else s[_BATCH]  # PP003 excludes it beside virtual stages
    beside = f" and {_home(f)}.batch_p2p_comm=false" if batched else ""
    return error(
        _OVERLAP,
        f"PP {f.parallelism.pp} has no virtual stages, and the non-interleaved schedule does not overlap messages",
        fix=f"set {_home(f)}.overlap_p2p_comm=null, or model.virtual_pipeline_model_parallel_size above 1{beside}",
        by=MEGATRON_CORE,
        at="first_forward",
        requested=_requested(f, "overlap_p2p_comm"),
    )


@rule("PP009", source="Megatron-LM training/arguments.py; megatron-core pipeline_parallel/p2p_communication.py")
def two_stages_without_overlap(f: Facts, s: State) -> Finding:
    """PP 2 with virtual stages, and messages in batches that do not overlap.

    Megatron-LM refuses it. Bridge has no such check, and nothing raises.

    Why: with two ranks the next and the previous one are the same. A batch sends an activation and a
    gradient to it, which it receives in the other order: each is taken for the other.
    Fix: overlap the messages, or use PP above 2.
    """
    vp = f.parallelism.vp
    if f.parallelism.pp != 2 or vp is None or vp == 1 or s[_OVERLAP] or not s[_BATCH]:
        return None
    because = (
        f"PP 2 with {vp} virtual stages and without overlap: several messages between the same two ranks per batch"
    )
    asked = _requested(f, "overlap_p2p_comm")
    if f.megatron_lm:
        fix = "set comm_overlap.overlap_p2p_comm=true"
        return error(_OVERLAP, because, fix=fix, by=MEGATRON_LM, at="validation", requested=asked)
    if f.overlap_setup and f.vp_at_setup == 1:
        fix = f"set model.virtual_pipeline_model_parallel_size={vp}"
    else:
        fix = f"set {_home(f)}.overlap_p2p_comm=true and {_home(f)}.batch_p2p_comm=false"
    return error(_OVERLAP, f"{because}: activations and gradients are swapped", fix=fix, requested=asked)


@rule("PP010", source=_PARALLEL_CONFIG)
def deferred_embedding_needs(f: Facts, s: State) -> Iterable[Verdict]:
    """``defer_embedding_wgrad_compute`` needs PP and gradient accumulation fusion.

    Why: the deferred weight gradient fills the pipeline's flush, and is added in place by the fused
    GEMM; Megatron-Core refuses it otherwise.
    Fix: set it to false, or meet both.
    """
    if not s["model.defer_embedding_wgrad_compute"]:
        return
    for because in _deferral_lacks(f):
        yield error(
            "model.defer_embedding_wgrad_compute",
            because,
            fix=f"set {_home(f)}.defer_embedding_wgrad_compute=false",
            by=MEGATRON_CORE,
            at="validation",
            requested=True,
        )


def _deferral_lacks(f: Facts) -> list[str]:
    lacks = ["PP is 1"] if f.parallelism.pp == 1 else []
    return lacks if f.gradient_accumulation_fusion else [*lacks, "gradient_accumulation_fusion is false"]


@rule("PP011", source=f"{_SETUP}; {_PARALLEL_CONFIG}")
def negative_deferral_limit(f: Facts, s: State) -> Finding:
    """``defer_embedding_wgrad_compute`` with a deferral limit below 0.

    Bridge writes -1 where the user gives no limit, in place of Megatron-Core's 0.

    Why: Megatron-Core refuses a negative limit once deferring is on, so asking Bridge for it without a
    limit always fails.
    Fix: set ``comm_overlap.wgrad_deferral_limit``; 0 defers all microbatches.
    """
    limit = s["model.wgrad_deferral_limit"]
    if not s["model.defer_embedding_wgrad_compute"] or limit >= 0:
        return None
    because = f"the limit is {limit}"
    if f.overlap_setup and f.asked.wgrad_deferral_limit is None:
        because = "no limit is given, and Bridge writes -1 in place of Megatron-Core's 0"
    return error(
        "model.wgrad_deferral_limit",
        because,
        fix=f"set {_home(f)}.wgrad_deferral_limit=0",
        by=MEGATRON_CORE,
        at="validation",
        requested=_requested(f, "wgrad_deferral_limit"),
    )


@rule("PP012", source="Megatron-LM training/arguments.py validate_args", bridge=None)
def parser_drops_p2p_overlap(f: Facts, s: State) -> Iterable[Verdict]:
    """Without virtual stages Megatron-LM turns off p2p overlap and the alignment of parameter gathers.

    Why: only an interleaved schedule overlaps messages and lets stages gather at the same time.
    Fix: set virtual stages, or accept it.
    """
    if f.parallelism.vp is not None:
        return
    because = "no virtual stages"
    asked_p2p, asked_align = f.asked.overlap_p2p_comm, f.asked.align_param_gather
    if s[_OVERLAP]:
        make = warning if asked_p2p and f.parallelism.pp > 1 else info
        yield make(_OVERLAP, because, value=False, requested=asked_p2p)
    yield info(_BATCH, "Megatron-LM batches messages where it does not overlap them", value=True)
    if s["ddp.align_param_gather"]:
        make = warning if asked_align else info
        yield make("ddp.align_param_gather", because, value=False, requested=asked_align)


@rule("PP013", source="Megatron-LM training/argument_utils.py", bridge=None)
def batch_p2p_has_no_flag(f: Facts, s: State) -> Finding:
    """Megatron-LM has no flag for ``batch_p2p_comm``.

    Why: it is always the opposite of ``overlap_p2p_comm``.
    Fix: choose by ``overlap_p2p_comm``.
    """
    asked = f.asked.batch_p2p_comm
    if asked is None or asked == s[_BATCH] or f.parallelism.pp == 1:
        return None
    because = "Megatron-LM takes the opposite of overlap_p2p_comm"
    fix = f"set comm_overlap.overlap_p2p_comm={str(not asked).lower()}"
    if asked and f.recipe.model.overlap_p2p_comm_warmup_flush:  # PP014
        fix = f"{fix} and model.overlap_p2p_comm_warmup_flush=false"
    if asked and f.parallelism.pp == 2 and f.parallelism.vp is not None:
        because = f"{because}, which has to be on with PP 2 and virtual stages"
        sections = {"comm_overlap": f.recipe.comm_overlap, "model": f.recipe.model}
        said = [name for name, values in sections.items() if getattr(values, "batch_p2p_comm", None) is not None]
        fix = f"set {' and '.join(f'{name}.batch_p2p_comm=null' for name in said)}"
    if not asked and f.parallelism.vp is None:
        fix = "set model.virtual_pipeline_model_parallel_size above 1, so that messages can overlap"
    return warning(_BATCH, because, requested=asked, fix=fix)


@rule("PP014", source=_PARALLEL_CONFIG)
def warmup_flush_needs_overlap(f: Facts, s: State) -> Finding:
    """``overlap_p2p_comm_warmup_flush`` needs ``overlap_p2p_comm`` without batching.

    Why: Megatron-Core refuses it otherwise.
    Fix: set virtual stages so that messages overlap, or turn it off.
    """
    if not f.recipe.model.overlap_p2p_comm_warmup_flush or (s[_OVERLAP] and not s[_BATCH]):
        return None
    return error(
        "model.overlap_p2p_comm_warmup_flush",
        f"overlap_p2p_comm is {str(s[_OVERLAP]).lower()}, batch_p2p_comm is {str(s[_BATCH]).lower()}",
        fix="set model.overlap_p2p_comm_warmup_flush=false",
        by=MEGATRON_CORE,
        at="validation",
        requested=True,
        value=True,
    )


@rule("PP015", source=_SETUP, megatron_lm=None)
def model_p2p_overwritten(f: Facts, s: State) -> Iterable[Verdict]:
    """Pipeline values on the model that Bridge's set-up overwrites.

    Why: Bridge takes them from ``comm_overlap`` or from PP and VP; what stands on ``model`` is lost.
    Fix: set the value under ``comm_overlap`` where the schedule allows it, or take it off the model.
    """
    if not f.overlap_setup:
        return
    for name in ("overlap_p2p_comm", "batch_p2p_comm", "defer_embedding_wgrad_compute", "wgrad_deferral_limit"):
        said = getattr(f.recipe.model, name)
        subject = f"model.{name}"
        if f.written(subject) and getattr(f.asked, name) is None and said != s[subject]:
            because, fix = "Bridge overwrites what stands on the model", f"set {_kept(f, s, name, said)}"
            yield warning(subject, because, requested=said, fix=fix)


def _kept(f: Facts, s: State, name: str, said: Any) -> str:
    """What makes Bridge keep a value of the model, where it works; else what leaves nothing to overwrite."""
    changes = {name: said}
    if name == "defer_embedding_wgrad_compute" and f.asked.wgrad_deferral_limit is None:
        changes["wgrad_deferral_limit"] = max(0, f.recipe.model.wgrad_deferral_limit or 0)  # PP011
    after = {**s, **{f"model.{key}": value for key, value in changes.items()}}
    defers = after["model.defer_embedding_wgrad_compute"]
    if not passes(f, after, "PP003", "PP004", "PP009", "PP011", "PP014") or (defers and _deferral_lacks(f)):
        return f"model.{name}={str(s[f'model.{name}']).lower()}"
    return " and ".join(f"comm_overlap.{key}={str(value).lower()}" for key, value in changes.items())
