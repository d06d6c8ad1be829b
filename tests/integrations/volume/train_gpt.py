"""A GPT of the real Megatron-Core from a recipe, and the second of two training steps, as Megatron's loops do them.

It reads a recipe as plain values, by the names of Megatron-Core's own fields: nothing of overlapkit is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from cpu_megatron import WITHOUT_KERNELS, attend_to_own_part
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from recording import Call, RecordingGroup

# What a recipe's model has beside the fields of TransformerConfig: GPTModel's arguments, and the vocabulary's padding.
_GPT = ("share_embeddings_and_output_weights", "position_embedding_type")
_NO_FIELD = (*_GPT, "seq_length", "vocab_size", "should_pad_vocab")
# Two steps are for counting: nothing is dropped at random, and nothing is fused by kernels that are not here.
_PLAIN = WITHOUT_KERNELS | {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "apply_rope_fusion": False,
    "moe_permute_fusion": False,
    "cross_entropy_fusion_impl": "native",
    "deallocate_pipeline_outputs": False,
}
TIMEOUT_MINUTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A rank's part of the job: its chunks of the model in their wrappers, and their optimizer."""

    recipe: dict[str, Any]
    config: Any
    chunks: list[Any]
    optimizer: Any
    device: torch.device


def build(recipe: dict[str, Any]) -> Training:
    """The rank's part, on the device that stands in for CUDA; torch.distributed is initialised."""
    model = recipe["model"]
    if model.get("context_parallel_size", 1) > 1:
        attend_to_own_part()
    config = _model_config(recipe)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=recipe["ddp"].get("num_distributed_optimizer_instances", 1),
        create_gloo_process_groups=False,
        distributed_timeout_minutes=TIMEOUT_MINUTES,
    )
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    ddp = DistributedDataParallelConfig(**recipe["ddp"])
    modules = [_module(model, config, index) for index in range(config.virtual_pipeline_model_parallel_size or 1)]
    chunks = [
        DistributedDataParallel(config, ddp, module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]
    optimizer = get_megatron_optimizer(_optimizer_config(recipe, config), chunks, use_gloo_process_groups=False)
    _as_the_loops_do(recipe, config, chunks, optimizer)
    return Training(recipe=recipe, config=config, chunks=chunks, optimizer=optimizer, device=_here())


def _here() -> torch.device:
    return torch.cuda.current_device()


def _model_config(recipe: dict[str, Any]) -> Any:
    fields = {name: value for name, value in recipe["model"].items() if name not in _NO_FIELD}
    dtype = torch.bfloat16 if fields.get("bf16") else torch.float16 if fields.get("fp16") else torch.float32
    if fields.get("gated_linear_unit"):
        fields["activation_func"] = torch.nn.functional.silu
    if fields.get("variable_seq_lengths"):
        fields.setdefault("moe_token_dispatcher_type", "alltoall")  # asked for of dense models too
    if fields.get("moe_router_enable_expert_bias"):
        fields.setdefault("moe_router_score_function", "sigmoid")  # the only one that goes with a bias
    return TransformerConfig(**{**_PLAIN, **fields, "params_dtype": dtype, "pipeline_dtype": dtype})


def _optimizer_config(recipe: dict[str, Any], config: Any) -> Any:
    # The first scale of fp16's losses would overflow, and the step be skipped.
    return OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=config.params_dtype,
        initial_loss_scale=1.0,
        **recipe["optimizer"],
    )


def _module(model: dict[str, Any], config: Any, index: int) -> Any:
    """The chunk of this number of the rank's stage."""
    vp_stage = index if config.virtual_pipeline_model_parallel_size else None
    place = {"ignore_virtual": False, "vp_stage": vp_stage}
    layers = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    module = _moved(
        GPTModel(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=model["vocab_size"],
            max_sequence_length=model["seq_length"],
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            vp_stage=vp_stage,
            **{name: model[name] for name in _GPT},
        )
    )
    return module if config.params_dtype is torch.float32 else Float16Module(config, module)


def _moved(module: Any) -> Any:
    """On the device, with what Megatron-Core notes on parameters: ``to`` makes new ones where they have no values."""
    notes = [dict(vars(parameter)) for parameter in module.parameters()]
    module = module.to(_here())
    for parameter, noted in zip(module.parameters(), notes, strict=True):
        vars(parameter).update(noted)
    return module


def _as_the_loops_do(recipe: dict[str, Any], config: Any, chunks: list[Any], optimizer: Any) -> None:
    """The functions by which the schedules reduce gradients and gather parameters."""
    ddp = chunks[0].ddp_config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if ddp.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
        if recipe["dist"]["align_grad_reduce"]:
            config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in chunks])
    if ddp.overlap_param_gather and ddp.align_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])


def _one_or_all(functions: list[Any]) -> Any:
    return functions if len(functions) > 1 else functions[0]


def second_step(training: Training, calls: list[Call]) -> list[Call]:
    """What the rank called in the second step: the first one has calls that no other has."""
    for _ in range(2):
        before = len(calls)
        _step(training)
    return calls[before:]


def _step(training: Training) -> None:
    model, train, config = training.recipe["model"], training.recipe["train"], training.config
    size, length = train["micro_batch_size"], model["seq_length"] // config.context_parallel_size
    shape = length // (config.tensor_model_parallel_size if config.sequence_parallel else 1), size, config.hidden_size
    RecordingGroup.announced_shape = shape
    for chunk in training.chunks:
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=_forward_step(training, size, length),
        data_iterator=[None] * len(training.chunks),
        model=training.chunks,
        num_microbatches=train["global_batch_size"] // size // parallel_state.get_data_parallel_world_size(),
        seq_length=model["seq_length"],
        micro_batch_size=size,
        decoder_seq_length=model["seq_length"],
        forward_only=False,
    )
    training.optimizer.step()
    _loop_scalars(training)


def _forward_step(training: Training, size: int, length: int) -> Any:
    tokens = torch.randint(0, training.recipe["model"]["vocab_size"], (size, length), device=training.device)
    positions = torch.arange(length, device=training.device).expand(size, -1)

    def loss(losses: torch.Tensor) -> tuple[Any, ...]:
        if training.config.calculate_per_token_loss:
            count = torch.tensor(losses.numel(), dtype=torch.int, device=training.device)
            return losses.sum(), count, {}
        return losses.mean(), {}

    def forward_step(_: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        return chunk(tokens, positions, None, labels=tokens), loss

    return forward_step


def _loop_scalars(training: Training) -> None:
    """What the training loops add, which are not part of megatron-core.

    Source: Megatron-LM training/training.py train_step: whether all ranks stepped, the norm of the gradients, the
    number of zeros in them where it is logged, and the loss that is reported with its number of tokens.
    """
    ranks = parallel_state.get_model_parallel_group()
    dist.all_reduce(torch.ones(1, dtype=torch.int, device=training.device), op=dist.ReduceOp.MIN, group=ranks)
    for _ in range(1 + training.optimizer.config.log_num_zeros_in_grad):
        dist.all_reduce(torch.zeros(1, device=training.device), op=dist.ReduceOp.MAX, group=ranks)
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(torch.zeros(2, device=training.device), group=ranks)
