"""Runs layouts on request: imports torch and Megatron-Core once, then forks a process for every rank that it is.

A line of JSON on stdin asks: ``recipe``, ``world``, ``backend``, ``device``, and the ``ranks`` to be. With gloo all of
them run at once, with the fake group one after the other. A line on stdout answers: per rank its ``stage`` and
``calls``, or the ``error`` that it met.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

# Nothing is compiled for two steps.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
# Megatron-Core asks for it where TP or CP is above 1.
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
sys.path.append(str(Path(__file__).resolve().parent.parent / "jobs"))

import torch
from cpu_megatron import run_on_cpu
from megatron.core import parallel_state
from recording import start
from train_gpt import build, second_step

# A full-size rank takes half a minute. One that never ends, as backward through itself does, is ended.
TIMEOUT_SECONDS = 300
_FORK = multiprocessing.get_context("fork")


def run(request: dict[str, Any], rank: int, store: str | None, answers: Any) -> None:
    """In a process of its own: is one rank for two steps."""
    signal.alarm(TIMEOUT_SECONDS)
    try:
        run_on_cpu(request["device"])
        calls = start(request["backend"], rank, request["world"], store)
        found = second_step(build(request["recipe"]), calls)
        answers.send({"rank": rank, "stage": parallel_state.get_pipeline_model_parallel_rank(), "calls": found})
    except BaseException:
        answers.send({"rank": rank, "error": traceback.format_exc()})
    answers.close()
    os._exit(0)  # the threads of gloo may wait for a rank that has gone


def answer(request: dict[str, Any]) -> list[dict[str, Any]]:
    if request["backend"] == "fake":
        return [found for rank in request["ranks"] for found in _at_once(request, [rank], None)]
    with tempfile.TemporaryDirectory() as folder:
        return _at_once(request, request["ranks"], f"{folder}/store")


def _at_once(request: dict[str, Any], ranks: list[int], store: str | None) -> list[dict[str, Any]]:
    running = []
    for rank in ranks:
        receiver, sender = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=run, args=(request, rank, store, sender))
        process.start()
        sender.close()
        running.append((rank, process, receiver))
    return [_result(*each) for each in running]


def _result(rank: int, process: Any, receiver: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] | None = receiver.recv()
    except EOFError:
        found = None
    process.join()
    return found or {"rank": rank, "error": f"the process ended with {process.exitcode}"}


def main() -> None:
    # Megatron-Core prints; the answers have a stream of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.WARNING)  # that random states change, as they do where CUDA's are the CPU's
    torch.set_num_threads(1)  # a process that has threads cannot be forked
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
