"""UB: what Transformer Engine's userbuffers can do."""

from __future__ import annotations

from overlapkit.facts import Facts
from overlapkit.recipe.sections import AUTO
from overlapkit.rules.changes import home
from overlapkit.rules.registry import (
    MEGATRON_CORE,
    MEGATRON_LM,
    TRANSFORMER_ENGINE,
    Finding,
    State,
    error,
    info,
    rule,
    warning,
)
from overlapkit.rules.tp import OVERLAP, drawback, obstacle, off

_INIT = "transformer-engine pytorch/module/base.py initialize_ub"


@rule("UB001", source=_INIT, te=">=1.13")
def no_cuda_multicast(f: Facts, s: State) -> Finding:
    """Userbuffers need CUDA multicast, or ``UB_SKIPMC=1``.

    Multicast wants an NVSwitch of Hopper or newer, and driver and CUDA runtime 12.1 (driver 530). A100,
    A800 and PCIe boards have none. With ``UB_SKIPMC=1`` the buffers go through CUDA IPC.

    Why: Transformer Engine refuses to set up the buffers otherwise. Where multicast works, skipping it only
    makes bulk collectives slower.
    Fix: export ``UB_SKIPMC=1``, or upgrade the driver.
    """
    if not s[OVERLAP] or f.parallelism.tp == 1:
        return None
    given = f.recipe.env_vars
    skips = given is not None and given.get("UB_SKIPMC") == "1"
    if f.cuda_multicast is not False:
        if skips and f.cuda_multicast:
            return warning(
                "env_vars.UB_SKIPMC",
                "CUDA multicast works here, and skipping it makes bulk collectives slower",
                requested="1",
                fix="set env_vars.UB_SKIPMC=0",
            )
        return None
    because = f"no CUDA multicast on {_where(f)}"
    refuses = given is not None and not skips
    exported = (info if refuses or f.tp_request == AUTO else warning)(
        "env.UB_SKIPMC",
        f"{because}: CUDA IPC instead, which may be slower",
        value="1",
        fix="upgrade the driver" if f.gpu is not None and f.gpu.cuda_multicast else None,
    )
    if not refuses:
        return exported
    refused = obstacle(
        f,
        f"{because}, and UB_SKIPMC=1 is not set",
        fix="set env_vars.UB_SKIPMC=1",
        by=TRANSFORMER_ENGINE,
        at="initialize_ub",
    )
    return refused if f.tp_request == AUTO else (exported, refused)


def _where(f: Facts) -> str:
    driver = f.recipe.cluster.driver_version
    gpu = f.gpu.name if f.gpu else "this GPU"
    return f"{gpu} with driver {driver}" if driver and f.gpu is not None and f.gpu.cuda_multicast else gpu


@rule("UB002", source=_INIT, te=">=1.9")
def unknown_bootstrap(f: Facts, s: State) -> Finding:
    """``tp_comm_bootstrap_backend`` must be nccl, gloo or mpi.

    Why: Transformer Engine knows no other.
    Fix: set ``comm_overlap.tp_comm_bootstrap_backend=nccl``.
    """
    backend = s["model.tp_comm_bootstrap_backend"]
    if not s[OVERLAP] or backend in (None, "nccl", "gloo", "mpi"):
        return None
    return error(
        "model.tp_comm_bootstrap_backend",
        "Transformer Engine knows nccl, gloo and mpi",
        fix=f"set {home(f)}.tp_comm_bootstrap_backend=nccl",
        by=TRANSFORMER_ENGINE,
        at="initialize_ub",
        requested=backend,
    )


@rule("UB003", source=_INIT, te=">=1.13")
def bootstrap_not_compiled(f: Facts, s: State) -> Finding:
    """The mpi bootstrap needs a torch that was built with MPI.

    Why: NGC's torch has it, the wheels from PyPI do not, and Transformer Engine refuses a backend that torch
    lacks.
    Fix: set ``comm_overlap.tp_comm_bootstrap_backend=nccl``.
    """
    if not s[OVERLAP] or s["model.tp_comm_bootstrap_backend"] != "mpi":
        return None
    return warning(
        "model.tp_comm_bootstrap_backend",
        "mpi works only with a torch built with MPI (not PyPI's wheels), in a job started by mpirun",
        requested="mpi",
        fix=f"set {home(f)}.tp_comm_bootstrap_backend=nccl",
    )


@rule("UB026", source="transformer-engine pytorch/module/base.py", te=">=1.0")
def quantizer_without_userbuffers(f: Facts, s: State) -> Finding:
    """A quantization that userbuffers cannot gather: blockwise FP8, NVFP4, a custom quantizer.

    Why: Transformer Engine's all-gather through userbuffers knows delayed and current scaling and, from
    2.4, MXFP8; anything else raises in the first forward pass.
    Fix: turn TP overlap off, or train in another precision.
    """
    if not s[OVERLAP] or f.parallelism.tp == 1:
        return None
    recipe = f.precision.fp8_recipe
    kind = "NVFP4" if f.precision.fp4 else f"{recipe} FP8" if recipe in ("blockwise", "custom") else None
    if recipe == "mxfp8" and not f.te_in(">=2.4.0"):
        kind = "MXFP8"
    if kind is None:
        return None
    return obstacle(
        f,
        f"userbuffers of transformer-engine {f.versions.transformer_engine} do not support {kind}",
        by=TRANSFORMER_ENGINE,
        at="first_forward",
    )


