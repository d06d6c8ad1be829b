"""What a layer of the real megatron-core keeps for its backward pass, against what memory counts.

On a CPU: layers that are not fused, in BF16, one rank. Autograd's hooks see every tensor that is kept; the difference
between two layers and one is a layer.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from volume_recipes import small

from overlapkit.cost.activations import kept_of, widths_of
from overlapkit.cost.kernels import kernels_of
from overlapkit.facts import derive
from overlapkit.resolver import plan
from overlapkit.volume.predict import predict

S, B, H, A = 64, 2, 128, 8
# The norms' statistics and rotary angles, which are not counted: 4 numbers per token, and one head's channels.
NOT_COUNTED = 0.02
JOB = """
import contextlib, os, sys, torch
from torch.autograd.graph import saved_tensors_hooks
torch.cuda.current_device = lambda: torch.device("cpu")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
from megatron.core import parallel_state
parallel_state.initialize_model_parallel(1, 1)
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

class Tracker:  # of random states on a GPU
    fork = staticmethod(contextlib.nullcontext)

tensor_parallel.get_cuda_rng_tracker = tensor_parallel.random.get_cuda_rng_tracker = Tracker
s, b, h, a, ffn = map(int, sys.argv[1:])

def kept(layers):
    config = TransformerConfig(
        num_layers=layers, hidden_size=h, num_attention_heads=a, ffn_hidden_size=ffn,
        bf16=True, params_dtype=torch.bfloat16, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, add_bias_linear=False, bias_dropout_fusion=False, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        attention_softmax_in_fp32=False,
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=256, max_sequence_length=s, position_embedding_type="rope"
    ).to(torch.bfloat16)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    tokens = torch.randint(0, 256, (b, s))
    mask = torch.triu(torch.ones(1, 1, s, s, dtype=torch.bool), 1)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, torch.arange(s).repeat(b, 1), mask, labels=tokens)
    return sum(found.values())

print(kept(2) - kept(1))
"""


@pytest.mark.parametrize("ffn", [4 * H, 2 * H])
def test_a_layer_keeps_what_is_counted(ffn: int) -> None:
    sizes = map(str, (S, B, H, A, ffn))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", JOB, *sizes],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    real = int(done.stdout.split()[-1])
    model = {
        "seq_length": S,
        "hidden_size": H,
        "num_attention_heads": A,
        "ffn_hidden_size": ffn,
        "gated_linear_unit": False,
        "transformer_impl": "local",
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
    }
    facts = derive(small(model=model, cluster={"num_gpus": 1}, train={"micro_batch_size": B, "global_batch_size": B}))
    found = predict(facts, plan(facts), approximate=True).model
    counted = kept_of(found, kernels_of(facts), widths_of(facts, found)).dense
    assert counted <= real <= counted * (1 + NOT_COUNTED)
