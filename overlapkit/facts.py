"""Recipe -> Facts: everything that rules need, derived once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from overlapkit.catalogue import Gpu, find_gpu, gpu_names
from overlapkit.errors import nearest, shown
from overlapkit.parallelism import derive_parallelism
from overlapkit.pipeline_layout import parse_layout
from overlapkit.plan import Parallelism, PresetChoice
from overlapkit.precision import Precision, derive_precision
from overlapkit.presets import Wanted
from overlapkit.presets.of_recipe import choose_userbuffers, report_of
from overlapkit.recipe.place import Place
from overlapkit.recipe.sections import CommOverlap, Recipe
from overlapkit.software import Versions, resolve_versions
from overlapkit.starting_values import asked_overlap, starting_values, tp_overlap_request
from overlapkit.userbuffers.check import Report
from overlapkit.versions import VersionRange, parse_range

BRIDGE = "megatron-bridge"
MEGATRON_LM = "megatron-lm"
_MULTICAST_DRIVER = (530,)  # CUDA 12.1's driver; Transformer Engine common/util/cuda_runtime.cpp


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A recipe with all that follows from it. Sizes count GPUs, layers or tokens; None is unknown."""

    recipe: Recipe
    framework: str
    versions: Versions
    gpu: Gpu | None
    gpus_per_node: int | None
    nvlink_domain_size: int | None
    cuda_multicast: bool | None
    parallelism: Parallelism
    sequence_parallel: bool  # as written; the parallelism shows what is left of it at TP 1
    vp_at_setup: int  # what Bridge's set-up sees: an explicit layout sets VP only later
    stages: tuple[str, ...] | None  # of an explicit pipeline layout, see pipeline_layout
    precision: Precision
    overlap_setup: bool  # Bridge's CommOverlapConfig.setup runs: comm_overlap is not null
    asked: CommOverlap  # what the user asked of it; for Megatron-LM the flags of every section
    tp_request: bool | Literal["auto"]
    preset: PresetChoice
    userbuffers: Mapping[str, Any] | str | None  # a text is a path that is not on this machine
    userbuffers_report: Report | None  # what Transformer Engine makes of them; None where it is not asked, or not known
    userbuffers_own_file: bool  # they stand in a preset's own file, which no framework reads
    wanted: Wanted  # of a preset
    dist_opt_at_setup: bool
    dist_opt: bool
    fsdp: bool
    torch_fsdp2: bool
    dispatcher: str
    flex_backend: str | None
    gradient_accumulation_fusion: bool
    graph_impl: str
    graph_modules: frozenset[str]
    full_iteration_graph: bool
    dense_parameters: int | None  # of a dense model, without padding; None for MoE or unknown sizes
    start: Mapping[str, Any]  # the settings before any rule

    @property
    def bridge(self) -> bool:
        return self.framework == BRIDGE

    @property
    def megatron_lm(self) -> bool:
        return self.framework == MEGATRON_LM

    @property
    def microbatch_group(self) -> int:
        """Microbatches that the interleaved schedule runs in a row through one chunk: PP unless the recipe says."""
        said: int | None = self.recipe.model.microbatch_group_size_per_vp_stage
        return self.parallelism.pp if said is None else said

    def reuses_gradient_buffer(self, part: str) -> bool:
        """Whether MXFP8 parameters are gathered in the gradient buffer, as ``part`` (optimizer or ddp) is told.

        Bridge copies its mixed-precision section over both; Megatron-LM has one flag, which FSDP drops from core 0.18.
        """
        recipe, section = self.recipe, self.precision.reuses_gradient_buffer
        said = {
            "ddp": bool(recipe.ddp.reuse_grad_buf_for_mxfp8_param_ag),
            "optimizer": bool(recipe.optimizer.reuse_grad_buf_for_mxfp8_param_ag),
        }
        if self.bridge:
            return said[part] if recipe.mixed_precision is None else section
        return (section or any(said.values())) and not (self.fsdp and self.core_in(">=0.18.0rc0"))

    @property
    def interleaved(self) -> bool:
        """Megatron-Core runs the interleaved schedule: PP and virtual stages, be it one."""
        return self.parallelism.pp > 1 and self.parallelism.vp is not None

    @property
    def tokens_per_rank(self) -> int | None:
        """Tokens of a microbatch on one CP rank, the rows of every userbuffer."""
        return self.wanted.tokens_per_rank

    def written(self, path: str) -> bool:
        """Whether the user set this field (in a dump: by an override)."""
        return path in self.recipe.written

    def bridge_in(self, text: str) -> bool:
        """Whether the target is a Megatron-Bridge in this range of versions."""
        version = self.versions.megatron_bridge
        return version is not None and version in _range(text)

    def core_in(self, text: str) -> bool:
        return self.versions.megatron_core in _range(text)

    def te_in(self, text: str) -> bool:
        """Whether Transformer Engine is there, in this range."""
        version = self.versions.transformer_engine
        return version is not None and version in _range(text)


