"""CFG: the recipe itself, before any overlap."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from overlapkit.catalogue import container_of_core
from overlapkit.facts import Facts
from overlapkit.recipe.known_keys import known_keys, snapshots_around
from overlapkit.rules.registry import (
    BRIDGE,
    MEGATRON_CORE,
    MEGATRON_LM,
    Finding,
    State,
    Verdict,
    error,
    info,
    rule,
    warning,
)

# Each Bridge snapshot holds the keys of the Megatron-Core of its time: 2 those of 0, 3 those of 1.
_BRIDGE_OF_CORE = {0: 2, 1: 3}


@rule("CFG001", source="megatron-core 0.16.1 and 0.19.2, megatron-bridge 0.3.1 and 0.6.2: the dataclasses' fields")
def key_of_another_version(f: Facts, s: State) -> Iterable[Verdict]:
    """A key that only another version of the software has.

    The key is right in some release of Megatron-Bridge or Megatron-Core, but not in the one that the
    recipe targets. For Megatron-LM a key counts that its parser has a flag for.

    Why: Bridge drops unknown keys of a YAML file with no more than a log line, and a dataclass refuses
    them; either way the value does not reach the job.
    Fix: remove the key, or name the version that has it under ``software``.
    """
    if not f.recipe.foreign_keys:
        return
    near = snapshots_around("megatron-core", f.versions.megatron_core.text)
    if f.versions.megatron_bridge is not None:
        near |= snapshots_around("megatron-bridge", f.versions.megatron_bridge.text)
    else:
        near |= {_BRIDGE_OF_CORE[core] for core in near}
    for path, indices in f.recipe.foreign_keys:
        owners = frozenset(map(int, indices))
        if owners & near or (f.megatron_lm and _is_a_flag(path, f)):
            continue
        names = ", ".join(known_keys().snapshots[index] for index in sorted(owners))
        because = f"only {names} {'has' if len(owners) == 1 else 'have'} this key"
        fix = f"remove it, or target a version that has it (this is {_target(f)})"
        yield warning(path, because, fix=fix)


def _is_a_flag(path: str, f: Facts) -> bool:
    """Whether Megatron-LM's parser takes the field, whose names Bridge's sections may have got later."""
    from overlapkit.megatron_lm.fields import pairs
    from overlapkit.megatron_lm.flags import flags_of

    pair, flags = pairs().get(path), flags_of(f.versions.megatron_core, doubtful=True)
    return pair is not None and any(name in flags for name, _ in pair.flags)


def _target(f: Facts) -> str:
    if f.versions.megatron_bridge is not None:
        return f"megatron-bridge {f.versions.megatron_bridge} with megatron-core {f.versions.megatron_core}"
    return f"megatron-lm with megatron-core {f.versions.megatron_core}"


@rule("CFG002", source="megatron-bridge 0.2.0 to 0.6.2; megatron-core 0.12 to 0.20")
def version_not_covered(f: Facts, s: State) -> Finding:
    """A version beyond those that the rules were checked against.

    The rules are known to hold for Megatron-Bridge 0.2.0 to 0.6.2 and for Megatron-LM with
    Megatron-Core 0.12 to 0.20. Outside, those of the nearest version are applied.

    Why: Bridge and Megatron-Core change their conditions between releases; an answer for an unknown
    release is an extrapolation.
    Fix: name a covered version under ``software``, or check the plan against the release.
    """
    bridge = f.versions.megatron_bridge
    fix = "name a covered version, or check the plan against the release"
    if bridge is not None and not f.bridge_in(">=0.2.0rc0,<0.6.3"):
        return warning("software.megatron_bridge", f"Megatron-Bridge {bridge} is not one of 0.2.0 to 0.6.2", fix=fix)
    core = f.versions.megatron_core
    if bridge is None and not f.core_in(">=0.12.0rc0,<0.21"):
        return warning("software.megatron_core", f"Megatron-Core {core} is not one of 0.12 to 0.20", fix=fix)
    return None


@rule(
    "CFG003", source="megatron-bridge scripts/performance and recipes/run_plugins.py; Megatron-LM training/arguments.py"
)
def gpu_not_named(f: Facts, s: State) -> Finding:
    """The recipe does not name the GPU.

    Why: the number of device connections, CUDA multicast, the NVLink domain and the userbuffers preset
    all depend on it; without it they are left out of the plan.
    Fix: set ``cluster.gpu``.
    """
    if f.gpu is not None:
        return None
    return info(
        "cluster.gpu",
        "no GPU is named, so CUDA_DEVICE_MAX_CONNECTIONS, the NVLink domain and presets are not decided",
        fix="set cluster.gpu, for example cluster.gpu=h100",
    )


@rule("CFG006", source="megatron-core transformer/transformer_config.py")
def heads_not_divisible(f: Facts, s: State) -> Finding:
    """The attention heads do not split over the TP group.

    ``num_attention_heads`` must be a multiple of TP; ``num_query_groups`` a multiple or, from Megatron-Core
    0.16, a divisor of it.

    Why: each TP rank computes whole heads.
    Fix: lower TP, or change the model.
    """
    heads, tp = f.recipe.model.num_attention_heads, f.parallelism.tp
    if heads is not None and heads % tp:
        return _refused(f, "num_attention_heads", f"{heads} heads are not a multiple of TP {tp}")
    groups = f.recipe.model.num_query_groups
    if groups is None or groups % tp == 0:
        return None
    if not f.core_in(">=0.16.0rc0"):
        because = f"{groups} groups are not a multiple of TP {tp}, and Megatron-Core before 0.16 takes no divisor"
        return _refused(f, "num_query_groups", because)
    if tp % groups:
        return _refused(f, "num_query_groups", f"{groups} groups are neither a multiple nor a divisor of TP {tp}")
    return None


def _refused(f: Facts, name: str, because: str) -> Verdict:
    model = f.recipe.model
    subject, value = f"model.{name}", getattr(model, name)
    divides = gcd(model.num_attention_heads or 0, model.num_query_groups or 0)
    fix = f"set model.tensor_model_parallel_size{f' to a divisor of {divides}' if divides > 1 else '=1'}"
    return error(subject, because, fix=fix, by=MEGATRON_CORE, at="validation", requested=value, value=value)


@rule("CFG007", source="megatron-bridge training/config.py validate", megatron_lm=None)
def sequence_lengths_differ(f: Facts, s: State) -> Finding:
    """The dataset's sequence length is not the model's.

    Bridge compares them for its own dataset configurations, not for dataset providers.

    Why: Bridge asserts that both are the same.
    Fix: set ``dataset.seq_length`` to ``model.seq_length``.
    """
    model = f.recipe.model.seq_length
    field = "sequence_length" if f.recipe.dataset.seq_length is None else "seq_length"
    dataset = getattr(f.recipe.dataset, field)
    if model is None or dataset is None or model == dataset:
        return None
    if (f.recipe.dataset.kind or "").endswith("Provider"):
        return None
    return error(
        f"dataset.{field}",
        f"the dataset's sequences have {dataset} tokens, the model's {model}",
        fix=f"set dataset.{field}={model}",
        by=BRIDGE,
        at="validation",
        requested=dataset,
        value=dataset,
    )


@rule("CFG009", source="megatron-bridge training/config.py runtime_config_update", megatron_lm=None)
def nothing_resolved(f: Facts, s: State) -> Finding:
    """``comm_overlap`` is null: Bridge resolves nothing.

    The raw values of ``model``, ``ddp`` and ``optimizer`` stand as they are written.

    Why: Bridge's set-up runs only on a CommOverlapConfig; without one there are no gates and no defaults.
    Fix: write a ``comm_overlap`` section, or leave the key out of a hand-written recipe.
    """
    if f.recipe.comm_overlap is not None:
        return None
    return info("comm_overlap", "comm_overlap is null: Bridge gates and sets nothing, the raw values stand")


@rule("CFG010", source="megatron-bridge training/config.py set_data_parallel_size", megatron_lm=None)
def data_parallel_size_overwritten(f: Facts, s: State) -> Finding:
    """``comm_overlap.data_parallel_size`` is not for the user.

    Why: Bridge sets it from the world size, TP, PP and CP, whatever the recipe says.
    Fix: remove it.
    """
    said = f.asked.data_parallel_size
    if said is None or said == f.parallelism.dp:
        return None
    return warning(
        "comm_overlap.data_parallel_size",
        f"Bridge overwrites it with {f.parallelism.dp}",
        requested=said,
        value=f.parallelism.dp,
        fix="set comm_overlap.data_parallel_size=null",
    )


@rule("CFG012", source="megatron-bridge documentation, releases/software-versions")
def versions_assumed(f: Facts, s: State) -> Finding:
    """Versions that the recipe does not name, and where they are taken from.

    From the container's row, else from the row of the named Bridge, else from the newest row. A Megatron-Core
    that is named alone and is not that of the newest row gets a warning.

    Why: conditions change between releases, so a plan is for one set of versions; versions that never were
    in one container may meet conditions that no job has met.
    Fix: name the container, or all versions, under ``software``, as text.
    """
    names = f.versions.assumed
    if not names:
        return None
    versions = ", ".join(f"{name} {getattr(f.versions, name)}" for name in names)
    because = f"not named, so as in {f.versions.row}: {versions}"
    software = f.recipe.software
    alone = software.container is None and software.megatron_bridge is None and software.megatron_core is not None
    container = container_of_core(f.versions.megatron_core) if alone and "transformer_engine" in names else None
    if container is None:
        return info("software", because)
    because = f"{because}; but megatron-core {f.versions.megatron_core} was released with other versions"
    return warning("software", because, fix=f"set software.container={container}, or name the versions")


@rule("CFG011", source="overlapkit: what each check needs")
def sizes_not_given(f: Facts, s: State) -> Finding:
    """Sizes that the recipe does not give, and what could not be checked without them.

    Why: a plan that looks complete should not hide what it did not see.
    Fix: add the named fields.
    """
    model, train = f.recipe.model, f.recipe.train
    sizes = {
        "model.num_layers": model.num_layers,
        "model.hidden_size": model.hidden_size,
        "model.seq_length": model.seq_length,
        "train.micro_batch_size": train.micro_batch_size,
        "train.global_batch_size": train.global_batch_size,
    }
    missing = [name for name, value in sizes.items() if value is None]
    if not missing:
        return None
    return info("recipe", f"not given: {', '.join(missing)}; what needs them was not checked")


@rule(
    "CFG013",
    source="megatron-bridge training/config.py _validate_and_apply_deterministic_mode; Megatron-LM "
    "training/arguments.py validate_args and training/determinism.py",
)
def fused_loss_in_deterministic_mode(f: Facts, s: State) -> Finding:
    """The fused cross-entropy in deterministic mode.

    Bridge's models have the fusion on unless told otherwise, Megatron-LM has it off.

    Why: its sums have no fixed order; Bridge and Megatron-LM refuse it.
    Fix: set ``model.cross_entropy_loss_fusion=false``.
    """
    model = f.recipe.model
    if not model.deterministic_mode or model.cross_entropy_loss_fusion is False:
        return None
    subject, fix = "model.cross_entropy_loss_fusion", "set model.cross_entropy_loss_fusion=false"
    if model.cross_entropy_loss_fusion:
        by, because = MEGATRON_LM if f.megatron_lm else BRIDGE, "deterministic_mode excludes it"
        return error(subject, because, fix=fix, by=by, at="validation", requested=True, value=True)
    if f.megatron_lm or f.recipe.is_dump:
        return None
    return warning(subject, "not set: Bridge's models have it on, and deterministic_mode excludes it", fix=fix)


@rule("CFG017", source="megatron-core model_parallel_config.py resolve_tensor_parallel_weight_shards", core=">=0.19.0")
def weight_shards_do_not_fit(f: Facts, s: State) -> Finding:
    """``tensor_parallel_num_weight_shards`` is a multiple of TP.

    Above TP, Megatron-LM takes the ranks that share a TP rank's weights from data parallelism. Bridge does not
    make groups for them.

    Why: each TP rank's part of a weight is cut into the same whole number of shards.
    Fix: set it to a multiple of TP, or leave it out.
    """
    shards, tp = f.recipe.model.tensor_parallel_num_weight_shards, f.parallelism.tp
    if shards is None or (shards >= tp and shards % tp == 0):
        return None
    subject = "model.tensor_parallel_num_weight_shards"
    because = f"{shards} is not a multiple of TP {tp}"
    by = MEGATRON_LM if f.megatron_lm else MEGATRON_CORE
    return error(subject, because, fix=f"set {subject}=null", by=by, at="validation", requested=shards, value=shards)
