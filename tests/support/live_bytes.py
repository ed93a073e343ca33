"""Counts the bytes of the tensors that are there at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Follows each tensor that an operation makes; `peak` is the most bytes that were alive after one."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """`known` tensors do not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.there: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.peak: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        return result

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.there:
            self.there[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self.there.pop, storage._cdata)
            self.peak = max(self.peak, sum(self.there.values()))
