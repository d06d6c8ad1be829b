"""A training script as users have it, small enough for two processes without a GPU.

    torchrun --nproc-per-node 2 train_tiny_gpt.py recipe.yaml [arguments that a launcher appends]

It builds a GPT of Megatron-Core from a recipe, applies the recipe's plan to the live configuration, trains two steps,
and prints from each process one line of JSON: what it saw and what it has.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

# Nothing is compiled for two steps.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
import torch.distributed as dist
from cpu_megatron import WITHOUT_KERNELS, run_on_cpu
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from overlapkit import load_recipe, resolve
from overlapkit.integrations.megatron import apply, check_environment
from overlapkit.live_objects import plain

STEPS = 2
# A process that waits for another in vain ends, and with it the job: a test says what went wrong.
TIMEOUT_MINUTES = 2


def main(recipe_path: str, arguments: list[str]) -> None:
    run_on_cpu()
    recipe = load_recipe(recipe_path)
    plan = resolve(recipe)
    findings = check_environment(plan)
    dist.init_process_group("gloo", timeout=timedelta(minutes=TIMEOUT_MINUTES))
    configs = build_configs(recipe)
    apply(plan, *configs.values())
    chunks, optimizer = build(recipe, **configs)
    losses = [train_step(recipe, chunks, optimizer) for _ in range(STEPS)]
    seen = {
        "rank": dist.get_rank(),
        "arguments": arguments,
        "env": {name: os.environ.get(name) for name in plan.env},
        "environment_findings": [str(finding) for finding in findings],
        "settings": live_settings(plan.settings, configs),
        "buckets": [len(buffer.buckets) for chunk in chunks for buffer in chunk.buffers],
        "losses": losses,
    }
    # One write: the lines of two processes on one pipe stay whole.
    os.write(1, (json.dumps(seen) + "\n").encode())
    dist.barrier()
    dist.destroy_process_group()


def build_configs(recipe: Any) -> dict[str, Any]:
    """The configuration as the recipe's user wrote it, without the plan."""
    model = recipe.model
    model_config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        tensor_model_parallel_size=model.tensor_model_parallel_size,
        pipeline_model_parallel_size=model.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=model.virtual_pipeline_model_parallel_size,
        sequence_parallel=model.sequence_parallel,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **WITHOUT_KERNELS,
    )
    sharded = recipe.ddp.use_distributed_optimizer
    optimizer_config = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=sharded)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    return {"model": model_config, "optimizer": optimizer_config, "ddp": ddp_config}


def build(recipe: Any, model: Any, optimizer: Any, ddp: Any) -> tuple[list[Any], Any]:
    """The model's chunks in their data-parallel wrappers, and the optimizer, as Megatron's training loops do it."""
    virtual = model.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=model.tensor_model_parallel_size,
        pipeline_model_parallel_size=model.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=TIMEOUT_MINUTES,
    )
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    chunks = []
    for index in range(virtual or 1):
        stage = {"ignore_virtual": False, "vp_stage": index if virtual else None}
        module = GPTModel(
            config=model,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=recipe.model.vocab_size,
            max_sequence_length=recipe.model.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            vp_stage=stage["vp_stage"],
        )
        chunks.append(DistributedDataParallel(model, ddp, module, disable_bucketing=index > 0))
    built = get_megatron_optimizer(optimizer, chunks, use_gloo_process_groups=False)
    model.finalize_model_grads_func = finalize_model_grads
    model.grad_scale_func = built.scale_loss
    if ddp.overlap_grad_reduce:
        model.no_sync_func = [chunk.no_sync for chunk in chunks] if virtual else chunks[0].no_sync
    if ddp.overlap_param_gather and ddp.align_param_gather:
        model.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    return chunks, built


def train_step(recipe: Any, chunks: list[Any], optimizer: Any) -> float | None:
    """The mean loss of the step's microbatches; None where the pipeline's last stage is elsewhere."""
    size, length = recipe.train.micro_batch_size, recipe.model.seq_length
    data_parallel_rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(data_parallel_rank)
    tokens = torch.randint(0, recipe.model.vocab_size, (size, length + 1), generator=generator)

    def forward_step(_: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        positions = torch.arange(length).expand(size, -1)
        output = chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().item()})

    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    microbatches = recipe.train.global_batch_size // size // parallel_state.get_data_parallel_world_size()
    reduced = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[None] * len(chunks),
        model=chunks,
        num_microbatches=microbatches,
        seq_length=length,
        micro_batch_size=size,
        forward_only=False,
    )
    optimizer.step()
    return sum(each["loss"] for each in reduced) / len(reduced) if reduced else None


def live_settings(settings: Any, configs: dict[str, Any]) -> dict[str, Any]:
    """The values that the objects have now, of the settings that they have a field for."""
    found = {}
    for path in settings:
        section, _, name = path.partition(".")
        if hasattr(configs[section], name):
            found[path] = plain(getattr(configs[section], name))
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
