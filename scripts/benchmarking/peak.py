"""What matrix products alone reach on this machine, the denominator of MFU; and memory at its peak."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

SECONDS = {"cpu": 2.0, "cuda": 1.0}
SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}


def matrix_product_peak(device: str, dtype: str) -> dict[str, float]:
    """FLOPs a second of square products in `dtype`: `best` one, `median` of the fastest kind and size."""
    rates = [
        _rates(size, product, device, getattr(torch, dtype))
        for size in SIZES[device]
        for product in _products(device)
    ]
    fastest = max(rates, key=max)
    return {"best": max(fastest), "median": statistics.median(fastest)}


def _products(device: str) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """torch's own; on a CPU also oneDNN's, which for fp32 is the faster one on some processors."""
    yield torch.mm
    if device == "cpu" and torch.backends.mkldnn.is_available():
        yield lambda left, right: torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")


def _rates(
    size: int, product: Callable[[Tensor, Tensor], Tensor], device: str, dtype: torch.dtype
) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    rates: list[float] = []
    for _ in range(3):  # wakes threads and clocks up
        product(left, right)
    _wait(device)
    begun = time.perf_counter()
    while time.perf_counter() - begun < SECONDS[device]:
        started = time.perf_counter()
        product(left, right)
        _wait(device)
        rates.append(2.0 * size**3 / (time.perf_counter() - started))
    return rates


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


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
