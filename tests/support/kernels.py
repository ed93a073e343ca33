"""Matrix products of another kernel for rows above a limit, as oneDNN has with AVX-512 and AMX."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_LINEAR = (torch.ops.aten.linear.default, torch.ops.mkldnn._linear_pointwise.default)
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, *_LINEAR)


class OtherKernel(TorchDispatchMode):
    """Products of matrices in 16 bits have sums in fp32. If they have more rows than the limit, the sums are
    those of two halves. Fp32 is treated alike."""

    def __init__(self, more_than_rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_rows = more_than_rows

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _PRODUCTS or kwargs or not args[-1 if function is _PRODUCTS[0] else 0].ndim:
            return function(*args, **(kwargs or {}))
        bias = None
        if function in _LINEAR:
            left, right, *rest = args
            right, bias = right.T, rest[0] if rest else None
        else:
            *before, left, right = args
            bias = before[0] if before else None
        rows = left.numel() // left.shape[-1]
        if left.dtype.itemsize > 4 or not (left.dtype.itemsize == 2 or rows > self.most_rows):
            return function(*args)
        half = left.shape[-1] // 2 if rows > self.most_rows else left.shape[-1]
        wide_left, wide_right = left.float(), right.float()
        product = wide_left[..., :half] @ wide_right[:half]
        if half < left.shape[-1]:
            product += wide_left[..., half:] @ wide_right[half:]
        if bias is not None:
            product += bias.float()
        return product.to(left.dtype)
