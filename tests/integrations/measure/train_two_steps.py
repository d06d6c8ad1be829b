"""A job of as many processes as its layout has ranks: a GPT of the real Megatron-Core, two training steps over gloo.

    torchrun --nproc-per-node 4 train_two_steps.py recipe.json

It knows nothing of recording.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

# Nothing is compiled for two steps; Megatron-Core asks for one connection where TP is above 1.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
sys.path.append(str(Path(__file__).resolve().parent.parent / "jobs"))
sys.path.append(str(Path(__file__).resolve().parent.parent / "volume"))

import torch
import torch.distributed as dist
from cpu_megatron import run_on_cpu
from train_gpt import TIMEOUT_MINUTES, build, second_step

torch.set_num_threads(1)
run_on_cpu()
dist.init_process_group("gloo", timeout=timedelta(minutes=TIMEOUT_MINUTES))
second_step(build(json.loads(Path(sys.argv[1]).read_text())), [])
dist.barrier()
dist.destroy_process_group()
