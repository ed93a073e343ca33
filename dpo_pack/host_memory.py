"""The machine's memory, and what the C library does with what is freed of it."""

from __future__ import annotations

import contextlib
import ctypes
import os

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


def machine_memory_bytes() -> int:
    """All of the machine's memory, used or not, without what a container may be limited to."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
