"""The machine's memory: what this process may use of it, and what the C library does with what is freed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# mallopt's numbers for its parameters, glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
# glibc takes no larger one: a bigger block is mapped by itself, and unmapped when it is freed.
_LARGEST_MMAP_THRESHOLD = 32 * 2**20


def keep_freed_memory() -> None:
    """Keep freed blocks for the next ones, instead of giving them back to the operating system at once.

    A step on the CPU frees and allocates activations of megabytes, hundreds of times, and each block that
    comes fresh from the system costs a fault and a clearing a page. `release_memory` still gives everything
    back.
    """
    with contextlib.suppress(OSError, AttributeError):  # other C libraries do as they do
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 64 * 2**20)


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableMemory:
    """Bytes of one device or machine; what is in use is left out of `free`."""

    free: int
    total: int


def host_memory(root: Path = Path("/")) -> AvailableMemory | None:
    """What this process may use of the machine's memory; None where the system does not say.

    A container or a batch job may have less than the machine: of nested limits the narrowest counts.
    """
    machine = _numbers_in(root / "proc/meminfo")
    if not {"MemAvailable", "MemTotal"} <= machine.keys():
        return None
    free, total = 1024 * machine["MemAvailable"], 1024 * machine["MemTotal"]
    for limit, used in _limits(root):
        free, total = min(free, limit - used), min(total, limit)
    return AvailableMemory(free=max(0, free), total=total)


def machine_memory_bytes() -> int:
    """All memory that this process may use, in use or not."""
    found = host_memory()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if found is None else found.total


def free_memory_bytes() -> int:
    """What is free of it; all of it where the system does not say."""
    found = host_memory()
    return machine_memory_bytes() if found is None else found.free


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of each control group around this process, from its own to the outermost.

    Inside a container the path may be the host's, of which only the mount point is to be seen.
    """
    mount = root / "sys/fs/cgroup"
    for line in _text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            if controllers == "":  # version 2
                yield from _limit(mount / group, "memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                place = mount / "memory" / group
                yield from _limit(place, "memory.limit_in_bytes", "memory.usage_in_bytes", prefix="total_")


def _limit(group: Path, limit_file: str, used_file: str, prefix: str = "") -> Iterator[tuple[int, int]]:
    """A group's limit and what it uses, if it has one; what it caches of files is given back."""
    limit, used = (_numbers_in(group / name).get("") for name in (limit_file, used_file))
    if limit is not None and used is not None:
        stat = _numbers_in(group / "memory.stat")
        yield limit, used - sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))


def _numbers_in(path: Path) -> dict[str, int]:
    """A system file's lines of a name and a number, or of a number alone, under ""; none where it is not."""
    found = re.findall(r"^(?:(\w+):?\s+)?(\d+)", _text_of(path), re.MULTILINE)
    return {name: int(number) for name, number in found}


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
