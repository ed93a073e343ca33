"""Limits on what this process may take while a test runs, and what it has taken."""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def memory_limit(more_bytes: int) -> Iterator[None]:
    """Lets the process take so many bytes more than it has; Python raises MemoryError for further ones."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    with _limited(resource.RLIMIT_AS, pages * resource.getpagesize() + more_bytes):
        yield


@contextlib.contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    """The system refuses to write a file's bytes after the first `num_bytes`, as a full disk does."""
    with _limited(resource.RLIMIT_FSIZE, num_bytes):
        yield


@contextlib.contextmanager
def _limited(kind: int, number: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def resident_bytes(kind: str = "VmRSS") -> int:
    """VmRSS: now; VmHWM: at most so far, where `ru_maxrss` would begin with that of the parent."""
    found = re.search(rf"{kind}:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return 1024 * int(found[1])
