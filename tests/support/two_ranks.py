"""Runs a function in several processes that form a gloo group, as a launcher would start them."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState

from dpo_pack.system import ranks
from support.file_operations import in_forks


def run_on_ranks(function: Callable[..., Any], *arguments: Any, num_ranks: int = 2) -> list[Any]:
    """What `function(*arguments)` returns on each rank, side by side; what it returns must be picklable.

    Ranks are forks of this process: they have its imports, and what a test has replaced. An exception on any
    rank is an AssertionError here, with the tracebacks of all ranks that failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        meeting = Path(directory) / "meeting"
        return in_forks(
            [
                functools.partial(_on_a_rank, rank, num_ranks, meeting, function, arguments)
                for rank in range(num_ranks)
            ]
        )


def _on_a_rank(
    rank: int, num_ranks: int, meeting: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # nobody asks there: they meet at a file
        "ACCELERATE_USE_CPU": "true",
    }
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else accelerate sets it and warns
    PartialState._reset_state()  # the parent's says that there is one process
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)
    try:
        return function(*arguments)
    finally:
        ranks.leave()
