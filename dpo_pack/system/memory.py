"""Memory: the amount that this process may use, freed blocks, and copies from the device to the host."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from dpo_pack.system.files import text_of

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # mallopt's parameters in glibc's malloc.h


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableMemory:
    """Bytes of memory of one device or machine: all of them, and those not in use."""

    free: int
    total: int


def host_memory(root: Path = Path("/")) -> AvailableMemory:
    """Returns the memory of the machine that this process may use.

    The smallest limit of its control groups counts (of a container or a batch job), without cached files. In
    a container, groups may have paths of the host: then only the last path, the mount point, has a limit.
    """
    machine = psutil.virtual_memory()
    free, total = machine.available, machine.total
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        mount, limit_file, used_file, prefix = "sys/fs/cgroup", "memory.max", "memory.current", ""
        if "memory" in controllers.split(","):  # version 1 of control groups
            mount, prefix = "sys/fs/cgroup/memory", "total_"
            limit_file, used_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif controllers:
            continue
        own = PurePosixPath(path.lstrip("/"))
        for group in (root / mount / part for part in (own, *own.parents)):
            limit, used = text_of(group / limit_file).strip(), text_of(group / used_file).strip()
            if limit.isdecimal() and used.isdecimal():
                cached = re.findall(
                    rf"^{prefix}(?:in)?active_file (\d+)", text_of(group / "memory.stat"), re.M
                )
                free = min(free, int(limit) - int(used) + sum(map(int, cached)))
                total = min(total, int(limit))
    return AvailableMemory(free=max(0, free), total=total)


def machine_memory_bytes() -> int:
    """Returns how many bytes this process may use at most, including bytes in use."""
    return host_memory().total


def free_memory_bytes() -> int:
    return host_memory().free


def keep_freed_memory() -> None:
    """Makes glibc keep freed blocks until `release_memory`: each page of a new block costs a page fault."""
    with contextlib.suppress(OSError, AttributeError):  # another C library: its settings are not changed
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_MMAP_THRESHOLD, 32 * 2**20)  # the largest: glibc unmaps a larger block when it is freed
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 64 * 2**20)


def release_memory() -> None:
    """Returns the memory of deleted models and tensors to the device and to the operating system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # another C library, which needs no such call
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopies:
    """Copies of tensors on the host, which the host can read while the device continues to compute."""

    tensors: tuple[Tensor, ...]  # on the host
    arrival: torch.cuda.Event | None  # when all copies are complete; None: they are complete at once

    @staticmethod
    def begin(tensors: Sequence[Tensor]) -> HostCopies:
        """Starts the copies and does not wait for them. Copies of tensors on CUDA are in pinned memory."""
        if tensors[0].device.type != "cuda":
            return HostCopies(tensors=tuple(tensors), arrival=None)
        copies = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors
        )
        arrival = torch.cuda.Event()
        arrival.record()
        return HostCopies(tensors=copies, arrival=arrival)

    def read(self) -> tuple[npt.NDArray[Any], ...]:
        """Returns the values. Waits for the copies only, and not for later work of the device."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return tuple(tensor.numpy() for tensor in self.tensors)
