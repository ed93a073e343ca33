"""Catches what makes the host wait for the device: on CUDA, and on a CPU, where nothing has to."""

from __future__ import annotations

import contextlib
import warnings
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


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """On CUDA: raises RuntimeError when the host waits for the device."""
    try:
        _set_sync_debug_mode("error")
        yield
    finally:
        _set_sync_debug_mode("default")


def _set_sync_debug_mode(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype, once it is set
        torch.cuda.set_sync_debug_mode(mode)


class _NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _READS or _counts_a_mask(func, args):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def _counts_a_mask(func: Any, args: Any) -> bool:
    """Whether `values[mask]` is taken: as many as the mask has ones."""
    if func.overloadpacket is not torch.ops.aten.index:
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])
