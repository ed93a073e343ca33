"""Results on their way from the device to the host, to be read while the device goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopies:
    """Copies of tensors that may be read without waiting for what is queued after them."""

    tensors: tuple[Tensor, ...]  # on the host
    arrival: torch.cuda.Event | None  # when they are all there; None: now

    @staticmethod
    def begin(tensors: Sequence[Tensor]) -> HostCopies:
        """Queue the copies, into pinned memory where the tensors are on CUDA. Waits for nothing."""
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
        """The values; waits until they have arrived."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return tuple(tensor.numpy() for tensor in self.tensors)
