"""Catches what makes the host wait for the device, on a CPU where nothing has to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.is_nonzero)


@contextlib.contextmanager
def no_reads() -> Iterator[None]:
    """Raises AssertionError when a number is read from a tensor, or a shape depends on one."""
    with _NoReads():  # type: ignore[no-untyped-call]
        yield


class _NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _READS:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))