@rule("UB029", source="transformer-engine pytorch/module/_common.py", te=">=2.3")
def delayed_wgrad_with_bulk(f: Facts, s: State) -> Finding:
    """``delay_wgrad_compute`` excludes the bulk weight-gradient overlap.

    Megatron-Core passes ``tp_comm_bulk_wgrad``, true unless set, whenever TP overlap is on.

    Why: the bulk collective runs beside the weight gradient's GEMM, which is no longer where it was;
    Transformer Engine asserts it when a layer is built.
    Fix: set ``model.tp_comm_bulk_wgrad=false``, or turn one of the two off.
    """
    if not (s[OVERLAP] and s["model.delay_wgrad_compute"]) or f.recipe.model.tp_comm_bulk_wgrad is False:
        return None
    return obstacle(
        f,
        "delay_wgrad_compute excludes tp_comm_bulk_wgrad, which is on by default",
        fix=f"set model.tp_comm_bulk_wgrad=false, or {home(f)}.tp_comm_overlap=false",
        by=TRANSFORMER_ENGINE,
        at="construction",
    )


@rule(
    "UB033",
    source="megatron-bridge training/initialize.py; Megatron-LM training/initialize.py",
    bridge=">=0.2.0,<0.6.0",
    megatron_lm=">=0.15.0",
    te=">=2.7,<2.8",
)
def quantization_modes_missing(f: Facts, s: State) -> Finding:
    """Transformer Engine 2.7 under Bridge before 0.6, or under Megatron-LM with core 0.15 or newer.

    Why: both ask for quantization modes from Transformer Engine 2.7.0 on, but they came with 2.8: an
    AttributeError when the buffers are set up. Bridge 0.6 asks from 2.8.
    Fix: use Transformer Engine 2.8.
    """
    if not s[OVERLAP]:
        return None
    who = "Megatron-LM" if f.megatron_lm else f"Bridge {f.versions.megatron_bridge}"
    return obstacle(
        f,
        f"{who} asks for quantization modes, which transformer-engine {f.versions.transformer_engine} lacks",
        fix=f"use transformer-engine 2.8 or newer, or {off(f)}",
        by=MEGATRON_LM if f.megatron_lm else TRANSFORMER_ENGINE,
        at="initialize_ub",
    )


@rule(
    "UB035",
    source="megatron-core extensions/transformer_engine.py TELinear, transformer/multi_token_prediction.py and "
    "transformer/multi_latent_attention.py",
)
def layers_without_buffers(f: Facts, s: State) -> Finding:
    """Layers whose linears are none of the qkv, proj, fc1 and fc2 that userbuffers know.

    Multi-latent attention (its down and up projections), multi-token prediction (``eh_proj``), and blocks of
    a heterogeneous model that are replaced by one linear.

    Why: where such a linear has a name of its own, Megatron-Core sets ``tp_comm_overlap`` to false on the
    configuration that all later layers of that rank share, with no more than a warning; the settings here
    are those before the model is built. Where it has none, an assertion stops the construction: MTP before
    core 0.17, MLA before 0.13.
    Fix: do not ask for TP overlap with these layers, or check ``model.config.tp_comm_overlap`` after the
    model is built.
    """
    if not s[OVERLAP]:
        return None
    nameless = _nameless_linear(f)
    if nameless is not None:
        return obstacle(
            f,
            f"{nameless} without a buffer's name in megatron-core {f.versions.megatron_core}",
            fix=f"use a newer Megatron-Core, or {off(f)}",
            by=MEGATRON_CORE,
            at="construction",
        )
    verify = f"verify model.config.tp_comm_overlap after the model is built, or {off(f)}"
    layers = _layers_that_switch_off(f)
    if layers:
        because = f"{' and '.join(layers)}: Megatron-Core turns TP overlap off for the layers after it"
        return drawback(f, f"{because} while it builds the model", fix=verify)
    if f.recipe.model.heterogeneous_block_specs:
        return drawback(f, "heterogeneous blocks: one that is replaced by a linear has no userbuffer", fix=off(f))
    return None


def _nameless_linear(f: Facts) -> str | None:
    model = f.recipe.model
    if model.multi_latent_attention and f.core_in("<0.13.0"):
        return "multi-latent attention has projections"
    # An MLA layer before it has turned the overlap off already.
    if model.mtp_num_layers and not model.multi_latent_attention and f.core_in("<0.17.0"):
        return "multi-token prediction has a projection"
    return None


def _layers_that_switch_off(f: Facts) -> list[str]:
    model = f.recipe.model
    layers = ["multi-latent attention"] if model.multi_latent_attention else []
    if model.mtp_num_layers:
        layers.append(f"{model.mtp_num_layers} MTP layer{'s' if model.mtp_num_layers > 1 else ''}")
    return layers
