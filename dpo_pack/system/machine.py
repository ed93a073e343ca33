"""The machine and the software of a run: the CPU, memory, versions of packages, the commit."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import psutil

from dpo_pack.system.errors import first_line
from dpo_pack.system.files import text_of

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # mallopt's parameters in glibc's malloc.h
_CPUINFO = Path("/proc/cpuinfo")
# CPU instructions that multiply bfloat16, on x86 and Arm: name in /proc/cpuinfo -> name for people.
_BFLOAT16_FLAGS = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX", "bf16": "Arm BF16"}
_PACKAGES = (
    "torch", "torchvision", "pillow", "transformers", "accelerate", "datasets", "tokenizers", "safetensors",
    "pyarrow", "numpy",
    "flash-attn", "flash-linear-attention", "causal-conv1d", "mamba-ssm", "peft",
)  # fmt: skip


def cpu_name() -> str:
    return _field("model name") or platform.processor() or platform.machine()


def is_intel(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether Intel made the CPU; MKL is written for CPUs of Intel. False if the maker is unknown."""
    return _field("vendor_id", cpuinfo=cpuinfo) == "GenuineIntel"


def bfloat16_instructions(cpuinfo: Path = _CPUINFO) -> tuple[str, ...] | None:
    """Returns the CPU's instructions that multiply bfloat16; None: unknown. Without, float32 is faster."""
    flags = _field("flags", "Features", cpuinfo=cpuinfo)
    if flags is None:
        return None
    return tuple(name for flag, name in _BFLOAT16_FLAGS.items() if flag in flags.split())


def _field(*names: str, cpuinfo: Path = _CPUINFO) -> str | None:
    """Returns the value of the first line with one of `names`. Other systems than Linux have no such file."""
    lines = (line.partition(":") for line in text_of(cpuinfo).splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() in names), None)


@functools.cache
def package_versions() -> dict[str, str]:
    """Returns the installed versions of Python and of the packages whose versions may change results."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def torchvision_fault() -> str | None:
    """Returns why torchvision cannot be imported, which transformers does; None: it can, or is not there."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return None
    except Exception as error:  # of operators that the installed torch does not have
        versions = package_versions()
        what = f"torchvision {versions.get('torchvision')} does not fit torch {versions.get('torch')}"
        remedy = "install the release for this torch from the index that torch is from, or remove torchvision"
        return f"{what} ({first_line(error)}); {remedy}"
    return None


def install_command(extra: str) -> str:
    """Returns the pip command for the packages of an extra. (Not every index has dpo-pack itself.)"""
    needed = [
        requirement.partition(";")[0].strip()
        for requirement in importlib.metadata.requires("dpo-pack") or ()
        if re.search(f"extra == ['\"]{extra}['\"]", requirement)
    ]
    assert needed, f"dpo-pack has no extra {extra}"
    return " ".join(["pip install", *(f"'{requirement}'" for requirement in needed)])


def git_commit() -> str | None:
    """Returns the commit that is checked out in the working directory, if any."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableMemory:
    """Bytes of memory of one device or machine: all of them, and those not in use."""

    free: int
    total: int


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Yields the control groups (of a container, a batch job) that limit "memory" or "cpu" of this process,
    innermost first, and whether they are of version 1.

    In a container, groups may have paths of the host: then only the last path, the mount point, has a limit.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        is_version_1 = controller in controllers.split(",")
        if is_version_1 or not controllers:
            mount = root / "sys/fs/cgroup" / (controller if is_version_1 else "")
            own = PurePosixPath(path.lstrip("/"))
            yield from ((mount / part, is_version_1) for part in (own, *own.parents))


def host_memory(root: Path = Path("/")) -> AvailableMemory:
    """Returns the memory that this process may use, by its control groups too; cached files count as free."""
    machine = psutil.virtual_memory()
    free, total = machine.available, machine.total
    for group, is_version_1 in control_groups("memory", root):
        limit_file, used_file, prefix = "memory.max", "memory.current", ""
        if is_version_1:
            limit_file, used_file, prefix = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        limit, used = text_of(group / limit_file).strip(), text_of(group / used_file).strip()
        if limit.isdecimal() and used.isdecimal():
            cached = re.findall(rf"^{prefix}(?:in)?active_file (\d+)", text_of(group / "memory.stat"), re.M)
            free = min(free, int(limit) - int(used) + sum(map(int, cached)))
            total = min(total, int(limit))
    return AvailableMemory(free=max(0, free), total=total)


def keep_freed_memory() -> None:
    """Makes glibc keep freed blocks until `release_memory`: each page of a new block costs a page fault."""
    with contextlib.suppress(OSError, AttributeError):  # another C library: its settings are not changed
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_MMAP_THRESHOLD, 32 * 2**20)  # the largest: glibc unmaps a larger block when it is freed
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 64 * 2**20)


def release_memory() -> None:
    """Returns the memory of deleted models and tensors to the device and to the operating system."""
    import torch  # not above, because commands that need no torch import this file

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # another C library, which needs no such call
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def host_copies(tensors: Sequence[Tensor]) -> Callable[[], tuple[npt.NDArray[Any], ...]]:
    """Starts copies on the host, and does not wait. The returned function waits for them and returns them."""
    import torch

    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # from CUDA into pinned memory
    arrival = torch.cuda.Event() if tensors[0].is_cuda else None
    if arrival is not None:
        arrival.record()

    def read() -> tuple[npt.NDArray[Any], ...]:
        if arrival is not None:
            arrival.synchronize()  # later work of the device is not waited for
        return tuple(copy.numpy() for copy in copies)

    return read