def _range(text: str) -> VersionRange:
    return parse_range(text)


def derive(recipe: Recipe) -> Facts:
    """Everything that follows from the recipe.

    Raises:
        RecipeError: no number of GPUs, an unknown GPU or container, text that is no version, sizes that
            do not divide the GPUs, or a preset that is neither known nor a file.
    """
    place = Place(recipe.source, recipe.lines, recipe.overridden)
    framework = recipe.software.framework or BRIDGE
    megatron_lm = framework == MEGATRON_LM
    versions = resolve_versions(recipe.software, megatron_lm=megatron_lm, fail=place.error)
    gpu = _gpu(recipe, place)
    precision = derive_precision(recipe, megatron_lm=megatron_lm)
    stages = _stages(recipe, place)
    parallelism = derive_parallelism(recipe, versions, stages, place)
    asked = asked_overlap(recipe, megatron_lm=megatron_lm)
    request = tp_overlap_request(recipe, megatron_lm=megatron_lm)
    wanted = _wanted(recipe, gpu, parallelism, precision, versions)
    if (wanted.tokens_per_rank or 0) >= 2**63:
        raise place.error("model.seq_length", "a microbatch of more tokens than 64 bits count")
    chosen = choose_userbuffers(recipe, asked, wanted, place, wanted_at_all=request is not False)
    dist_opt_at_setup, dist_opt = _distributed_optimizer(recipe, versions)
    graph_impl, graph_modules, full_iteration = _cuda_graphs(recipe, versions)
    return Facts(
        recipe=recipe,
        framework=framework,
        versions=versions,
        gpu=gpu,
        gpus_per_node=_gpus_per_node(recipe, gpu),
        nvlink_domain_size=_nvlink_domain_size(recipe, gpu),
        cuda_multicast=_cuda_multicast(recipe, gpu),
        parallelism=parallelism,
        sequence_parallel=bool(recipe.model.sequence_parallel),
        vp_at_setup=recipe.model.virtual_pipeline_model_parallel_size or 1,
        stages=stages,
        precision=precision,
        overlap_setup=not megatron_lm and recipe.comm_overlap is not None,
        asked=asked,
        tp_request=request,
        preset=chosen.preset,
        userbuffers=chosen.userbuffers,
        userbuffers_own_file=chosen.own_file,
        userbuffers_report=report_of(recipe, versions, wanted, chosen, fp8=precision.fp8 is not None)
        if request
        else None,
        wanted=wanted,
        dist_opt_at_setup=dist_opt_at_setup,
        dist_opt=dist_opt,
        fsdp=_megatron_fsdp(recipe, versions),
        torch_fsdp2=bool(recipe.dist.use_torch_fsdp2),
        dispatcher=recipe.model.moe_token_dispatcher_type or "allgather",
        flex_backend=_flex_backend(recipe),
        gradient_accumulation_fusion=recipe.model.gradient_accumulation_fusion is not False,
        graph_impl=graph_impl,
        graph_modules=graph_modules,
        full_iteration_graph=full_iteration,
        dense_parameters=_dense_parameters(recipe, megatron_lm=megatron_lm),
        start=starting_values(recipe, asked, request, chosen.userbuffers, megatron_lm=megatron_lm),
    )


