"""Runs a function in several processes that form a gloo group, as a launcher would start them."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from dpo_pack.system import ranks


def run_on_ranks(function: Callable[..., Any], *arguments: Any, num_ranks: int = 2) -> list[Any]:
    """What `function(*arguments)` returns on each rank; it must be a test module's own, to be found there.

    A failure on any rank fails with that rank's traceback. Starting costs some seconds: check many things in
    one function.
    """
    with tempfile.TemporaryDirectory() as directory:
        port = _free_port()
        spawn(_on_a_rank, args=(num_ranks, port, directory, function, arguments), nprocs=num_ranks)
        results = [Path(directory) / f"{rank}.pt" for rank in range(num_ranks)]
        return [torch.load(path, weights_only=False) for path in results]


def _on_a_rank(
    rank: int,
    num_ranks: int,
    port: int,
    directory: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    try:
        torch.save(function(*arguments), Path(directory) / f"{rank}.pt")
    finally:
        ranks.leave()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
