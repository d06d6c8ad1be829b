"""Starts jobs as torchrun would, from one process that has torch and Megatron-Core imported: seconds less for each.

    fork_ranks.py PROCESSES FOLDER SCRIPT CONFIGURATION…

A process of a job is ``python -m overlapkit.record -o FOLDER/<configuration's name> -- SCRIPT CONFIGURATION``, except
that Megatron-Core was imported before the recorder came.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import traceback
from pathlib import Path

# Nothing is compiled for two steps; Megatron-Core asks for one connection where TP is above 1.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
sys.path.append(str(Path(__file__).resolve().parent.parent / "jobs"))
sys.path.append(str(Path(__file__).resolve().parent.parent / "volume"))

import torch
import train_gpt

from overlapkit.record import main

torch.set_num_threads(1)  # a process that has threads cannot be forked


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def be(rank: int, processes: int, port: int, arguments: list[str]) -> None:
    """Never returns: the process is the rank until it ends."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    status = 1
    try:
        main(arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    os._exit(status)


def job(processes: int, arguments: list[str]) -> list[int]:
    """The exit statuses of the processes."""
    port, children = free_port(), []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            be(rank, processes, port, arguments)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    assert train_gpt.parallel_state  # imported before
    number, folder, script, *configurations = sys.argv[1:]
    for each in configurations:
        statuses = job(int(number), ["-o", f"{folder}/{Path(each).stem}", "--", script, each])
        if any(statuses):
            sys.exit(f"{each}: the processes ended with {statuses}")