def _gpu(recipe: Recipe, place: Place) -> Gpu | None:
    spelling = recipe.cluster.gpu
    if spelling is None:
        return None
    gpu = find_gpu(spelling)
    if gpu is None:
        near = nearest(spelling.lower(), gpu_names())
        hint = f"did you mean {near}?" if near else f"known are {', '.join(gpu_names())}"
        raise place.error("cluster.gpu", f"{shown(spelling)} is not a known GPU", hint)
    return gpu


def _nvlink_domain_size(recipe: Recipe, gpu: Gpu | None) -> int | None:
    """GPUs that NVLink connects: as the recipe says, else of a smaller node than usual no more than it has."""
    given, node = recipe.cluster.nvlink_domain_size, _gpus_per_node(recipe, gpu)
    if given is not None or gpu is None or gpu.nvlink_domain_size is None or node is None:
        return given or (gpu.nvlink_domain_size if gpu else None)
    rack_wide = gpu.gpus_per_node is not None and gpu.nvlink_domain_size > gpu.gpus_per_node
    return gpu.nvlink_domain_size if rack_wide else min(gpu.nvlink_domain_size, node)


def _gpus_per_node(recipe: Recipe, gpu: Gpu | None) -> int | None:
    return recipe.cluster.gpus_per_node or (gpu.gpus_per_node if gpu else None)


def _cuda_multicast(recipe: Recipe, gpu: Gpu | None) -> bool | None:
    """Whether userbuffers can use CUDA multicast: an NVSwitch of Hopper or newer, and a driver for CUDA 12.1."""
    said = recipe.cluster.cuda_multicast
    if said is not None:
        return said
    driver = recipe.cluster.driver_version
    if driver is not None and _driver_release(driver) < _MULTICAST_DRIVER:
        return False
    return gpu.cuda_multicast if gpu else None


def _driver_release(text: str) -> tuple[int, ...]:
    head = text.strip().partition(".")[0]
    return (int(head),) if head.isdigit() and len(head) < 9 else _MULTICAST_DRIVER


def _stages(recipe: Recipe, place: Place) -> tuple[str, ...] | None:
    layout = recipe.model.pipeline_model_parallel_layout
    if layout is None:
        return None
    try:
        return parse_layout(layout)
    except ValueError as error:
        raise place.error("model.pipeline_model_parallel_layout", str(error)) from None


def _wanted(
    recipe: Recipe, gpu: Gpu | None, parallelism: Parallelism, precision: Precision, versions: Versions
) -> Wanted:
    return Wanted(
        gpu=gpu.name if gpu else None,
        family=gpu.presets_of if gpu else None,
        precision=precision.preset_class,
        hidden_size=recipe.model.hidden_size,
        tensor_model_parallel_size=parallelism.tp,
        context_parallel_size=parallelism.cp,
        micro_batch_size=recipe.train.micro_batch_size,
        seq_length=recipe.model.seq_length,
        lora=recipe.peft is not None,
        fp8_recipe=precision.fp8_recipe,
        quantization_modes_differ=_quantization_modes_differ(precision, versions),
        rs_dgrad=bool(recipe.model.tp_comm_overlap_rs_dgrad),
    )


def _quantization_modes_differ(precision: Precision, versions: Versions) -> bool:
    """Whether userbuffers are set up for FP8 layers and BF16 ones; Megatron-LM asks for it from core 0.15.

    Source: megatron-bridge training/initialize.py; Megatron-LM training/initialize.py.
    """
    te = versions.transformer_engine
    asks = versions.megatron_bridge is not None or versions.megatron_core in _range(">=0.15.0rc0")
    return (
        asks
        and te is not None
        and te in _range(">=2.8")
        and precision.fp8 is not None
        and precision.bf16_layers_at_ends
    )


