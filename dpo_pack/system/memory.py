"""Memory: the amount that this process may use, freed blocks, and copies from the device to the host."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from dpo_pack.system.files import text_of

# mallopt's numbers for its parameters, glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
# The largest threshold of glibc. glibc maps a larger block alone, and unmaps it when it is freed.
_LARGEST_MMAP_THRESHOLD = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableMemory:
    """Bytes of memory of one device or machine: all of them, and those not in use."""

    free: int
    total: int


def host_memory(root: Path = Path("/")) -> AvailableMemory | None:
    """Returns the memory of the machine that this process may use; None if the system does not report it.

    A container or a batch job may have less memory than the machine. The smallest of nested limits counts.
    """
    machine = _numbers_in(root / "proc/meminfo")
    if not {"MemAvailable", "MemTotal"} <= machine.keys():
        return None
    free, total = 1024 * machine["MemAvailable"], 1024 * machine["MemTotal"]
    for limit, used in _limits(root):
        free, total = min(free, limit - used), min(total, limit)
    return AvailableMemory(free=max(0, free), total=total)


def machine_memory_bytes() -> int:
    """Returns how many bytes this process may use at most, including bytes in use."""
    found = host_memory()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if found is None else found.total


def free_memory_bytes() -> int:
    """Returns the free bytes of `machine_memory_bytes`; all bytes if the system does not report them."""
    found = host_memory()
    return machine_memory_bytes() if found is None else found.free


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, bytes in use) of each control group of this process, from innermost to outermost.

    In a container the path of the group may be a path on the host, which does not exist in the container.
    Then only the last path that is tried, the mount point, has the limit.
    """
    mount = root / "sys/fs/cgroup"
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            if controllers == "":  # version 2
                yield from _limit(mount / group, "memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                place = mount / "memory" / group
                yield from _limit(place, "memory.limit_in_bytes", "memory.usage_in_bytes", prefix="total_")


def _limit(group: Path, limit_file: str, used_file: str, prefix: str = "") -> Iterator[tuple[int, int]]:
    """Yields a group's limit and its bytes in use, if it has a limit. Cached files do not count as used."""
    limit, used = (_numbers_in(group / name).get("") for name in (limit_file, used_file))
    if limit is not None and used is not None:
        stat = _numbers_in(group / "memory.stat")
        yield limit, used - sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))


def _numbers_in(path: Path) -> dict[str, int]:
    """Returns a system file's numbers by name; a number without a name has "". {} if there is no file."""
    found = re.findall(r"^(?:(\w+):?\s+)?(\d+)", text_of(path), re.MULTILINE)
    return {name: int(number) for name, number in found}


def keep_freed_memory() -> None:
    """Makes glibc keep freed blocks for later allocations, instead of returning them to the system at once.

    A step on the CPU frees and allocates activations of megabytes, hundreds of times. For every page of a new
    block, the operating system handles a page fault and clears the page, which takes time. `release_memory`
    still returns all free memory.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library: its settings are not changed
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 64 * 2**20)


def release_memory() -> None:
    """Returns the memory of deleted models and tensors to the device and to the operating system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # another C library, which needs no such call
        # glibc keeps freed blocks of up to 32 MiB. Most weights of a model are not larger.
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
