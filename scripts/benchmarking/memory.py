"""Peak memory of this process, or of its GPU."""

from __future__ import annotations

import gc
from pathlib import Path

import torch


def forget_peak() -> None:
    """Free what an earlier contender of this process has left on the GPU, and begin anew there."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory_bytes(device: str) -> int:
    """On CUDA what was allocated at most since `forget_peak`; else the most this process has had resident.

    `getrusage` would not do: what a process inherits there from the one that started it counts as its own.
    """
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kibibytes = next(line.split()[1] for line in status if line.startswith("VmHWM:"))
    return int(kibibytes) * 1024