def _megatron_fsdp(recipe: Recipe, versions: Versions) -> bool:
    """``use_custom_fsdp`` was its name before core 0.14, and is read by nothing since."""
    old_name = recipe.ddp.use_custom_fsdp and versions.megatron_core in _range("<0.14.0")
    return bool(recipe.ddp.use_megatron_fsdp or recipe.dist.use_megatron_fsdp or old_name)


def _distributed_optimizer(recipe: Recipe, versions: Versions) -> tuple[bool, bool]:
    """Whether it is on when Bridge's set-up looks (it reads ddp's flag), and after validation.

    Megatron-FSDP turns it on from Bridge 0.5 (training/config.py) and in Megatron-LM from core 0.18.
    """
    ddp = bool(recipe.ddp.use_distributed_optimizer)
    either = ddp or bool(recipe.optimizer.use_distributed_optimizer)
    bridge = versions.megatron_bridge
    forces = bridge in _range(">=0.5.0") if bridge is not None else versions.megatron_core in _range(">=0.18.0rc0")
    final = either or (forces and _megatron_fsdp(recipe, versions))
    return (final if bridge is None else ddp), final


def _flex_backend(recipe: Recipe) -> str | None:
    """The library behind the flex dispatcher; Megatron-Core's own default is deepep.

    A dump holds the field as it is. A hand-written recipe that does not name it has one only if its
    dispatcher is flex.
    """
    model = recipe.model
    if model.moe_flex_dispatcher_backend is not None:
        backend: str = model.moe_flex_dispatcher_backend
        return backend
    if model.moe_enable_deepep:
        return "deepep"
    return "deepep" if not recipe.is_dump and model.moe_token_dispatcher_type == "flex" else None


def _cuda_graphs(recipe: Recipe, versions: Versions) -> tuple[str, frozenset[str], bool]:
    """The implementation, the parts of a layer that are captured, and whether whole iterations are.

    Source: megatron-bridge utils/cuda_graph.py; megatron-core TransformerConfig.__post_init__.
    """
    model = recipe.model
    impl = model.cuda_graph_impl or "none"
    if impl == "none" and model.enable_cuda_graph:
        impl = "local"
    elif impl == "none" and model.external_cuda_graph:
        impl = "transformer_engine"
    names = {*(model.cuda_graph_modules or ()), *(model.cuda_graph_scope or ())}
    if impl == "none" and "full_iteration" in names and versions.megatron_core in _range(">=0.18.0"):
        impl = "full_iteration"  # the older way to say it
    full = impl == "full_iteration" or (impl == "local" and "full_iteration" in names)
    return impl, frozenset(names - {"full", "full_iteration", "full_iteration_inference"}), full


def _dense_parameters(recipe: Recipe, *, megatron_lm: bool) -> int | None:
    """Parameters of a dense GPT: attention, MLP and the embeddings, without norms, biases and padding.

    Megatron-LM ties the embeddings unless told otherwise.
    """
    model = recipe.model
    layers, hidden = model.num_layers, model.hidden_size
    if model.num_moe_experts or model.multi_latent_attention or layers is None or hidden is None:
        return None
    heads = model.num_attention_heads or 1
    channels = model.kv_channels or hidden // heads
    groups = model.num_query_groups or heads
    attention = hidden * channels * (2 * heads + 2 * groups)
    ffn = model.ffn_hidden_size or 4 * hidden
    mlp = hidden * ffn * (3 if model.gated_linear_unit else 2)
    tied = model.share_embeddings_and_output_weights
    embeddings = (model.vocab_size or 0) * hidden * (1 if tied or (tied is None and megatron_lm) else 2)
    total: int = layers * (attention + mlp) + embeddings
    return total
